"""One training stage, which turns rows and a loss into trained parameters, a log and checkpoints. A stage is resumable:
batch i is a function of (seed, i), so the step alone gives the position in the data."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import backend, config, registry
from specjax.data.rows import Batches, NumberedRows, Rows
from specjax.errors import ConfigError, Stopped, TrainingError
from specjax.interfaces import Batch, Loss, Params, Target, Trainable, TrainingForm
from specjax.models.vocabulary import TokenRows
from specjax.runtime import artifact, fingerprint, memory
from specjax.runtime.checkpoint import Checkpoints, Restored, steps_taken
from specjax.runtime.distributed import is_first, on_main_process
from specjax.runtime.log import LOG, Log, read_log
from specjax.runtime.profile import Profile
from specjax.runtime.progress import Bars, StepProgress, no_bars, waiting
from specjax.runtime.signals import stop_requested
from specjax.training.evaluate import evaluate
from specjax.training.init.cached import FirstWeights
from specjax.training.kept_streams import Streams
from specjax.training.layout import ONE_DEVICE, Layout
from specjax.training.optimizer import make_optimizer, make_schedule
from specjax.training.selection import DraftEvaluator, Selector, fingerprint_of
from specjax.training.sources.on_policy import Sampler
from specjax.training.step import Update, abstract_state, microbatch_rows, start_state
from specjax.training.teacher import needs_target
from specjax.training.teacher_cache import CachedRows, Logits, RecordFormat, TeacherCache, numbers_of

LOG_EVERY = 10
"""Number of steps between two host syncs, at which the metrics are read; in between, the host never waits."""
_CHANGE_NO_WEIGHT = (
    "eval_every",
    "eval_positions",
    "save_every",
    "profile",
    "skip_non_finite",
    "teacher_path",
    "teacher_gb",
)
"""Fields of a stage that change no weights and may differ when it goes on. (With `skip_non_finite`, a step that is
skipped now was an error before.)"""


_CAN_GO_ON = ("constant", "wsd")
"""Schedules whose first steps do not depend on the number of steps."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StageData:
    """Data of a stage. ``train``: rows to train on (`specjax.training.sources.text`); ``held_out``: rows to evaluate
    on; ``sample``: sampler of the draft, for on-policy data."""

    train: Rows
    held_out: Rows
    seed: int
    sample: Sampler | None = None


