"""The main job of one config, from corpus to report: distill, decode, write `results.json`, build the report.

What is finished under `out` is reused, what was interrupted goes on: training from its last checkpoint, the decoding
benchmark from its start, because its timings belong to one run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.console import Console

import specjax
from specjax import registry, report
from specjax.config import RunConfig
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError
from specjax.formats.loading import load_drafter
from specjax.jobs import distill as job
from specjax.jobs import inputs, memory
from specjax.jobs.bench import check, decoding_figures, held_out_prompts, num_ticks
from specjax.models.files import draft_of, resolve, write_json
from specjax.report import record
from specjax.report.figures import figures as check_figures
from specjax.report.labels import format_duration
from specjax.report.terminal import comparison_table, legend, render_pieces, speedups
from specjax.runtime import artifact, fingerprint, sinks
from specjax.runtime.compile_cache import programs_kept
from specjax.runtime.progress import Bars, StepProgress, console_bars

_DECODING, _SECONDS, _RESULTS = "decoding.json", "seconds.json", "results.json"


def run(config: RunConfig) -> dict[str, Any]:
    """Everything of one run, in ``config.out``; returns the summary. Raises `SpecjaxError` for what a user can mend."""
    if config.distributed.enabled:
        raise ConfigError("distributed: several processes train, one decodes; run `specjax train` with it, then this")
    out = Path(config.out)
    console = Console()
    with contextlib.ExitStack() as held:
        held.enter_context(programs_kept(config.compile_cache))
        held.enter_context(artifact.exclusive(out))
        recorded = sinks.recorded(config.logging, out, console_bars(console), dataclasses.asdict(config))
        bars = held.enter_context(recorded)
        stages = Stages(out / _SECONDS, bars, plan(config), console)
        prepared = inputs.prepare(config, stages.bars, (*memory.STAGES, memory.DECODING))
        stages.planned = plan(config, len(prepared.train_rows))
        check(config, prepared)
        if not (out / _DECODING).exists():
            _preview(config, prepared, console)
        distilled = job.distill(config, stages.bars, prepared)
        decoding = _decoding(config, distilled, out / _DECODING, stages.bars)
        measures = dataclasses.asdict(distilled.measures)
        at = measures["alpha_at_after"]
        measures |= {"alpha_after_at_5": at[4] if len(at) > 4 else measures["alpha_after"]}
        measures |= {"alpha_positions": measures.pop("positions"), **_tokens_a_call(decoding["decoding"])}
        summary = {**measures, **decoding["figures"], "minutes": sum(stages.seconds.values()) / 60}
        results = {
            "name": out.name,
            "date": decoding["date"],
            "command": record.command(),
            "config_yaml": yaml.safe_dump(dataclasses.asdict(config), sort_keys=False),
            "machine": {**decoding["machine"], "stream_gb_per_s": decoding["figures"].get("stream_gb_per_s")},
            "summary": summary,
            "figures": [figure.model_dump() for figure in check_figures(summary)],
            "training": _training(distilled.logs),
            "comparison": _with_alpha(decoding["comparison"], distilled.alphas),
            "places": _by_depth(distilled),
            "simulated": [dataclasses.asdict(row) for row in distilled.comparison if row.simulated is not None],
            "self_tests": {name: str(found) for name, found in distilled.self_tests.items()},
            "stage_seconds": stages.seconds,
            **{key: decoding[key] for key in ("decoding", "verifier", "compile_seconds", "roofline", "sample")},
        }
        write_json(out / _RESULTS, results)
        where = report.build(out)
    console.print(comparison_table(results["comparison"]))
    for line in speedups(results["decoding"], results["comparison"]):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"report: {where / 'report.html'}")
    return summary


def _preview(config: RunConfig, prepared: inputs.Prepared, console: Console) -> None:
    """Print a greedy continuation of a held-out prompt, its tokens coloured by who chose them, and how fast the first
    of `bench.drafts` makes it beside plain decoding. Nothing is printed for a config without finished drafts."""
    settings = config.bench
    if not settings.drafts or prepared.target.tokenizer is None:
        return
    name, directory = next(iter(settings.drafts.items()))
    target = dataclasses.replace(prepared.target)  # whose layout for decoding goes with it
    [prompt] = held_out_prompts(prepared.corpus.held_out, target, settings.prompt_tokens, 1)
    drafter: Any = load_drafter(directory, target)
    drafter = dataclasses.replace(drafter, k=min(max(settings.ks), drafter.longest or max(settings.ks)))
    console.print(f"first, a look at {target.name} and the draft in {directory}:", highlight=False)
    plain, _ = _decoded(Decoder(target), prompt, settings.new_tokens)
    drafted, result = _decoded(Decoder(target, drafter, config.verifier, "fixed"), prompt, settings.new_tokens)
    console.print(render_pieces(result.pieces(0)), soft_wrap=True)
    console.print(legend())
    speeds = f"{plain:,.0f} tokens/s without a draft, {drafted:,.0f} with {name}, {drafter.k} tokens a block"
    per_call = result.stats[0].block_efficiency
    console.print(f"{speeds}: {drafted / plain:.2f}x, {per_call:.1f} tokens a target call\n", highlight=False)


def _decoded(decoder: Decoder, prompt: list[int], new_tokens: int) -> tuple[float, Any]:
    """Tokens a second of a greedy generation that is compiled already, and its result."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    decoder.generate([prompt], **options)
    began = time.perf_counter()
    result = decoder.generate([prompt], **options)
    return len(result.tokens[0]) / (time.perf_counter() - began), result


