"""Base of the controllers that choose a length by its expected tokens over its cost: how often proposed tokens were
accepted lately, depth by depth, and when to probe again after blocks without proposals.

A block of k proposed tokens gives 1 + S_k tokens, S_k = s_1 + ... + s_k, and takes t_k (`Calibration.seconds`): the
best k has the largest (1 + S_k) / t_k. s_j is the product of the chances a_1 .. a_j that a depth is accepted once those
before it are. a_j is the share of accepted among reached tokens at depth j, decayed block by block. While these are
few, a_j follows the depth before, changed by as much as the calibration changes between the two. The controllers look
neither at a drawn token's own probability nor at an unverified draft, so every choice depends on the past alone. A
drafter whose proposals are deterministic and cost nothing is asked first, and the controller chooses with the proposal
in view: no token of it is drawn at random, so the controller may drop any of them for any reason.

Dims: B rows, R rows or 1 for all of them together, G match classes of a proposal, S sources of a proposal (2 where the
text and a model propose in turn, else 1), K depths, K1 = K + 1, N lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.controllers.fixed import Fixed
from specjax.errors import ConfigError
from specjax.interfaces import Calibration, Context, Controller, Draft, Outcome
from specjax.proposal import Proposal

_MOST_PROBES = 8
"""Most blocks of one run of probes, of one row: a probe that was worth it is repeated at once."""
_FIRST_WAIT = 4
"""Number of blocks without proposals before the first probe; each probe in vain doubles the next wait."""
_AFTER_A_PAUSE, _AFTER_A_CHANGE = 1.0, 3.0
"""Number of blocks that the evidence from before a pause or a sudden change counts for after it."""
_FIRST_DEPTH, _LATER_DEPTHS = 0.5, 4.0
"""Least number of blocks that the expectation for a depth counts for: at the first depth that of the calibration, at a
later depth that of the depth before."""
_SUDDEN = 3.0
"""Standard deviations between recent and expected acceptance from which on something has changed."""
_LEAST_VARIANCE = 0.12
"""Variance added to that of recent acceptance, so that one rejection alone, however unlikely, is no change."""
_FAVOUR_OF_PLAIN = 1.03
"""Factor in favour of a first block without proposals, since costs are never exact."""
_UNTRIED_DECAY = 0.9
"""Weight of a block relative to the one after it, at depths behind its last proposed token: old evidence is not tested
there any more, and must not keep blocks short for long."""
_RECENT_DECAY = 0.8
"""Weight of a block relative to the one after it, in recent acceptance."""
_LEAST_GAIN = 0.05
"""Least gain, as a share, of a draft that is always accepted: below, probes cost more than they find."""
_LEAST_HOPE = 10.0
"""Least gain that a probe must be able to find, as a multiple of the cost of reading what a draft missed. Both are
shares of the time of plain blocks."""


@flax.struct.dataclass
class Pause:
    """Blocks of one source without proposals, and when it is probed again; of all sources with a last axis S."""

    waited: Int[Array, "B ..."]
    """Number of blocks without proposals since the last one with; unchanged during a run of probes."""
    interval: Int[Array, "B ..."]
    """Number of blocks without proposals before the next probe."""
    run: Int[Array, "B ..."]
    """Number of probes so far in the current run of probes."""


@flax.struct.dataclass
class Weighed:
    """The state of a weighing controller, row by row."""

    reached: Float[Array, "B G K"]
    """Number of blocks whose verification reached depth j; old blocks count less."""
    accepted: Float[Array, "B G K"]
    """Number of those blocks that accepted depth j."""
    trusted: Float[Array, "B G"]
    """Share of ``Settings.trust`` that is left to the calibration; it fades as the evidence does."""
    surprise: Float[Array, "B G"]
    """Number of recently accepted tokens beyond the expected number."""
    spread: Float[Array, "B G"]
    """Variance that ``surprise`` would have if nothing had changed."""
    blocks: Int[Array, " B"]
    next: Int[Array, " B"]
    """Length chosen for the next block; before the first one it means nothing."""
    pauses: Pause
    """Waits of each source, ``[B, S]``."""
    probes: Int[Array, " B"]
    """Number of probes in all."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the controllers that choose a length by expected tokens over cost."""

    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths to choose from, ascending from 0; None: 0, 1, 2, 3, 5, 8, ... and the drafter's longest."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.98
    """Weight of a block relative to the one after it, while nothing changes suddenly."""
    trust: Annotated[float, Field(gt=0)] = 12.0
    """Number of blocks that the calibration's acceptance counts for at first; it fades as the evidence of blocks
    does."""
    row_trust: Annotated[float, Field(gt=0)] = 5.0
    """Weight of all rows' acceptance in the estimate for one row, in blocks of that row."""
    margin: Annotated[float, Field(ge=0)] = 0.02
    """Least gain, as a share, for a change to another length, so that the length does not flap."""
    probe: Annotated[int, Field(ge=1)] = 16
    """Number of blocks without proposals before a probe, once a few earlier ones were in vain; more where a probe costs
    more, up to ``longest_wait``."""
    longest_wait: Annotated[int, Field(ge=1)] = 64
    """Most blocks without proposals before a probe."""
    looks_cost: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Largest share of the time of plain blocks that probes are expected to cost, where ``longest_wait`` lets them be
    so rare."""

    corrects: bool = True
    """True to measure the costs of blocks again now and then, False to keep to those that are known, so that the same
    costs give the same lengths."""

    def __post_init__(self):
        if self.ks is not None and (len(self.ks) < 2 or self.ks[0] != 0 or list(self.ks) != sorted(set(self.ks))):
            raise ConfigError(f"adaptive: ks={list(self.ks)}; give lengths in ascending order, 0 the first of them")


@dataclasses.dataclass(frozen=True)
class Weighing(Controller):
    """The choice of each row alone (2211.17192, section 3.3): the length of the most tokens for what a block of all
    rows at that length would cost, by how often the row's own proposals were accepted. Base of the choices that rows
    make together."""

    needs_costs: ClassVar[bool] = True
    together: ClassVar[bool] = False
    """True if all rows of the batch share one length."""
    settings: Settings
    ks: tuple[int, ...]
    """Lengths to choose from, ascending from 0."""
    match_classes: int = 1
    """Number of match classes, see `BoundDrafter.match_classes`."""
    reviews: bool = False
    """True if the length is chosen with the proposal in view, see `review`."""
    model_class: int | None = None
    """Match class of proposals that a model makes, see `BoundDrafter.model_class`."""
    kind: str = "adaptive"

    @property
    def corrects_costs(self) -> bool:
        return self.settings.corrects

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        return self.ks

    def without_costs(self) -> Controller:
        return Fixed()

    def init(self, batch: int) -> Weighed:
        """A state without evidence."""
        zeros = jnp.zeros((batch, self.match_classes, self.ks[-1]), jnp.float32)
        nothing, trusted = jnp.zeros((batch,), jnp.int32), jnp.ones((batch, self.match_classes), jnp.float32)
        of_sources = jnp.zeros((batch, 1 if self.model_class is None else 2), jnp.int32)
        return Weighed(
            reached=zeros,
            accepted=zeros,
            trusted=trusted,
            surprise=jnp.zeros_like(trusted),
            spread=jnp.zeros_like(trusted),
            blocks=nothing,
            next=nothing,
            pauses=Pause(of_sources, of_sources + min(_FIRST_WAIT, self.settings.probe), of_sources),
            probes=nothing,
        )

    def choose(self, state: Weighed, context: Context) -> Int[Array, " B"]:
        """The length chosen after the block before; for the first block, the best by the calibration alone. With the
        proposal in view later, the longest."""
        if self.reviews:
            return jnp.full_like(state.next, self.ks[-1])
        first = self._first(calibration_of(context, self))
        return jnp.where(state.blocks == 0, self._lengths()[first], state.next)

    def review(self, state: Weighed, context: Context, draft: Draft) -> Int[Array, " B"] | None:
        """Number of tokens of each row's proposal, chosen with its preview in view."""
        if not self.reviews:
            return None
        valid, match_class = draft.valid[:, : self.ks[-1]], draft.match_class
        best, _ = self.best(state, context, valid, match_class)
        # A probe costs time too: only a draft that would pay if all of it were accepted is probed.
        hoped = self.rates(jnp.ones(valid.shape, jnp.float32), context, valid, match_class)
        hopeful = jnp.max(hoped, axis=1) > (1 + self.settings.margin) * hoped[:, 0]
        due = valid[:, 0] & hopeful & self.probes_now(self.pause_of(state, match_class), context)
        return jnp.where(due, jnp.maximum(best, self._probe_length(calibration_of(context, self))), best)

    def best(
        self, state: Weighed, context: Context, valid: Bool[Array, "B K"], match_class: Int[Array, " B"] | None
    ) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
        """The best length with the proposals in view, and its expected tokens per second. A change of length costs
        nothing here, but any draft must beat none by the margin."""
        rates = self.rates(self.chances(state, context, match_class), context, valid, match_class)
        rates = rates.at[:, 0].mul(1 + self.settings.margin)
        return self._lengths()[jnp.argmax(rates, axis=1)], jnp.max(rates, axis=1)

    def chances(
        self, state: Weighed, context: Context, match_class: Int[Array, " B"] | None = None
    ) -> Float[Array, "B K"]:
        """Chance that each depth is accepted if those before it are, from the row's own proposals of that match
        class."""
        counts = (state.reached, state.accepted, state.trusted[..., None])
        reached, accepted, trusted = (of_match_class(x, match_class) for x in counts)
        prior = self.expected(context, match_class)
        return estimated(reached, accepted, prior, self.settings.trust * trusted[:, 0])

    def expected(self, context: Context, match_class: Int[Array, " B"] | None) -> Float[Array, "S K"]:
        """Chance of acceptance at each depth by the calibration alone, of each row's match class if it tells them
        apart."""
        known = calibration_of(context, self)
        if known.by_class is None or match_class is None:
            return known.acceptance[None]
        return known.by_class[match_class]

    def counted(self, state: Weighed) -> tuple[Float[Array, "B G K"], Float[Array, "B G K"]]:
        """Decayed counts of blocks that reached a depth, and that accepted it."""
        return state.reached, state.accepted

    def rates(
        self,
        chances: Float[Array, "B K"],
        context: Context,
        valid: Bool[Array, "B K"] | None = None,
        match_class: Int[Array, " B"] | None = None,
    ) -> Float[Array, "R N"]:
        """Expected tokens per second of a block at each of ``ks``."""
        return self.emitted(chances, valid) / self.seconds(context, match_class)

    def emitted(self, chances: Float[Array, "B K"], valid: Bool[Array, "B K"] | None) -> Float[Array, "B N"]:
        """Expected tokens of a block at each of ``ks``."""
        # Sums and products over masks, which XLA fuses; it makes several pieces of a cumulative one on CPU.
        depths = jnp.arange(chances.shape[1])[None]
        before = depths <= depths.T
        kept = jnp.prod(jnp.where(before[None], chances[:, None], 1.0), axis=2)
        kept = kept if valid is None else jnp.where(valid, kept, 0.0)
        return 1.0 + jnp.sum(jnp.where((depths < self._lengths()[:, None])[None], kept[:, None], 0.0), axis=2)

    def seconds(self, context: Context, match_class: Int[Array, " B"] | None = None) -> Float[Array, "R N"]:
        """Seconds of a block at each of ``ks``, for proposals of each row's match class."""
        known, ks = calibration_of(context, self), jnp.asarray(self.ks)
        seconds = known.seconds[ks][None]
        if known.found is None or match_class is None:
            return seconds
        return jnp.where(self.asks_model(match_class, context)[:, None], seconds, known.found[ks][None])

    def asks_model(self, match_class: Int[Array, " B"], context: Context) -> Bool[Array, " R"]:
        """True for rows whose block waits for the draft's model."""
        return match_class == self.model_class

    def adapt(self, state: Weighed, outcome: Outcome) -> Weighed:
        """The state after one more block, with the choice for the next one."""
        active, limit = outcome.emitted > 0, outcome.context.limit
        assert limit is not None
        state = dataclasses.replace(state, blocks=state.blocks + active.astype(jnp.int32))
        pause, of = self.pause_of(state, outcome.draft.match_class), outcome.draft.match_class
        longer = dataclasses.replace(pause, waited=pause.waited + active.astype(jnp.int32))
        length = self._probe_length(calibration_of(outcome.context, self))
        due = self.probes_now(longer, outcome.context)
        waiting = dataclasses.replace(self._with_pause(state, longer, of), next=jnp.where(due, length, 0))
        # A row whose drafter found nothing learns nothing. If all rows share a length, they share a probe too.
        ended = dataclasses.replace(pause, waited=jnp.zeros_like(pause.waited)) if self.together else pause
        found = dataclasses.replace(self._with_pause(state, ended, of), next=limit)
        if outcome.draft.tokens.shape[1]:
            proposed = self._after_proposing(self._with_evidence(state, outcome, active), outcome, active)
            found = _chosen(jnp.any(outcome.draft.valid, axis=1), proposed, found)
        return _chosen(limit == 0, waiting, found)

    def pause_of(self, state: Weighed, match_class: Int[Array, " B"] | None) -> Pause:
        """The pause of each row's source: text and model wait apart, since one that pays must not end the waiting of
        one that does not. ``match_class`` None: of the text, which is the only source or the one that is looked at."""
        own = self._sources(match_class)
        return jax.tree.map(lambda x: jnp.sum(jnp.where(own, x, 0), axis=1, dtype=jnp.int32), state.pauses)

    def _with_pause(self, state: Weighed, pause: Pause, match_class: Int[Array, " B"] | None) -> Weighed:
        """The state with another pause of each row's source."""
        own = self._sources(match_class)
        pauses = jax.tree.map(lambda old, new: jnp.where(own, new[:, None], old), state.pauses, pause)
        return dataclasses.replace(state, pauses=pauses)

    def _sources(self, match_class: Int[Array, " B"] | None) -> Bool[Array, "R S"]:
        """True at each row's source."""
        if self.model_class is None:
            return jnp.ones((1, 1), bool)
        of_model = jnp.zeros((1,), bool) if match_class is None else match_class == self.model_class
        return jnp.stack([~of_model, of_model], axis=1)

    def probes_now(self, pause: Pause, context: Context) -> Bool[Array, " B"]:
        """True for rows that are to probe. None is, if not even a draft that is always accepted would pay for its
        blocks and for what it reads after each pause."""
        return (pause.waited >= pause.interval) & self._could_pay(calibration_of(context, self))

    def never_proposes(self, calibration: Calibration) -> bool:
        """True if no block will ever have proposals: neither the first one, nor a probe."""
        return not (self._could_pay(calibration) or self._first(calibration))

    # Functions of the calibration alone: XLA takes them out of the loop, and NumPy arrays give them at once.
    def _first(self, calibration: Calibration) -> Int[Array, ""]:
        """Index in ``ks`` of the best length before there is evidence."""
        by_class = calibration.acceptance[None] if calibration.by_class is None else calibration.by_class
        ks, kept = np.asarray(self.ks), by_class.cumprod(axis=1).cumsum(axis=1).max(axis=0)
        tokens = np.float32(ks > 0) * kept[ks - 1] + np.where(ks > 0, 1.0, _FAVOUR_OF_PLAIN)
        return (tokens / _least(calibration)[ks]).argmax()

    def _probe_length(self, calibration: Calibration) -> Int[Array, ""]:
        """The shortest length that pays if all of it is accepted; a shorter probe says less than it costs."""
        ks = np.asarray(self.ks)
        seconds = _least(calibration)
        pays = np.float32(1 + ks) * seconds[0] > (1 + self.settings.margin) * seconds[ks]
        return jnp.asarray(ks, jnp.int32)[jnp.argmax(jnp.asarray(pays) & jnp.asarray(ks > 0))]

    def _could_pay(self, calibration: Calibration) -> Bool[Array, ""]:
        """True if a draft that is always accepted would pay."""
        ks, seconds = np.asarray(self.ks), _least(calibration)
        plain = seconds[0]
        gain = (np.float32(1 + ks) / seconds[ks]).max() * plain - 1.0
        return (gain > max(self.settings.margin, _LEAST_GAIN)) & (gain > _LEAST_HOPE * calibration.catch_up / plain)

    def _after_proposing(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        context, of = outcome.context, outcome.draft.match_class
        pause, chances = self.pause_of(state, of), self.chances(state, context, of)
        probed, rates = pause.waited > 0, self.rates(chances, context, match_class=of)
        rates = jnp.broadcast_to(rates, (len(probed), len(self.ks)))
        best, before = jnp.argmax(rates, axis=1), self._index_before(probed, context)
        of_before = jnp.take_along_axis(rates, before[:, None], axis=1)[:, 0]
        better = jnp.max(rates, axis=1) > (1 + self.settings.margin) * of_before
        chosen = self._lengths()[jnp.where(better, best, before)]
        # A probe that was worth it is repeated at once: the evidence is old, and one block says little.
        length = self._probe_length(calibration_of(context, self))
        worth_it = self.kept_enough(outcome, length)
        again = (chosen == 0) & probed & worth_it & ((pause.run + 1) * self.rows_of_a_probe(active) < _MOST_PROBES)
        seconds = self.seconds(context, of)
        at = jnp.sum(self._lengths() < length)
        lost = seconds[:, at] / seconds[:, 0] - 1 - self.gained(outcome, chances, length)
        lost = lost / self.settings.looks_cost
        lost = lost * (pause.run + 1).astype(jnp.float32)
        longest = max(self.settings.probe, self.settings.longest_wait)
        interval = jnp.clip(lost, self.settings.probe, longest).astype(jnp.int32)
        soon = min(_FIRST_WAIT, self.settings.probe)
        interval = jnp.where(probed & (chosen == 0), jnp.minimum(2 * pause.interval, interval), soon)
        after = Pause(
            waited=jnp.where(again, pause.waited, 0),
            interval=jnp.where(again, pause.interval, interval),
            run=jnp.where(again, pause.run + 1, 0),
        )
        return dataclasses.replace(
            self._with_pause(state, after, of),
            next=jnp.where(again, length, chosen),
            probes=state.probes + (probed & active).astype(jnp.int32),
        )

    def probes(self, state: Weighed) -> Int[Array, " B"]:
        return state.probes

    def rows_of_a_probe(self, active: Bool[Array, " B"]) -> Int[Array, ""]:
        """Number of rows whose proposals one probe tells of."""
        return jnp.int32(1)

    def kept_enough(self, outcome: Outcome, length: Int[Array, ""]) -> Bool[Array, " R"]:
        """True if at least half of a probe's proposed tokens were accepted."""
        return 2 * outcome.verdict.num_accepted >= length

    def gained(self, outcome: Outcome, chances: Float[Array, "B K"], length: Int[Array, ""]) -> Float[Array, " R"]:
        """Expected accepted tokens of a probe in each row."""
        depths = jnp.arange(chances.shape[1], dtype=jnp.int32)[None]
        kept = jnp.where(depths < length, jnp.cumprod(chances, axis=1), 0.0)
        return jnp.where(outcome.draft.valid[:, 0], jnp.sum(kept, axis=1), 0.0)

    def _with_evidence(self, state: Weighed, outcome: Outcome, active: Bool[Array, " B"]) -> Weighed:
        n, depth = outcome.verdict.num_accepted[:, None], jnp.arange(1, self.ks[-1] + 1, dtype=jnp.int32)[None]
        proposal = Proposal.of(outcome.context, outcome.draft)
        proposed = active[:, None] & (proposal.offered(outcome.draft.valid)[:, None] >= depth)
        reached, kept = (proposed & (n >= least) for least in (depth - 1, depth))
        classes = jnp.arange(state.reached.shape[1], dtype=jnp.int32)[None]
        match_class = outcome.draft.match_class
        concerned = classes == (jnp.zeros_like(classes) if match_class is None else match_class[:, None])
        expected = self.chances(state, outcome.context, match_class)
        beyond = jnp.sum(jnp.where(reached, kept.astype(jnp.float32) - expected, 0.0), axis=1)[:, None]
        varies = jnp.sum(jnp.where(reached, expected * (1 - expected), 0.0), axis=1)[:, None]
        surprise = _RECENT_DECAY * state.surprise + jnp.where(concerned, beyond, 0.0)
        spread = _RECENT_DECAY**2 * state.spread + jnp.where(concerned, varies, 0.0)
        paused = (self.pause_of(state, match_class).waited >= self.settings.probe)[:, None]
        changed = self.of_all(surprise, active) ** 2 > _SUDDEN**2 * (self.of_all(spread, active) + _LEAST_VARIANCE)
        # Evidence ages only by proposed tokens, and by a pause or a change much faster.
        known = jnp.maximum(jnp.max(state.reached, axis=2), self.settings.trust * state.trusted)
        left = jnp.where(paused, _AFTER_A_PAUSE, jnp.where(changed, _AFTER_A_CHANGE, jnp.inf))
        decay = jnp.minimum(self.settings.decay, left / jnp.maximum(known, _AFTER_A_PAUSE))
        decay = jnp.where(concerned & jnp.any(reached, axis=1, keepdims=True), decay, 1.0)
        pairs = ((state.reached, reached), (state.accepted, kept))
        tried = jnp.where(proposed[:, None] | ~concerned[..., None], 1.0, _UNTRIED_DECAY)
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
        """The values of each row, not pooled."""
        return values

    def _index_before(self, probed: Bool[Array, " B"], context: Context) -> Int[Array, " B"]:
        """Index in ``ks`` of the block's length; 0 for a probe, since without it the row would go on without
        proposals."""
        assert context.limit is not None
        had = jnp.sum(self._lengths()[None] < context.limit[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(probed, 0, had)

    def _lengths(self) -> Int[Array, " N"]:
        return jnp.asarray(self.ks, jnp.int32)


def of_match_class(counts: Float[Array, "R G K"], match_class: Int[Array, " B"] | None) -> Float[Array, "B K"]:
    """The counts of each row's match class; ``match_class`` None: of the only one."""
    if match_class is None:
        return counts[:, 0]
    counts = jnp.broadcast_to(counts, (len(match_class), *counts.shape[1:]))
    return jnp.take_along_axis(counts, match_class[:, None, None], axis=1)[:, 0]


def estimated(
    reached: Float[Array, "R K"], accepted: Float[Array, "R K"], prior: Float[Array, "S K"], weight: Float[Array, " R"]
) -> Float[Array, "R K"]:
    """Chances of acceptance, from accepted among reached tokens and from an expectation. The expectation counts for
    ``weight`` blocks, or for a fixed minimum if that is more. It is ``prior`` at the first depth; at a later depth it
    is the chance found for the depth before, changed as ``prior`` changes."""
    found: list[Array] = []
    weights = jnp.maximum(weight, _FIRST_DEPTH), jnp.maximum(weight, _LATER_DEPTHS)
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
    """The lengths ``ks`` cut at ``depth``; None: 0, 1, 2, 3, 5, 8, ... and ``depth``. The best of these is near the
    best of all, since tokens per second change little around it."""
    found = [0, 1, 2]
    while ks is None and found[-1] < depth:
        found.append(found[-2] + found[-1])
    return tuple(sorted({min(k, depth) for k in (ks or found)}))


def _least(calibration: Calibration) -> Any:
    """Seconds of a block at each length, of the proposals that cost less."""
    return calibration.seconds if calibration.found is None else calibration.found


def calibration_of(context: Context, controller: Any) -> Calibration:
    """The calibration that the controller weighs with. Raises `ConfigError` if there is none."""
    if context.calibration is None:
        raise ConfigError(
            f"controller {controller.kind!r}: it needs a calibration; decode with a `Decoder`, or give one"
        )
    return context.calibration
