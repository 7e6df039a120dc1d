"""The two distributions, made from logits, that a loss or a metric compares: over the vocabulary, or, if only the
target's k largest logits are known, over those k tokens and a stand-in for all others.

The stand-in is n tokens drawn from p's tail, if they were cached. Each has 1/n of the tail's mass under p and, under q,
that mass times its own q/p. Sums whose terms are p times a function of q/p, like KL(p || q) and the overlap, are then
right in expectation, and so are their gradients (2503.16870); q's part does not add up to its tail. Otherwise the
stand-in is one bucket. Both distributions are then coarsened alike: their divergence is at most the true one (data
processing), and their overlap is the upper end of what alpha can be.

Dims: B rows, T predicted positions, V vocabulary, k best tokens, n of the tail, W outcomes: V, k + n or k + 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.interfaces import FullLogits, TopKLogits
from specjax.metrics import alpha_per_position

_NOTHING = -1e30
"""Stand-in for a logit that is left out: finite, because the gradient of a logsumexp over -inf alone is NaN."""


def log_distributions(
    draft_logits: Float[Array, "B T V"],
    teacher: FullLogits | TopKLogits,
    target_temperature: float = 1.0,
    draft_temperature: float = 1.0,
) -> tuple[Float[Array, "B T W"], Float[Array, "B T W"]]:
    """The pair (log p, log q) over the same outcomes, in float32; no gradient reaches p.

    Raises `ValueError` for cached logits at a temperature: their tail is known at temperature 1 only.
    """
    log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32) / draft_temperature, axis=-1)
    teacher = jax.lax.stop_gradient(teacher)
    if isinstance(teacher, FullLogits):
        return jax.nn.log_softmax(teacher.logits.astype(jnp.float32) / target_temperature, axis=-1), log_q
    if target_temperature != 1:
        raise ValueError(
            f"target_temperature={target_temperature:g} needs the target's whole distribution, found its top k"
        )
    logsumexp = teacher.logsumexp.astype(jnp.float32)[..., None]
    log_p = teacher.values.astype(jnp.float32) - logsumexp
    inside = jnp.take_along_axis(log_q, teacher.ids, axis=-1)
    if teacher.ids.shape[-1] == log_q.shape[-1]:
        return log_p, inside
    mass = jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True), 0.0))
    if teacher.tail_ids is None or teacher.tail_values is None:
        # Sum the draft's tail without the k tokens: 1 - sum would have no digits left when the tail is small.
        left = jnp.put_along_axis(log_q, teacher.ids, jnp.float32(_NOTHING), axis=-1, inplace=False)
        tail_p, tail_q = mass, jax.nn.logsumexp(left, axis=-1, keepdims=True)
    else:
        tail_p = jnp.broadcast_to(mass - math.log(teacher.tail_ids.shape[-1]), teacher.tail_ids.shape)
        own = teacher.tail_values.astype(jnp.float32) - logsumexp
        ratio = jnp.take_along_axis(log_q, teacher.tail_ids, axis=-1) - own
        # Nothing was drawn from a tail without mass.
        tail_q = jnp.where(tail_p > -jnp.inf, tail_p + ratio, -jnp.inf)
    return jnp.concatenate([log_p, tail_p], axis=-1), jnp.concatenate([inside, tail_q], axis=-1)


def overlap(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """Overlap of two distributions: alpha = sum min(p, q) = 1 - total variation."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def log_overlap(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """Log of the overlap alpha, with all its digits and its gradient, however small alpha is."""
    return jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)


def acceptance(draft_logits: Float[Array, "B T V"], teacher: FullLogits | TopKLogits) -> dict[str, Float[Array, "B T"]]:
    """Acceptance ``alpha`` at temperature 1. Cached logits give three values instead: the ends of the interval that
    holds alpha, ``alpha_lower``, the overlap of the k tokens, and ``alpha_upper``, with the most that the tails can
    add; and ``alpha_estimate``, from the tokens drawn from the tail, or the upper end if there are none."""
    if isinstance(teacher, FullLogits):
        return {"alpha": alpha_per_position(teacher.logits, draft_logits)}
    log_p, log_q = log_distributions(draft_logits, dataclasses.replace(teacher, tail_values=None, tail_ids=None))
    k = teacher.ids.shape[-1]
    return {
        "alpha_lower": overlap(log_p[..., :k], log_q[..., :k]),
        "alpha_estimate": overlap(*log_distributions(draft_logits, teacher)),
        "alpha_upper": overlap(log_p, log_q),
    }


def top_k_logits(
    logits: Float[Array, "B T V"], k: int, uniform: Float[Array, "B T"] | None = None, n: int = 0
) -> TopKLogits:
    """The ``k`` largest logits, largest first, in float32. They are shifted so that the best one is 0: large logits
    lose no digits.

    ``uniform`` in [0, 1), a number a position, adds ``n`` tokens of the tail, at equal distances of its cumulative
    distribution. A token comes on average n times its share of the tail; the draws are not independent of each other.
    """
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, k)
    best = TopKLogits(values, ids, jax.nn.logsumexp(logits, axis=-1))
    if uniform is None:
        return best
    cumulative = jnp.cumsum(jnp.put_along_axis(jnp.exp(logits), ids, jnp.float32(0), axis=-1, inplace=False), axis=-1)
    total = cumulative[..., -1:]
    points = (uniform[..., None] + jnp.arange(n, dtype=jnp.float32)[None, None]) / n * total
    # A point rounded up to the total would lie behind the last token.
    points = jnp.minimum(points, jnp.nextafter(total, jnp.zeros_like(total)))
    find = jnp.vectorize(functools.partial(jnp.searchsorted, side="right"), signature="(v),(n)->(n)")
    tail_ids = jnp.minimum(find(cumulative, points), logits.shape[-1] - 1).astype(jnp.int32)
    return dataclasses.replace(best, tail_values=jnp.take_along_axis(logits, tail_ids, axis=-1), tail_ids=tail_ids)