def _decoding(config: RunConfig, distilled: job.Distilled, file: Path, bars: Bars) -> dict[str, Any]:
    """Figures of decoding, measured once. The file also holds what they were measured on: if that changes, they are
    measured again."""
    trained = {"draft_before": distilled.draft_before, "draft_after": distilled.draft_after}
    verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
    measured_on = {
        "bench": dataclasses.asdict(config.bench),
        "verifier": config.verifier,
        "sampling": dataclasses.asdict(config.sampling),
        "certify": None if verifier.lossless else dataclasses.asdict(config.certify),
        "seed": config.seed,
        "target": fingerprint.of_model(distilled.target),
        "drafts": [(fingerprint.digest(draft.params), repr(draft.drafter)) for draft in trained.values()],
        "others": {name: _files_digest(resolve(draft_of(at)).iterdir()) for name, at in config.bench.drafts.items()},
        "specjax": _source_digest(),
        "jax": jax.__version__,
    }
    known = artifact.read_record(file, "it is measured again")
    if known is not None and known["measured_on"] == json.loads(json.dumps(measured_on)):
        return known
    jax.clear_caches()  # the programs of training
    distilled.target.free_originals()
    drafts = {name: draft.of(1) for name, draft in trained.items()}
    measured = decoding_figures(config, distilled.target, drafts, distilled.prepared.corpus.held_out, bars)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {**measured, "date": now, "machine": record.machine(), "measured_on": measured_on}
    artifact.write_record(file, found)
    return found


def _with_alpha(comparison: list[dict[str, Any]], alphas: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The comparison with each draft's held-out acceptance on the text of the same source."""
    return [{**row, "alpha": alphas.get(row["drafter"], {}).get(row["source"])} for row in comparison]


def _source_digest() -> str:
    """Digest of every source file of specjax: timings belong to one version of the code."""
    return _files_digest(Path(specjax.__file__).parent.rglob("*.py"))


def _files_digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files) if file.is_file())).hexdigest()


_STEP_SECONDS = {"text": 0.08, "target": 0.3, "evaluation": 1.2, "held-out decoding": 1.8, "decoding": 0.52}
"""Seconds of a training step without and with the target, and of a tick of the other stages, in the demo on 2 slow
cores. For other configs and machines their ratios say enough."""


