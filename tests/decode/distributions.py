"""Statistical comparison of decoded tokens with an exactly enumerated distribution."""

from __future__ import annotations

import collections
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from specjax.decode.decoder import Decoder
from tests import cases

LAWS = 64
"""Bonferroni: there are no more distribution tests than this."""
LEVEL = 1e-3 / LAWS
ROWS, CALLS = 2048, 36
SMOKE_CALLS, SMOKE_LEVEL = 8, 1e-3
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


def counted_rows(calls: int = CALLS) -> int:
    return calls * ROWS * 15 // 16


def decode_counts(
    decoder: Decoder,
    prompt: Sequence[int],
    length: int,
    *,
    calls: int = CALLS,
    neighbours: Mapping[str, Any] | None = None,
    logits_processor=None,
    **settings: Any,
) -> collections.Counter[tuple[int, ...]]:
    """How often each new sequence comes out, over many rows with different seeds among ragged neighbours: every 16th
    row has another prompt, length, temperature and the parameters of ``neighbours``, which must change nothing."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    counted = np.arange(ROWS) % 16 != 15
    prompts = [list(prompt) if own else [1, 0, 2, 1, 3] for own in counted]
    others = {"temperature": 0.5, **(neighbours or {})}
    options: dict[str, Any] = {
        name: [(settings if own else others).get(name, NEUTRAL[name]) for own in counted]
        for name in {*settings, *others}
    }
    options["temperature"][31::32] = [0.0] * len(options["temperature"][31::32])
    gc.disable()  # a collection walks over all that JAX has traced: a quarter of the time
    try:
        for call in range(calls):
            result = decoder.generate(
                prompts, max_new_tokens=length, seed=1000 + call, logits_processor=logits_processor, **options
            )
            counts.update(tuple(row) for row, own in zip(result.tokens, counted, strict=True) if own)
    finally:
        gc.enable()
    return counts


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


def power(rows: int, level: float, distance: float, cells: int) -> float:
    """Of `p_value` < ``level`` against any distribution at a total variation of ``distance``: its noncentrality is at
    least 4 rows distance^2 (Cauchy-Schwarz)."""
    critical = stats.chi2.isf(level, cells - 1)
    return float(stats.ncx2.sf(critical, cells - 1, 4 * rows * distance**2))