@dataclasses.dataclass
class Trainer:
    """One stage, which trains ``params`` as ``stage`` says. A resumed stage makes no `FirstWeights`.

    ``target``: a `LoadedModel`, or None if the loss needs none (then no acceptance is measured). ``directory`` holds
    ``log.jsonl`` (`read_log`), checkpoints, a fingerprint, and traces of `jax.profiler`. ``decoding``: decodes with the
    draft at every evaluation, and says whether that decides which weights are returned and when the stage ends
    (`specjax.training.selection`). ``bars``: progress bars of the work before the first step. ``stage.steps`` may
    differ from the number that the directory was made with, if the steps taken would be the same.

    Raises `TrainingError` without a target that loss or draft need, `DataError` if the rows do not fill one batch,
    `ConfigError` if the batch cannot be split as ``layout`` says.
    """

    directory: Path
    stage: config.Stage
    drafter: Trainable
    params: Params | FirstWeights
    target: Target | None
    data: StageData
    layout: Layout = ONE_DEVICE
    decoding: DraftEvaluator | None = None
    bars: Bars = no_bars

    def __post_init__(self) -> None:
        name, data = self.directory.name, self.data
        self.stage = with_defaults(self.stage.over(len(data.train)), self.drafter)
        self._steps = self.stage.num_steps
        self._first = FirstWeights.of(self.params)
        self._loss: Loss = registry.build(registry.LOSSES, self.stage.loss, f"{name}: loss")
        if self._loss.needs_target and self.target is None:
            raise TrainingError(
                f"{name}: the loss {self._loss.kind!r} needs a target model; use cross_entropy or give one"
            )
        self._check_reads(name)
        self._rows = rows_at_once(name, self.stage, data.train.length, self.layout)
        self._form = form_of(self.stage)
        self.drafter.in_training(self._form)  # refuse before anything is made
        if backend.is_host(jax.devices()[0]):
            memory.keep_freed_memory()
        self._source = registry.build(registry.DATA, self.stage.data, f"{name}: data")
        batches = Batches(data.train, self.stage.batch_size, data.seed)
        self._batches = self._source.batches(batches, self.directory / "pools", data.sample, self._steps)
        bound = {} if self.target is None else self._loss.references(self.target)
        self._references, self._frozen = ({name: pair[i] for name, pair in bound.items()} for i in (0, 1))

    def _check_reads(self, name: str) -> None:
        if self.target is None and needs_target(self.drafter):
            how = "shares weights with" if self.drafter.shares_target else "reads"
            raise TrainingError(f"{name}: the draft {how} its target; give the target")
        if self.stage.teacher == "cached" and self.drafter.reads.kv_layers:
            raise TrainingError(
                f"{name}: teacher=cached keeps the target's hidden states and logits, and the draft reads its keys and "
                "values; set teacher=online"
            )

    def run(self, progress: StepProgress | None = None) -> Params:
        """The trained parameters; a finished stage returns them at once. Called again after an interruption, it goes on
        from the last checkpoint to the same weights, optimizer state and log, bit for bit, on the same layout (the
        log's ``tokens_per_s`` is a timing). If there are several processes, all call this.

        Raises `TrainingError` if a loss or gradient is not finite in more steps than ``stage.skip_non_finite`` (naming
        step and rows; the last good checkpoint stays), if something cannot be written, if the directory was made with
        other settings, or if no undamaged checkpoint of the training is left; `Stopped` once a SIGTERM has come and the
        step that was under way is saved.
        """
        self._claim(keep=self._steps > 0)
        if self._steps == 0:
            return self._first.params
        with Checkpoints(self.directory / "checkpoints") as self._checkpoints:
            start = self._restore()
            self._tell_another_mesh(start)
            # Record changed settings only now that a whole state to go on from is known.
            self._claim()
            self._selector = Selector(self.directory, self.decoding, start)
            if start == self._steps or self._selector.stops:
                return self._selector.result(self._state.result, start)
            self._log = Log(self.directory / LOG, start)
            self._compile(start)
            with stop_requested() as stops, Profile(self.directory / "profile", self.stage.profile) as self._profile:
                return self._train(start, stops, progress)

    def _train(self, start: int, stops: Callable[[int], bool], progress: StepProgress | None) -> Params:
        stage, record = self.stage, {}
        self._timed, self._began = start, time.perf_counter()
        for step in range(start + 1, self._steps + 1):
            self.step(step)
            last = step == self._steps
            evaluates = last or step % stage.eval_every == 0
            saves = last or step % stage.save_every == 0
            logs = evaluates or saves or step % LOG_EVERY == 0
            if logs:
                record = self.log(step, evaluates)
                saves = saves or (evaluates and self._selector.stops)
            # Ask after an evaluation: a signal that comes during the last one must not be lost.
            ends = stops(step)
            if saves or ends:
                self.save(step)
            if logs:
                self._timed, self._began = step, time.perf_counter()
            if progress is not None:
                # Steps are enqueued sooner than they run: one may be shown before it ends, and no more.
                jax.block_until_ready(self._pending[:-1][-1:])
                progress(step, record)
            if ends:
                self._checkpoints.wait()
                raise Stopped(f"{self.directory}: stopped by SIGTERM; step {step} is saved, the same command goes on")
            if self._selector.stops:
                break
        return self._selector.result(self._state.result, step)

    def step(self, step: int) -> None:
        """One update of the weights. Its metrics stay on the device until the next host sync."""
        self._profile.before(step)
        self._batches.refresh(step - 1, self._state.params, self._checkpoints.oldest)
        self._state, metrics = self._update(self._state, self._teacher, self._batch(step - 1), self._frozen)
        self._profile.after(step, self._state)
        self._pending.append(metrics)

    def log(self, step: int, evaluates: bool) -> dict[str, float]:
        """The record of the steps since the last record, written to the log."""
        self._look(step)
        seconds, tokens = time.perf_counter() - self._began, self.stage.batch_size * self.data.train.length
        record = {"step": step, "tokens": step * tokens, "tokens_per_s": (step - self._timed) * tokens / seconds}
        record |= _means(self._pending)
        if self.stage.skip_non_finite:
            record["skipped"] = int(self._pending[-1]["skipped"])
        if evaluates:
            record |= self.evaluate(step)
        self._log.append(record)
        self._pending = []
        return record

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out figures of the current weights, teacher-forced and decoded."""
        measured = (self.target, self.data.held_out, self.stage.eval_positions, self._rows, self.layout)
        with waiting("evaluating"):
            result = evaluate(self.drafter, self._state.result, *measured)
        record = {"held_out_nll": result.nll}
        if self.target is not None:
            record |= {"alpha": result.alpha, "agreement": result.agreement}
            for name, values in {"alpha": result.alpha_at, "agreement": result.agreement_at}.items():
                record |= {f"{name}_at_{depth}": value for depth, value in enumerate(values, 1)}
        with waiting("decoding"):
            return record | self._selector.measure(step, self._state.result)

    def save(self, step: int) -> None:
        """Save the state with the metrics that are not logged yet, so that the log does not depend on interruptions."""
        self._look(step)
        with waiting("saving"):
            self._checkpoints.save(step, self._state, jax.tree.map(lambda x: np.asarray(x).item(), self._pending))

    def _look(self, step: int) -> None:
        """Read the metrics of the steps up to ``step``, a host sync, and refuse those that are not finite: none is
        logged or saved."""
        self._pending = jax.device_get(self._pending)
        _refuse_non_finite(self.directory, self.stage, step, self._pending, self._batches, self._checkpoints)

    @functools.cached_property
    def _made_of(self) -> dict[str, Any]:
        made_of = _fingerprint(self.stage, self.drafter, self.target, self.data)
        known = on_main_process(lambda: artifact.made_from(self.directory))
        made_of |= {"initial_params": self._first.digest(known), "initial_made_from": self._first.made_from}
        made_of["mesh"] = self.layout.described
        made_of["selection"] = fingerprint_of(self.decoding, self.stage)
        if self._frozen:
            made_of["reference_params"] = [fingerprint.digest(params) for params in self._frozen.values()]
        return made_of

    def _claim(self, keep: bool = False) -> None:
        why_not = functools.partial(_why_not_steps, self.directory, self.stage, self._source, self._batches)
        made_of = self._made_of  # by all processes: arrays may lie on several
        # First weights are compared by their digest; another mesh gives a warning.
        may_change = {"stage.steps": why_not, "initial_made_from": _may_differ, "mesh": _may_differ}
        on_main_process(lambda: artifact.claim(self.directory, made_of, may_change, keep=keep))

    def _tell_another_mesh(self, start: int) -> None:
        was, now = on_main_process(lambda: artifact.made_from(self.directory).get("mesh")), self.layout.described
        if was in (None, now) or start == 0:
            return
        if start == self._steps:  # no step is taken on this mesh
            self._made_of["mesh"] = was
        elif is_first():
            _log.warning(
                "%s: the first %d steps were taken on the mesh %s, and the next ones are taken on %s, which adds up in "
                "another order: the weights will not be bit for bit those of a run on one mesh",
                *(self.directory, start, was, now),
            )

    def _restore(self) -> int:
        """Load the state to go on from, or make the first one; returns its step."""
        self._optimizer, averages = make_optimizer(self.stage), self.stage.optimizer.ema is not None
        settings = self._optimizer, averages, self.layout, self.drafter
        restored = self._checkpoints.restore_latest(abstract_state(self._first.shapes, *settings))
        if restored is None:
            _refuse_to_start_over(self.directory, self._checkpoints)
            restored = Restored(0, start_state(self._first.params, *settings))
        self._state, self._pending = restored.state, restored.pending
        return restored.step

    def _compile(self, start: int) -> None:
        """Compile the step, before the clock starts."""
        spec = self._place_teacher()
        update = Update(
            self.drafter,
            self._loss,
            self._optimizer,
            spec,
            self._rows,
            self._references,
            skip=self.stage.skip_non_finite > 0,
            form=self._form,
            ema=self.stage.optimizer.ema,
            layout=self.layout,
            tokens=TokenRows.of(self.target),
        )
        self._batches.refresh(start, self._state.params, self._checkpoints.oldest)
        arguments = (self._state, self._teacher, self._batch(start), self._frozen)
        self._update = update.jitted(self._state).lower(*arguments).compile()

    def _place_teacher(self) -> Any:
        """Place the target's weights that the step needs; returns the target's static half, None if the target does not
        run in the step."""
        stage, layout, target = self.stage, self.layout, self.target
        spec, self._teacher, shares = None, None, self.drafter.shares_target
        runs = self._loss.needs_target or bool(self.drafter.reads)
        if target is not None and (runs or shares):
            spec = target.spec if runs else None
            self._teacher = layout.put(target.params, layout.of_target(target.params, target.spec))
        if spec is None or stage.teacher != "cached":
            return spec
        self._batches = Batches(self._cached_rows(), stage.batch_size, self.data.seed)
        if self.drafter.reads:
            return spec  # its head makes logits of the cached streams
        if not shares:
            self._teacher = None
        return None

    def _cached_rows(self) -> Rows:
        """The training rows with the target's cached output, computed before the first step."""
        stage, target, reads = self.stage, self.target, self.drafter.reads
        assert target is not None
        kept = Streams.of(reads, target, stage) if reads else Logits.of(stage.teacher_top_k, target, self.data.train)
        return cached_rows(stage, self._batches, target, kept, self._rows, self.directory, self.bars)

    def _batch(self, step: int) -> Batch:
        rows = self._batches.rows
        rows = NumberedRows(rows, step) if self.drafter.samples_anchors else rows
        return self.layout.batch(rows, self._batches.indices(step))


