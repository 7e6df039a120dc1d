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
from specjax.proposal import Proposal
from specjax.types import Calibration, Context, Draft, Outcome

_LOOKS = 8
"""Blocks of one look, at most, each of one row."""
_SOON = 4
"""Blocks without proposals before the first look; before each one that follows in vain, twice as many."""
_AFTER_A_PAUSE, _AFTER_A_CHANGE = 1.0, 3.0
"""Blocks that the evidence from before counts for, beside what comes."""
_FIRST_PLACE, _LATER_PLACES = 0.5, 4.0
"""Blocks that what is expected of a place counts for at least: of the first one by the calibration, of a later one by
the place before it."""
_SUDDEN = 3.0
"""Standard deviations: what was kept lately lies so far from what was expected where something has changed."""
_AT_LEAST = 0.12
"""Variance of what was kept lately that is allowed for besides: one rejection alone is no change, however unlikely."""
_CERTAIN = 1.03
"""Times: what a first block without proposals is worth beside what others are expected to be, by costs that are never
exact."""
_NOT_TRIED = 0.9
"""What a block counts beside the one after it at the places behind its last proposal: what was found there is not
tested any more, and must not keep blocks short for long."""
_LATELY = 0.8
"""What a block counts beside the one after it, in what was kept lately."""
_WORTH = 0.05
"""Share that a draft which is always kept has to gain: else looks cost more than they find."""
_HOPED = 10.0
"""Times what it takes to read what was missed, as a share of plain blocks: what a look must be able to find."""


