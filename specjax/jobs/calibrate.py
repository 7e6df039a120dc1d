"""`specjax calibrate`: measure the costs of a config's target and drafters on this device (`specjax.costs`) once,
and store them. `specjax plan` calls `cost_model`, which measures only costs that are not stored yet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax import registry
from specjax.config import RunConfig
from specjax.costs import calibrations, store
from specjax.costs.acceptance import Acceptance
from specjax.costs.calibrations import Kept
from specjax.costs.cost_model import BatchCosts, CostModel, batch_costs, fit
from specjax.costs.measuring import CostTimer, Wanted, spread_lengths, temperatures_of
from specjax.costs.timer import count_compiles
from specjax.drafters.base import refuse_longer
from specjax.errors import ConfigError
from specjax.evaluation.bench import AUTOREGRESSIVE, Bench, Cell, DrafterFactory
from specjax.formats.loading import asked_kind, load_drafter
from specjax.interfaces import Drafter
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts, registered
from specjax.models.hf import LoadedModel
from specjax.runtime.progress import Bars, StepProgress, no_bars

_TURNS = 5
"""Number of times that every point is timed; its median counts."""
_LOOKS_AT_WHOLE_BLOCKS = "block"
"""Verifier by which the number of accepted tokens depends on the length of the block."""
TRAINED = "draft_after"
"""Name, in the benchmark, of the draft that training left in the run's directory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A target with the drafters that a config names, and held-out prompts to measure them on."""

    config: RunConfig
    prepared: inputs.Prepared
    bench: Bench
    drafters: tuple[str, ...]
    timed: Sequence[Sequence[int]]
    """Prompts to measure decoding on, `bench.prompts` of them."""
    tuning: Sequence[Sequence[int]]
    """Other prompts, three times as many, to measure acceptance and costs on."""

    @property
    def target(self) -> LoadedModel:
        return self.prepared.target

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes rounded up to powers of two (buckets of rows), ascending."""
        return tuple(sorted({1 << (size - 1).bit_length() for size in self.config.bench.batch_sizes}))

    def ks(self) -> tuple[int, ...]:
        """Draft lengths of the config's benchmark at any batch size, ascending."""
        return tuple(sorted({*self.config.bench.ks, *(self.config.bench.batch_ks or ())}))

    @classmethod
    def of(cls, config: RunConfig, bars: Bars = no_bars) -> Subject:
        """Load the target, the drafts in `bench.drafts`, the draft trained in `out`, if any, and `bench.drafters`."""
        settings, trained = config.bench, Path(config.out) / "draft"
        if not (settings.drafts or settings.drafters or trained.is_dir()):
            raise ConfigError(
                "bench: no drafter to calibrate; give bench.drafts={name: DIRECTORY} or bench.drafters=[ngram], or "
                "train one with `specjax train`"
            )
        prepared = inputs.prepare(config, bars)
        target = prepared.target
        drafts: dict[str, Drafter] = {name: load_drafter(at, target) for name, at in settings.drafts.items()}
        if trained.is_dir():
            drafts = {TRAINED: load_drafter(trained, target, kind=asked_kind(config.draft)), **drafts}
        for draft in drafts.values():
            refuse_longer(draft, settings.max_k, "bench.ks, bench.batch_ks")
        factories: dict[str, DrafterFactory] = {name: _of_length(draft) for name, draft in drafts.items()}
        factories |= {kind: registered(kind) for kind in settings.drafters}
        count = settings.prompts
        prompts = held_out_prompts(prepared.corpus.held_out, target, settings.prompt_tokens, 4 * count)
        verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
        timed, tuning = prompts[:count], prompts[count:]
        options = (settings, timed, tuning, verifier, config.sampling.options(), config.seed)
        return cls(config, prepared, Bench(target, factories, *options), tuple(factories), timed, tuning)

    def wanted(self, rows: int) -> Wanted:
        """Measurements that a bucket of ``rows`` rows needs."""
        settings, tuning = self.config.bench, self.tuning
        shortest = min(map(len, tuning))
        prompts = [tuning[i % len(tuning)][:shortest] for i in range(rows)]
        lengths = {name: spread_lengths(self.ks()) for name in self.drafters}
        sampling = {**self.config.sampling.options(), "stop_token_ids": ()}
        return Wanted(prompts, settings.new_tokens, lengths, temperatures_of(settings.temperatures), sampling)

    def key(self, rows: int) -> dict[str, Any]:
        """Key that the costs of a bucket of ``rows`` rows are stored under."""
        wanted, longest = self.wanted(rows), max(self.ks())
        decoders = {name: self.bench.decoder(name, longest) for name in self.drafters}
        decoders[AUTOREGRESSIVE] = self.bench.decoder(AUTOREGRESSIVE, 0)
        settings = {
            "lengths": wanted.lengths,
            "temperatures": [*wanted.temperatures],
            "sampling": wanted.sampling,
            "prompt": len(wanted.prompts[0]),
            "new_tokens": wanted.new_tokens,
            "verifier": self.config.verifier,
        }
        return store.key_of(rows, str(self.target.dtype), decoders, settings)


