"""A total of proposed tokens for a whole batch, spent where they are most likely accepted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.controllers.weighing import Weighed, Weighing
from specjax.interfaces import Calibration, Context, Draft


@dataclasses.dataclass(frozen=True)
class Total(Weighing):
    """A fixed number of proposed tokens for the batch, given to the rows and depths with the largest chance of
    acceptance (2501.12162, without trees). A pass here is padded to its longest row, so a total saves arithmetic only
    where it makes that row shorter."""

    total: int = 1
    """Proposed tokens of a block, all rows together."""

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """Number of each row's depths that are among the best of the batch."""
        if self.reviews:
            return super().choose(state, context)
        return self._allotted(state, context, jnp.cumprod(self.chances(state, context), axis=1), None)

    def review(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"] | None:
        """Number of each row's proposed tokens that are among the best of the batch, once the draft is there."""
        if not self.reviews:
            return None
        kept = jnp.cumprod(self.chances(state, context, draft.match_class), axis=1)
        kept = jnp.where(draft.valid[:, : self.ks[-1]], kept, 0.0)
        return self._allotted(state, context, kept, draft.match_class)

    def never_proposes(self, calibration: Calibration) -> bool:
        """False: the total is spent whatever it costs."""
        return False

    def _allotted(
        self, state: Weighed, context: Context, kept: Float[Array, "B K"], match_class: Int[Array, " B"] | None
    ) -> Int[Array, " B"]:
        active = jnp.ones_like(state.blocks, bool) if context.active is None else context.active
        kept = jnp.where(active[:, None], kept, 0.0)
        best = jnp.sort(kept.reshape(-1))[::-1]
        least = jnp.maximum(best[min(self.total, len(best)) - 1], 1e-6)
        wanted = jnp.sum(kept >= least, axis=1, dtype=jnp.int32)
        probing = active & (state.blocks > 0) & self.probes_now(self.pause_of(state, match_class), context)
        return jnp.where(probing, jnp.maximum(wanted, self.ks[1]), wanted)
