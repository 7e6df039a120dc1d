"""One length for the whole batch, from what all rows kept lately."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.controllers.weighing import Weighed, Weighing, calibration_of, estimated, of_grade
from specjax.types import Context, Draft, Outcome

_AHEAD = 4.0
"""Tokens; a row that is so much ahead of the slowest counts for a third of it."""


@dataclasses.dataclass(frozen=True)
class Pooled(Weighing):
    """A `Weighing` of which all rows choose the same."""

    together: ClassVar[bool] = True
    row_trust: Annotated[float, Field(gt=0)] = 5.0
    """Blocks of a row that what all rows kept counts for, in what is expected of that row."""

    def chances(self, state: Weighed, context: Context, grade: Int[Array, " B"] | None = None) -> Float[Array, "B K"]:
        """By what the row's own proposals became and those of all rows that are not done; old evidence fades for each
        row, so a batch has more of it."""
        counts, active = (state.reached, state.accepted), _active(state, context)[:, None, None]
        prior = calibration_of(context, self).acceptance[None]
        own, pooled = (
            [of_grade(x, grade) for x in found]
            for found in (counts, [jnp.sum(jnp.where(active, x, 0.0), axis=0, keepdims=True) for x in counts])
        )
        share, rows = active[:, 0, 0].astype(jnp.float32), len(active)
        trusted = jnp.sum(share * of_grade(state.trusted[..., None], grade)[:, 0], keepdims=True)
        trusted = trusted / jnp.maximum(jnp.sum(share), 1.0)
        of_all = estimated(pooled[0], pooled[1], prior, self.trust * trusted)
        if rows == 1:  # whose evidence must not count twice
            return of_all
        return estimated(own[0], own[1], of_all, jnp.full((rows,), self.row_trust, jnp.float32))

    def rates(
        self, chances: Float[Array, "B K"], context: Context, valid: Bool[Array, "B K"] | None = None
    ) -> Float[Array, "1 N"]:
        """How fast the batch gets to its end. Of a block that is in view, by the tokens that it gives, those of rows
        that are ahead of the slowest for less."""
        emitted, left = self.emitted(chances, valid), jnp.ones((len(chances), 1), jnp.float32)
        if context.remaining is not None:
            left = jnp.maximum(context.remaining, 0).astype(jnp.float32)[:, None]
        if context.active is not None:
            left = jnp.where(context.active[:, None], left, 0.0)
        if valid is None:
            return 1.0 / (jnp.max(left / emitted, axis=0, keepdims=True) * self.seconds(context)[None] + 1e-9)
        weight = jnp.where(left > 0, jnp.exp((left - jnp.max(left)) / _AHEAD), 0.0)
        return jnp.sum(weight * emitted, axis=0, keepdims=True) / self.seconds(context)[None]

    def of_one_look(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """All that are not done."""
        return jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1)

    def kept_enough(self, outcome: Outcome, look: Int[Array, ""]) -> Bool[Array, "1"]:
        """Whether half of the rows kept half of what a look proposed."""
        active, kept = outcome.emitted > 0, super().kept_enough(outcome, look)
        return 2 * jnp.sum(active & kept, keepdims=True) >= jnp.sum(active, keepdims=True)

    def of_all(self, values: Float[Array, "B G"], active: Bool[Array, " B"]) -> Float[Array, "1 G"]:
        """The sum of the rows that are not done."""
        return jnp.sum(jnp.where(active[:, None], values, 0.0), axis=0, keepdims=True)

    def gained(self, outcome: Outcome, chances: Float[Array, "B K"], look: Int[Array, ""]) -> Float[Array, "1"]:
        """Tokens that the proposals of a look were expected to give, in the mean of all rows that are not done."""
        active = (outcome.emitted > 0).astype(jnp.float32)
        of_all = jnp.sum(active * super().gained(outcome, chances, look), keepdims=True)
        return of_all / jnp.maximum(jnp.sum(active), 1.0)

    def due(self, state: Weighed, waited: Int[Array, " B"], context: Context) -> Bool[Array, " B"]:
        """All rows at once, when the most patient of them is."""
        longest = jnp.max(jnp.where(_active(state, context), state.interval, 0))
        return super().due(
            dataclasses.replace(state, interval=jnp.broadcast_to(longest, waited.shape)), waited, context
        )

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """The same for all rows: what those chose that have decoded before, since rows come and go."""
        chosen, active = super().choose(state, context), _active(state, context)
        known = active & (state.blocks > 0)
        voters = jnp.where(jnp.any(known), known, active)
        return jnp.broadcast_to(jnp.max(jnp.where(voters, chosen, 0)), chosen.shape)

    def decide(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"]:
        """The same for all rows."""
        decided = super().decide(state, context, draft)
        return jnp.broadcast_to(jnp.max(jnp.where(_active(state, context), decided, 0)), decided.shape)


@dataclasses.dataclass(frozen=True)
class Ladder(Pooled):
    """One length for the whole batch (the goodput of 2406.14066, for batches that end together): the one by which its
    slowest row is expected to end first, since a batch takes as long as that row does. Which sample of its distribution
    a row gets then depends on the rows beside it: a batch replays with the same prompts, seeds and calibration; a row
    alone does so only greedily or with the `coupled` rule, where lengths change nothing."""

    kind: Literal["ladder"] = "ladder"


def _active(state: Weighed, context: Context) -> Bool[Array, " B"]:
    return jnp.ones_like(state.blocks, bool) if context.active is None else context.active
