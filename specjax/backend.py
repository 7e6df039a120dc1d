"""Every decision that depends on the kind of device, with its reason and what was measured. The module imports nothing
of specjax, and nothing here changes a result beyond the order of a sum."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_T = TypeVar("_T")

FEW_ROWS = 16
"""Most rows for which one reduction beats a matrix product on CPU (measured on 2 cores in float32: 12-16)."""
FEW_NARROW_ROWS, SEVERAL_NARROW_ROWS = 8, 192
"""Row limits of a kernel stored in bfloat16. Up to the first, one reduction takes all rows. Up to the second,
reductions of a few rows at a time beat the library's matrix product, which needs a widened kernel (the two are as fast
at 256)."""
SHORT_ROW = 512
"""Most features of a kernel's row that is short: sums of single vectors end every row, so that fewer rows at a time are
faster."""
FEW_QUERIES = 32
"""Most queries of a key-value head, counted over all tokens fed, for which attention on CPU is made of reductions. The
library's product would also copy the layer out of a looped cache: with 24 queries a head, 3 heads of 64 and 1,024 slots
it takes 1.3 to 1.8 times as long (2 cores, AVX-512)."""
UNROLLED_ROWS_CPU = 16
"""Most rows whose writes into a cache are written out one by one on a CPU; those of more rows are a loop. The scatter
over rows that `vmap` makes becomes a loop over single elements there. An accelerator would launch as many kernels."""
MATRIX_UNIT_ROWS = 32
"""Fewest rows for which three products of bfloat16 beat reductions in float32, on a processor with matrix units."""
MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch of training on CPU: its activations stay in the processor's cache, 1.35x over the whole batch
at once on 2 cores."""


PREFILL_TOKENS_CPU, PREFILL_TOKENS = 2048, 8192
"""Most prompt tokens of one pass, on CPU and on accelerators: enough that reading the weights hardly counts."""
ROW_PREFILL_TOKENS_CPU = 256
"""Most tokens of each prompt in a pass on a CPU, which computes the padding too: SmolLM2-135M reads 600 tokens in .76
of the time that it takes to read them padded to 1,024, and 1,200 in .56 of that of 2,048."""
QUEUE_ROWS_CPU, QUEUE_ROWS = 64, 256
"""Most rows of a queue of requests, on CPU and on accelerators."""
PREFILL_SHARE = 1 / 16
"""Largest share of a device's memory that the intermediate arrays of a pass over a prompt may take."""
LOGIT_BYTES_CPU, LOGIT_BYTES = 2**26, 2**30
"""Most bytes of float32 logits that training and evaluation make at a time, on CPU and on accelerators: a loss makes
several arrays as large, and an accelerator reads the whole head for each piece."""

SCORE_BYTES_CPU, SCORE_BYTES = 2**26, 2**29
"""Most bytes of float32 attention scores that exist at a time, on CPU and on accelerators."""
ROW_SCORE_BYTES_CPU = 2**23
"""Most bytes of float32 attention scores of one row that a CPU makes at once: more leave its caches before they are
read again, and blocks skip the keys that no query of theirs sees. With 9 heads of 64 (2 cores of an AMD EPYC) blocks
take .85 of the time at 512 tokens, .6 at 1,024 and .45 at 2,048; with gradients .7 at 512 and .45 at 1,024."""
BLOCK_QUERIES_CPU, BLOCK_QUERIES = 256, 512
"""Most tokens of a block of queries, on CPU and on accelerators. With more blocks, causal attention skips more of the
keys that no query of a block sees, up to half."""
BLOCK_KEYS = 256
"""Fewest keys of a block, and on a CPU the most: there a block's scores stay in the caches."""
NEAR_SCORE_BYTES = 24 * 2**20
"""Most bytes of float32 attention scores that stay in the second-level cache of a GPU (50 MB on an H100) until they
have been read."""


_lowered_for: contextvars.ContextVar[tuple[str, float | None] | None] = contextvars.ContextVar("lowered", default=None)


def platform() -> str:
    """Name of the platform that programs are compiled for, as `jax.export` spells it: cpu, cuda, rocm, tpu."""
    elsewhere = _lowered_for.get()
    found = jax.default_backend() if elsewhere is None else elsewhere[0]
    return "cuda" if found == "gpu" else found


def device_memory() -> float | None:
    """Bytes of memory of one device; on CPU, the machine's memory divided by its devices. None: unknown."""
    elsewhere = _lowered_for.get()
    if elsewhere is not None:
        return elsewhere[1]
    device = jax.local_devices()[0]  # a device of another process reports nothing
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats or not is_host(device):
        return stats.get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    except (ValueError, OSError, AttributeError):
        return None


