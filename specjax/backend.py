"""Everything that depends on the kind of device, in one place: each decision with its reason and what was measured. It
imports nothing of ours, and nothing here changes a result beyond the order of a sum."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

FEW_ROWS = 16
"""Most rows for which one reduction beats a matrix product on CPU (2 cores, float32: 12-16)."""
FEW_NARROW_ROWS, SEVERAL_NARROW_ROWS = 8, 192
"""The same of kernels in bfloat16: more than the first go a few at a time, which beats widening the kernel for the
library's matrix product up to the second (the two are as fast at 256)."""
FEW_QUERIES = 16
"""Most queries of a key-value head, of all tokens fed, for which attention on CPU is made of reductions."""
UNROLLED_ROWS_CPU = 16
"""Most rows that are written into a cache one by one: each is an update in place, where the scatter over rows that
`vmap` makes becomes a loop over single elements on CPU. An accelerator would launch as many kernels."""
MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch on CPU: its activations stay in cache, 1.35x over the whole batch at once on 2 cores."""


PREFILL_TOKENS_CPU, PREFILL_TOKENS = 2048, 8192
"""Prompt tokens of a pass, on CPU and elsewhere: enough that reading the weights is no matter."""
PREFILL_SHARE = 1 / 16
"""Of a device's memory, at most, for what a pass over a prompt makes on its way."""
LOGIT_BYTES_CPU, LOGIT_BYTES = 2**26, 2**30
"""Of the float32 logits that training and evaluation make at a time, on CPU and elsewhere: a loss makes several arrays
as large, and an accelerator reads the whole head for each."""

SCORE_BYTES_CPU, SCORE_BYTES = 2**26, 2**29
"""Of the float32 scores of attention that exist at a time, likewise."""


_lowered_for: contextvars.ContextVar[tuple[str, float | None] | None] = contextvars.ContextVar("lowered", default=None)


def platform() -> str:
    """What is compiled for, as `jax.export` names it: cpu, cuda, rocm, tpu."""
    elsewhere = _lowered_for.get()
    found = jax.default_backend() if elsewhere is None else elsewhere[0]
    return "cuda" if found == "gpu" else found


def device_memory() -> float | None:
    """Bytes of a device; of a CPU those of the machine. None: unknown."""
    elsewhere = _lowered_for.get()
    if elsewhere is not None:
        return elsewhere[1]
    device = jax.local_devices()[0]  # of another process it would say nothing
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats or not is_host(device):
        return stats.get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    except (ValueError, OSError, AttributeError):
        return None


@contextlib.contextmanager
def lowering_for(name: str, memory: float | None = None) -> Iterator[None]:
    """Whatever is traced inside is for the platform ``name``, whose devices have so much ``memory``, wherever it is
    traced."""
    token = _lowered_for.set((name, memory))
    try:
        yield
    finally:
        _lowered_for.reset(token)


def _on_cpu() -> bool:
    return platform() == "cpu"


def default_dtype() -> str:
    """The dtype of loaded weights: a CPU has no arithmetic for bfloat16, and takes 20 times as long."""
    return "float32" if _on_cpu() else "bfloat16"


def remat() -> bool:
    """Whether training keeps no activations where nothing else is asked for: memory is what an accelerator has least
    of, and a draft's forward pass little beside its target's."""
    return not _on_cpu()


def turns_kernels() -> bool:
    """Whether decoding reads float32 kernels transposed, and as bfloat16 where they are such numbers: XLA's matrix
    product on CPU packs the kernel anew in every call, which costs twice the reading of it, and a reduction over a
    transposed one does not (2-3x for 2 to 8 tokens; for one token it is as fast as the best matrix-vector product).
    bfloat16 is half as much to read, and in float32 products the same numbers (1.4-2x for 1 to 8 tokens)."""
    return _on_cpu()


def keeps_copies() -> bool:
    """Whether a model that is trained or cut from as well has its weights laid out for decoding beside them: on a CPU
    memory is what is left over."""
    return _on_cpu()


def token_share() -> float:
    """What a token more costs a pass of the target, as a share of one over a single token, where nothing is measured:
    on 2 cores a pass over 4 takes 1.6 times as long; where weights stream from memory it is nearly free."""
    return 0.2 if _on_cpu() else 0.02


def microbatch_tokens() -> int | None:
    """Most tokens of one microbatch of training; None: the whole batch at once."""
    return MICRO_TOKENS_CPU if _on_cpu() else None


def prefill_tokens(token_bytes: int) -> int:
    """Most prompt tokens of all rows that are fed at a time, of which each makes so many bytes in a layer."""
    if _on_cpu():
        return PREFILL_TOKENS_CPU
    memory = device_memory()
    fitting = PREFILL_TOKENS if memory is None else int(PREFILL_SHARE * memory / max(1, token_bytes))
    return min(PREFILL_TOKENS, 1 << (max(1, fitting).bit_length() - 1))


def logit_tokens(vocab_size: int) -> int:
    """Most positions whose logits exist at a time where none is fed back: at least one."""
    return max(1, (LOGIT_BYTES_CPU if _on_cpu() else LOGIT_BYTES) // (4 * vocab_size))


def score_count() -> int:
    """Most scores of attention, of all rows, heads, queries and keys, that exist at a time."""
    return (SCORE_BYTES_CPU if _on_cpu() else SCORE_BYTES) // 4


def flash_kernel() -> str | None:
    """The library's kernel that attends to whole rows without an array of scores; see
    `specjax.models.attention.flash`."""
    return {"cuda": "cudnn", "tpu": "splash"}.get(platform())


def unrolled_rows() -> int:
    """Most rows that are written into a cache one by one, and not by one scatter."""
    return UNROLLED_ROWS_CPU if _on_cpu() else 1


def asks_the_host() -> bool:
    """Whether a condition inside a program waits for the host to read it, so that what can be settled before should be:
    a GPU does, for every `cond` of every token."""
    return not _on_cpu()


def is_host(device: Any) -> bool:
    """Whether a device's memory is the host's own: numpy reads it in place, and compiles nothing."""
    return device.platform == "cpu"


def row_sums(rows: Sequence[Float[Array, "B V"]]) -> Float[Array, "B N"]:
    """Sum of each of N rows, in one reduction with N results, which makes its operands as it reads them: a plain sum
    over [B, N, V] is a library call on CPU, for which XLA would store them."""
    zeros = (jnp.zeros((), rows[0].dtype),) * len(rows)
    found = jax.lax.reduce(tuple(rows), zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
    return jnp.stack(found, axis=1)


def compiler_options(*, decoding: bool = False) -> dict[str, str | bool | int]:
    """Options of every program that runs long, on the default backend. On x86 LLVM prefers 256-bit vectors; a training
    step gains 1.2x from 512-bit ones on a CPU that has them, others ignore the wish. ``decoding``: sums may be added in
    any order (infinities and NaN keep their meaning), without which reductions are not vectorised."""
    if not _on_cpu():
        return {}
    options: dict[str, str | bool | int] = {"xla_cpu_prefer_vector_width": 512}
    return options | ({"xla_cpu_enable_fast_math": True} if decoding else {})
