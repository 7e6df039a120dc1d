"""Greedy verification: accept proposed tokens while they equal the target's argmax (2211.17192, temperature 0).

Dims: B rows, K draft length, N proposed tokens (K for a chain), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float

from specjax import sampling
from specjax.interfaces import Draft, Verdict, VerdictDistribution, Verifier
from specjax.verifiers.chain import leading_run_distribution
from specjax.verifiers.matching import walk


@dataclasses.dataclass(frozen=True)
class Greedy(Verifier):
    """Greedy verification (2211.17192, temperature 0), lossless: accept proposed tokens while they equal the target's
    argmax. The output equals greedy decoding token for token. It decides every all-greedy batch, and needs no noise."""

    kind: Literal["greedy"] = "greedy"
    lossless: ClassVar[bool] = True
    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "none"
    proposals: ClassVar[tuple[str, ...]] = ("chain", "tree")
    reference: ClassVar[str] = "2211.17192"

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Any) -> Verdict:
        best = sampling.argmax(p_logits)
        return walk(draft, best, sampling.has_distribution(p_logits))

    def distribution(
        self, draft: Draft, p: Float[Array, "B K1 V"], q: Float[Array, "B K V"] | None
    ) -> VerdictDistribution:
        """The exact distribution of the verdict, for any float type: under the point mass at the argmax of ``p``, not
        under ``p``."""
        best = sampling.argmax(p)
        keep = ((draft.tokens == best[:, :-1]) & draft.valid).astype(p.dtype)
        return VerdictDistribution(leading_run_distribution(keep), jax.nn.one_hot(best, p.shape[-1], dtype=p.dtype))