@contextlib.contextmanager
def lowering_for(name: str, memory: float | None = None) -> Iterator[None]:
    """Make all tracing inside the context compile for the platform ``name`` with ``memory`` bytes a device, whatever
    machine it runs on."""
    token = _lowered_for.set((name, memory))
    try:
        yield
    finally:
        _lowered_for.reset(token)


def _on_cpu() -> bool:
    return platform() == "cpu"


def default_dtype() -> str:
    """Dtype of loaded weights. A CPU has no arithmetic for bfloat16, and takes 20 times as long with it."""
    return "float32" if _on_cpu() else "bfloat16"


def remat() -> bool:
    """True if training stores no activations unless asked to: memory is an accelerator's scarcest resource, and a
    draft's forward pass costs little beside its target's."""
    return not _on_cpu()


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # the C library is not glibc
        return None


def return_memory() -> None:
    """Give freed memory of the host back to the system. glibc keeps arrays of up to 32 MB for later ones, and of a
    model's layers that are copied one by one it would keep them all."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


LEAST_SCANNED = 16
"""Fewest equal layers that decoding runs as one loop."""


def scans_layers(count: int) -> bool:
    """True if decoding holds ``count`` equal layers as one array for each parameter, and runs them as a loop, which is
    compiled once. On a CPU each product reads its layer where it lies; an accelerator's libraries would copy it
    first."""
    return _on_cpu() and count >= LEAST_SCANNED


def transposes_kernels() -> bool:
    """True if decoding reads float32 kernels transposed, and as bfloat16 where that holds all their numbers. XLA's
    matrix product on CPU packs the kernel anew in every call, which costs twice the reading of it. A reduction over a
    transposed kernel does not (2-3x for 2 to 8 tokens; for one token it is as fast as the best matrix-vector product).
    bfloat16 halves the bytes to read, and gives the same numbers in float32 products (1.4-2x for 1 to 8 tokens)."""
    return _on_cpu()


@functools.cache
def processor_features() -> str:
    """Line of the kernel that names this machine's instruction sets; empty where Linux does not tell it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    return ""


def has_wide_vectors() -> bool:
    """True if this machine's processor is known to have AVX-512: vectors of 64 bytes, and 32 registers of them where
    others have 16. False is slower there, and never wrong."""
    return "avx512f" in processor_features().split()


def multiplies_bfloat16() -> bool:
    """True on a processor that is known to have units for products of bfloat16 matrices, added up in float32 (AMX).
    XLA's library uses them for a product whose operands are bfloat16 and whose result is float32."""
    return _on_cpu() and "amx_bf16" in processor_features().split()


def product_parts(rows: int, features: int) -> int:
    """Number of parts of a kernel, one row of each at a time, that a product of few ``rows`` with kernel rows of
    ``features`` weights reads together. Many parts keep memory and adders busy; each takes one register for each row of
    the product, and more sums than registers go through memory. Measured on 2 cores. With 16 registers: two parts over
    four 1.3-1.7x for 3 to 6 rows, one over four 1.7x for 8. With 32: four over two 1.0-1.25x for 4 and 6 rows, four
    over one 1.2-1.5x for 7 and 8."""
    wide = has_wide_vectors()
    if rows in (7, 8) and not wide:
        return 1
    return 4 if features > SHORT_ROW and rows <= (8 if wide else 2) else 2


def product_rows() -> int:
    """Most rows that a product of several rows takes at a time: as many as have room in registers with their parts
    (with 32 registers 8 over 6: 1.05-1.28x for 16 to 64 rows)."""
    return 8 if has_wide_vectors() else 6


def doubles_single_rows() -> bool:
    """True if a product of a single row is made of two equal rows. On a GPU or a TPU, XLA makes of a product of one row
    with fewer than some 10 million weights no matrix product but products of single numbers and their sum: written to
    memory as large as the weights, or added up on few of the cores (a draft's pass reads its weights at a quarter of
    the bandwidth). Two rows keep the matrix units busy, and cost what one does."""
    return platform() in ("cuda", "tpu")


def keeps_copies() -> bool:
    """True if a model that is also trained, or that drafts are cut from, holds a second copy of its weights laid out
    for decoding: a CPU has memory to spare."""
    return _on_cpu()


def microbatch_tokens() -> int | None:
    """Most tokens of one microbatch of training; None: the whole batch at once."""
    return MICRO_TOKENS_CPU if _on_cpu() else None


