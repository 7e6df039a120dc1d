"""Top-k acceptance (as in 1811.03115, section 5.1): accept a proposed token that is among the target's k most likely
ones, whatever the draft's probability for it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from pydantic import Field

from specjax.verifiers.chain import Acceptance, ChainVerifier, at


@dataclasses.dataclass(frozen=True)
class TopK(ChainVerifier):
    """Top-k acceptance (as in 1811.03115, section 5.1), LOSSY: accept a token among the target's k most likely, ties
    with the k-th included. The acceptance is not random; the token after it has the target's own distribution."""

    k: Annotated[int, Field(ge=1)] = 4
    """The number of most likely tokens."""
    kind: Literal["top_k"] = "top_k"
    lossless: ClassVar[bool] = False
    reference: ClassVar[str] = "1811.03115"

    def acceptance(self, draft, p, q) -> Acceptance:
        drafted = at(p[:, :-1], draft.tokens)
        better = jnp.sum(p[:, :-1] > drafted[..., None], axis=-1)
        return Acceptance(((better < self.k) & (drafted > 0)).astype(p.dtype))

    def residual(self, p, q, weight):
        return p