def cached_rows(
    stage: config.Stage,
    batches: Batches,
    target: Target,
    kept: RecordFormat,
    at_once: int,
    directory: Path,
    bars: Bars,
) -> CachedRows:
    """The rows that the steps of ``stage`` take, with the target's output beside them. What is not cached yet is
    computed, ``at_once`` rows at a time. ``directory``: the stage's, in which the cache lies if it has no path of its
    own."""
    numbers = numbers_of(batches, stage.num_steps)
    with bars(f"{directory.name}-teacher", len(numbers)) as shown:
        cache = TeacherCache(target, batches.rows, numbers, kept, at_once, shown, stage.teacher_gb * 1e9)
        if stage.teacher_path is None:
            return cache.at(directory / "teacher")
        return cache.shared(Path(stage.teacher_path).expanduser())


def with_defaults(stage: config.Stage, drafter: Trainable) -> config.Stage:
    """The stage with its open fields set for this device, so that it goes on as it began."""
    stage = dataclasses.replace(stage, compute_dtype=stage.compute_dtype or backend.default_dtype())
    if stage.remat is not None:
        return stage
    remat = dataclasses.replace(stage, remat=True)
    try:
        drafter.in_training(form_of(remat))
    except ConfigError:  # this draft has no remat
        return dataclasses.replace(stage, remat=False)
    return remat if backend.remat() else dataclasses.replace(stage, remat=False)