def prefill_tokens(token_bytes: int, rows: int) -> int:
    """Most tokens of each of ``rows`` prompts that one pass feeds if each token makes ``token_bytes`` bytes in a
    layer."""
    if _on_cpu():
        return max(1, min(PREFILL_TOKENS_CPU // rows, ROW_PREFILL_TOKENS_CPU))
    memory = device_memory()
    fitting = PREFILL_TOKENS if memory is None else int(PREFILL_SHARE * memory / max(1, token_bytes))
    return max(1, min(PREFILL_TOKENS, 1 << (max(1, fitting).bit_length() - 1)) // rows)


def logit_tokens(vocab_size: int) -> int:
    """Most positions whose logits exist at a time in training and evaluation: at least one."""
    return max(1, (LOGIT_BYTES_CPU if _on_cpu() else LOGIT_BYTES) // (4 * vocab_size))


def score_count() -> int:
    """Most attention scores that exist at a time, counted over all rows, heads, queries and keys."""
    return (SCORE_BYTES_CPU if _on_cpu() else SCORE_BYTES) // 4


def all_scores_at_once(rows: int, of_row: int) -> bool:
    """True if attention over ``rows`` of ``of_row`` scores each makes all of them at once; else block by block."""
    return rows * of_row <= score_count() and (not _on_cpu() or 4 * of_row <= ROW_SCORE_BYTES_CPU)


def block_queries() -> int:
    """Most tokens of a block of queries."""
    return BLOCK_QUERIES_CPU if _on_cpu() else BLOCK_QUERIES


def block_keys(queries: int) -> int:
    """Number of keys of a block of ``queries``, counted over all rows and heads."""
    return BLOCK_KEYS if _on_cpu() else max(BLOCK_KEYS, score_count() // queries)


def attended_rows(scores: int) -> int | None:
    """Number of rows, of so many attention ``scores`` each, that attend together; None: all. On a GPU the scores of a
    few rows stay near, where those of all rows would be written to memory and read again, beside the cache."""
    if platform() != "cuda":
        return None
    fitting = NEAR_SCORE_BYTES // (4 * max(1, scores))
    return 1 << (fitting.bit_length() - 1) if fitting else None


def queue_rows(row_bytes: int) -> int:
    """Number of rows through which many requests decode, each with a cache of ``row_bytes``: a CPU's products are near
    their full speed with 64 (SmolLM2-135M: 300 tokens/s, 217 with 32), an accelerator reads its weights for 256. Their
    caches take at most a quarter of the memory."""
    most, memory = QUEUE_ROWS_CPU if _on_cpu() else QUEUE_ROWS, device_memory()
    return most if memory is None else max(1, min(most, int(memory / 4 / row_bytes)))


def flash_kernel() -> str | None:
    """Name of the library's kernel that attends to whole rows without an array of scores, None without one; see
    `specjax.models.attention.flash`."""
    return {"cuda": "cudnn", "tpu": "splash"}.get(platform())


def writes_row_by_row(rows: int) -> bool:
    """True if ``rows`` rows are written into a cache one after the other, each in place, instead of by one scatter."""
    return rows == 1 or _on_cpu()


def reduces_together() -> bool:
    """True if the largest logit, its index and whether all are finite come of one reduction: an accelerator then reads
    the logits once. On a CPU plain reductions, one after the other, are faster."""
    return not _on_cpu()


def marks_whole_tokens() -> bool:
    """True if one mark a head says that the values of a token overflowed: a CPU's step of training takes 1.5% longer
    with a mark for each value, and an accelerator would launch one more kernel a layer for their reduction."""
    return _on_cpu()


def asks_the_host() -> bool:
    """True if a condition inside a program is a host sync, as it is on a GPU for every `cond` of every token. The
    caller then settles in advance what it can."""
    return not _on_cpu()


def is_host(device: Any) -> bool:
    """True if a device's memory is the host's own: numpy reads it in place, and nothing is compiled."""
    return device.platform == "cpu"


def row_sums(rows: Sequence[Float[Array, "B V"]]) -> Float[Array, "B N"]:
    """Sums over V of N arrays, in one reduction with N results that makes its operands as it reads them. A plain sum
    over [B, N, V] is a library call on CPU, for which XLA would store the operands."""
    zeros = (jnp.zeros((), rows[0].dtype),) * len(rows)
    found = jax.lax.reduce(tuple(rows), zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
    return jnp.stack(found, axis=1)


def compiler_options(*, decoding: bool = False) -> dict[str, str | bool | int]:
    """Compiler options of every program that runs long, on the default backend. LLVM prefers 256-bit vectors on x86;
    512-bit ones make a training step 1.2x faster on a CPU that has them, and other CPUs ignore the wish. ``decoding``:
    sums may be added in any order (infinities and NaN keep their meaning); otherwise reductions are not vectorised."""
    if not _on_cpu():
        return {}
    options: dict[str, str | bool | int] = {"xla_cpu_prefer_vector_width": 512}
    return options | ({"xla_cpu_enable_fast_math": True} if decoding else {})


def run_if(condition: Bool[Array, ""], change: Callable[[_T], _T], state: _T) -> _T:
    """``change(state)`` if the condition holds, else ``state``: a loop of at most one round, since a `cond` copies the
    caches."""

    def once(carry):
        return jnp.bool_(False), change(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (condition, state))[1]
