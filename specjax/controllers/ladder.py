"""One length for the whole batch, from what all rows kept lately."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.controllers.adaptive import Adapted, Adaptive
from specjax.types import Context


@dataclasses.dataclass(frozen=True)
class Ladder(Adaptive):
    """One length for the whole batch, that of the most tokens for its cost by what all rows kept together. Which sample
    of its distribution a row gets then depends on the rows beside it: a batch replays with the same prompts, seeds and
    calibration; a row alone does so only greedily or with the `coupled` rule, where lengths change nothing."""

    kind: Literal["ladder"] = "ladder"

    def pooled(self, counts: Float[Array, "B K"], active: Bool[Array, " B"]) -> Float[Array, "1 K"]:
        """That of all rows that are not done. Old evidence fades for each row, so a batch has more of it."""
        return jnp.sum(jnp.where(active[:, None], counts, 0.0), axis=0, keepdims=True)

    def choose(self, state: Adapted, context: Context) -> Int[Array, " B"]:
        """The same for all rows: what those chose that have decoded before, since rows come and go."""
        chosen = super().choose(state, context)
        active = jnp.ones_like(chosen, bool) if context.active is None else context.active
        known = active & (state.blocks > 0)
        voters = jnp.where(jnp.any(known), known, active)
        return jnp.broadcast_to(jnp.max(jnp.where(voters, chosen, 0)), chosen.shape)
