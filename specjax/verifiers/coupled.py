"""Drafter-invariant coupling (2408.07978): draft and target take the argmax of log-probability plus the same Gumbel
noise, a function of the row's seed and the absolute position alone. The output equals that of plain sampling with that
noise, token for token, whatever the draft.

Dims: B rows, K draft length, K1 = K + 1, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.interfaces import CoupledNoise, Draft, Verdict, VerdictDistribution, Verifier
from specjax.proposal import depths, paths
from specjax.verifiers.chain import at, leading_run_distribution
from specjax.verifiers.matching import walk


@dataclasses.dataclass(frozen=True)
class Coupled(Verifier):
    """Drafter-invariant coupling (2408.07978), lossless: accept proposed tokens while they equal the target's choice
    under shared noise. It needs no draft probabilities and no residual."""

    kind: Literal["coupled"] = "coupled"
    lossless: ClassVar[bool] = True
    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "coupled"
    proposals: ClassVar[tuple[str, ...]] = ("chain", "tree")
    reference: ClassVar[str] = "2408.07978"

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Any) -> Verdict:
        assert isinstance(noise, CoupledNoise), "the engine builds the noise that the verifier declares"
        gumbel = noise.gumbel
        if draft.parents is not None:  # the noise of a node's position, which siblings share
            gumbel = jnp.take_along_axis(gumbel, depths(paths(draft.parents))[..., None], axis=1)
        perturbed = p_logits + gumbel
        return walk(draft, sampling.argmax(perturbed), sampling.has_distribution(perturbed))

    def distribution(
        self, draft: Draft, p: Float[Array, "B K1 V"], q: Float[Array, "B K V"] | None
    ) -> VerdictDistribution:
        """The exact distribution of the verdict over the noise, given the proposed tokens that it chose, for any float
        type and small vocabularies (V^3 memory)."""
        if q is None:
            chosen = p[:, :-1]
        else:
            joint = jax.vmap(jax.vmap(_joint))(p[:, :-1], q, draft.tokens)
            # A token that the draft never chooses has no joint distribution.
            joint = jnp.where(at(q, draft.tokens)[..., None] > 0, joint, p[:, :-1])
            chosen = joint / jnp.sum(joint, axis=-1, keepdims=True)
        keep = jnp.where(draft.valid, at(chosen, draft.tokens), 0.0)
        index = jnp.arange(p.shape[-1])[None, None]
        # The target's choice, given that it is not the proposed token.
        other = jnp.where((index == draft.tokens[..., None]) & draft.valid[..., None], 0.0, chosen)
        other = jnp.where(draft.valid[..., None], other, p[:, :-1])
        other = other / jnp.maximum(jnp.sum(other, axis=-1, keepdims=True), jnp.finfo(p.dtype).tiny)
        return VerdictDistribution(leading_run_distribution(keep), jnp.concatenate([other, p[:, -1:]], axis=1))


def _joint(p: Float[Array, " V"], q: Float[Array, " V"], a: Int[Array, ""]) -> Float[Array, " V"]:
    """Pr(draft chooses a, target chooses b) for every b. In the exponential race, the two choices are a and b != a for
    ratios r of their arrival times from q_b/q_a to p_b/p_a. So it is the integral of (1 + r + sum_u max(q_u/q_a, r
    p_u/p_b))^-2 over these r, where u are the other tokens; the maxima change sides at the ``turns``."""

    def divided(x, y):
        return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), jnp.inf)

    token = jnp.arange(len(p))
    same = jnp.sum(jnp.maximum(divided(p, p[a]), divided(q, q[a])))

    def different(b):
        others = (token != a) & (token != b)
        low, high = divided(q[b], q[a]), divided(p[b], p[a])
        turns = divided(q * p[b], q[a] * p)
        edges = jnp.sort(jnp.concatenate([jnp.clip(turns, low, high), jnp.stack([low, high])]))
        start, end = edges[:-1], edges[1:]
        turned = (turns[None] <= start[:, None]) & others[None]
        constant = 1.0 + jnp.sum(jnp.where(others[None] & ~turned, divided(q, q[a])[None], 0.0), axis=1)
        slope = 1.0 + jnp.sum(jnp.where(turned, divided(p, p[b])[None], 0.0), axis=1)
        value = constant + slope * start
        finite = jnp.isfinite(end)
        last = jnp.where(finite, end, start)
        piece = jnp.where(finite, (last - start) / (value * (constant + slope * last)), 1.0 / (slope * value))
        return jnp.where((high > low) & (p[b] > 0), jnp.sum(jnp.where(start < end, piece, 0.0)), 0.0)

    return jnp.where(token == a, 1.0 / same, jax.vmap(different)(token))
