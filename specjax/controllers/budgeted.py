"""So many proposals for a whole batch, where they are expected to give the most."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.controllers.weighing import Weighed, Weighing, calibration_of
from specjax.types import Calibration, Context, Draft


@dataclasses.dataclass(frozen=True)
class Budgeted(Weighing):
    """A total of proposals for the batch, given to the rows and places whose chance of being kept is largest
    (2501.12162, without trees); as many as pay, or ``tokens`` of them.

    A pass here is padded to its longest row, so a total saves arithmetic only where that row is shorter for it;
    `ladder` and `survival` count what this engine pays. Rows depend on each other as in `ladder`."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    """Most proposals of a block, of all rows together; None: those that pay."""
    kind: Literal["budgeted"] = "budgeted"

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """Of each row the places that are among the best ones of all."""
        return self._allotted(state, context, jnp.cumprod(self.chances(state, context), axis=1))

    def decide(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"]:
        """The same, of what was found."""
        kept = jnp.cumprod(self.chances(state, context, draft.grade), axis=1)
        return self._allotted(state, context, jnp.where(draft.valid[:, : self.rungs[-1]], kept, 0.0))

    def never_proposes(self, calibration: Calibration) -> bool:
        """No: a total of proposals is spent, and its costs are between those of ``ks``."""
        return False

    def _allotted(self, state: Weighed, context: Context, kept: Float[Array, "B K"]) -> Int[Array, " B"]:
        active = jnp.ones_like(state.blocks, bool) if context.active is None else context.active
        kept = jnp.where(active[:, None], kept, 0.0)
        best = jnp.sort(kept.reshape(-1))[::-1]
        rows = jnp.maximum(jnp.sum(active, dtype=jnp.float32), 1)
        emitted = rows + jnp.pad(jnp.cumsum(best), (1, 0))
        seconds = calibration_of(context, self).seconds
        places = jnp.arange(len(best) + 1, dtype=jnp.float32)
        rates = emitted / jnp.interp(places / rows, jnp.arange(len(seconds), dtype=jnp.float32), seconds)
        total = jnp.argmax(rates) if self.tokens is None else jnp.int32(min(self.tokens, len(best)))
        least = jnp.where(total > 0, best[jnp.maximum(total - 1, 0)], jnp.inf)
        wanted = jnp.sum(kept >= jnp.maximum(least, 1e-6), axis=1, dtype=jnp.int32)
        looking = active & (state.blocks > 0) & self.due(state, state.waited, context)
        return jnp.where(looking, jnp.maximum(wanted, self.rungs[1]), wanted)
