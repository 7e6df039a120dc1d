"""Block verification (2403.10444): the proposed tokens are judged together, and the longest prefix that succeeds is
accepted, also past a failure. In expectation, it accepts never fewer tokens than the token rule for the same proposal,
p and q.

It needs fresh noise in every block: a rejected position is drawn again, and the decision looked at tokens after it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from specjax import backend
from specjax.proposal import leading_run
from specjax.verifiers.chain import Acceptance, ChainVerifier, at, ratios


@dataclasses.dataclass(frozen=True)
class Block(ChainVerifier):
    """Block verification (2403.10444), lossless: the proposed tokens are judged together. Exact for sampled drafts and
    for deterministic ones (``draft.logits`` None: q is a point mass)."""

    kind: Literal["block"] = "block"
    lossless: ClassVar[bool] = True
    reference: ClassVar[str] = "2403.10444"
    last_success: ClassVar[bool] = True

    def acceptance(self, draft, p, q) -> Acceptance:
        """The chance that each depth succeeds, and the weight of the residual after it. b_i = min(1, b_(i-1) p/q), b_0
        = 1; the mass left after i tokens is S_i = sum (b_i p - q)+ at depth i + 1. The last valid depth succeeds with
        chance b, one before it with S_i / (S_i + 1 - b_i)."""
        ratio = ratios(draft, p, q)
        weights = [jnp.ones(len(ratio), ratio.dtype)]
        for i in range(ratio.shape[1]):  # the clamp acts on every factor, not on the product
            weights.append(jnp.minimum(weights[-1] * ratio[:, i], 1.0))
        weight = jnp.stack(weights, axis=1)
        b, inner = weight[:, 1:], weight[:, 1:-1]
        if q is None or q.shape[1] == 1:
            left = inner * (1.0 - at(p[:, 1:-1], draft.tokens[:, 1:]))
        else:
            left = backend.row_sums(
                [jnp.maximum(weight[:, i, None] * p[:, i] - q[:, i], 0.0) for i in range(1, q.shape[1])]
            )
        whole = left + (1.0 - inner)
        # 0/0: nothing is left because p = q, and all later tokens are accepted. NaN stays, and accepts nothing.
        nothing = whole <= 0
        h = jnp.where(nothing, 1.0, left / jnp.where(nothing, 1.0, whole))
        last = jnp.arange(1, b.shape[1] + 1, dtype=jnp.int32)[None] == leading_run(draft.valid)[:, None]
        return Acceptance(jnp.where(last, b, jnp.pad(h, ((0, 0), (0, 1)))), weight)