def _of_length(drafter: Any) -> DrafterFactory:
    return lambda k: dataclasses.replace(drafter, k=k)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """Costs of a config's passes and blocks, and the time that it took to get them."""

    model: CostModel
    kept: Mapping[int, bool]
    """Rows of a bucket -> True if its costs were read instead of measured."""
    seconds: float
    """Seconds of measuring, without compilation."""
    compile_seconds: float
    directory: Path | None
    """Directory that the costs are stored in; None: it cannot be written, and nothing is stored."""
    lengths: Mapping[tuple[str, int, str], Kept] = dataclasses.field(default_factory=dict)
    """(drafter, rows, kind of program) -> costs that the default controller uses; empty: not asked for."""

    @property
    def summary(self) -> str:
        """A sentence with the seconds of measuring, the error of the fit and the place of the stored costs."""
        error = self.model.error
        off = "no point left out of the fit" if error is None else f"median {error[0]:.1%}, worst {error[1]:.1%}"
        took = f"measured in {self.seconds:.1f} s, beside {self.compile_seconds:.1f} s of compilation"
        place = "not kept" if self.directory is None else f"kept in {self.directory}"
        return f"{'read' if all(self.kept.values()) else took}; error at points left out: {off}; {place}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object of costs, errors of the fit and seconds."""
        checks = [
            {"batch": rows, "point": c.name, "predicted": c.predicted, "measured": c.measured, "error": c.error}
            for rows, c in self.model.checks
        ]
        more = {"kept": list(map(int, filter(self.kept.get, self.kept))), "left_out": checks}
        more["lengths"] = [
            {"drafter": name, "batch": rows, "mode": mode, "seconds": kept.calibration.seconds.tolist()}
            for (name, rows, mode), kept in self.lengths.items()
        ]
        more |= {"seconds": self.seconds, "compile_seconds": self.compile_seconds, "directory": self.directory}
        return {**self.model.to_json(), **more}


def cost_model(subject: Subject, again: bool = False, bars: Bars = no_bars) -> Calibrated:
    """Costs of every batch of the config: read if they are stored, else measured now and stored. ``again``: measure in
    any case."""
    batches, kept, place = {}, {}, None
    measuring = compiling = 0.0
    keys = {rows: subject.key(rows) for rows in subject.batches}
    known: dict[int, BatchCosts | None] = {
        rows: None if again else store.read(key, batch_costs) for rows, key in keys.items()
    }
    new = [rows for rows, costs in known.items() if costs is None]
    with bars("calibrate", len(new) * (_TURNS + 1)) as progress:
        tick = counting(progress)
        for rows, key in keys.items():
            costs, kept[rows] = known[rows], known[rows] is not None
            if costs is None:
                costs, seconds, compile_seconds = _measured(subject, rows, tick)
                measuring, compiling = measuring + seconds, compiling + compile_seconds
                store.write(key, dataclasses.asdict(costs))
            batches[rows] = costs
            place = store.file_of(key).parent if store.file_of(key).exists() else None
    device = jax.devices()[0].device_kind
    model = CostModel(device, str(subject.target.dtype), True, batches)
    return Calibrated(model, kept, measuring, compiling, place)


