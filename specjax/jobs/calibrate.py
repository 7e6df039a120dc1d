"""`specjax calibrate`: the costs of a config's target and drafters on this device (`specjax.planning`), measured once
and kept. Jobs that decode adaptively call `cost_model`, which measures only what is not known yet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax import registry
from specjax.config import RunConfig
from specjax.drafters.base import refuse_longer
from specjax.drafters.loading import asked_kind, load_drafter
from specjax.errors import ConfigError
from specjax.evaluation.bench import AUTOREGRESSIVE, Bench, Cell, DrafterFactory
from specjax.evaluation.costs import count_compiles
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts, registered
from specjax.models.hf import LoadedModel
from specjax.planning import calibrations, store
from specjax.planning.acceptance import Acceptance
from specjax.planning.calibrations import Kept
from specjax.planning.cost_model import BatchCosts, CostModel, batch_costs, fit
from specjax.planning.measuring import CostTimer, Wanted, spread_lengths, temperatures_of
from specjax.runtime.progress import Bars, StepProgress, no_bars
from specjax.types import Drafter

_TURNS = 5
"""Whose medians count."""
_LOOKS_AT_WHOLE_BLOCKS = "block"
"""The rule by which what is kept of a block depends on its length."""
TRAINED = "draft_after"
"""The draft that training left in the run's directory, as the benchmark calls it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A target with the drafters that a config names, and prompts that nothing else is measured on."""

    config: RunConfig
    prepared: inputs.Prepared
    bench: Bench
    drafters: tuple[str, ...]
    timed: Sequence[Sequence[int]]
    """Prompts to measure decoding on, `bench.prompts` of them."""
    tuning: Sequence[Sequence[int]]
    """Others, three times as many, for acceptance and costs."""

    @property
    def target(self) -> LoadedModel:
        return self.prepared.target

    @property
    def batches(self) -> tuple[int, ...]:
        """Buckets of rows, ascending."""
        return tuple(sorted({1 << (size - 1).bit_length() for size in self.config.bench.batch_sizes}))

    def ks(self) -> tuple[int, ...]:
        """Every length that the config's benchmark has, in whichever batch."""
        return tuple(sorted({*self.config.bench.ks, *(self.config.bench.batch_ks or ())}))

    @classmethod
    def of(cls, config: RunConfig, bars: Bars = no_bars) -> Subject:
        """The target, the drafts in `bench.drafts`, what training left in `out`, if anything, and `bench.drafters`."""
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
        """What is measured of a bucket of rows."""
        settings, tuning = self.config.bench, self.tuning
        shortest = min(map(len, tuning))
        prompts = [tuning[i % len(tuning)][:shortest] for i in range(rows)]
        lengths = {name: spread_lengths(self.ks()) for name in self.drafters}
        sampling = {**self.config.sampling.options(), "stop_token_ids": ()}
        return Wanted(prompts, settings.new_tokens, lengths, temperatures_of(settings.temperatures), sampling)

    def key(self, rows: int) -> dict[str, Any]:
        """What the costs of a bucket are kept under."""
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
    """Costs, and what it took to know them."""

    model: CostModel
    kept: Mapping[int, bool]
    """By rows: whether the costs were read, not measured."""
    seconds: float
    """Of measuring, beside compilation."""
    compile_seconds: float
    directory: Path | None
    """Where the costs are kept; None: nowhere, it cannot be written."""
    lengths: Mapping[tuple[str, int, str], Kept] = dataclasses.field(default_factory=dict)
    """What the default controller weighs with, by drafter, rows and kind of program; empty: not asked for."""

    @property
    def summary(self) -> str:
        """A sentence: what was measured, how long it took, how far off the fit is, where the costs are."""
        error = self.model.error
        off = "no point left out of the fit" if error is None else f"median {error[0]:.1%}, worst {error[1]:.1%}"
        took = f"measured in {self.seconds:.1f} s, beside {self.compile_seconds:.1f} s of compilation"
        place = "not kept" if self.directory is None else f"kept in {self.directory}"
        return f"{'read' if all(self.kept.values()) else took}; error at points left out: {off}; {place}"

    def to_json(self) -> dict[str, Any]:
        """Costs, errors of the fit and seconds, as a JSON object."""
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
    """The costs of every batch of the config: as they were kept, or measured now and kept. ``again``: measured in any
    case."""
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
    """Costs of a bucket, seconds of measuring and of compiling."""
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
    batch: it is the same in all. Under a rule that judges a token by those before it, blocks of the largest length tell
    the others'. ``alpha``: assumed instead. ``only``: of this drafter at this temperature."""
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
    """A tick that tells ``progress`` how many there were."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, {})

    return tick


def run_calibrate(config: RunConfig, again: bool = False, bars: Bars = no_bars) -> Calibrated:
    """`cost_model` of a config, and what the default controller weighs the lengths of its drafters with. Raises
    `SpecjaxError` for what the user can mend."""
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
