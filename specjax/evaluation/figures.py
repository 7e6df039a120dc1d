"""Figures of a run's trained drafts: their acceptance on held-out rows, and their decoding of held-out prompts. They
are measured once, and stored in `evaluations.json` under everything that they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.config import RunConfig
from specjax.data.corpus import BadRecordPolicy, Document
from specjax.data.prompts import by_source
from specjax.data.rows import Rows, pack, spread_predictions
from specjax.errors import DataError
from specjax.evaluation.held_out import HeldOutDecoding, with_median_seconds
from specjax.interfaces import Params, Trainable
from specjax.metrics import DecodeStats, block_efficiency_interval
from specjax.models.hf import LoadedModel
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process
from specjax.runtime.progress import Bars
from specjax.training.evaluate import Evaluation, evaluate_all
from specjax.training.layout import make_layout
from specjax.training.selection import Decoded

_FILE = "evaluations.json"
_TURNS = 3
"""Number of timed decodings of each draft, whose median counts."""
DRAFTS: tuple[str, str] = ("draft_before", "draft_after")
ALL = "all"


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """Figures of one draft on the text of one source, or of `ALL` if there are several. ``low`` .. ``high``: 95%
    interval of the block efficiency over prompts. None: not measured, or not known for this source alone."""

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
    simulated: float | None = None
    """Block efficiency by the training forward on the same texts."""


def comparison(
    decoding: HeldOutDecoding, decoded: Mapping[str, Sequence[Decoded]], alphas: Mapping[str, Mapping[str, float]]
) -> list[ComparisonRow]:
    """Rows of all sources, temperatures and drafts. ``decoded``: draft -> results of ``decoding``. Speed is of all
    prompts in one batch."""
    sources = [prompt.source for prompt in decoding.prompts]
    found = []
    for source in shown(sources):
        chosen = [i for i, own in enumerate(sources) if source in (own, ALL)]
        for i, temperature in enumerate(decoding.temperatures):
            for draft, measured in decoded.items():
                stats = [measured[i].by_prompt[j] for j in chosen]
                speed = measured[i].tokens_per_s if len(chosen) == len(sources) else None
                alpha = alphas[draft].get(source)
                row = compared(source, temperature, draft, decoding.rule.k, stats, speed, alpha)
                simulated = measured[i].simulated if len(chosen) == len(sources) else None
                found.append(dataclasses.replace(row, simulated=simulated))
    return found


def shown(sources: Sequence[str]) -> list[str]:
    """Sources to tell apart, and `ALL` if there are several."""
    names = sorted(set(sources))
    return names if len(names) == 1 else [*names, ALL]


def compared(
    source: str,
    temperature: float,
    drafter: str,
    k: int | None,
    by_prompt: Sequence[DecodeStats],
    tokens_per_s: float | None,
    alpha: float | None,
) -> ComparisonRow:
    """Row of one draft on the prompts of a source. ``k`` None: plain decoding, which has no block efficiency."""
    if k is None:
        return ComparisonRow(source, temperature, drafter, len(by_prompt), k, None, None, None, None, tokens_per_s)
    efficiency = functools.reduce(operator.add, by_prompt).block_efficiency
    interval = block_efficiency_interval(by_prompt)
    figures = (alpha, efficiency, interval.low, interval.high, tokens_per_s)
    return ComparisonRow(source, temperature, drafter, len(by_prompt), k, *figures)


def card_facts(decoded: Sequence[Decoded], chose: bool) -> dict[str, str]:
    """Rows of a draft's card, one a temperature. ``chose``: True if these prompts selected the draft."""
    found, by = {}, ", which chose this draft" if chose else ""
    for d in decoded:
        temperature = "greedy" if d.temperature == 0 else f"temperature {d.temperature:g}"
        interval = f"95% {d.interval.low:.2f} to {d.interval.high:.2f}"
        by_depth = ", ".join(f"{s:.2f}" for s in d.stats.acceptance_at)
        simulated = "" if d.simulated is None else f"; {d.simulated:.2f} by its training forward on the same texts"
        found[f"block efficiency, k={len(d.stats.acceptance_at)}, {temperature}"] = (
            f"{d.stats.block_efficiency:.2f} ({interval}, {len(d.by_prompt)} held-out prompts{by}){simulated}; "
            f"accepted at depth 1 .. k: {by_depth}"
        )
    return found


