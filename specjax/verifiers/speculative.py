"""Speculative sampling, the token rule (2211.17192, 2302.01318): accept x with probability min(1, p(x)/q(x)); at the
first rejection draw from the residual norm((p - q)+), after a full acceptance from the target's next law.

Dims: B rows, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import sampling
from specjax.types import Draft, Noise, Verdict
from specjax.verifiers.chain import leading_run

_TINY = 1e-12
"""A residual sum at or below this is rounding (p == q): the branch has probability 0 in exact arithmetic."""


@dataclasses.dataclass(frozen=True)
class Speculative:
    """Exact for sampled drafts and for deterministic ones (``draft.logits`` None: q is a point mass)."""

    kind: Literal["speculative"] = "speculative"
    lossless: ClassVar[bool] = True
    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "fresh"

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Noise | None) -> Verdict:
        assert noise is not None, "the engine builds the noise that the verifier declares"
        p = jax.nn.softmax(p_logits, axis=-1)
        q = None if draft.logits is None else jax.nn.softmax(draft.logits, axis=-1)
        p_drafted = _at(p[:, :-1], draft.tokens)
        q_drafted = jnp.ones_like(p_drafted) if q is None else _at(q, draft.tokens)
        # u < p/q without the division: q = 0 is never drawn, p = 0 never accepted.
        num_accepted = leading_run((noise.accept * q_drafted < p_drafted) & draft.valid)

        rejected = num_accepted < leading_run(draft.valid)
        p_next = _row(p, num_accepted)
        if q is None:
            # A point mass at the rejected token: no one-hot of V is stored. (No proposal, no token to take out.)
            tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
            drafted = jnp.where(rejected, jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0], -1)
            index = jax.lax.broadcasted_iota(jnp.int32, p_next.shape, 1)
            residual = jnp.where(index == drafted[:, None], 0.0, p_next)
        else:
            q_next = _row(q, jnp.minimum(num_accepted, q.shape[1] - 1))
            residual = jnp.maximum(p_next - jnp.where(rejected[:, None], q_next, 0.0), 0.0)
        residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > _TINY, residual, p_next)
        return Verdict(num_accepted, sampling.inverse_cdf(residual, noise.next_token))


def _at(probabilities: Float[Array, "B K V"], tokens) -> Float[Array, "B K"]:
    return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]


def _row(probabilities: Float[Array, "B R V"], row) -> Float[Array, "B V"]:
    return jnp.take_along_axis(probabilities, row[:, None, None], axis=1)[:, 0]