def _measured(subject: Subject, rows: int, tick: Callable[[], None]) -> tuple[BatchCosts, float, float]:
    """Costs of a bucket of rows, seconds of measuring, and seconds of compiling."""
    start, wanted = time.perf_counter(), subject.wanted(rows)
    with count_compiles() as count:
        timer = CostTimer(subject.bench.decoder, wanted)
        tick()
        for _ in range(_TURNS):
            timer.turn()
            tick()
    costs = fit(timer.points(), wanted.left_out)
    return costs, max(time.perf_counter() - start - count.seconds, 0.0), count.seconds


def acceptances(
    subject: Subject, alpha: float | None = None, bars: Bars = no_bars, only: tuple[str, float] | None = None
) -> dict[tuple[str, int, float], Acceptance]:
    """Acceptance of every drafter, length and temperature of the config, counted on the tuning prompts in the largest
    batch, as it is the same in all. If the verifier judges a token only by those before it, blocks of the largest
    length also give the acceptance of shorter ones. ``alpha``: acceptance to assume instead of counting. ``only``: the
    drafter and temperature to count for, instead of all."""
    settings, ks = subject.config.bench, subject.ks()
    names, temperatures = (subject.drafters, settings.temperatures) if only is None else ((only[0],), (only[1],))
    if alpha is not None:
        return {(name, k, t): Acceptance.of_alpha(alpha, k) for name in names for k in ks for t in temperatures}
    verifier = subject.config.verifier
    kind = verifier if isinstance(verifier, str) else verifier["kind"]
    size, found = max(settings.batch_sizes), {}
    wanted = {t: ks if t > 0 and kind == _LOOKS_AT_WHOLE_BLOCKS else ks[-1:] for t in temperatures}
    batches = -(-len(subject.tuning) // size)
    with bars("acceptance", batches * len(names) * sum(map(len, wanted.values()))) as progress:
        tick = counting(progress)
        for t, lengths in wanted.items():
            for name in names:
                for k in lengths:
                    [run] = subject.bench.run([Cell(name, k, size, t)], subject.tuning, tick).values()
                    rows = [stats for _, stats in run.by_row[: len(subject.tuning)]]
                    found[name, k, t] = Acceptance.counted(rows)
                found |= {(name, k, t): found[name, lengths[-1], t].first(k) for k in ks if k not in lengths}
    return {(name, k, t): found[name, k, t] for t in temperatures for name in names for k in ks}


def counting(progress: StepProgress | None) -> Callable[[], None]:
    """A function without arguments that tells ``progress`` how often it was called."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, {})

    return tick


def run_calibrate(config: RunConfig, again: bool = False, bars: Bars = no_bars) -> Calibrated:
    """`cost_model` of a config, and the block costs by which the default controller chooses the lengths of its
    drafters. Raises `SpecjaxError` for errors that the user can mend."""
    subject = Subject.of(config, bars)
    found, lengths = cost_model(subject, again, bars), {}
    longest = max(subject.ks())
    with bars("lengths", sum(len(subject.wanted(rows).temperatures) for rows in subject.batches)) as progress:
        tick = counting(progress)
        for rows in subject.batches:
            wanted = subject.wanted(rows)
            for mode, temperature in wanted.temperatures.items():
                for name in subject.drafters:
                    decoder = subject.bench.adaptive(name, longest)
                    options = {**wanted.sampling, "temperature": temperature}
                    kept = calibrations.calibrate(decoder, wanted.prompts, again, **options)
                    assert kept is not None
                    lengths[name, rows, mode] = kept
                tick()
    more = [kept.seconds for kept in lengths.values()]
    return dataclasses.replace(found, lengths=lengths, seconds=found.seconds + sum(more))
