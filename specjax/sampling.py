"""Logits to logits, row by row, and keyed draws. One transform serves draft, target and the plain baseline.

Dims: B rows, R block rows, K draft length, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from specjax.types import Noise, SamplingParams

_GROUP = 64
"""Width of the groups of the two-level inverse CDF: about the square root of usual vocabularies."""


def argmax(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Index of the largest logit, ties to the lowest; two plain reductions are faster on CPU than one paired one."""
    size = logits.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    at_top = logits == jnp.max(logits, axis=-1, keepdims=True)
    # A row of NaN has no top; keep the id in range, the run fails elsewhere.
    return jnp.minimum(jnp.min(jnp.where(at_top, index, size), axis=-1), size - 1)


def transform(logits: Float[Array, "B R V"], sampling: SamplingParams) -> Float[Array, "B R V"]:
    """float32 logits after the sampling parameters: what is drawn from and compared. Temperature 0 becomes the log of
    a one-hot (0 at the argmax, -inf elsewhere), so nothing downstream branches on temperature."""
    logits = logits.astype(jnp.float32)
    temperature = sampling.temperature[:, None, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)

    def with_greedy_rows():
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        one_hot = jnp.where(index == argmax(logits)[..., None], 0.0, -jnp.inf)
        return jnp.where(temperature > 0, scaled, one_hot)

    # The argmax over V is paid only by batches that hold a greedy row.
    return jax.lax.cond(jnp.any(sampling.temperature == 0), with_greedy_rows, lambda: scaled)


def fresh_noise(seeds: UInt[Array, "B 2"], lengths: Int[Array, " B"], k: int) -> Noise:
    """The uniforms of one block, keyed by (row seed, row length at its start): never by batch slot or step number, so
    that a row replays alone, and never twice, so that rejected positions are redrawn with independent noise."""

    def of_row(seed, length):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), length)
        return jax.random.uniform(key, (3, k + 1), jnp.float32)

    return Noise(jax.vmap(of_row)(seeds, lengths))


def draw(logits: Float[Array, "B V"], uniform: Float[Array, " B"] | None) -> Int[Array, " B"]:
    """One token a row from transformed logits; without noise (an all-greedy batch), the argmax."""
    if uniform is None:
        return argmax(logits)
    # Unnormalised weights: the inverse CDF scales its threshold by their sum.
    return inverse_cdf(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), uniform)


def inverse_cdf(weights: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index whose cumulative weight exceeds ``uniform`` times the total. Two levels (groups, then inside one
    group), because one long cumulative sum is slow everywhere. An index of weight zero is never returned, whatever
    the rounding, as long as one weight is positive."""
    batch, size = weights.shape
    groups = -(-size // _GROUP)
    weights = jnp.pad(weights, ((0, 0), (0, groups * _GROUP - size))).reshape(batch, groups, _GROUP)
    sums = jnp.sum(weights, axis=-1)
    edges = jnp.cumsum(sums, axis=-1)
    threshold = uniform * edges[:, -1]
    group = _first_above(edges, threshold, sums)
    inside = jnp.take_along_axis(weights, group[:, None, None], axis=1)[:, 0]
    below = jnp.take_along_axis(edges - sums, group[:, None], axis=1)
    return group * _GROUP + _first_above(below + jnp.cumsum(inside, axis=-1), threshold, inside)


def _first_above(
    cumulative: Float[Array, "B N"], threshold: Float[Array, " B"], weights: Float[Array, "B N"]
) -> Int[Array, " B"]:
    """First index of positive weight whose cumulative weight exceeds the threshold; if rounding leaves none, the last
    index of positive weight."""
    index = jax.lax.broadcasted_iota(jnp.int32, cumulative.shape, 1)
    positive = weights > 0
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    first = jnp.min(jnp.where(positive & (cumulative > threshold[:, None]), index, cumulative.shape[1]), axis=-1)
    return jnp.minimum(first, last)
