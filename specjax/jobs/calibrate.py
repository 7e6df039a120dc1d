"""`specjax calibrate`: measure the costs of a config's target and drafters on this device (`specjax.costs`) once,
and store them. `specjax plan` calls `cost_model`, which measures only costs that are not stored yet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.config import RunConfig
from specjax.costs import calibrations, store
from specjax.costs.acceptance import Acceptance
from specjax.costs.calibrations import StoredCalibration
from specjax.costs.cost_model import BatchCosts, CostModel
from specjax.costs.measuring import CostTimer, Wanted, spread_lengths, temperatures_of
from specjax.decode.request import bucket
from specjax.errors import ConfigError
from specjax.evaluation.bench import AUTOREGRESSIVE, Bench, Cell
from specjax.formats.loading import asked_kind, load_drafter
from specjax.interfaces import Drafter
from specjax.jobs import inputs
from specjax.jobs.bench import bench_of, counting, held_out_prompts
from specjax.models.hf import LoadedModel
from specjax.runtime.compile_cache import count_compiles
from specjax.runtime.progress import Bars, no_bars

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
        return tuple(sorted(set(map(bucket, self.config.bench.batch_sizes))))

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
        drafts: dict[str, Drafter] = {}
        if trained.is_dir():
            drafts[TRAINED] = load_drafter(trained, target, kind=asked_kind(config.draft))
        count = settings.prompts
        prompts = held_out_prompts(prepared.corpus.held_out, target, settings.prompt_tokens, 4 * count)
        bench, drafters, _ = bench_of(config, target, drafts, prompts)
        return cls(config, prepared, bench, tuple(drafters), prompts[:count], prompts[count:])

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
    lengths: Mapping[tuple[str, int, str], StoredCalibration] = dataclasses.field(default_factory=dict)
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
    keys, measuring, compiling = {rows: subject.key(rows) for rows in subject.batches}, 0.0, 0.0
    batches = {rows: None if again else store.read(key, BatchCosts) for rows, key in keys.items()}
    kept = {rows: costs is not None for rows, costs in batches.items()}
    with bars("calibrate", (_TURNS + 1) * list(kept.values()).count(False)) as progress:
        tick = counting(progress)
        for rows in (rows for rows, known in kept.items() if not known):
            batches[rows], seconds, compile_seconds = _measured(subject, rows, tick)
            measuring, compiling = measuring + seconds, compiling + compile_seconds
            store.write(keys[rows], batches[rows])
    file = store.file_of(keys[subject.batches[-1]])
    known = {rows: costs for rows, costs in batches.items() if costs is not None}
    model = CostModel(jax.devices()[0].device_kind, str(subject.target.dtype), True, known)
    return Calibrated(model, kept, measuring, compiling, file.parent if file.exists() else None)


def _measured(subject: Subject, rows: int, tick: Callable[[], None]) -> tuple[BatchCosts, float, float]:
    """Costs of a bucket of rows, seconds of measuring, and seconds of compiling."""
    start = time.perf_counter()
    with count_compiles() as count:
        timer = CostTimer(subject.bench.decoder, subject.wanted(rows))
        tick()
        for _ in range(_TURNS):
            timer.turn()
            tick()
    return timer.costs(), max(time.perf_counter() - start - count.seconds, 0.0), count.seconds


def acceptances(
    subject: Subject, alpha: float | None = None, bars: Bars = no_bars
) -> dict[tuple[str, int, float], Acceptance]:
    """Acceptance of every drafter, length and temperature of the config, counted on the tuning prompts in the largest
    batch, as it is the same in all. If the verifier judges a token only by those before it, blocks of the largest
    length also give the acceptance of shorter ones. ``alpha``: acceptance to assume instead of counting."""
    settings, ks, verifier = subject.config.bench, subject.ks(), subject.config.verifier
    kind = verifier if isinstance(verifier, str) else verifier["kind"]
    size, found = max(settings.batch_sizes), {}
    cells = [(name, k, t) for t in settings.temperatures for name in subject.drafters for k in ks]
    if alpha is not None:
        return {(name, k, t): Acceptance.of_alpha(alpha, k) for name, k, t in cells}
    counted = [(name, k, t) for name, k, t in cells if k == ks[-1] or (t > 0 and kind == _LOOKS_AT_WHOLE_BLOCKS)]
    with bars("acceptance", -(-len(subject.tuning) // size) * len(counted)) as progress:
        tick = counting(progress)
        for name, k, t in counted:
            [run] = subject.bench.run([Cell(name, k, size, t)], subject.tuning, tick).values()
            found[name, k, t] = Acceptance.counted([stats for _, stats in run.by_row[: len(subject.tuning)]])
    return {(name, k, t): found.get((name, k, t)) or found[name, ks[-1], t].first(k) for name, k, t in cells}


def run_calibrate(config: RunConfig, again: bool = False, bars: Bars = no_bars) -> Calibrated:
    """`cost_model` of a config, and the block costs by which the default controller chooses the lengths of its
    drafters. Raises `SpecjaxError` for errors that the user can mend."""
    subject = Subject.of(config, bars)
    found, lengths, longest = cost_model(subject, again, bars), {}, max(subject.ks())
    wanted = {rows: subject.wanted(rows) for rows in subject.batches}
    with bars("lengths", sum(len(of.temperatures) for of in wanted.values())) as progress:
        tick = counting(progress)
        for rows, of in wanted.items():
            for mode, temperature in of.temperatures.items():
                options = {**of.sampling, "temperature": temperature}
                for name in subject.drafters:
                    decoder = subject.bench.adaptive(name, longest)
                    kept = calibrations.calibrate(decoder, of.prompts, again, **options)
                    assert kept is not None
                    lengths[name, rows, mode] = kept
                tick()
    seconds = found.seconds + sum(kept.seconds for kept in lengths.values())
    return dataclasses.replace(found, lengths=lengths, seconds=seconds)