def form_of(stage: config.Stage) -> TrainingForm:
    """Form of the draft's forward and backward pass in a stage that is `with_defaults`."""
    return TrainingForm(
        bool(stage.remat), stage.scan_layers, dtype=stage.compute_dtype, matmul_dtype=stage.matmul_dtype
    )


def _why_not_steps(
    directory: Path, stage: config.Stage, source: Any, batches: Batches, was: int | None, now: int
) -> str | None:
    """Reason why a stage of ``was`` steps cannot get ``now``, or None, see `artifact.MayChange`: the steps taken
    must not have depended on how many follow."""
    taken = steps_taken(directory / "checkpoints")
    # The last step is measured, whatever `eval_every` says.
    measured = now > taken or any(r["step"] == now and "held_out_nll" in r for r in read_log(directory))
    if was is None or now < taken or not measured:
        return f"steps can be raised, or lowered to no fewer than those taken, {taken}, of which the last is measured"
    with jax.numpy_dtype_promotion("standard"):
        rates, others = (np.asarray(make_schedule(stage.optimizer, n)(np.arange(taken + 1))) for n in (was, now))
    schedule = stage.optimizer.schedule
    if taken and (schedule not in _CAN_GO_ON or (rates != others)[:taken].any()):
        return (
            f"the schedule {schedule} sets the learning rate by the number of steps, {taken} of which are taken; what "
            "can be prolonged is schedule=constant, or wsd before its decay"
        )
    in_stage = stage.teacher == "cached" and stage.teacher_path is None
    if in_stage and not np.array_equal(numbers_of(batches, was), numbers_of(batches, now)):
        return "its cached logits are of the rows of that many steps; set teacher_path, where others can be beside"
    return source.why_not_longer(min(was, now), taken)


