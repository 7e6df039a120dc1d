"""Teacher-forced logits by the passes that decoding makes: the prompts at once, then blocks of tokens over the KV
cache, rows side by side, with weights laid out for decoding. In a low precision the shape of a pass decides how it
rounds, so only passes of the same shape give the same numbers.

Dims: B rows, L cache slots and tokens, N output tokens (or a few more), V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specjax import backend
from specjax.models import cache as cache_lib


@functools.lru_cache(maxsize=64)
def block_passes(spec: Any, width: int, fed: int, passes: int):
    """Jitted ``(params, tokens[B, L], lengths[B]) -> logits[B, passes * fed, V]`` in float32, which choose the token
    after each one fed. It fills the cache with the first ``width`` tokens, then feeds ``fed`` tokens a pass, each row
    from token ``lengths[b] - 1`` on, the last one of its prompt. Needs ``L >= lengths[b] - 1 + passes * fed``."""

    def run(params, tokens, lengths):
        batch, slots = tokens.shape

        def feed(cache, first, size):
            at = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
            return spec(params, jnp.take_along_axis(tokens, at, axis=1), at, at, cache)

        def one(cache, first):
            out = feed(cache, first, fed)
            return out.cache, out.logits.astype(jnp.float32)

        cache = cache_lib.with_total(spec.init_cache(batch, slots), lengths + passes * fed)
        cache = cache_lib.fold(feed(cache, jnp.zeros_like(lengths), width).cache)
        starts = lengths[None] - 1 + fed * jnp.arange(passes, dtype=jnp.int32)[:, None]
        _, logits = jax.lax.scan(one, cache, starts)
        return logits.swapaxes(0, 1).reshape(batch, passes * fed, -1)

    return jax.jit(run, compiler_options=backend.compiler_options(decoding=True))


def output_logits(
    spec: Any, params: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], fed: int
) -> list[Float[np.ndarray, "N V"]]:
    """Logits in float32 that choose each token of ``outputs`` after its prompt, in blocks of ``fed`` tokens."""
    width, count = max(map(len, prompts)), max(map(len, outputs))
    passes = -(-count // fed)
    tokens = np.zeros((len(prompts), width + passes * fed), np.int32)
    for row, prompt, output in zip(tokens, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = [*prompt, *output]
    lengths = np.asarray([*map(len, prompts)], np.int32)
    logits = np.asarray(block_passes(spec, width, fed, passes)(params, tokens, lengths))
    return [row[: len(output)] for row, output in zip(logits, outputs, strict=True)]
