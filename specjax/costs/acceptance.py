"""Number of blocks of a generation: from acceptance counted on some prompts, or from an assumed alpha.

Rows of a batch are decoded together until the last of them has its tokens, so a batch takes as many blocks as its
slowest row. Rows differ by much more than chance (a text that repeats itself is drafted well), so the counted rows tell
how much slower the slowest one is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from specjax.metrics import DecodeStats, expected_blocks


@dataclasses.dataclass(frozen=True)
class Row:
    """One decoded row, or an estimate of it with shorter blocks."""

    at: tuple[float, ...]
    """`Acceptance.at` over the row's own blocks."""
    blocks: float
    tokens: int
    """Number of emitted tokens."""

    def first(self, k: int) -> Row:
        """The row in blocks of ``k`` proposed tokens, for rules that accept a token whatever follows it."""
        more = expected_blocks(self.at[:k], self.tokens) / expected_blocks(self.at, self.tokens)
        return Row(self.at[:k], self.blocks * more, self.tokens)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The acceptance of one drafter at one temperature."""

    at: tuple[float, ...]
    """Chance that at least j tokens of a block are accepted, j = 1 .. k: over all blocks, those that proposed fewer
    included. Empty: no drafter."""
    alpha: float = 0.0
    """Chance that one proposed token is accepted: `metrics.DecodeStats.alpha_mle`, or an assumed one."""
    rows: tuple[Row, ...] = ()
    """Counted rows, all of equally many tokens; empty: no row was counted, and all rows are alike."""

    @classmethod
    def of_alpha(cls, alpha: float, k: int) -> Acceptance:
        """Acceptance where every token has the chance ``alpha``, whatever came before (2211.17192, section 3.1)."""
        return cls(tuple(alpha**j for j in range(1, k + 1)), alpha)

    @classmethod
    def counted(cls, stats: Sequence[DecodeStats]) -> Acceptance:
        """Acceptance counted over decoded rows of one token budget."""
        rows = [
            Row(tuple(float(n) / max(own.blocks, 1) for n in own.accepted_at), own.blocks, own.emitted) for own in stats
        ]
        accepted, reached = (sum(sum(counts) for counts in x) for x in zip(*map(_counts, stats), strict=True))
        return cls(_pooled(rows), accepted / max(reached, 1), tuple(rows))

    def first(self, k: int) -> Acceptance:
        """Acceptance in blocks of ``k`` proposed tokens, computed row by row: a row that accepts much has a larger
        share of all blocks when they are short."""
        rows = tuple(row.first(k) for row in self.rows)
        return dataclasses.replace(self, at=_pooled(rows) if rows else self.at[:k], rows=rows)

    def blocks(self, tokens: int, batch: int = 1) -> float:
        """Expected blocks until all of ``batch`` rows have emitted ``tokens`` tokens each: blocks of the slowest of as
        many rows, drawn among the counted ones. Without counted rows, all rows are alike and differ by chance alone."""
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
    """`Acceptance.at` over all blocks of the rows together."""
    weights = np.array([row.blocks for row in rows])
    return tuple(map(float, weights @ np.array([row.at for row in rows]) / max(weights.sum(), 1.0)))


def blocks_distribution(at: Sequence[float], tokens: int) -> Float[np.ndarray, " N"]:
    """Chance that ``tokens`` tokens take n blocks, n = 0 .. tokens, if every block accepts tokens as ``at`` says,
    whatever came before; the mean is `metrics.expected_blocks`."""
    reached = np.array([1.0, *at, 0.0])
    emitted = np.append(0.0, reached[:-1] - reached[1:])
    sums, unfinished = np.eye(1, tokens)[0], [1.0]  # chances of fewer tokens in all than asked for
    for _ in range(tokens):
        sums = np.convolve(sums, emitted)[:tokens]
        unfinished.append(sums.sum())
    return np.append(0.0, -np.diff(unfinished))