def evaluate(
    config: RunConfig, bars: Bars, drafter: Trainable, target: LoadedModel, models: Sequence[Params], rows: Rows
) -> list[Evaluation]:
    """Evaluation of each model on held-out ``rows``."""
    chosen = spread_predictions(rows, config.eval.positions)

    def evaluated(missing: list[int]) -> list[dict[str, Any]]:
        settings = (target, rows, config.eval.positions, config.eval.batch_size)
        with bars("evaluation", -(-len(chosen.tokens) // config.eval.batch_size)) as progress:
            found = evaluate_all(drafter, [models[i] for i in missing], *settings, progress, make_layout(config.mesh))
        return [evaluation.to_json() for evaluation in found]

    measured_on = (*fingerprint.of_model(target), fingerprint.digest(chosen))
    return list(map(Evaluation.from_json, _kept(config, models, measured_on, evaluated)))


def decode(
    config: RunConfig,
    bars: Bars,
    decoding: HeldOutDecoding | None,
    drafts: Mapping[str, Params],
    target: LoadedModel,
) -> dict[str, list[Decoded]]:
    """Results of each draft on the prompts of ``config.selection``, decoded in turns; empty lists without prompts."""
    if decoding is None:
        return {name: [] for name in drafts}
    names = list(drafts)

    def decoded(missing: list[int]) -> list[list[dict[str, Any]]]:
        turns: list[list[list[Decoded]]] = []
        with bars("held-out decoding", _TURNS) as progress:
            for turn in range(1, _TURNS + 1):
                turns.append([decoding(drafts[names[i]]) for i in missing])
                if progress is not None:
                    progress(turn, {})
        return [list(map(dataclasses.asdict, with_median_seconds(one))) for one in zip(*turns, strict=True)]

    measured_on = (*fingerprint.of_model(target), decoding.identity)
    found = _kept(config, list(drafts.values()), measured_on, decoded)
    return {name: list(map(Decoded.from_json, one)) for name, one in zip(names, found, strict=True)}


def alphas_by_source(
    config: RunConfig,
    target: LoadedModel,
    held_out: Sequence[Document],
    evaluate: Callable[[list[Params], Rows], list[Evaluation]],
    drafts: list[Params],
    of_all: Sequence[Evaluation],
) -> dict[str, dict[str, float]]:
    """Alphas of the two drafts on the text of each source; a source that does not fill a row is left out."""
    sources, data = by_source(held_out), config.data
    [*names, together] = shown(list(sources))
    found = {together: of_all}
    for source in names:
        with contextlib.suppress(DataError):
            options = (target.eos_ids[0], data.seq_len, data.prompt_weight, BadRecordPolicy(data.on_bad))
            found[source] = evaluate(drafts, pack(target.tokenizer, sources[source], *options))
    return {
        name: {source: evaluations[i].alpha for source, evaluations in found.items()} for i, name in enumerate(DRAFTS)
    }


def _kept(
    config: RunConfig, models: Sequence[Params], measured_on: Sequence[str], make: Callable[[list[int]], list[Any]]
) -> list[Any]:
    """JSON values of the models, each measured once on what has the digests ``measured_on``. ``make`` gives the missing
    ones, from the models' indices."""
    keys = ["".join((fingerprint.digest(params), *measured_on)) for params in models]
    keys = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    file = Path(config.out) / _FILE
    known = on_main_process(lambda: artifact.read_record(file, "what is asked of it is measured again")) or {}
    new = {key: i for i, key in reversed([*enumerate(keys)]) if key not in known}
    if new:
        known |= dict(zip(new, make(list(new.values())), strict=True))
        on_main_process(lambda: artifact.write_record(file, known))
    return [known[key] for key in keys]
