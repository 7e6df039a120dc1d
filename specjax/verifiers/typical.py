"""Typical acceptance (Medusa, 2401.10774): accept a proposed token that is likely enough for how undecided the target
is."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax.scipy.special import entr
from pydantic import Field

from specjax.verifiers.chain import Acceptance, ChainVerifier, at


@dataclasses.dataclass(frozen=True)
class Typical(ChainVerifier):
    """Typical acceptance (Medusa, 2401.10774), LOSSY: accept x if p(x) > min(epsilon, delta exp(-H(p))), H the entropy
    in nats; the token after that has the target's own distribution."""

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.09
    """The probability that is always enough."""
    delta: Annotated[float, Field(gt=0)] = 0.3
    """The share of exp(-H(p)) that is enough where the target is undecided."""
    kind: Literal["typical"] = "typical"
    lossless: ClassVar[bool] = False
    reference: ClassVar[str] = "2401.10774"

    def acceptance(self, draft, p, q) -> Acceptance:
        entropy = jnp.sum(entr(p[:, :-1]), axis=-1)
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        return Acceptance((at(p[:, :-1], draft.tokens) > threshold).astype(p.dtype))

    def residual(self, p, q, weight):
        return p
