"""Statistical comparison of decoded tokens with an exactly enumerated law."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from specjax.decode.decoder import Decoder

LEVEL = 1e-3 / 20
"""Bonferroni over the law tests; there are fewer than 20."""
ROWS, CALLS = 1024, 72
"""72 x 896 = 64,512 counted rows: 99% power at `LEVEL` against any law at a total variation of 0.02, over 64 cells
(noncentrality at least 4 N TV^2 = 103.2)."""


def decode_counts(decoder: Decoder, prompt: Sequence[int], length: int, *, calls: int = CALLS, **kwargs):
    """How often each new sequence comes out, over many rows with different seeds among ragged neighbours."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    # Every eighth row is a neighbour with another prompt, length and temperature, which must change nothing.
    prompts = [[1, 0, 2, 1, 3] if i % 8 == 7 else list(prompt) for i in range(ROWS)]
    temperature = kwargs.pop("temperature", 1.0)
    temperatures = [0.0 if i % 16 == 15 else temperature for i in range(len(prompts))]
    for call in range(calls):
        result = decoder.generate(prompts, max_new_tokens=length, temperature=temperatures, seed=1000 + call, **kwargs)
        for i, row in enumerate(result.tokens):
            if i % 8 != 7:
                counts[tuple(row)] += 1
    return counts


def p_value(counts: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> float:
    """Pearson's chi-square against a fully specified law. Cells expecting fewer than 5 are pooled; an outcome of
    probability zero gives 0."""
    if any(law.get(outcome, 0.0) == 0.0 for outcome in counts):
        return 0.0
    total = sum(counts.values())
    observed = np.array([counts.get(outcome, 0) for outcome in law], float)
    expected = np.array([probability * total for probability in law.values()])
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
