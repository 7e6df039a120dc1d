"""The common part of chain verifiers. A rule gives the chance to accept each proposed token and the unnormalised
distribution of the token after them. Counting, drawing and the exact `distribution` are here, so that the proof covers
the code that samples.

Dims: B rows, K draft length, K1 = K + 1, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.interfaces import Draft, Noise, Verdict, VerdictDistribution, Verifier
from specjax.proposal import leading_run

_TINY = 1e-12
"""Residual sum at or below which it is rounding (p == q): the branch has probability 0 in exact arithmetic."""


class Acceptance(NamedTuple):
    """The chances that a rule gives to the depths of a proposal; depths that are not valid are ignored."""

    accept_prob: Float[Array, "B K"]
    """The chance that depth i succeeds."""
    weight: Float[Array, "B K1"] | None = None
    """Factor w of the residual ``(w p - q)+`` after n tokens; None: 1."""


class ChainVerifier(Verifier):
    """A verifier of chains: it accepts a prefix of the proposal, then draws one token from the residual, or after full
    acceptance from the target's next distribution."""

    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "fresh"
    last_success: ClassVar[bool] = False
    """True: accept up to the last depth that succeeds; False: up to the first that fails."""

    def acceptance(self, draft: Draft, p: Float[Array, "B K1 V"], q: Float[Array, "B K V"] | None) -> Acceptance:
        """The chance that each proposed token is accepted, given the probabilities of target and draft. ``q`` None: the
        draft is deterministic (a point mass at each token)."""
        raise NotImplementedError

    def residual(
        self, p: Float[Array, "B V"], q: Float[Array, "B V"], weight: Float[Array, " B"] | None
    ) -> Float[Array, "B V"]:
        """Unnormalised distribution of the token after a rejection. ``q`` may be computed where it is used: read it
        once."""
        scaled = p if weight is None else weight[:, None] * p
        return jnp.maximum(scaled - q, 0.0)

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Any) -> Verdict:
        assert isinstance(noise, Noise), "the engine builds the noise that the verifier declares"
        p = jax.nn.softmax(p_logits, axis=-1)
        q = None if draft.logits is None else jax.nn.softmax(draft.logits, axis=-1)
        acceptance = self.acceptance(draft, p, q)
        success = (noise.accept < acceptance.accept_prob) & draft.valid
        n = last_success(success) if self.last_success else leading_run(success)
        return Verdict(n, sampling.inverse_cdf(self._next(draft, p, q, acceptance, n), noise.next_words))

    def distribution(
        self, draft: Draft, p: Float[Array, "B K1 V"], q: Float[Array, "B K V"] | None
    ) -> VerdictDistribution:
        """The exact distribution of the verdict, for any float type. ``p``, ``q``: the probabilities of target and
        draft."""
        acceptance = self.acceptance(draft, p, q)
        keep = jnp.where(draft.valid, acceptance.accept_prob, 0.0).astype(p.dtype)
        counts = last_success_distribution(keep) if self.last_success else leading_run_distribution(keep)
        rows = [self._next(draft, p, q, acceptance, jnp.full(len(p), n, jnp.int32)) for n in range(p.shape[1])]
        following = jnp.stack(rows, axis=1)
        return VerdictDistribution(counts, following / jnp.sum(following, axis=-1, keepdims=True))

    def _next(self, draft: Draft, p, q, acceptance: Acceptance, num_accepted: Int[Array, " B"]) -> Float[Array, "B V"]:
        """Unnormalised distribution of the next token: the residual after a rejection, p after full acceptance."""
        rejected = (num_accepted < leading_run(draft.valid))[:, None]
        p_next = row(p, num_accepted)
        if q is None:
            # A point mass at the rejected token, computed where it is used: no one-hot of V is stored.
            tokens = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
            index = jax.lax.broadcasted_iota(jnp.int32, p_next.shape, 1)
            q_next = (index == row(tokens, num_accepted)[:, None]).astype(p.dtype)
        else:
            q_next = row(q, jnp.minimum(num_accepted, q.shape[1] - 1))
        weight = None if acceptance.weight is None else row(acceptance.weight, num_accepted)
        residual = jnp.where(rejected, self.residual(p_next, q_next, weight), p_next)
        return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > _TINY, residual, p_next)


def last_success(success: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of tokens up to the last success, 0 without any."""
    return jnp.max(jnp.where(success, jnp.arange(1, success.shape[1] + 1, dtype=jnp.int32)[None], 0), axis=1, initial=0)


def leading_run_distribution(keep: Float[Array, "B K"]) -> Float[Array, "B K1"]:
    """Distribution of `leading_run` for independent successes."""
    one = jnp.ones((len(keep), 1), keep.dtype)
    reached = jnp.concatenate([one, jnp.cumprod(keep, axis=1)], axis=1)
    return reached * jnp.concatenate([1.0 - keep, one], axis=1)


def last_success_distribution(keep: Float[Array, "B K"]) -> Float[Array, "B K1"]:
    """Distribution of `last_success` for independent successes."""
    one = jnp.ones((len(keep), 1), keep.dtype)
    failed_after = jnp.cumprod((1.0 - keep)[:, ::-1], axis=1)[:, ::-1]
    return jnp.concatenate([one, keep], axis=1) * jnp.concatenate([failed_after, one], axis=1)


def ratios(draft: Draft, p: Float[Array, "B K1 V"], q: Float[Array, "B K V"] | None) -> Float[Array, "B K"]:
    """p(x) / q(x) for every proposed token, so that ``u < ratio`` means ``u q(x) < p(x)``. Where q(x) = 0, which is
    never drawn, it is 1 if p(x) > 0. Values that are not finite give NaN, and no u is below NaN."""
    p_drafted = at(p[:, :-1], draft.tokens)
    if q is None:
        return p_drafted
    q_drafted = at(q, draft.tokens)
    never = q_drafted == 0
    return jnp.where(never, (p_drafted > 0).astype(p.dtype), p_drafted / jnp.where(never, 1.0, q_drafted))


def at(probabilities: Float[Array, "B K V"], tokens: Int[Array, "B K"]) -> Float[Array, "B K"]:
    """The probability of each token at its depth."""
    return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]


def row(values: Array, index: Int[Array, " B"]) -> Array:
    """The entry ``values[b, index[b]]`` of each row."""
    return jnp.take_along_axis(values, index.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]
