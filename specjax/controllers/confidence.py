"""Early stop of each row where its draft is unsure, judged before a token is drawn by the distribution that it would be
drawn from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.controllers.weighing import lengths
from specjax.errors import ConfigError
from specjax.interfaces import BoundDrafter, Context, Controller, Outcome


@dataclasses.dataclass(frozen=True)
class Confidence(Controller):
    """Early stop: a row proposes until its draft is less sure than ``threshold`` (2410.18351). The controller judges
    before a token is drawn, which keeps the output's distribution; dropping a token for its own probability (as a
    threshold on the drawn token would) does not. For drafters with a distribution; the proposals of others stay
    whole."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Least probability of the draft's most likely token; with ``by`` entropy, the most entropy as a share of that of a
    uniform distribution; with ``by`` head, the least chance of acceptance."""
    by: Literal["max_prob", "entropy", "head"] = "max_prob"
    """Source of the judgement: the draft's distribution, or the head of a draft that has been taught how likely its
    tokens are accepted (`dspark`)."""
    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths that blocks are compiled for; None: 0, 1, 2, 3, 5, 8, ... and the drafter's longest."""
    kind: Literal["confidence"] = "confidence"

    @property
    def needs_confidence(self) -> bool:
        return self.by == "head"

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        """The lengths ``ks``."""
        return self.ks or ()

    def bind(self, drafter: BoundDrafter) -> Confidence:
        """The controller with the lengths that the drafter has."""
        return dataclasses.replace(self, ks=lengths(self.ks, drafter.max_depth))

    def init(self, batch: int) -> Any:
        """An empty state: nothing is adapted."""
        return {}

    def choose(self, state: Any, context: Context) -> Int[Array, " B"]:
        """The longest length for every row."""
        return jnp.full(context.lengths.shape, self.ks[-1] if self.ks else 64, jnp.int32)

    def stop_by_confidence(
        self, state: Any, confidence: Float[Array, " B"] | None, offset: int | Int[Array, ""]
    ) -> Bool[Array, " B"] | None:
        """True for rows whose drafter is not sure enough of this token. Raises `ConfigError` for a drafter without a
        confidence head."""
        if self.by != "head":
            return None
        if confidence is None:
            raise ConfigError(
                "controller: confidence by head, and this draft has no confidence head; judge it by max_prob"
            )
        return confidence < self.threshold

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """True for rows whose distribution is not sure enough of this token."""
        if self.by == "head":
            return None
        if self.by == "max_prob":
            return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) < self.threshold
        log_q = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(log_q), jnp.exp(log_q) * log_q, 0.0), axis=-1)
        return entropy > self.threshold * jnp.log(logits.shape[-1])

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The unchanged state."""
        return state