def _refuse_to_start_over(directory: Path, checkpoints: Checkpoints) -> None:
    """Raises `TrainingError` if a checkpoint was saved and no undamaged one is left. Before the first whole checkpoint
    nothing is lost, and the stage begins."""
    saved, aside = checkpoints.saved, checkpoints.set_aside
    if saved == 0 or (saved is None and not on_main_process(lambda: bool(read_log(directory)))):
        checkpoints.begin()
        return
    folder = directory / "checkpoints"
    found = f"the damaged ones are kept: {', '.join(aside)} in {folder}" if aside else f"{folder} holds none"
    was = f"that of step {saved} was whole, " if saved else ""
    raise TrainingError(
        f"{directory}: its log shows progress, but no undamaged checkpoint is left ({was}{found}); put their files "
        f"back from a copy and drop the end of the name, or move {directory} elsewhere to train the stage again"
    )


def rows_at_once(name: str, stage: config.Stage, length: int, layout: Layout) -> int:
    """Number of rows of a microbatch of the stage ``name``, over all devices. Raises `ConfigError` if batch or
    microbatch cannot be split as ``layout`` says."""
    layout.check_rows(stage.batch_size, f"{name}: batch_size")
    if stage.micro_batch_size is None:
        return microbatch_rows(stage.batch_size, length, layout.row_shards)
    layout.check_rows(stage.micro_batch_size, f"{name}: micro_batch_size")
    return stage.micro_batch_size


def _may_differ(was: Any, now: Any) -> None:
    """No reason against any change, see `artifact.MayChange`."""


def _fingerprint(stage, drafter, target, data: StageData) -> dict[str, Any]:
    settings = {k: v for k, v in dataclasses.asdict(stage).items() if k not in _CHANGE_NO_WEIGHT}
    target_params, target_config = (None, None) if target is None else fingerprint.of_model(target)
    # A value too large to be written out has a digest.
    described = json.loads(json.dumps(dataclasses.asdict(drafter), default=lambda x: x.digest))
    model = described.get("model")
    if isinstance(model, dict) and "vocabulary" in model:
        model["kept"] = model.pop("vocabulary")  # the name in the directories of runs that have begun
    return {
        "stage": settings,
        "drafter": described,
        "seed": data.seed,
        "target_params": target_params,
        "target_config": target_config,
        "train_rows": data.train.digest,
        "held_out_rows": data.held_out.digest,
    }


def _refuse_non_finite(
    directory: Path,
    stage: config.Stage,
    step: int,
    pending: Sequence[dict[str, Any]],
    batches: Batches,
    checkpoints: Checkpoints,
) -> None:
    """Raises `TrainingError` if too many steps were not finite, before anything of them is saved. ``pending``: metrics
    of the steps up to ``step``, on the host."""
    numbered = enumerate(pending, step - len(pending) + 1)
    found = next(((number, m) for number, m in numbered if m["skipped"] > stage.skip_non_finite), None)
    if found is None:
        return
    number, metrics = found
    checkpoints.wait()
    where = ", ".join(map(str, batches.indices(number - 1)))
    last = checkpoints.latest
    kept = "nothing was saved yet" if last is None else f"the checkpoint of step {last} is kept"
    passed = f", after {stage.skip_non_finite} skipped steps" if stage.skip_non_finite else ""
    raise TrainingError(
        f"{directory}: step {number}: the loss is {metrics['loss']}, the gradient's norm {metrics['grad_norm']}"
        f"{passed}; rows {where} of the training data; {kept}; try an optimizer.learning_rate below "
        f"{stage.optimizer.peak:g}, more warmup_steps, or a higher skip_non_finite to leave such steps out"
    )


def _means(pending: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means over the steps since the last record, without skipped ones. The batch's own acceptance is named
    ``train_...``, apart from the held-out ``alpha``."""
    names = {"loss": "loss", "grad_norm": "grad_norm"}
    taken = [metrics for metrics in pending if metrics["sound"]]
    depths = {name for metrics in taken[:1] for name in metrics if "_at_" in name}
    names |= {name: name for name in sorted(depths) if name.startswith("loss")}
    of_alpha = ("alpha", "alpha_lower", "alpha_estimate", "alpha_upper", "confidence_error")
    names |= {name: f"train_{name}" for name in (*of_alpha, *sorted(depths)) if name not in names}
    means = {key: np.mean([m[key] for m in taken], dtype=np.float64) for key in names if taken and key in taken[0]}
    return {names[key]: float(mean) for key, mean in means.items()}
