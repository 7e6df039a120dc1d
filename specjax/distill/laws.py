"""Logits in, the two laws that a loss or a metric compares out: over the vocabulary, or, where only the target's k
largest logits are known, over those k tokens and one bucket for all others.

The bucket keeps what the k tokens leave to each side. As both laws are coarsened alike, a divergence of theirs is at
most the true one (data processing), and their overlap is the upper end of what alpha can be.

Dims: B rows, T predicted positions, V vocabulary, W outcomes: V, or k + 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.metrics import alpha_per_position
from specjax.types import FullLogits, TopKLogits

_NOTHING = -1e30
"""In place of a logit that is left out: finite, because the gradient of a logsumexp over -inf alone is NaN."""


def log_laws(
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
        raise ValueError(f"target_temperature={target_temperature:g} needs the target's whole law, found its top k")
    log_p = teacher.values.astype(jnp.float32) - teacher.logsumexp.astype(jnp.float32)[..., None]
    inside = jnp.take_along_axis(log_q, teacher.ids, axis=-1)
    if teacher.ids.shape[-1] == log_q.shape[-1]:
        return log_p, inside
    # The draft's tail by leaving the k tokens out, not as 1 - sum: that would have no digits left when it is small.
    left = jnp.put_along_axis(log_q, teacher.ids, jnp.float32(_NOTHING), axis=-1, inplace=False)
    tail_q = jax.nn.logsumexp(left, axis=-1, keepdims=True)
    tail_p = jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(log_p), axis=-1, keepdims=True), 0.0))
    return jnp.concatenate([log_p, tail_p], axis=-1), jnp.concatenate([inside, tail_q], axis=-1)


def overlap(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """alpha = sum min(p, q) = 1 - total variation."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


def acceptance(draft_logits: Float[Array, "B T V"], teacher: FullLogits | TopKLogits) -> dict[str, Float[Array, "B T"]]:
    """``alpha`` at temperature 1, or from cached logits the ends of the interval that holds it: ``alpha_lower``, the
    overlap of the k tokens, and ``alpha_upper``, with what the tails can add to it."""
    if isinstance(teacher, FullLogits):
        return {"alpha": alpha_per_position(teacher.logits, draft_logits)}
    log_p, log_q = log_laws(draft_logits, teacher)
    k = teacher.ids.shape[-1]
    return {"alpha_lower": overlap(log_p[..., :k], log_q[..., :k]), "alpha_upper": overlap(log_p, log_q)}


def top_k_logits(logits: Float[Array, "B T V"], k: int) -> TopKLogits:
    """The ``k`` largest, largest first; float32, and the best one 0, so that large logits lose no digits."""
    logits = logits.astype(jnp.float32)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    values, ids = jax.lax.top_k(logits, k)
    return TopKLogits(values, ids, jax.nn.logsumexp(logits, axis=-1))
