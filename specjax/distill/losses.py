"""Distillation losses: draft logits against the target's logits or the text's tokens, a masked mean over predictions.

Each is a frozen dataclass that is its own configuration. p is the target's law, q = softmax of the draft's logits z;
everything is float32. Gradients reach the draft only.

Dims: B rows, T predicted positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.metrics import alpha_per_position


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean of the values that ``mask`` selects; 0 if it selects none."""
    count = jnp.sum(mask.astype(jnp.float32))
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(count, 1.0)


def negative_log_likelihood(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log softmax(logits)[token], in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """-log q(next token). dL/dz = q - onehot(token). ``alpha`` is reported when the target's logits are given."""

    needs_target: ClassVar[bool] = False
    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        target_logits: Float[Array, "B T V"] | None,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
        loss = masked_mean(negative_log_likelihood(draft_logits, tokens), mask)
        return loss, {"loss": loss} | _alpha(draft_logits, target_logits, mask)


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """KL(p || q) = sum p (log p - log q), the target's full law as the label. dL/dz = q - p."""

    needs_target: ClassVar[bool] = True
    kind: Literal["forward_kl"] = "forward_kl"

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        target_logits: Float[Array, "B T V"] | None,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
    ) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
        if target_logits is None:
            raise ValueError("forward_kl needs the target's logits; none were given")
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits).astype(jnp.float32), axis=-1)
        log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
        p = jnp.exp(log_p)
        # A token the target excludes (p = 0, log p = -inf) contributes nothing.
        loss = masked_mean(jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1), mask)
        return loss, {"loss": loss} | _alpha(draft_logits, target_logits, mask)


def _alpha(draft_logits, target_logits, mask) -> dict[str, jax.Array]:
    if target_logits is None:
        return {}
    draft_logits, target_logits = jax.lax.stop_gradient((draft_logits, target_logits))
    return {"alpha": masked_mean(alpha_per_position(target_logits, draft_logits), mask)}