def plan(config: RunConfig, rows: int = 1000) -> dict[str, float]:
    """Seconds of each stage on those 2 slow cores, in the order they run; an epoch counts as ``rows`` rows."""
    pretrain, distill = (stage.over(rows).num_steps for stage in (config.draft.pretrain, config.distill))
    trained = {} if config.target.path else {"target-train": ("text", config.target.steps)}
    trained |= {
        "draft-pretrain": ("text", pretrain),
        "draft-distill": ("target", distill),
    }
    control = "text" if config.draft.kind == DraftModel.kind else "target"  # which others may read
    trained |= {f"control-{rate:g}": (control, distill) for rate in config.control.learning_rates}
    rows = -(-config.eval.positions // config.data.seq_len)
    trained |= {"evaluation": ("evaluation", -(-rows // config.eval.batch_size))}
    if config.selection.temperatures is not None or config.selection.prompts:
        trained |= {"held-out decoding": ("held-out decoding", 3)}
    trained |= {"decoding": ("decoding", num_ticks(config))}
    return {name: steps * _STEP_SECONDS[kind] for name, (kind, steps) in trained.items() if steps}


class Stages:
    """Bars of a run's stages. Each prints how long the whole run still takes: the plan for the stages to come, scaled
    by what the finished ones took beside their plan. Its seconds are added to a file, over interrupted runs."""

    def __init__(self, file: Path, bars: Bars, planned: dict[str, float], console: Console):
        self._file, self._bars, self.planned, self._console = file, bars, planned, console
        self._began = time.perf_counter()
        self._took: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.seconds = json.loads(file.read_text())

    @contextlib.contextmanager
    def bars(self, name: str, steps: int) -> Iterator[StepProgress | None]:
        """A progress bar of a stage, whose seconds are added to the file when it ends."""
        before, began = self.seconds.get(name, 0.0), time.perf_counter()
        if name in self.planned:
            self._tell(name, began - self._began)
        try:
            with self._bars(name, steps) as progress:
                yield progress
        finally:
            took = time.perf_counter() - began
            if name in self.planned and took > 0.05 * self.planned[name]:  # or it was reused
                self._took[name] = took
            self.seconds[name] = round(before + took, 1)
            write_json(self._file, self.seconds)

    def _tell(self, name: str, gone: float) -> None:
        names = list(self.planned)
        done = sum(self.planned[finished] for finished in self._took)
        ratio = sum(self._took.values()) / done if done else 1.0
        left = ratio * sum(self.planned[later] for later in names[names.index(name) :])
        title = f"[{names.index(name) + 1}/{len(names)}] {name}: about {format_duration(left)} left in all"
        self._console.print(f"{title}, {format_duration(gone)} gone", highlight=False)


def _tokens_a_call(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens a target call of the distilled draft at batch 1, at lengths that every config shares, if measured."""
    keys = {(0.0, 5): "tokens_a_call_greedy_k5", (1.0, 3): "tokens_a_call_t1_k3"}
    own = [row for row in rows if (row["drafter"], row["batch_size"]) == ("draft_after", 1)]
    return {keys[at]: row["block_efficiency"] for row in own if (at := (row["temperature"], row["k"])) in keys}


def _by_depth(distilled: job.Distilled) -> list[dict[str, Any]]:
    """Acceptance, loss and agreement at each depth of a block."""
    measures = distilled.measures
    after = measures.alpha_at_after, measures.nll_at_after, measures.agreement_at_after
    names = ("alpha_before", "alpha_after", "loss", "agreement")
    each = zip(measures.alpha_at_before, *after, strict=True)
    return [{"place": place, **dict(zip(names, row, strict=True))} for place, row in enumerate(each, 1)]


def _training(logs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    names = {"draft-pretrain": "pretrain", "draft-distill": "distill"}
    control = {name.removeprefix("control-"): log for name, log in logs.items() if name.startswith("control-")}
    return {**{short: logs[name] for name, short in names.items() if name in logs}, "control": control}
