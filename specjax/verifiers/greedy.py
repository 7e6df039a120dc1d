"""Greedy verification: keep draft tokens while they equal the target's argmax (2211.17192, temperature 0).

Dims: B rows, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import sampling
from specjax.types import Draft, Noise, Verdict
from specjax.verifiers.chain import leading_run


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Output equals greedy decoding token for token. Used for every all-greedy batch; needs no noise."""

    kind: Literal["greedy"] = "greedy"
    lossless: ClassVar[bool] = True
    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "none"

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Noise | None) -> Verdict:
        best = sampling.argmax(p_logits)
        num_accepted = leading_run((draft.tokens == best[:, :-1]) & draft.valid)
        return Verdict(num_accepted, jnp.take_along_axis(best, num_accepted[:, None], axis=1)[:, 0])
