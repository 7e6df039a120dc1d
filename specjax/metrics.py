"""Every metric once, under the one name it has everywhere: code, JSON, reports.

A block is one draft-and-verify step of one row. N = blocks, n = draft tokens accepted in a block, k_r = draft tokens
that were proposed validly in it (padding is not drafted).

    drafted            sum of k_r over blocks
    accepted           sum of n over blocks, as verified (before a cut at end-of-sequence or budget)
    emitted            tokens committed to the row, after such cuts
    target_calls       N, forward passes of the target over a block; prefill is not a block
    block_efficiency   emitted / N, with the target's own token of each block (tau = 1 + sum_j s_j when nothing is cut)
    accepted_length    accepted / N, without it
    acceptance_rate    accepted / drafted; depends on k, is not alpha
    acceptance_at[j]             s_j = #(n >= j) / #(k_r >= j), unconditional, j = 1..k
    conditional_acceptance_at[j] a_j = #(n >= j) / #(n >= j - 1 and k_r >= j)
    alpha              E sum_v min(p(v), q(v)) under teacher forcing on given text: 1 - total variation, per position
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def alpha_per_position(p_logits: Float[Array, "*B V"], q_logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """sum_v min(p, q) of two laws given by float32 logits (2211.17192, its acceptance probability)."""
    p = jax.nn.softmax(p_logits.astype(jnp.float32), axis=-1)
    q = jax.nn.softmax(q_logits.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Counts of one row or of several rows added up; every ratio is derived from them."""

    blocks: int
    emitted: int
    drafted_at: tuple[int, ...]
    reached_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    def __add__(self, other: DecodeStats) -> DecodeStats:
        if len(self.drafted_at) != len(other.drafted_at):
            raise ValueError(f"stats at k={len(self.drafted_at)} and k={len(other.drafted_at)} do not add")
        return DecodeStats(
            self.blocks + other.blocks,
            self.emitted + other.emitted,
            *(
                tuple(a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True))
                for name in ("drafted_at", "reached_at", "accepted_at")
            ),
        )

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def target_calls(self) -> int:
        return self.blocks

    @property
    def block_efficiency(self) -> float:
        return self.emitted / max(self.blocks, 1)

    @property
    def accepted_length(self) -> float:
        return self.accepted / max(self.blocks, 1)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / max(self.drafted, 1)

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        return tuple(a / max(d, 1) for a, d in zip(self.accepted_at, self.drafted_at, strict=True))

    @property
    def conditional_acceptance_at(self) -> tuple[float, ...]:
        return tuple(a / max(r, 1) for a, r in zip(self.accepted_at, self.reached_at, strict=True))

    def to_json(self) -> dict:
        names = (
            "drafted",
            "accepted",
            "emitted",
            "target_calls",
            "block_efficiency",
            "accepted_length",
            "acceptance_rate",
            "acceptance_at",
            "conditional_acceptance_at",
        )
        return {name: getattr(self, name) for name in names}


def expected_blocks(acceptance_at: Sequence[float], tokens: int) -> float:
    """Blocks that emit ``tokens`` tokens, when each block accepts by position as measured, whatever came before. More
    than ``tokens / tau``, because the budget cuts the last block: E[N_m] = 1 + sum_j Pr(j emitted) E[N_(m-j)]."""
    reached = np.array([1.0, *acceptance_at, 0.0])
    emitted = reached[:-1] - reached[1:]
    expected = np.zeros(tokens + 1)
    for m in range(1, tokens + 1):
        before = expected[max(m - len(emitted), 0) : m][::-1]
        expected[m] = 1.0 + emitted[: len(before)] @ before
    return float(expected[tokens])
