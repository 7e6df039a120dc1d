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
class Acceptance:
    """The acceptance of one drafter at one temperature."""

    at: tuple[float, ...]
    """The chance that a block keeps at least j drafts, j = 1 .. k: of all blocks, those that proposed less among
    them. Empty: no drafter."""
    alpha: float = 0.0
    """The chance of one proposal: `metrics.DecodeStats.alpha_mle`, or what was assumed."""
    row_blocks: tuple[int, ...] = ()
    """Blocks of single rows that all emitted as many tokens; empty: not known, rows are alike."""

    @classmethod
    def of_alpha(cls, alpha: float, k: int) -> Acceptance:
        """Every proposal is kept with chance ``alpha``, whatever came before (2211.17192, section 3.1)."""
        return cls(tuple(alpha**j for j in range(1, k + 1)), alpha)

    @classmethod
    def counted(cls, rows: Sequence[DecodeStats]) -> Acceptance:
        """What rows of the same budget say, added up."""
        blocks = max(sum(row.blocks for row in rows), 1)
        kept = np.sum([row.accepted_at for row in rows], axis=0)
        reached = sum(sum(row.reached_at) for row in rows)
        alpha = float(kept.sum()) / max(reached, 1)
        return cls(tuple(float(n) / blocks for n in kept), alpha, tuple(row.blocks for row in rows))

    def first(self, k: int) -> Acceptance:
        """Of blocks of ``k`` proposals, where what is kept of a longer block does not depend on its end."""
        return dataclasses.replace(self, at=self.at[:k])

    def conditional(self) -> tuple[float, ...]:
        """The chance of the proposal at each place, given that those before it are kept."""
        before = (1.0, *self.at)
        return tuple(a / b if b else 0.0 for a, b in zip(self.at, before, strict=False))

    def blocks(self, tokens: int, batch: int = 1) -> float:
        """Expected blocks until all of ``batch`` rows have emitted ``tokens`` tokens each. Without rows that were
        counted, all are alike and differ by chance alone."""
        if not self.at or tokens == 0:
            return float(tokens)
        if self.row_blocks or batch == 1:
            return expected_blocks(self.at, tokens) * self._slowest(batch)
        within = np.cumsum(blocks_distribution(self.at, tokens))
        return float(np.sum(1.0 - within**batch))

    def _slowest(self, batch: int) -> float:
        """Blocks of the slowest of ``batch`` rows over those of the mean one, rows drawn among the counted ones."""
        if not self.row_blocks:
            return 1.0
        ordered = np.sort(self.row_blocks)
        ranks = np.arange(len(ordered) + 1) / len(ordered)
        return float(ordered @ np.diff(ranks**batch) / ordered.mean())


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
