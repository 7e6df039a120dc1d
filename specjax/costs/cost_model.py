"""Cost model of a generation, from a few measured points: a pass of the target over m tokens, a pass of a draft over
one, the time of a block beyond its passes, prefill, and the host.

Every bucket of rows has its own costs, since the kind of product and what bounds it change with the rows. Costs lie on
straight lines between measured points in the tokens fed, and have one slope in the cache's slots, all of which a pass
reads. The time of a block beyond its passes is measured from whole blocks of the program that decodes, at the shortest
and the longest length, and lies on a straight line between them. Other lengths are measured too and left out of the
fit; they tell its error.

Times are seconds. Dims: B rows, m tokens fed to each, k proposed tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.costs.acceptance import Acceptance
from specjax.errors import SpecjaxError

GREEDY, SAMPLED = "greedy", "sampled"
PLAIN = "autoregressive"
"""Name of decoding without a drafter."""
_LEAST_PROMPT = 16
"""Number of tokens that the shortest prompt is padded to, as in `specjax.decode.request`."""


def mode_of(temperature: float) -> str:
    """Kind of program that decodes at a temperature."""
    return GREEDY if temperature == 0 else SAMPLED


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds by straight lines between measured points, extended beyond the first and the last."""

    at: tuple[float, ...]
    """Measured sizes, ascending."""
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Line:
        """Line through ``points``, at least one."""
        at, seconds = zip(*sorted(points.items()), strict=True)
        return cls(tuple(map(float, at)), tuple(map(float, seconds)))

    def __call__(self, x: float) -> float:
        at, seconds = self.at, self.seconds
        if len(at) == 1:
            return seconds[0]
        i = int(np.clip(np.searchsorted(at, x), 1, len(at) - 1))
        slope = (seconds[i] - seconds[i - 1]) / (at[i] - at[i - 1])
        return float(seconds[i - 1] + slope * (x - at[i - 1]))


@dataclasses.dataclass(frozen=True)
class DrafterCosts:
    """Costs of one drafter in a batch."""

    each: float
    """Seconds of a pass, which proposes a token to every row."""
    once: float
    """Seconds of proposing that do not depend on the draft length."""
    per_slot: float
    """Seconds that a pass takes longer for each further slot of the cache."""
    beyond: Mapping[str, Line]
    """Seconds of a block beyond its passes, by `GREEDY` or `SAMPLED` and then by k."""
    prefill_each: float
    """Seconds of prefill per prompt token beyond the target's."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A point that was measured and left out of the fit."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error against the measured seconds."""
        return abs(self.predicted / self.measured - 1)


@dataclasses.dataclass(frozen=True)
class BatchCosts:
    """All costs of a bucket of rows."""

    context: int
    """Slots of the cache that the costs were measured in."""
    target: Line
    """Seconds of a pass of the target, by tokens fed to each row."""
    target_per_slot: Line
    """Seconds that a pass of the target takes longer for each further slot, by tokens fed to each row."""
    plain: Mapping[str, float]
    """Seconds of a step of plain decoding beyond its pass, by `GREEDY` or `SAMPLED`."""
    drafters: Mapping[str, DrafterCosts]
    prefill: Line
    """Seconds from handing a request in to its first block, by padded length of the prompts."""
    host: float
    """Seconds of a generation beside prefill and blocks: the call, reading back, text."""
    checks: tuple[Check, ...] = ()


@dataclasses.dataclass(frozen=True)
class Points:
    """Measured points of a bucket of rows: medians, in seconds. Drafters have the names of `CostModel`."""

    context: int
    """Slots of the cache."""
    wide: int
    """Slots of the larger cache of ``wide_target`` and ``wide_draft``."""
    target: Mapping[int, float]
    """Seconds of a pass of the target, by tokens fed to each row."""
    wide_target: Mapping[int, float]
    """Seconds of a pass in the larger cache, by tokens fed to each row; empty if the target has too few positions."""
    draft: Mapping[tuple[str, int], float]
    """Seconds of all that a drafter does for a block, by drafter and k."""
    wide_draft: Mapping[tuple[str, int], float]
    block: Mapping[tuple[str, int, str], float]
    """Seconds of a block, by drafter, k and `GREEDY` or `SAMPLED`; k is 0 for plain decoding."""
    prefill: Mapping[tuple[str, int], float]
    """Seconds of a prefill, by drafter and padded length."""
    shortest: float
    """Seconds of a whole generation of two tokens, plain and greedy, with prompts of the longest length. It calls its
    program twice, like all longer ones."""


