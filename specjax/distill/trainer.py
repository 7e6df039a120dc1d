"""One training stage: rows and a loss in, trained parameters, a log and checkpoints out. A stage is resumable: batch i
is a function of (seed, i), so the step is the whole cursor."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import backend, config, registry
from specjax.distill import fingerprint
from specjax.distill.checkpoint import Checkpoints
from specjax.distill.distributed import by_first
from specjax.distill.evaluate import evaluate
from specjax.distill.layout import ONE_DEVICE, Layout
from specjax.distill.log import LOG, Log
from specjax.distill.optimizer import make_optimizer
from specjax.distill.progress import StepProgress
from specjax.distill.rows import Batches, Rows
from specjax.distill.step import make_update, microbatch_rows, start_state
from specjax.errors import ConfigError, TrainingError
from specjax.models.training import TrainingModel
from specjax.models.transformer import Model
from specjax.types import Batch, Params, Trainable

LOG_EVERY = 10
"""Steps between two looks at the metrics; in between, the host never waits for the device."""


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
    layout: Layout = ONE_DEVICE,
) -> Params:
    """Train ``params`` as ``stage`` says and return the result; a finished stage returns its own at once.

    ``target``: a `LoadedModel`, or None where the loss needs none (then no acceptance is measured). Called again after
    an interruption, it goes on from the last checkpoint in ``directory`` to the same weights, bit for bit, on the same
    ``layout``. ``directory`` keeps ``log.jsonl`` (`read_log`), checkpoints and a fingerprint. Of several processes, all
    call this.

    Raises `TrainingError` if a loss is not finite (naming the step; the last good checkpoint is kept) or if the
    directory was made with other settings, `DataError` if the windows do not fill one batch, `ConfigError` if the batch
    cannot be split as ``layout`` says.
    """
    loss = registry.build(registry.LOSSES, stage.loss, f"{directory.name}: loss")
    if loss.needs_target and target is None:
        raise TrainingError(
            f"{directory.name}: the loss {loss.kind!r} needs a target model; use cross_entropy or give one"
        )
    rows = _microbatch_rows(directory.name, stage, train_rows.length, layout)
    student = _student(drafter, stage)
    backend.keep_freed_memory()
    batches = Batches(train_rows, stage.batch_size, seed)
    made_from = (params, None if target is None else target.params, train_rows, held_out_rows)
    made_from = _fingerprint(stage, drafter, seed, *made_from)
    by_first(lambda: fingerprint.claim(directory, made_from))
    if stage.steps == 0:
        return params
    optimizer = make_optimizer(stage)
    ema = stage.optimizer.ema
    state = start_state(params, optimizer, ema is not None, layout, drafter)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state)
        start, state = (0, state) if restored is None else (restored.step, restored.state)
        if start == stage.steps:
            return state.result
        log = Log(directory / LOG, start)
        length = train_rows.length
        spec, teacher = None, None
        if target is not None and loss.needs_target:
            spec, teacher = target.spec, layout.put(target.params, layout.of_target(target.params, target.spec))
        precision = {"compute_dtype": stage.compute_dtype, "ema": ema}
        update = make_update(student, loss, optimizer, spec, rows, **precision, layout=layout, state=state)

        def batch(step: int) -> Batch:
            return layout.batch(batches.rows, batches.indices(step))

        # Compiled before the clock starts.
        update = update.lower(state, teacher, batch(start)).compile()
        record, pending, began = {}, [], time.perf_counter()
        for step in range(start + 1, stage.steps + 1):
            state, metrics = update(state, teacher, batch(step - 1))
            pending.append(metrics)
            measures = step % stage.eval_every == 0 or step == stage.steps
            saves = step % stage.save_every == 0 or step == stage.steps
            if step % LOG_EVERY == 0 or measures or saves:
                fetched = jax.device_get(pending)
                _refuse_non_finite(directory, stage, step - len(fetched), fetched, checkpoints.latest)
                seconds, tokens = time.perf_counter() - began, stage.batch_size * length
                record = {"step": step, "tokens": step * tokens, "tokens_per_s": len(fetched) * tokens / seconds}
                record |= _means(fetched)
                if measures:
                    measured = (target, held_out_rows, stage.eval_positions, rows, layout)
                    result = evaluate(drafter, state.result, *measured)
                    record["held_out_nll"] = result.nll
                    if target is not None:
                        record["alpha"] = result.alpha
                log.append(record)
                if saves:
                    checkpoints.save(step, state)
                pending, began = [], time.perf_counter()
            if progress is not None:
                progress(step, record)
    return state.result


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


def _fingerprint(stage, drafter, seed, params, target_params, train_rows, held_out_rows) -> dict[str, Any]:
    settings = dataclasses.asdict(stage)
    for name in ("eval_every", "eval_positions", "save_every"):  # they change no weight
        del settings[name]
    return {
        "stage": settings,
        "drafter": dataclasses.asdict(drafter),
        "seed": seed,
        "initial_params": fingerprint.digest(params),
        "target_params": None if target_params is None else fingerprint.digest(target_params),
        "train_rows": train_rows.digest,
        "held_out_rows": held_out_rows.digest,
    }


def _refuse_non_finite(
    directory: Path, stage: config.Stage, before: int, fetched: list[dict], kept: int | None
) -> None:
    for offset, metrics in enumerate(fetched, 1):
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["update_norm"]):
            continue
        what = f"the loss is {metrics['loss']}, the gradient's norm {metrics['grad_norm']}"
        state = "nothing was saved yet" if kept is None else f"the checkpoint of step {kept} is kept"
        raise TrainingError(
            f"{directory}: step {before + offset}: {what}; {state}; "
            f"try an optimizer.learning_rate below {stage.optimizer.learning_rate:g}, or more warmup_steps"
        )


def _means(fetched: list[dict]) -> dict[str, float]:
    """Of the steps since the last record. The batch's own acceptance is kept apart from the held-out ``alpha``."""
    names = {"loss": "loss", "grad_norm": "grad_norm", "alpha": "train_alpha"}
    return {names[name]: float(np.mean([metrics[name] for metrics in fetched])) for name in names if name in fetched[0]}
