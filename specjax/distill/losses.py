"""Distillation losses: what the draft's prediction of one token costs, against the target's law or the text's token.

Each is a frozen dataclass that is its own configuration and gives one value a position. p is the target's law, q =
softmax of the draft's logits z; everything is float32. Gradients reach the draft only.

Dims: B rows, T predicted positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.types import FullLogits, TopKLogits


def negative_log_likelihood(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log softmax(logits)[token], in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """-log q(next token). dL/dz = q - onehot(token)."""

    needs_target: ClassVar[bool] = False
    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        return negative_log_likelihood(draft_logits, tokens)


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """KL(p || q) = sum p (log p - log q), the target's full law as the label. dL/dz = q - p."""

    needs_target: ClassVar[bool] = True
    kind: Literal["forward_kl"] = "forward_kl"

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
    ) -> Float[Array, "B T"]:
        if not isinstance(teacher, FullLogits):
            raise ValueError("forward_kl needs the target's logits; none were given")
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher.logits).astype(jnp.float32), axis=-1)
        log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32), axis=-1)
        p = jnp.exp(log_p)
        # A token the target excludes (p = 0, log p = -inf) contributes nothing.
        return jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