def fit(points: Points, left_out: Sequence[int] = ()) -> BatchCosts:
    """Costs fitted to the points. Two kinds of points are left out and check the fit: passes of the target over
    ``left_out`` tokens, and blocks of lengths between the shortest and the longest of their drafter."""
    wider = max(points.wide - points.context, 1)
    target = Line.through({m: s for m, s in points.target.items() if m not in left_out})
    slopes = {m: max(s - points.target[m], 0.0) / wider for m, s in points.wide_target.items()}
    per_slot = Line.through(slopes or {1: 0.0})
    plain = {mode: s - points.target[1] for (name, _, mode), s in points.block.items() if name == PLAIN}
    prefill = Line.through({width: s for (name, width), s in points.prefill.items() if name == PLAIN})
    names = dict.fromkeys(name for name, _ in points.draft)
    drafters = {name: _drafter(name, points, target, prefill, wider) for name in names}
    longest = max(width for name, width in points.prefill if name == PLAIN)
    host = max(points.shortest - prefill(longest) - 2 * points.block[PLAIN, 0, GREEDY], 0.0)
    found = BatchCosts(points.context, target, per_slot, plain, drafters, prefill, host)
    return dataclasses.replace(found, checks=tuple(_checks(points, found, left_out)))


def _drafter(name: str, points: Points, target: Line, prefill: Line, wider: int) -> DrafterCosts:
    own = {k: s for (of, k), s in points.draft.items() if of == name}
    low, high = min(own), max(own)
    each = max((own[high] - own[low]) / (high - low), 0.0) if high > low else own[low] / low
    once = max(own[low] - low * each, 0.0)
    wide = [(s - own[k]) / k / wider for (of, k), s in points.wide_draft.items() if of == name]
    beyond: dict[str, dict[int, float]] = {}
    for (of, k, mode), seconds in points.block.items():
        if of == name and k in (low, high):
            beyond.setdefault(mode, {})[k] = seconds - target(k + 1) - once - k * each
    more = [(s - prefill(width)) / width for (of, width), s in points.prefill.items() if of == name]
    lines = {mode: Line.through(found) for mode, found in beyond.items()}
    return DrafterCosts(each, once, max([*wide, 0.0]), lines, max([*more, 0.0]))


def _checks(points: Points, found: BatchCosts, left_out: Sequence[int]):
    for m in left_out:
        yield Check(f"target, {m} tokens", found.target(m), points.target[m])
    for (name, k, mode), seconds in points.block.items():
        lengths = [length for of, length, _ in points.block if of == name]
        if name != PLAIN and min(lengths) < k < max(lengths):
            yield Check(f"{name}, k = {k}, {mode}", _block(found, name, k, mode, found.context), seconds)


