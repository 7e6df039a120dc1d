"""Logits in, the two distributions that a loss or a metric compares out: over the vocabulary, or, where only the
target's k largest logits are known, over those k tokens and something for all others.

That is n tokens drawn from p's tail, where they were kept: each has 1/n of the tail's mass under p and, under q, that
times its own q/p. Sums like KL(p || q) and the overlap, whose terms are p times a function of q/p, are then right in
expectation, and so are their gradients (2503.16870); q's part does not add up to its tail. Otherwise it is one bucket.
As both distributions are coarsened alike, a divergence of theirs is then at most the true one (data processing), and
their overlap is the upper end of what alpha can be.

Dims: B rows, T predicted positions, V vocabulary, k best tokens, n of the tail, W outcomes: V, k + n or k + 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.metrics import alpha_per_position
from specjax.types import FullLogits, TopKLogits

_NOTHING = -1e30
"""In place of a logit that is left out: finite, because the gradient of a logsumexp over -inf alone is NaN."""


def log_distributions(
    draft_logits: Float[Array, "B T V"],
    teacher: FullLogits | TopKLogits,
    target_temperature: float = 1.0,
    draft_temperature: float = 1.0,
) -> tuple[Float[Array, "B T W"], Float[Array, "B T W"]]:
    """(log p, log q) of the same outcomes, in float32; no gradient reaches p.

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
        # The draft's tail by leaving the k tokens out, not as 1 - sum: that would have no digits left when it is small.
        left = jnp.put_along_axis(log_q, teacher.ids, jnp.float32(_NOTHING), axis=-1, inplace=False)
        tail_p, tail_q = mass, jax.nn.logsumexp(left, axis=-1, keepdims=True)
    else:
        tail_p = jnp.broadcast_to(mass - math.log(teacher.tail_ids.shape[-1]), teacher.tail_ids.shape)
        own = teacher.tail_values.astype(jnp.float32) - logsumexp
        ratio = jnp.take_along_axis(log_q, teacher.tail_ids, axis=-1) - own
        # Without a tail there was nothing to draw from.
        tail_q = jnp.where(tail_p > -jnp.inf, tail_p + ratio, -jnp.inf)
    return jnp.concatenate([log_p, tail_p], axis=-1), jnp.concatenate([inside, tail_q], axis=-1)


def overlap(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """alpha = sum min(p, q) = 1 - total variation."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def log_overlap(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """log alpha, with all its digits and its gradient however small alpha is."""
    return jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)


def acceptance(draft_logits: Float[Array, "B T V"], teacher: FullLogits | TopKLogits) -> dict[str, Float[Array, "B T"]]:
    """``alpha`` at temperature 1, or what cached logits say of it: the ends of the interval that holds it,
    ``alpha_lower``, the overlap of the k tokens, and ``alpha_upper``, with what the tails can add; and
    ``alpha_estimate``, from the tokens of the tail if there are any, else the upper end."""
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
    """The ``k`` largest, largest first; float32, and the best one 0, so that large logits lose no digits.

    With ``uniform`` in [0, 1), a number a position, ``n`` tokens of the tail as well, at equal distances of its
    cumulative distribution: each token is expected as often as its share of n, and no draw is independent of the
    others.
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
    # Rounded up to the total, a point would lie behind the last token.
    points = jnp.minimum(points, jnp.nextafter(total, jnp.zeros_like(total)))
    find = jnp.vectorize(functools.partial(jnp.searchsorted, side="right"), signature="(v),(n)->(n)")
    tail_ids = jnp.minimum(find(cumulative, points), logits.shape[-1] - 1).astype(jnp.int32)
    return dataclasses.replace(best, tail_values=jnp.take_along_axis(logits, tail_ids, axis=-1), tail_ids=tail_ids)
