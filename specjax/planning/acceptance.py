"""How many blocks a generation takes: from what was counted on some prompts, or from an assumed alpha.

Rows of a batch are decoded together until the last of them has its tokens, so a batch takes as many blocks as its
slowest row. Rows differ by much more than chance (a text that repeats itself is drafted well), so how much slower the
slowest is comes from the rows that were counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from specjax.metrics import DecodeStats, expected_blocks


@dataclasses.dataclass(frozen=True)
class Row:
    """One row that was decoded, or what it would have been with shorter blocks."""

    at: tuple[float, ...]
    """As `Acceptance.at`, of its own blocks."""
    blocks: float
    tokens: int
    """That it emitted."""

    def first(self, k: int) -> Row:
        """The row in blocks of ``k`` proposals, where what is kept of a longer block does not depend on its end."""
        more = expected_blocks(self.at[:k], self.tokens) / expected_blocks(self.at, self.tokens)
        return Row(self.at[:k], self.blocks * more, self.tokens)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The acceptance of one drafter at one temperature."""

    at: tuple[float, ...]
    """The chance that a block keeps at least j drafts, j = 1 .. k: of all blocks, those that proposed less among
    them. Empty: no drafter."""
    alpha: float = 0.0
    """The chance of one proposal: `metrics.DecodeStats.alpha_mle`, or what was assumed."""
    rows: tuple[Row, ...] = ()
    """Those that were counted, all of as many tokens; empty: none was, and rows are alike."""

    @classmethod
    def of_alpha(cls, alpha: float, k: int) -> Acceptance:
        """Every proposal is kept with chance ``alpha``, whatever came before (2211.17192, section 3.1)."""
        return cls(tuple(alpha**j for j in range(1, k + 1)), alpha)

    @classmethod
    def counted(cls, stats: Sequence[DecodeStats]) -> Acceptance:
        """What rows of the same budget say, added up."""
        rows = [
            Row(tuple(float(n) / max(own.blocks, 1) for n in own.accepted_at), own.blocks, own.emitted) for own in stats
        ]
        accepted, reached = (sum(sum(counts) for counts in x) for x in zip(*map(_counts, stats), strict=True))
        return cls(_pooled(rows), accepted / max(reached, 1), tuple(rows))

    def first(self, k: int) -> Acceptance:
        """Of blocks of ``k`` proposals, row by row: one that keeps much has a larger share of the blocks when they are
        short."""
        rows = tuple(row.first(k) for row in self.rows)
        return dataclasses.replace(self, at=_pooled(rows) if rows else self.at[:k], rows=rows)

    def conditional(self) -> tuple[float, ...]:
        """The chance of the proposal at each place, given that those before it are kept."""
        before = (1.0, *self.at)
        return tuple(a / b if b else 0.0 for a, b in zip(self.at, before, strict=False))

    def blocks(self, tokens: int, batch: int = 1) -> float:
        """Expected blocks until all of ``batch`` rows have emitted ``tokens`` tokens each: those of the slowest of as
        many rows, drawn among the counted ones. Without any, all are alike and differ by chance alone."""
        if not self.at or tokens == 0:
            return float(tokens)
        if self.rows:
            ordered, ranks = np.sort([row.blocks for row in self.rows]), np.arange(len(self.rows) + 1) / len(self.rows)
            longer = expected_blocks(self.at, tokens) / expected_blocks(self.at, self.rows[0].tokens)
            return float(ordered @ np.diff(ranks**batch)) * longer
        if batch == 1:
            return expected_blocks(self.at, tokens)
        within = np.cumsum(blocks_distribution(self.at, tokens))
        return float(np.sum(1.0 - within**batch))


def _counts(stats: DecodeStats) -> tuple[Sequence[int], Sequence[int]]:
    return stats.accepted_at, stats.reached_at


def _pooled(rows: Sequence[Row]) -> tuple[float, ...]:
    """Of all blocks of the rows together."""
    weights = np.array([row.blocks for row in rows])
    return tuple(map(float, weights @ np.array([row.at for row in rows]) / max(weights.sum(), 1.0)))


def blocks_distribution(at: Sequence[float], tokens: int) -> Float[np.ndarray, " N"]:
    """The chance that ``tokens`` tokens take n blocks, n = 0 .. tokens, if every block keeps drafts as ``at`` says,
    whatever came before; its mean is `metrics.expected_blocks`."""
    reached = np.array([1.0, *at, 0.0])
    emitted = reached[:-1] - reached[1:]
    left = np.zeros(tokens + 1)  # the chance of so many tokens to go
    left[tokens] = 1.0
    found = np.zeros(tokens + 1)
    for block in range(1, tokens + 1):
        after = np.zeros(tokens + 1)
        for j, chance in enumerate(emitted, 1):
            after[0] += chance * left[1 : j + 1].sum()  # cut at the budget
            if j < tokens:
                after[1 : tokens - j + 1] += chance * left[j + 1 :]
        found[block] = after[0]
        after[0] = 0.0
        left = after
    return found
