"""Speculative sampling, the token rule (2211.17192, 2302.01318): accept x with probability min(1, p(x)/q(x)); at the
first rejection draw from the residual norm((p - q)+), after full acceptance from the target's next distribution."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from specjax.verifiers.chain import Acceptance, ChainVerifier, ratios


@dataclasses.dataclass(frozen=True)
class Speculative(ChainVerifier):
    """Speculative sampling, token by token (2211.17192, 2302.01318), lossless: accept x with probability min(1, p(x) /
    q(x)). Exact for sampled drafts and for deterministic ones (``draft.logits`` None: q is a point mass)."""

    kind: Literal["speculative"] = "speculative"
    lossless: ClassVar[bool] = True
    reference: ClassVar[str] = "2211.17192"

    def acceptance(self, draft, p, q) -> Acceptance:
        return Acceptance(ratios(draft, p, q).clip(max=1.0))
