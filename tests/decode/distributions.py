"""Statistical comparison of decoded tokens with an exactly enumerated distribution: rows are drawn until the answer is
clear, up to a number that gives the power stated (a group-sequential test)."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from specjax.decode.decoder import Decoder
from tests import cases

LAWS = 64
"""Bonferroni: there are no more distribution tests than this."""
ROWS = 2048
"""Rows of a call, 15 of 16 of which count."""
CELLS = 64
"""Sequences of three tokens over a vocabulary of four."""
_CERTAIN = 1e-9
"""A p-value below which nobody waits for more rows: it adds nothing to the level."""


def counted_rows(calls: int) -> int:
    return calls * ROWS * 15 // 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long rows are drawn: at most ``calls`` calls, with a look at the counts after every ``every`` of them.

    ``level``: the chance of a false alarm. ``distance``: a total variation that must be found. A look ends the test
    well if its p-value is so large that a distribution at this distance gives one with probability ``missed`` at most.
    """

    level: float
    distance: float
    calls: int
    every: int
    missed: float = 5e-4

    @property
    def looks(self) -> range:
        """Calls after which the counts are looked at."""
        return range(self.every, self.calls + 1, self.every)

    def enough(self, calls: int, cells: int = CELLS) -> float:
        """The p-value above which a look after so many ``calls`` ends the test well."""
        if calls == self.calls:
            return self.level
        statistic = stats.ncx2.ppf(self.missed, cells - 1, self._noncentrality(calls))
        return float(stats.chi2.sf(statistic, cells - 1))

    def power(self, cells: int = CELLS) -> float:
        """The chance that a distribution at ``distance`` is found, at least: it may be missed at every look."""
        critical = stats.chi2.isf(self.level, cells - 1)
        found_at_the_end = stats.ncx2.sf(critical, cells - 1, self._noncentrality(self.calls))
        return float(found_at_the_end) - self.missed * (len(self.looks) - 1)

    def _noncentrality(self, calls: int) -> float:
        """Of the statistic at ``distance``, at least so much (Cauchy-Schwarz)."""
        return 4 * counted_rows(calls) * self.distance**2


WHOLE = Plan(level=1e-3 / LAWS, distance=0.02, calls=40, every=4)
SMOKE = Plan(level=1e-3, distance=0.04, calls=8, every=2)
NEUTRAL: dict[str, Any] = {
    **cases.NEUTRAL,
    "logit_bias": {},
    "banned_tokens": [],
    "allowed_tokens": [],
    "stop_token_ids": [],
}
OTHERS: dict[str, Any] = {
    "top_k": 2,
    "top_p": 0.6,
    "min_p": 0.2,
    "repetition_penalty": 0.5,
    "presence_penalty": 2.0,
    "frequency_penalty": -1.0,
    "min_new_tokens": 2,
    "logit_bias": {2: 4.0},
    "banned_tokens": [0],
    "stop_token_ids": [1],
}
"""Parameters of the neighbours, where the parameters are what is tested."""


def check_law(
    decoder: Decoder,
    prompt: Sequence[int],
    length: int,
    distribution: Mapping[tuple[int, ...], float],
    plan: Plan = WHOLE,
    **settings: Any,
) -> None:
    """Fail unless new sequences come out with the probabilities of ``distribution``. ``settings``: of
    `decode_counts`."""
    for calls, counts in enumerate(decode_counts(decoder, prompt, length, **settings), 1):
        if calls not in plan.looks:
            continue
        assert sum(counts.values()) == counted_rows(calls)
        p = p_value(counts, distribution)
        if p > plan.enough(calls, len(distribution)):
            return
        assert p > (plan.level if calls == plan.calls else _CERTAIN), f"p = {p:.2g} after {counted_rows(calls)} rows"


def decode_counts(
    decoder: Decoder,
    prompt: Sequence[int],
    length: int,
    *,
    neighbours: Mapping[str, Any] | None = None,
    logits_processor=None,
    **settings: Any,
) -> Iterator[collections.Counter[tuple[int, ...]]]:
    """After every call, how often each new sequence has come out, over many rows with different seeds among ragged
    neighbours: every 16th row has another prompt, length, temperature and the parameters of ``neighbours``, which must
    change nothing."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    counted = np.arange(ROWS) % 16 != 15
    prompts = [list(prompt) if own else [1, 0, 2, 1, 3] for own in counted]
    others = {"temperature": 0.5, **(neighbours or {})}
    options: dict[str, Any] = {
        name: [(settings if own else others).get(name, NEUTRAL[name]) for own in counted]
        for name in {*settings, *others}
    }
    options["temperature"][31::32] = [0.0] * len(options["temperature"][31::32])
    for call in itertools.count():
        gc.disable()  # a collection walks over all that JAX has traced: a quarter of the time
        try:
            result = decoder.generate(
                prompts, max_new_tokens=length, seed=1000 + call, logits_processor=logits_processor, **options
            )
        finally:
            gc.enable()
        counts.update(tuple(row) for row, own in zip(result.tokens, counted, strict=True) if own)
        yield counts


def p_value(counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's chi-square against a fully specified distribution. Cells expecting fewer than 5 are pooled; an outcome
    of probability zero gives 0."""
    if any(distribution.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = sum(counts.values())
    observed = np.array([counts.get(outcome, 0) for outcome in distribution], float)
    expected = np.array([probability * total for probability in distribution.values()])
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5:
            keep = np.argsort(expected)[:2]
            observed = np.append(np.delete(observed, keep), observed[keep].sum())
            expected = np.append(np.delete(expected, keep), expected[keep].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))
