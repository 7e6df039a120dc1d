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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.decode.request import LEAST_PROMPT, bucket
from specjax.errors import SpecjaxError

GREEDY, SAMPLED = "greedy", "sampled"
PLAIN = "autoregressive"
"""Name of decoding without a drafter."""


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

    def at(self, slots: int) -> BatchCosts:
        """The costs in a cache of ``slots`` slots."""
        further = slots - self.context
        target = {int(m): self.target(m) + further * self.target_per_slot(m) for m in self.target.at}
        drafters = {
            name: dataclasses.replace(d, each=d.each + further * d.per_slot) for name, d in self.drafters.items()
        }
        return dataclasses.replace(self, context=slots, target=Line.through(target), drafters=drafters)

    def drafter(self, name: str) -> DrafterCosts:
        """Costs of a drafter. Raises `SpecjaxError` if they are not known."""
        if name not in self.drafters:
            known = ", ".join(self.drafters) or "none"
            raise SpecjaxError(f"cost model: drafter {name!r} was not calibrated, known here are {known}; calibrate it")
        return self.drafters[name]

    def prefill_of(self, prompt: int, drafter: str = PLAIN) -> float:
        """Seconds from handing in prompts of ``prompt`` tokens to the first block."""
        width = bucket(prompt, LEAST_PROMPT)
        return self.prefill(width) + (0.0 if drafter == PLAIN else width * self.drafter(drafter).prefill_each)

    def block(self, drafter: str, k: int, mode: str = GREEDY) -> float:
        """Seconds of a block of ``k`` tokens proposed by ``drafter`` in every row; 0: a step of plain decoding."""
        own = None if drafter == PLAIN or k == 0 else self.drafter(drafter)
        known = self.plain if own is None else own.beyond
        if mode not in known:
            raise SpecjaxError(
                f"cost model: {mode} blocks of {drafter} were not measured, only {', '.join(known)} ones; calibrate "
                f"with bench.temperatures=[0, 1]"
            )
        if own is None:
            return self.target(1) + self.plain[mode]
        return self.target(k + 1) + own.once + k * own.each + own.beyond[mode](k)

    def generation(self, prompt: int, blocks: float, drafter: str, k: int, mode: str) -> float:
        """Seconds of one batch of ``blocks`` blocks, from handing it in to its text."""
        return self.host + self.prefill_of(prompt, drafter) + blocks * self.block(drafter, k, mode)


Table = Mapping[tuple[Any, ...], float]
"""Measured seconds of a bucket of rows: ("target", m) of a pass over m tokens; ("draft", drafter, k) of all that a
drafter does for a block; ("wide_target", m) and ("wide_draft", drafter, k) of the same in a larger cache; ("block",
drafter, k, mode) of a block, with k 0 for plain decoding; ("prefill", drafter, width) of a prefill; ("shortest",) of a
whole generation of two tokens, plain and greedy, with prompts of the longest length. It calls its program twice, like
all longer ones."""


def _part(table: Table, *first: Any) -> dict[Any, float]:
    """Points whose keys begin with ``first``, by the rest of their keys."""
    found = {key[len(first) :]: seconds for key, seconds in table.items() if key[: len(first)] == first}
    return {key[0] if len(key) == 1 else key: seconds for key, seconds in found.items()}


def fit(table: Table, context: int, wide: int, left_out: Sequence[int] = ()) -> BatchCosts:
    """Costs fitted to the points, in a cache of ``context`` slots; the larger cache has ``wide``. Two kinds of points
    are left out and check the fit: passes of the target over ``left_out`` tokens, and blocks of lengths between the
    shortest and the longest of their drafter."""
    further, first = max(wide - context, 1), table["target", 1]
    target = Line.through({m: s for m, s in _part(table, "target").items() if m not in left_out})
    slopes = {m: max(s - table["target", m], 0.0) / further for m, s in _part(table, "wide_target").items()}
    plain = {mode: s - first for mode, s in _part(table, "block", PLAIN, 0).items()}
    prefill = Line.through(_part(table, "prefill", PLAIN))
    names = dict.fromkeys(name for name, _ in _part(table, "draft"))
    drafters = {name: _drafter(name, table, target, prefill, further) for name in names}
    host = max(table["shortest",] - prefill.seconds[-1] - 2 * table["block", PLAIN, 0, GREEDY], 0.0)
    found = BatchCosts(context, target, Line.through(slopes or {1: 0.0}), plain, drafters, prefill, host)
    return dataclasses.replace(found, checks=tuple(_checks(table, found, left_out)))


def _drafter(name: str, table: Table, target: Line, prefill: Line, further: int) -> DrafterCosts:
    own = _part(table, "draft", name)
    low, high = min(own), max(own)
    each = max((own[high] - own[low]) / (high - low), 0.0) if high > low else own[low] / low
    once = max(own[low] - low * each, 0.0)
    wide = [(s - own[k]) / k / further for k, s in _part(table, "wide_draft", name).items()]
    beyond: dict[str, dict[int, float]] = {}
    for (k, mode), seconds in _part(table, "block", name).items():
        if k in (low, high):
            beyond.setdefault(mode, {})[k] = seconds - target(k + 1) - once - k * each
    more = [(s - prefill(width)) / width for width, s in _part(table, "prefill", name).items()]
    lines = {mode: Line.through(found) for mode, found in beyond.items()}
    return DrafterCosts(each, once, max([*wide, 0.0]), lines, max([*more, 0.0]))


def _checks(table: Table, found: BatchCosts, left_out: Sequence[int]) -> Iterator[Check]:
    for m in left_out:
        yield Check(f"target, {m} tokens", found.target(m), table["target", m])
    for (name, k, mode), seconds in _part(table, "block").items():
        lengths = [length for length, _ in _part(table, "block", name)]
        if name != PLAIN and min(lengths) < k < max(lengths):
            yield Check(f"{name}, k = {k}, {mode}", found.block(name, k, mode), seconds)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Costs of a target and its drafters on a device."""

    device: str
    dtype: str
    measured: bool
    """True if measured, False if computed from the device's bandwidth and FLOP/s, and no better than those."""
    batches: Mapping[int, BatchCosts]
    """Costs by rows, which are powers of two: a batch is padded to one of them."""

    def of_batch(self, batch: int) -> BatchCosts:
        """Costs of the bucket that ``batch`` rows are padded to. Raises `SpecjaxError` if they are not known."""
        rows = bucket(batch)
        if rows not in self.batches:
            known = ", ".join(map(str, sorted(self.batches)))
            raise SpecjaxError(
                f"cost model: batch {batch} is decoded as {rows} rows, and only {known} are known; calibrate with "
                f"bench.batch_sizes=[{rows}]"
            )
        return self.batches[rows]

    @property
    def checks(self) -> list[tuple[int, Check]]:
        """(rows, point) for every point that was measured and left out of the fit."""
        return [(rows, check) for rows, costs in self.batches.items() for check in costs.checks]

    @property
    def error(self) -> tuple[float, float] | None:
        """(median, worst) relative error at the points left out of the fit; None without any."""
        errors = [check.error for _, check in self.checks]
        return (float(np.median(errors)), max(errors)) if errors else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        batches = {str(rows): dataclasses.asdict(costs) for rows, costs in self.batches.items()}
        return {"device": self.device, "dtype": self.dtype, "measured": self.measured, "batches": batches}
