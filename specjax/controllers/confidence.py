"""A row stops where its draft is no longer sure: before a token is drawn, by the distribution that it would be drawn
from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.controllers.weighing import lengths
from specjax.errors import ConfigError
from specjax.types import Context, Outcome


@dataclasses.dataclass(frozen=True)
class Confidence:
    """A row proposes until its draft's distribution is less sure than ``threshold`` (2410.18351), judged before a token
    is drawn from it, which keeps the output's distribution: dropping a token for its own probability (as a threshold on
    the drawn token would) does not. For drafters with a distribution; others are proposed whole."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Least largest probability; with ``by`` entropy, the most entropy as a share of that of a uniform distribution;
    with ``by`` head, the least chance of being kept."""
    by: Literal["max_prob", "entropy", "head"] = "max_prob"
    """What is asked: the draft's distribution, or the head of one that has been taught how likely its tokens are kept
    (`dspark`)."""
    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths that blocks are compiled for; None: 0, 1, 2, 3, 5, 8, ... and the drafter's longest."""
    kind: Literal["confidence"] = "confidence"
    asks_the_drafter: ClassVar[bool] = True

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

    def stop(
        self,
        state: Any,
        logits: Float[Array, "B V"],
        offset: int | Int[Array, ""],
        kept: Float[Array, " B"] | None = None,
    ) -> Bool[Array, " B"]:
        """The rows that are not sure enough of this token; ``kept``: see `specjax.types.Context.stop`."""
        if self.by == "head":
            if kept is None:
                raise ConfigError(
                    "controller: confidence by head, and this draft has no confidence head; judge it by max_prob"
                )
            return kept < self.threshold
        if self.by == "max_prob":
            return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) < self.threshold
        log_q = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(jnp.isfinite(log_q), jnp.exp(log_q) * log_q, 0.0), axis=-1)
        return entropy > self.threshold * jnp.log(logits.shape[-1])

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The state as it is."""
        return state