@flax.struct.dataclass
class Weighed:
    """The state of a controller that weighs, row by row."""

    reached: Float[Array, "B G K"]
    """Blocks whose verification got to place j, those long ago for less."""
    accepted: Float[Array, "B G K"]
    """Those of them that kept it."""
    trusted: Float[Array, "B G"]
    """Share of ``Weighing.trust`` that is left to the calibration: it fades as the evidence does."""
    surprise: Float[Array, "B G"]
    """Tokens that were kept lately beyond what was expected."""
    spread: Float[Array, "B G"]
    """The variance that it would have if nothing had changed."""
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
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """What a block counts beside the one after it, as long as nothing changes suddenly."""
    trust: Annotated[float, Field(gt=0)] = 12.0
    """Blocks that the calibration's acceptance counts for at first; it fades as the evidence of blocks does."""
    margin: Annotated[float, Field(ge=0)] = 0.02
    """How much better another length has to be to be changed to, so that nothing flaps."""
    probe: Annotated[int, Field(ge=1)] = 16
    """Blocks without proposals before a look whether they pay again, once a few earlier ones were in vain; more where a
    look costs more, up to ``longest_wait``."""
    longest_wait: Annotated[int, Field(ge=1)] = 64
    looks_cost: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of the time of plain blocks that looks may be expected to cost, where ``longest_wait`` lets them be so
    rare."""

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
        trusted = jnp.ones((batch, grades), jnp.float32)
        return Weighed(
            reached=zeros,
            accepted=zeros,
            trusted=trusted,
            surprise=jnp.zeros_like(trusted),
            spread=jnp.zeros_like(trusted),
            blocks=nothing,
            next=nothing,
            waited=nothing,
            interval=nothing + min(_SOON, self.probe),
            looks=nothing,
            probes=nothing,
        )

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """What was chosen after the block before; for the first one, what is best by the calibration alone."""
        first = self._first(calibration_of(context, self))
        return jnp.where(state.blocks == 0, self._lengths()[first], state.next)

    def decide(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"]:
        """How much to verify of a deterministic draft that cost nothing, which may be looked at."""
        valid = draft.valid[:, : self.rungs[-1]]
        rates = self.rates(self.chances(state, context, draft.grade), context, valid)
        # Nothing is lost by a change here, but no draft is worth what it is not expected to give back for certain.
        best = self._lengths()[jnp.argmax(rates.at[:, 0].mul(1 + self.margin), axis=1)]
        # A look costs time too: it is taken where this very draft would pay if all of it were kept.
        hoped = self.rates(jnp.ones(valid.shape, jnp.float32), context, valid)
        hopeful = jnp.max(hoped, axis=1) > (1 + self.margin) * hoped[:, 0]
        due = valid[:, 0] & hopeful & self.due(state, state.waited, context)
        return jnp.where(due, jnp.maximum(best, self._look(calibration_of(context, self))), best)

    def stop(self, state: Weighed, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Any:
        """No row stops early."""
        return None

    def chances(self, state: Weighed, context: Context, grade: Int[Array, " B"] | None = None) -> Float[Array, "B K"]:
        """That each place is kept if those before it are, by what the row's own proposals of that grade became."""
        counts = (state.reached, state.accepted, state.trusted[..., None])
        reached, accepted, trusted = (of_grade(x, grade) for x in counts)
        prior = calibration_of(context, self).acceptance[None]
        return estimated(reached, accepted, prior, self.trust * trusted[:, 0])

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
        look = self._look(calibration_of(outcome.context, self))
        due = self.due(state, waited, outcome.context)
        waiting = dataclasses.replace(state, waited=waited, next=jnp.where(due, look, 0))
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
        tokens = np.float32(ks > 0) * kept[ks - 1] + np.where(ks > 0, 1.0, _CERTAIN)
        return (tokens / calibration.seconds[ks]).argmax()

    def _look(self, calibration: Calibration) -> Int[Array, ""]:
        """The shortest length that pays if all of it is kept; a shorter one says less than it costs."""
        ks = np.asarray(self.rungs)
        pays = np.float32(1 + ks) * calibration.seconds[0] > (1 + self.margin) * calibration.seconds[ks]
        return jnp.asarray(ks, jnp.int32)[jnp.argmax(jnp.asarray(pays) & jnp.asarray(ks > 0))]

    def _could_pay(self, calibration: Calibration) -> Bool[Array, ""]:
        """Whether a draft that is always kept would."""
        ks, plain = np.asarray(self.rungs), calibration.seconds[0]
        gain = (np.float32(1 + ks) / calibration.seconds[ks]).max() * plain - 1.0
        return (gain > max(self.margin, _WORTH)) & (gain > _HOPED * calibration.catch_up / plain)

    def _after_proposing(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        context, looked = outcome.context, state.waited > 0
        chances = self.chances(state, context, outcome.draft.grade)
        rates = jnp.broadcast_to(self.rates(chances, context), (len(looked), len(self.rungs)))
        best, before = jnp.argmax(rates, axis=1), self._rung_of(looked, context)
        better = jnp.max(rates, axis=1) > (1 + self.margin) * jnp.take_along_axis(rates, before[:, None], axis=1)[:, 0]
        chosen = self._lengths()[jnp.where(better, best, before)]
        # A look that was worth it is taken again at once: what is known is old, and one block says little.
        look = self._look(calibration_of(context, self))
        worth_it = self.kept_enough(outcome, look)
        again = (chosen == 0) & looked & worth_it & ((state.looks + 1) * self.of_one_look(active) < _LOOKS)
        seconds = self.seconds(context)
        at = jnp.sum(self._lengths() < look)
        lost = (seconds[at] / seconds[0] - 1 - self.gained(outcome, chances, look)) / self.looks_cost
        lost = lost * (state.looks + 1).astype(jnp.float32)
        interval = jnp.clip(lost, self.probe, max(self.probe, self.longest_wait)).astype(jnp.int32)
        interval = jnp.where(looked & (chosen == 0), jnp.minimum(2 * state.interval, interval), min(_SOON, self.probe))
        return dataclasses.replace(
            state,
            next=jnp.where(again, look, chosen),
            waited=jnp.where(again, state.waited, 0),
            interval=jnp.where(again, state.interval, interval),
            looks=jnp.where(again, state.looks + 1, 0),
            probes=state.probes + (looked & active).astype(jnp.int32),
        )

    def of_one_look(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Rows whose proposals a block that looks tells of."""
        return jnp.int32(1)

    def kept_enough(self, outcome: Outcome, look: Int[Array, ""]) -> Bool[Array, " R"]:
        """Whether half of what a look proposed was kept."""
        return 2 * outcome.verdict.num_accepted >= look

    def gained(self, outcome: Outcome, chances: Float[Array, "B K"], look: Int[Array, ""]) -> Float[Array, " R"]:
        """Tokens that the proposals of a look were expected to give, a row."""
        places = jnp.arange(chances.shape[1], dtype=jnp.int32)[None]
        kept = jnp.where(places < look, jnp.cumprod(chances, axis=1), 0.0)
        return jnp.where(outcome.draft.valid[:, 0], jnp.sum(kept, axis=1), 0.0)

    def _with_evidence(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        n, place = outcome.verdict.num_accepted[:, None], jnp.arange(1, self.rungs[-1] + 1, dtype=jnp.int32)[None]
        proposal = Proposal.of(outcome.context, outcome.draft)
        proposed = active[:, None] & (proposal.offered(outcome.draft.valid)[:, None] >= place)
        reached, kept = (proposed & (n >= least) for least in (place - 1, place))
        grades = jnp.arange(state.reached.shape[1], dtype=jnp.int32)[None]
        grade = outcome.draft.grade
        concerned = grades == (jnp.zeros_like(grades) if grade is None else grade[:, None])
        expected = self.chances(state, outcome.context, grade)
        beyond = jnp.sum(jnp.where(reached, kept.astype(jnp.float32) - expected, 0.0), axis=1)[:, None]
        varies = jnp.sum(jnp.where(reached, expected * (1 - expected), 0.0), axis=1)[:, None]
        surprise = _LATELY * state.surprise + jnp.where(concerned, beyond, 0.0)
        spread = _LATELY**2 * state.spread + jnp.where(concerned, varies, 0.0)
        paused = (state.waited >= self.probe)[:, None]
        changed = self.of_all(surprise, active) ** 2 > _SUDDEN**2 * (self.of_all(spread, active) + _AT_LEAST)
        # Only what was proposed makes what is known older, and a pause or a change much older.
        known = jnp.maximum(jnp.max(state.reached, axis=2), self.trust * state.trusted)
        left = jnp.where(paused, _AFTER_A_PAUSE, jnp.where(changed, _AFTER_A_CHANGE, jnp.inf))
        decay = jnp.minimum(self.decay, left / jnp.maximum(known, _AFTER_A_PAUSE))
        decay = jnp.where(concerned & jnp.any(reached, axis=1, keepdims=True), decay, 1.0)
        pairs = ((state.reached, reached), (state.accepted, kept))
        tried = jnp.where(proposed[:, None] | ~concerned[..., None], 1.0, _NOT_TRIED)
        fading = jnp.minimum(decay[..., None], tried)
        counts = [fading * old + (concerned[..., None] & new[:, None]).astype(jnp.float32) for old, new in pairs]
        surprise, spread = (jnp.where(paused | changed, 0.0, x) for x in (surprise, spread))
        return dataclasses.replace(
            state,
            reached=counts[0],
            accepted=counts[1],
            trusted=decay * state.trusted,
            surprise=surprise,
            spread=spread,
        )

    def of_all(self, values: Float[Array, "B G"], active: Bool[Array, " B"]) -> Float[Array, "R G"]:
        """Each row's own."""
        return values

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
    reached: Float[Array, "R K"], accepted: Float[Array, "R K"], prior: Float[Array, "S K"], weight: Float[Array, " R"]
) -> Float[Array, "R K"]:
    """Chances by what was kept of what was reached, and by what is expected without it, which counts for ``weight``
    blocks at least: at the first place ``prior``, at a later one what was found for the place before it, changed as
    ``prior`` changes."""
    found: list[Array] = []
    weights = jnp.maximum(weight, _FIRST_PLACE), jnp.maximum(weight, _LATER_PLACES)
    for j in range(reached.shape[1]):
        expected, weight = prior[:, j], weights[j > 0]
        if j:
            expected = jnp.clip(found[-1] * expected / jnp.maximum(prior[:, j - 1], 0.01), 0.0, 1.0)
        found.append((accepted[:, j] + weight * expected) / (reached[:, j] + weight))
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
