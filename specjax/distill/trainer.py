"""One training stage: rows and a loss in, trained parameters, a log and checkpoints out. A stage is resumable: batch i
is a function of (seed, i), so the step is the whole cursor."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import backend, config, registry
from specjax.data.rows import Batches, Rows
from specjax.distill.losses import references_of
from specjax.distill.optimizer import make_optimizer, make_schedule
from specjax.distill.selection import Selector, fingerprint_of
from specjax.distill.sources.on_policy import Sampler
from specjax.distill.step import make_update, microbatch_rows, start_state
from specjax.distill.teacher_cache import cached_rows, numbers_of, shared_rows
from specjax.errors import ConfigError, Stopped, TrainingError
from specjax.evaluation.evaluate import evaluate
from specjax.evaluation.held_out import DraftEvaluator
from specjax.models.training import TrainingModel
from specjax.models.transformer import Model
from specjax.models.vocabulary import TokenRows
from specjax.runtime import fingerprint
from specjax.runtime.checkpoint import Checkpoints, Restored, steps_taken
from specjax.runtime.distributed import by_first
from specjax.runtime.layout import ONE_DEVICE, Layout
from specjax.runtime.log import LOG, Log, read_log
from specjax.runtime.profile import Profile
from specjax.runtime.progress import Bars, StepProgress, no_bars, waiting
from specjax.runtime.signals import stop_requested
from specjax.types import Batch, Params, Sharing, Trainable

LOG_EVERY = 10
"""Steps between two looks at the metrics; in between, the host never waits for the device."""
_CHANGE_NO_WEIGHT = ("eval_every", "eval_positions", "save_every", "profile", "skip_non_finite", "teacher_path")
"""Fields of a stage that may change when it goes on. A step that may be skipped now was an error before."""


_CAN_GO_ON = ("constant", "wsd")
"""Schedules that do not lead to the last step from the first."""


def train_stage(
    directory: Path,
    stage: config.Stage,
    drafter: Trainable,
    params: Params,
    target: Any,
    train_rows: Rows,
    held_out_rows: Rows,
    seed: int,
    progress: StepProgress | None = None,
    sample: Sampler | None = None,
    layout: Layout = ONE_DEVICE,
    decoding: DraftEvaluator | None = None,
    bars: Bars = no_bars,
) -> Params:
    """Train ``params`` as ``stage`` says and return the result; a finished stage returns its own at once.

    ``target``: a `LoadedModel`, or None where the loss needs none (then no acceptance is measured). ``train_rows``:
    of the stage's data (`specjax.distill.sources.text`); ``sample``: from the draft, for data that is on-policy.
    Called again after an interruption, it goes on from the last checkpoint in ``directory`` to the same weights,
    optimizer state and log, bit for bit, on the same ``layout`` (the log's ``tokens_per_s`` is a timing). ``directory``
    keeps ``log.jsonl`` (`read_log`), checkpoints, a fingerprint, and what `jax.profiler` traced. Of several processes,
    all call this. ``decoding``: decodes with the draft at every evaluation, and says whether that decides which weights
    are returned and when the stage ends (`specjax.distill.selection`). ``bars``: show what is made before the first
    step. ``stage.steps`` may be others than when the directory was made, where the steps taken would be the same.

    Raises `TrainingError` if a loss or gradient is not finite in more steps than ``stage.skip_non_finite`` (naming step
    and rows; the last good checkpoint is kept), if something cannot be written, or if the directory was made with other
    settings, or holds nothing undamaged of what was trained; `DataError` if the windows do not fill one batch;
    `ConfigError` if the batch cannot be split as ``layout`` says; `Stopped` once a SIGTERM has come and the step that
    was under way is saved.
    """
    stage = stage.over(len(train_rows))
    steps = stage.num_steps
    loss = registry.build(registry.LOSSES, stage.loss, f"{directory.name}: loss")
    if loss.needs_target and target is None:
        raise TrainingError(
            f"{directory.name}: the loss {loss.kind!r} needs a target model; use cross_entropy or give one"
        )
    if isinstance(drafter, Sharing) and target is None:
        raise TrainingError(f"{directory.name}: the draft shares weights with its target; give the target")
    rows = _microbatch_rows(directory.name, stage, train_rows.length, layout)
    student = _student(drafter, stage)
    backend.keep_freed_memory()
    source = registry.build(registry.DATA, stage.data, f"{directory.name}: data")
    batches = Batches(train_rows, stage.batch_size, seed)
    batches = source.batches(batches, directory / "pools", sample, steps)
    bound = references_of([loss], target)
    references, frozen = ({name: pair[i] for name, pair in bound.items()} for i in (0, 1))
    made_of = _fingerprint(stage, drafter, seed, params, target, train_rows, held_out_rows)
    made_of["selection"] = fingerprint_of(decoding, stage)
    if frozen:
        made_of["reference_params"] = [fingerprint.digest(params) for params in frozen.values()]
    may_change = {"stage.steps": functools.partial(_why_not_steps, directory, stage, source, batches)}
    by_first(lambda: fingerprint.claim(directory, made_of, may_change, keep=steps > 0))
    if steps == 0:
        return params
    optimizer = make_optimizer(stage)
    ema = stage.optimizer.ema
    state = start_state(params, optimizer, ema is not None, layout, drafter)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state)
        if restored is None:
            _refuse_to_start_over(directory, checkpoints)
            restored = Restored(0, state)
        # A change is taken once there is something whole to go on from.
        by_first(lambda: fingerprint.claim(directory, made_of, may_change))
        start, state, pending = restored.step, restored.state, restored.pending
        selector = Selector(directory, decoding, start)
        if start == steps or selector.stops:
            return selector.result(state.result, start)
        log = Log(directory / LOG, start)
        tokens = stage.batch_size * train_rows.length
        spec, teacher, shares = None, None, isinstance(drafter, Sharing)
        if target is not None and (loss.needs_target or shares):
            spec = target.spec if loss.needs_target else None
            teacher = layout.put(target.params, layout.of_target(target.params, target.spec))
        if spec is not None and stage.teacher == "cached":
            numbers = numbers_of(batches, steps)
            with bars(f"{directory.name}-teacher", len(numbers)) as shown:
                cache = (target, train_rows, numbers, stage.teacher_top_k, rows, shown)
                if stage.teacher_path is None:
                    kept = cached_rows(directory / "teacher", *cache)
                else:
                    kept = shared_rows(Path(stage.teacher_path).expanduser(), *cache)
            spec, teacher, batches = None, teacher if shares else None, Batches(kept, stage.batch_size, seed)
        options = {"skip": stage.skip_non_finite > 0, "compute_dtype": stage.compute_dtype, "ema": ema}
        options |= {"layout": layout, "state": state, "tokens": TokenRows.of(target)}
        update = make_update(student, loss, optimizer, spec, rows, references, **options)

        def batch(step: int) -> Batch:
            return layout.batch(batches.rows, batches.indices(step))

        # Compiled before the clock starts.
        batches.refresh(start, state.params, checkpoints.oldest)
        update = update.lower(state, teacher, batch(start), frozen).compile()
        with stop_requested() as stops, Profile(directory / "profile", stage.profile) as profile:
            record, timed, began = {}, start, time.perf_counter()
            for step in range(start + 1, steps + 1):
                profile.before(step)
                batches.refresh(step - 1, state.params, checkpoints.oldest)
                state, metrics = update(state, teacher, batch(step - 1), frozen)
                profile.after(step, state)
                pending.append(metrics)
                last = step == steps
                measures = last or step % stage.eval_every == 0
                saves = last or step % stage.save_every == 0
                logs = measures or saves or step % LOG_EVERY == 0
                if logs:
                    pending = jax.device_get(pending)
                    _refuse_non_finite(directory, stage, step, pending, batches, checkpoints)
                    seconds = time.perf_counter() - began
                    record = {"step": step, "tokens": step * tokens, "tokens_per_s": (step - timed) * tokens / seconds}
                    record |= _means(pending)
                    if stage.skip_non_finite:
                        record["skipped"] = int(pending[-1]["skipped"])
                    if measures:
                        measured = (target, held_out_rows, stage.eval_positions, rows, layout)
                        with waiting("evaluating"):
                            result = evaluate(drafter, state.result, *measured)
                        record["held_out_nll"] = result.nll
                        if target is not None:
                            record["alpha"] = result.alpha
                        with waiting("decoding"):
                            record |= selector.measure(step, state.result)
                        saves = saves or selector.stops
                    log.append(record)
                    pending = []
                # After an evaluation: a signal that comes during the last one must not be lost.
                ends = stops(step)
                if ends:
                    pending = jax.device_get(pending)
                    _refuse_non_finite(directory, stage, step, pending, batches, checkpoints)
                if saves or ends:
                    # What is not logged yet goes with the state, so that the log does not depend on interruptions.
                    with waiting("saving"):
                        checkpoints.save(step, state, jax.tree.map(lambda x: np.asarray(x).item(), pending))
                if logs:
                    timed, began = step, time.perf_counter()
                if progress is not None:
                    progress(step, record)
                if ends:
                    checkpoints.wait()
                    raise Stopped(f"{directory}: stopped by SIGTERM; step {step} is saved, the same command goes on")
                if selector.stops:
                    break
    return selector.result(state.result, step)


def _why_not_steps(
    directory: Path, stage: config.Stage, source: Any, batches: Batches, was: int | None, now: int
) -> str | None:
    """A stage of ``was`` steps that gets ``now``, see `fingerprint.MayChange`: the steps taken must not have depended
    on how many follow."""
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
    return source.why_not_longer(min(was, now), taken) if hasattr(source, "why_not_longer") else None


def _refuse_to_start_over(directory: Path, checkpoints: Checkpoints) -> None:
    """Nothing undamaged is left of what was trained. Before the first checkpoint was whole, nothing is lost."""
    saved, aside = checkpoints.saved, checkpoints.set_aside
    if saved == 0 or (saved is None and not by_first(lambda: bool(read_log(directory)))):
        checkpoints.begin()
        return
    folder = directory / "checkpoints"
    found = f"the damaged ones are kept: {', '.join(aside)} in {folder}" if aside else f"{folder} holds none"
    was = f"that of step {saved} was whole, " if saved else ""
    raise TrainingError(
        f"{directory}: its log shows progress, but no undamaged checkpoint is left ({was}{found}); put their files "
        f"back from a copy and drop the end of the name, or move {directory} elsewhere to train the stage again"
    )


def _microbatch_rows(name: str, stage: config.Stage, length: int, layout: Layout) -> int:
    layout.check_rows(stage.batch_size, f"{name}: batch_size")
    if stage.micro_batch_size is None:
        return microbatch_rows(stage.batch_size, length, layout.row_shards)
    layout.check_rows(stage.micro_batch_size, f"{name}: micro_batch_size")
    return stage.micro_batch_size


def _student(drafter: Any, stage: config.Stage) -> Any:
    """The drafter as the step runs it."""
    if not (stage.remat or stage.scan_layers):
        return drafter
    if not isinstance(getattr(drafter, "model", None), Model):
        raise ConfigError(f"remat, scan_layers: {type(drafter).__name__} has no transformer of its own; set both false")
    return dataclasses.replace(drafter, model=TrainingModel(drafter.model.config, stage.remat, stage.scan_layers))


def _fingerprint(stage, drafter, seed, params, target, train_rows, held_out_rows) -> dict[str, Any]:
    settings = {k: v for k, v in dataclasses.asdict(stage).items() if k not in _CHANGE_NO_WEIGHT}
    target_params, target_config = (None, None) if target is None else fingerprint.of_model(target)
    return {
        "stage": settings,
        "drafter": dataclasses.asdict(drafter),
        "seed": seed,
        "initial_params": fingerprint.digest(params),
        "target_params": target_params,
        "target_config": target_config,
        "train_rows": train_rows.digest,
        "held_out_rows": held_out_rows.digest,
    }


def _refuse_non_finite(
    directory: Path,
    stage: config.Stage,
    step: int,
    pending: Sequence[dict[str, Any]],
    batches: Batches,
    checkpoints: Checkpoints,
) -> None:
    """``pending``: metrics of the steps up to ``step``, on the host. Asked before anything of them is saved."""
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
    """Of the steps since the last record, less those skipped. The batch's own acceptance is kept apart from the
    held-out ``alpha``."""
    names = {"loss": "loss", "grad_norm": "grad_norm"}
    names |= {name: f"train_{name}" for name in ("alpha", "alpha_lower", "alpha_estimate", "alpha_upper")}
    taken = [metrics for metrics in pending if metrics["sound"]]
    means = {key: np.mean([m[key] for m in taken], dtype=np.float64) for key in names if taken and key in taken[0]}
    return {names[key]: float(mean) for key, mean in means.items()}
