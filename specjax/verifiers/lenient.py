"""Lenience (2211.17192, appendix): the token rule with the draft's probabilities scaled down by l, in the acceptance
and in the residual. It accepts more; the chance of a token may grow to p / l."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from pydantic import Field

from specjax.verifiers.chain import Acceptance, ChainVerifier, ratios


@dataclasses.dataclass(frozen=True)
class Lenient(ChainVerifier):
    """Lenience (2211.17192, appendix), LOSSY below 1: accept with probability min(1, p / (l q)), else draw from norm((p
    - l q)+)."""

    lenience: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor l; 1 is the token rule."""
    kind: Literal["lenient"] = "lenient"
    lossless: ClassVar[bool] = False
    reference: ClassVar[str] = "2211.17192"

    def acceptance(self, draft, p, q) -> Acceptance:
        return Acceptance(jnp.minimum(ratios(draft, p, q) / self.lenience, 1.0))

    def residual(self, p, q, weight):
        return jnp.maximum(p - self.lenience * q, 0.0)