def _block(costs: BatchCosts, name: str, k: int, mode: str, context: int) -> float:
    """Seconds of a block in a cache of ``context`` slots."""
    further = context - costs.context
    seconds = costs.target(k + 1) + further * costs.target_per_slot(k + 1)
    if name == PLAIN or k == 0:
        return seconds + costs.plain[mode]
    drafter = costs.drafters[name]
    return seconds + drafter.once + k * (drafter.each + further * drafter.per_slot) + drafter.beyond[mode](k)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Generations to predict: ``batch`` rows with prompts of ``prompt`` tokens, which emit ``tokens`` tokens each."""

    batch: int
    prompt: int
    tokens: int
    sampled: bool
    """True at a temperature above 0."""

    @property
    def mode(self) -> str:
        return SAMPLED if self.sampled else GREEDY


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Costs of a target and its drafters on a device. Raises `SpecjaxError` for rows, a drafter or a kind of sampling
    whose costs it does not know."""

    device: str
    dtype: str
    measured: bool
    """True if measured, False if computed from the device's bandwidth and FLOP/s, and no better than those."""
    batches: Mapping[int, BatchCosts]
    """Costs by rows, which are powers of two: a batch is padded to one of them."""

    def of_batch(self, batch: int) -> BatchCosts:
        """Costs of the bucket that ``batch`` rows are padded to."""
        rows = 1 << (batch - 1).bit_length()
        if rows not in self.batches:
            known = ", ".join(map(str, sorted(self.batches)))
            raise SpecjaxError(
                f"cost model: batch {batch} is decoded as {rows} rows, and only {known} are known; calibrate with "
                f"bench.batch_sizes=[{rows}]"
            )
        return self.batches[rows]

    def target_seconds(self, batch: int, tokens: int, context: int | None = None) -> float:
        """Seconds of a pass of the target over ``tokens`` tokens a row, in a cache of ``context`` slots; None: as many
        as were measured in."""
        costs = self.of_batch(batch)
        further = 0 if context is None else context - costs.context
        return costs.target(tokens) + further * costs.target_per_slot(tokens)

    def draft_seconds(self, batch: int, drafter: str, context: int | None = None) -> float:
        """Seconds of a pass of the draft, which proposes a token to every row."""
        costs = self.of_batch(batch)
        found = self._drafter(costs, drafter)
        return found.each + (0 if context is None else context - costs.context) * found.per_slot

    def prefill_seconds(self, batch: int, prompt: int, drafter: str = PLAIN) -> float:
        """Seconds from handing in prompts of ``prompt`` tokens to the first block."""
        costs, width = self.of_batch(batch), max(1 << (prompt - 1).bit_length(), _LEAST_PROMPT)
        more = 0.0 if drafter == PLAIN else width * self._drafter(costs, drafter).prefill_each
        return costs.prefill(width) + more

    def block_seconds(
        self, batch: int, drafter: str, k: int, *, sampled: bool = False, context: int | None = None
    ) -> float:
        """Seconds of a block of ``k`` tokens proposed by ``drafter`` in every row; 0: a step of plain decoding."""
        costs, mode = self.of_batch(batch), SAMPLED if sampled else GREEDY
        known = costs.plain if drafter == PLAIN or k == 0 else self._drafter(costs, drafter).beyond
        if mode not in known:
            raise SpecjaxError(
                f"cost model: {mode} blocks of {drafter} were not measured, only {', '.join(known)} ones; calibrate "
                f"with bench.temperatures=[0, 1]"
            )
        return _block(costs, drafter, k, mode, costs.context if context is None else context)

    def generation_seconds(
        self, work: Workload, drafter: str, k: int, acceptance: Acceptance, context: int | None = None
    ) -> float:
        """Seconds of one batch, from handing it in to its text. ``acceptance``: acceptance in blocks of ``k``."""
        costs = self.of_batch(work.batch)
        block = self.block_seconds(work.batch, drafter, k, sampled=work.sampled, context=context)
        blocks = acceptance.blocks(work.tokens, work.batch) if k else work.tokens
        return costs.host + self.prefill_seconds(work.batch, work.prompt, drafter) + blocks * block

    def tokens_per_s(
        self, work: Workload, drafter: str, k: int, acceptance: Acceptance, context: int | None = None
    ) -> float:
        """Tokens of all rows over the seconds of the batch."""
        return work.batch * work.tokens / self.generation_seconds(work, drafter, k, acceptance, context)

    @property
    def checks(self) -> list[tuple[int, Check]]:
        """(rows, point) for every point that was measured and left out of the fit."""
        return [(rows, check) for rows, costs in self.batches.items() for check in costs.checks]

    @property
    def error(self) -> tuple[float, float] | None:
        """(median, worst) relative error at the points left out of the fit; None without any."""
        errors = [check.error for _, check in self.checks]
        return (float(np.median(errors)), max(errors)) if errors else None

    def _drafter(self, costs: BatchCosts, name: str) -> DrafterCosts:
        if name not in costs.drafters:
            known = ", ".join(costs.drafters) or "none"
            raise SpecjaxError(f"cost model: drafter {name!r} was not calibrated, known here are {known}; calibrate it")
        return costs.drafters[name]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        batches = {str(rows): dataclasses.asdict(costs) for rows, costs in self.batches.items()}
        return {"device": self.device, "dtype": self.dtype, "measured": self.measured, "batches": batches}


def batch_costs(value: Mapping[str, Any]) -> BatchCosts:
    """Inverse of `dataclasses.asdict` for `BatchCosts`. Raises `KeyError` or `TypeError` for any other ``value``."""
    drafters = {name: _drafter_costs(costs) for name, costs in value["drafters"].items()}
    lines = {name: _line(value[name]) for name in ("target", "target_per_slot", "prefill")}
    checks = tuple(Check(**check) for check in value["checks"])
    return BatchCosts(**{**value, **lines, "drafters": drafters, "checks": checks, "plain": dict(value["plain"])})


def _drafter_costs(value: Mapping[str, Any]) -> DrafterCosts:
    return DrafterCosts(**{**value, "beyond": {mode: _line(line) for mode, line in value["beyond"].items()}})


def _line(value: Mapping[str, Any]) -> Line:
    return Line(tuple(map(float, value["at"])), tuple(map(float, value["seconds"])))
