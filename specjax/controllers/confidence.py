"""A row stops where its draft is no longer sure: before a token is drawn, by the distribution that it would be drawn
from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.controllers.weighing import lengths
from specjax.types import Context, Outcome


@dataclasses.dataclass(frozen=True)
class Confidence:
    """A row proposes until its draft's distribution is less sure than ``threshold`` (2410.18351), judged before a token
    is drawn from it, which keeps the output's distribution: dropping a token for its own probability (as a threshold on
    the drawn token would) does not. For drafters with a distribution; others are proposed whole."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Least largest probability; with ``by`` entropy, the most entropy as a share of that of a uniform distribution."""
    by: Literal["max_prob", "entropy"] = "max_prob"
    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths that blocks are compiled for; None: 0, 1, 2, 3, 5, 8, ... and the drafter's longest."""
    kind: Literal["confidence"] = "confidence"

    @property
    def rungs(self) -> tuple[int, ...]:
        """``ks``."""
        return self.ks or ()

    def bind(self, depth: int) -> Confidence:
        """With the lengths that a drafter of ``depth`` has."""
        return dataclasses.replace(self, ks=lengths(self.ks, depth))

    def init(self, batch: int) -> Any:
        """An empty state: nothing is adapted."""
        return {}

    def choose(self, state: Any, context: Context) -> Int[Array, " B"]:
        """The drafter's longest for every row."""
        return jnp.full(context.lengths.shape, self.rungs[-1] if self.rungs else 64, jnp.int32)

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"]:
        """The rows whose distribution of this token is not sure enough."""
        if self.by == "max_prob":
            return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) < self.threshold
        log_q = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(log_q), jnp.exp(log_q) * log_q, 0.0), axis=-1)
        return entropy > self.threshold * jnp.log(logits.shape[-1])

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The state as it is."""
        return state
