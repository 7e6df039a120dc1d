"""What the controllers share that choose a length by what it is expected to give for what it costs: how often proposals
were kept lately, place by place, and when to look again after proposing nothing.

A block of k proposals gives 1 + S_k tokens, S_k = s_1 + ... + s_k, and takes t_k (`Calibration.seconds`): the best k is
that of the largest (1 + S_k) / t_k. s_j is the product of the chances a_1 .. a_j that a place is kept once those before
it are. a_j is the share of what was kept among what was reached, decayed block by block; until there is enough of it,
what the place before says, changed by as much as the calibration changes from place to place. Nothing here looks at a
drawn token's own probability or at a draft that was not verified, so every choice is one of the past. A drafter whose
proposals are deterministic and cost nothing is asked first, and the choice is made with them in view: what is not
drawn can be dropped for any reason.

Dims: B rows, R rows or 1 for all of them together, G grades of a proposal, K places, K1 = K + 1, N lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.errors import ConfigError
from specjax.types import Calibration, Context, Draft, Outcome

_LOOKS = 4
"""Blocks of one look, at most."""
_HOPED = 10.0
"""Times what it takes to read what was missed, as a share of plain blocks: what a look must be able to find."""


@flax.struct.dataclass
class Weighed:
    """The state of a controller that weighs, row by row."""

    reached: Float[Array, "B G K"]
    """Blocks whose verification got to place j, those long ago for less."""
    accepted: Float[Array, "B G K"]
    """Those of them that kept it."""
    blocks: Int[Array, " B"]
    next: Int[Array, " B"]
    """Chosen for the next block; before the first one it means nothing."""
    waited: Int[Array, " B"]
    """Blocks without proposals since the last one with; during a look, as before it."""
    interval: Int[Array, " B"]
    """After how many of them to look again."""
    looks: Int[Array, " B"]
    """Blocks of this look, so far."""
    probes: Int[Array, " B"]
    """Blocks that looked, of all looks."""


@dataclasses.dataclass(frozen=True)
class Weighing:
    """A controller that chooses one of ``ks`` for each block, by what is expected of it."""

    needs_calibration: ClassVar[bool] = True
    together: ClassVar[bool] = False
    """Whether all rows choose the same."""
    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths to choose from, ascending from 0; None: 0, 1, 2, 3, 5, 8, ... and the drafter's longest."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.93
    """What a block counts beside the one after it."""
    trust: Annotated[float, Field(gt=0)] = 12.0
    """Blocks that the calibration counts for."""
    margin: Annotated[float, Field(ge=0)] = 0.03
    """How much better another length has to be to be changed to, so that nothing flaps."""
    probe: Annotated[int, Field(ge=1)] = 16
    """Blocks without proposals before one of the shortest length looks whether they pay again; more where a look costs
    more, and twice as many after each look in vain, up to ``longest_wait``."""
    longest_wait: Annotated[int, Field(ge=1)] = 256
    looks_cost: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Most of the time of plain blocks that looks may be expected to cost, as a share."""

    def __post_init__(self):
        if self.ks is not None and (len(self.ks) < 2 or self.ks[0] != 0 or list(self.ks) != sorted(set(self.ks))):
            raise ConfigError(f"controller: ks={list(self.ks)}; give lengths in ascending order, 0 the first of them")

    @property
    def rungs(self) -> tuple[int, ...]:
        """``ks``."""
        return self.ks or ()

    def bind(self, depth: int) -> Self:
        """With the lengths that a drafter of ``depth`` has."""
        return dataclasses.replace(self, ks=lengths(self.ks, depth))

    def init(self, batch: int, grades: int = 1) -> Weighed:
        """No evidence yet."""
        zeros, nothing = jnp.zeros((batch, grades, self.rungs[-1]), jnp.float32), jnp.zeros((batch,), jnp.int32)
        return Weighed(zeros, zeros, nothing, nothing, nothing, nothing + self.probe, nothing, nothing)

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """What was chosen after the block before; for the first one, what is best by the calibration alone."""
        first = self._first(calibration_of(context, self))
        return jnp.where(state.blocks == 0, self._lengths()[first], state.next)

    def decide(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"]:
        """How much to verify of a deterministic draft that cost nothing, which may be looked at."""
        rates = self.rates(self.chances(state, context, draft.grade), context, draft.valid)
        # Nothing is lost by a change here, but no draft is worth what it is not expected to give back for certain.
        best = self._lengths()[jnp.argmax(rates.at[:, 0].mul(1 + self.margin), axis=1)]
        # A look costs time too: it is taken where this very draft would pay if all of it were kept.
        hoped = self.rates(jnp.ones(draft.valid.shape, jnp.float32), context, draft.valid)
        hopeful = jnp.max(hoped, axis=1) > (1 + self.margin) * hoped[:, 0]
        due = draft.valid[:, 0] & hopeful & self.due(state, state.waited, context)
        return jnp.where(due, jnp.maximum(best, self.rungs[1]), best)

    def stop(self, state: Weighed, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Any:
        """No row stops early."""
        return None

    def chances(self, state: Weighed, context: Context, grade: Int[Array, " B"] | None = None) -> Float[Array, "B K"]:
        """That each place is kept if those before it are, by what the row's own proposals of that grade became."""
        reached, accepted = (of_grade(x, grade) for x in (state.reached, state.accepted))
        return estimated(reached, accepted, calibration_of(context, self).acceptance[None], self.trust)

    def rates(
        self, chances: Float[Array, "B K"], context: Context, valid: Bool[Array, "B K"] | None = None
    ) -> Float[Array, "R N"]:
        """What each of ``ks`` is worth: tokens for the time of a block."""
        return self.emitted(chances, valid) / self.seconds(context)[None]

    def emitted(self, chances: Float[Array, "B K"], valid: Bool[Array, "B K"] | None) -> Float[Array, "B N"]:
        """Tokens of a block of each of ``ks``."""
        # Sums and products over masks, which a compiler fuses; of a cumulative one XLA makes several pieces on CPU.
        places = jnp.arange(chances.shape[1])[None]
        before = places <= places.T
        kept = jnp.prod(jnp.where(before[None], chances[:, None], 1.0), axis=2)
        kept = kept if valid is None else jnp.where(valid, kept, 0.0)
        return 1.0 + jnp.sum(jnp.where((places < self._lengths()[:, None])[None], kept[:, None], 0.0), axis=2)

    def seconds(self, context: Context) -> Float[Array, " N"]:
        """Those of a block of each of ``ks``."""
        return calibration_of(context, self).seconds[jnp.asarray(self.rungs)]

    def adapt(self, state: Weighed, outcome: Outcome) -> Weighed:
        """The state with one more block, and the choice for the next one."""
        active, limit = outcome.emitted > 0, outcome.context.limit
        assert limit is not None
        state = dataclasses.replace(state, blocks=state.blocks + active.astype(jnp.int32))
        waited = state.waited + active.astype(jnp.int32)
        due = self.due(state, waited, outcome.context)
        waiting = dataclasses.replace(state, waited=waited, next=jnp.where(due, self.rungs[1], 0))
        # Where nothing was found to propose, nothing is learnt; but what others look at, nobody has to look at again.
        found = dataclasses.replace(state, next=limit, waited=jnp.zeros_like(waited) if self.together else state.waited)
        if outcome.draft.tokens.shape[1]:
            proposed = self._after_proposing(self._with_evidence(state, outcome, active), outcome, active)
            found = _chosen(jnp.any(outcome.draft.valid, axis=1), proposed, found)
        return _chosen(limit == 0, waiting, found)

    def due(self, state: Weighed, waited: Int[Array, " B"], context: Context) -> Bool[Array, " B"]:
        """The rows that are to look again: never where not even a draft that is always kept would pay, also for what it
        has to read after each pause."""
        return (waited >= state.interval) & self._could_pay(calibration_of(context, self))

    def never_proposes(self, calibration: Calibration) -> bool:
        """Whether no block will have proposals, whatever comes: not the first one, and nobody looks again."""
        return not (self._could_pay(calibration) or self._first(calibration))

    # Of the calibration alone: a compiler takes them out of the loop, and of NumPy's arrays they are made at once.
    def _first(self, calibration: Calibration) -> Int[Array, ""]:
        """Which of ``ks`` is the best before there is evidence."""
        ks, kept = np.asarray(self.rungs), calibration.acceptance.cumprod().cumsum()
        return ((1.0 + np.float32(ks > 0) * kept[ks - 1]) / calibration.seconds[ks]).argmax()

    def _could_pay(self, calibration: Calibration) -> Bool[Array, ""]:
        """Whether a draft that is always kept would."""
        ks, plain = np.asarray(self.rungs), calibration.seconds[0]
        gain = (np.float32(1 + ks) / calibration.seconds[ks]).max() * plain - 1.0
        return (gain > self.margin) & (gain > _HOPED * calibration.catch_up / plain)

    def _after_proposing(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        context, looked = outcome.context, state.waited > 0
        chances = self.chances(state, context, outcome.draft.grade)
        rates = jnp.broadcast_to(self.rates(chances, context), (len(looked), len(self.rungs)))
        best, before = jnp.argmax(rates, axis=1), self._rung_of(looked, context)
        better = jnp.max(rates, axis=1) > (1 + self.margin) * jnp.take_along_axis(rates, before[:, None], axis=1)[:, 0]
        chosen = self._lengths()[jnp.where(better, best, before)]
        # A look that was worth it is taken again at once: what is known is old, and one block says little.
        worth_it = outcome.verdict.num_accepted >= self.rungs[1]
        again = (chosen == 0) & looked & worth_it & (state.looks + 1 < _LOOKS)
        seconds = self.seconds(context)
        lost = (seconds[1] / seconds[0] - 1 - self.gained(outcome, chances)) / self.looks_cost
        interval = jnp.where(looked, jnp.minimum(2 * state.interval, self.longest_wait), self.probe)
        interval = jnp.maximum(interval, jnp.clip(lost, 0, 1e6).astype(jnp.int32))
        return dataclasses.replace(
            state,
            next=jnp.where(again, self.rungs[1], chosen),
            waited=jnp.where(again, state.waited, 0),
            interval=jnp.where(again, state.interval, jnp.where(chosen > 0, self.probe, interval)),
            looks=jnp.where(again, state.looks + 1, 0),
            probes=state.probes + (looked & active).astype(jnp.int32),
        )

    def gained(self, outcome: Outcome, chances: Float[Array, "B K"]) -> Float[Array, " R"]:
        """Tokens that the first proposals were expected to give, a row."""
        return jnp.where(outcome.draft.valid[:, 0], chances[:, 0], 0.0)

    def _with_evidence(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        valid, n = outcome.draft.valid, outcome.verdict.num_accepted[:, None]
        place = jnp.arange(1, valid.shape[1] + 1, dtype=jnp.int32)[None]
        reached, kept = (active[:, None] & valid & (n >= least) for least in (place - 1, place))
        more = ((0, 0), (0, self.rungs[-1] - valid.shape[1]))
        grades = jnp.arange(state.reached.shape[1], dtype=jnp.int32)[None]
        grade = outcome.draft.grade
        concerned = grades == (jnp.zeros_like(grades) if grade is None else grade[:, None])
        # Only what was proposed makes what is known older; a look, more so.
        decay = jnp.where(state.waited > 0, self.decay**4, self.decay)[:, None]
        decay = jnp.where(concerned & jnp.any(reached, axis=1, keepdims=True), decay, 1.0)[..., None]
        pairs = ((state.reached, reached), (state.accepted, kept))
        counts = [
            decay * old + (concerned[..., None] & jnp.pad(new, more)[:, None]).astype(jnp.float32) for old, new in pairs
        ]
        return dataclasses.replace(state, reached=counts[0], accepted=counts[1])

    def _rung_of(self, looked: Bool[Array, " B"], context: Context) -> Int[Array, " B"]:
        """Which of ``ks`` the block had; of a look, nothing, since it is what would go on without."""
        assert context.limit is not None
        had = jnp.sum(self._lengths()[None] < context.limit[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(looked, 0, had)

    def _lengths(self) -> Int[Array, " N"]:
        return jnp.asarray(self.rungs, jnp.int32)


def of_grade(counts: Float[Array, "R G K"], grade: Int[Array, " B"] | None) -> Float[Array, "B K"]:
    """The counts of each row's grade; None: of the only one."""
    if grade is None:
        return counts[:, 0]
    counts = jnp.broadcast_to(counts, (len(grade), *counts.shape[1:]))
    return jnp.take_along_axis(counts, grade[:, None, None], axis=1)[:, 0]


def estimated(
    reached: Float[Array, "R K"], accepted: Float[Array, "R K"], prior: Float[Array, "S K"], trust: float
) -> Float[Array, "R K"]:
    """Chances by what was kept of what was reached, with ``trust`` blocks of what is expected before: ``prior``,
    changed from place to place as it does."""
    found: list[Array] = []
    for j in range(reached.shape[1]):
        expected = prior[:, j]
        if j:
            expected = jnp.clip(found[-1] * expected / jnp.maximum(prior[:, j - 1], 0.01), 0.0, 1.0)
        found.append((accepted[:, j] + trust * expected) / (reached[:, j] + trust))
    return jnp.stack(found, axis=1)


def _chosen(rows: Bool[Array, " B"], those: Weighed, others: Weighed) -> Weighed:
    def of(a: Array, b: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(of, those, others)


def lengths(ks: tuple[int, ...] | None, depth: int) -> tuple[int, ...]:
    """``ks`` cut at ``depth``; None: 0, 1, 2, 3, 5, 8, ... and ``depth``: the best of them is near the best of all, as
    the tokens for the time of a block change little around it."""
    found = [0, 1, 2]
    while ks is None and found[-1] < depth:
        found.append(found[-2] + found[-1])
    return tuple(sorted({min(k, depth) for k in (ks or found)}))


def calibration_of(context: Context, controller: Any) -> Calibration:
    """What the controller weighs with. Raises `ConfigError` without."""
    if context.calibration is None:
        raise ConfigError(
            f"controller {controller.kind!r}: it needs a calibration; decode with a `Decoder`, or give one"
        )
    return context.calibration
