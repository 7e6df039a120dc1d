"""Before and after distillation: alpha, block efficiency and speed of a run's two drafts, by data source."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

from specjax.distill.selection import Decoded, HeldOutDecoding
from specjax.metrics import DecodeStats, block_efficiency_interval

DRAFTS: tuple[str, str] = ("draft_before", "draft_after")
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Row:
    """One draft on the text of one source, or of `ALL` if there are several. ``low`` .. ``high``: 95% interval of the
    block efficiency over prompts. None: not measured, or not to be told apart from other sources."""

    source: str
    temperature: float
    drafter: str
    prompts: int
    k: int | None
    alpha: float | None
    block_efficiency: float | None
    low: float | None
    high: float | None
    tokens_per_s: float | None


def rows(
    decoding: HeldOutDecoding, decoded: Mapping[str, Sequence[Decoded]], alphas: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """``decoded``: draft -> what ``decoding`` gave for it. Speed is of all prompts in one batch."""
    sources = [prompt.source for prompt in decoding.prompts]
    found = []
    for source in shown(sources):
        chosen = [i for i, own in enumerate(sources) if source in (own, ALL)]
        for i, temperature in enumerate(decoding.temperatures):
            for draft, measured in decoded.items():
                stats = [measured[i].by_prompt[j] for j in chosen]
                speed = measured[i].tokens_per_s if len(chosen) == len(sources) else None
                alpha = alphas[draft].get(source)
                found.append(row(source, temperature, draft, decoding.rule.k, stats, speed, alpha))
    return found


def shown(sources: Sequence[str]) -> list[str]:
    """The sources to tell apart, and `ALL` where there are several."""
    names = sorted(set(sources))
    return names if len(names) == 1 else [*names, ALL]


def row(
    source: str,
    temperature: float,
    drafter: str,
    k: int | None,
    by_prompt: Sequence[DecodeStats],
    tokens_per_s: float | None,
    alpha: float | None,
) -> Row:
    """``k`` None: plain decoding, which has no block efficiency."""
    if k is None:
        return Row(source, temperature, drafter, len(by_prompt), k, None, None, None, None, tokens_per_s)
    efficiency = functools.reduce(operator.add, by_prompt).block_efficiency
    interval = block_efficiency_interval(by_prompt)
    figures = (alpha, efficiency, interval.low, interval.high, tokens_per_s)
    return Row(source, temperature, drafter, len(by_prompt), k, *figures)


def card_rows(decoded: Sequence[Decoded], chose: bool) -> dict[str, str]:
    """Rows of a draft's card, one a temperature. ``chose``: these prompts decided which draft it is."""
    found, by = {}, ", which chose this draft" if chose else ""
    for d in decoded:
        temperature = "greedy" if d.temperature == 0 else f"temperature {d.temperature:g}"
        interval = f"95% {d.interval.low:.2f} to {d.interval.high:.2f}"
        by_position = ", ".join(f"{s:.2f}" for s in d.stats.acceptance_at)
        found[f"block efficiency, k={len(d.stats.acceptance_at)}, {temperature}"] = (
            f"{d.stats.block_efficiency:.2f} ({interval}, {len(d.by_prompt)} held-out prompts{by}); "
            f"accepted at position 1 .. k: {by_position}"
        )
    return found
