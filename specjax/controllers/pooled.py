"""One length for the whole batch, by how often all rows' tokens were accepted lately."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.controllers.weighing import Pause, Weighed, Weighing, estimated, of_match_class
from specjax.interfaces import Context, Draft, Outcome

_AHEAD = 4.0
"""Lead over the slowest row, in tokens, at which a row counts about a third (1/e) as much."""


@dataclasses.dataclass(frozen=True)
class Pooled(Weighing):
    """One length for the whole batch (the goodput of 2406.14066, for batches that end together): the one by which its
    slowest row is expected to end first, since a batch takes as long as that row."""

    together: ClassVar[bool] = True

    def chances(
        self, state: Weighed, context: Context, match_class: Int[Array, " B"] | None = None
    ) -> Float[Array, "B K"]:
        """Chance of acceptance at each depth, from the row's own evidence and that of all rows that are not done. Old
        evidence fades row by row, so a batch has more of it."""
        counts, active = (state.reached, state.accepted), _active(state, context)[:, None, None]
        prior = self.expected(context, match_class)
        own, pooled = (
            [of_match_class(x, match_class) for x in found]
            for found in (counts, [jnp.sum(jnp.where(active, x, 0.0), axis=0, keepdims=True) for x in counts])
        )
        share, rows = active[:, 0, 0].astype(jnp.float32), len(active)
        trusted = jnp.sum(share * of_match_class(state.trusted[..., None], match_class)[:, 0], keepdims=True)
        trusted = trusted / jnp.maximum(jnp.sum(share), 1.0)
        of_all = estimated(pooled[0], pooled[1], prior, self.settings.trust * trusted)
        if rows == 1:  # its evidence must not count twice
            return of_all
        return estimated(own[0], own[1], of_all, jnp.full((rows,), self.settings.row_trust, jnp.float32))

    def rates(
        self,
        chances: Float[Array, "B K"],
        context: Context,
        valid: Bool[Array, "B K"] | None = None,
        match_class: Int[Array, " B"] | None = None,
    ) -> Float[Array, "1 N"]:
        """Speed of the batch towards its end at each of ``ks``, set by its slowest row. With a draft in view
        (``valid``), the tokens per second of the block, where tokens of rows ahead of the slowest count less."""
        emitted, left = self.emitted(chances, valid), jnp.ones((len(chances), 1), jnp.float32)
        seconds = self.seconds(context, match_class)
        if context.remaining is not None:
            left = jnp.maximum(context.remaining, 0).astype(jnp.float32)[:, None]
        if context.active is not None:
            left = jnp.where(context.active[:, None], left, 0.0)
        if valid is None:
            return 1.0 / (jnp.max(left / emitted, axis=0, keepdims=True) * seconds + 1e-9)
        weight = jnp.where(left > 0, jnp.exp((left - jnp.max(left)) / _AHEAD), 0.0)
        return jnp.sum(weight * emitted, axis=0, keepdims=True) / seconds

    def asks_model(self, match_class: Int[Array, " B"], context: Context) -> Bool[Array, "1"]:
        """True if any row that is not done waits for the draft's model, since then all rows do."""
        waits = super().asks_model(match_class, context)
        return jnp.any(waits if context.active is None else waits & context.active, keepdims=True)

    def rows_of_a_probe(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Number of rows that are not done."""
        return jnp.maximum(jnp.sum(active, dtype=jnp.int32), 1)

    def kept_enough(self, outcome: Outcome, length: Int[Array, ""]) -> Bool[Array, "1"]:
        """True if at least half of the rows accepted at least half of a probe's proposed tokens."""
        active, kept = outcome.emitted > 0, super().kept_enough(outcome, length)
        return 2 * jnp.sum(active & kept, keepdims=True) >= jnp.sum(active, keepdims=True)

    def of_all(self, values: Float[Array, "B G"], active: Bool[Array, " B"]) -> Float[Array, "1 G"]:
        """The sum over the rows that are not done."""
        return jnp.sum(jnp.where(active[:, None], values, 0.0), axis=0, keepdims=True)

    def gained(self, outcome: Outcome, chances: Float[Array, "B K"], length: Int[Array, ""]) -> Float[Array, "1"]:
        """Expected accepted tokens of a probe, in the mean of all rows that are not done."""
        active = (outcome.emitted > 0).astype(jnp.float32)
        of_all = jnp.sum(active * super().gained(outcome, chances, length), keepdims=True)
        return of_all / jnp.maximum(jnp.sum(active), 1.0)

    def probes_now(self, pause: Pause, context: Context) -> Bool[Array, " B"]:
        """True for rows that have waited for the longest interval of all rows, so that all probe at once."""
        interval = pause.interval if context.active is None else jnp.where(context.active, pause.interval, 0)
        longest = jnp.broadcast_to(jnp.max(interval), pause.waited.shape)
        return super().probes_now(dataclasses.replace(pause, interval=longest), context)

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """One length for all rows, the longest that any of them chose. New rows, which have decoded no block, have no
        say if others have: rows come and go."""
        chosen, active = super().choose(state, context), _active(state, context)
        known = active & (state.blocks > 0)
        voters = jnp.where(jnp.any(known), known, active)
        return jnp.broadcast_to(jnp.max(jnp.where(voters, chosen, 0)), chosen.shape)

    def review(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"] | None:
        """One length for all rows, the longest that any of them decided on. Rows that wait for the draft's model get 0
        if the batch is faster without it."""
        decided = super().review(state, context, draft)
        if decided is None:
            return None
        longest = jnp.broadcast_to(jnp.max(jnp.where(_active(state, context), decided, 0)), draft.valid.shape[:1])
        if self.model_class is None or draft.match_class is None:
            return longest
        waits = super().asks_model(draft.match_class, context)
        views = draft.valid[:, : self.ks[-1]], draft.match_class
        _, with_model = self.best(state, context, *views)
        found, without = self.best(state, context, views[0] & ~waits[:, None], jnp.where(waits, 0, views[1]))
        return jnp.where(without > with_model, jnp.where(waits, 0, found), longest)


def _active(state: Weighed, context: Context) -> Bool[Array, " B"]:
    return jnp.ones_like(state.blocks, bool) if context.active is None else context.active
