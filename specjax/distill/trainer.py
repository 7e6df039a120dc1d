"""One training stage: rows and a loss in, trained parameters, a log and checkpoints out. A stage is resumable: batch i
is a function of (seed, i), so the step is the whole cursor."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import backend, config, registry
from specjax.distill import fingerprint
from specjax.distill.checkpoint import Checkpoints
from specjax.distill.evaluate import evaluate
from specjax.distill.log import LOG, Log
from specjax.distill.optimizer import make_optimizer
from specjax.distill.progress import StepProgress
from specjax.distill.rows import Batches, Rows
from specjax.distill.step import TrainState, make_update, microbatch_rows
from specjax.distill.teacher_cache import cached_rows, numbers_of
from specjax.errors import TrainingError
from specjax.types import Params, Trainable

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
) -> Params:
    """Train ``params`` as ``stage`` says and return the result; a finished stage returns its own at once.

    ``target``: a `LoadedModel`, or None where the loss needs none (then no acceptance is measured). Called again after an interruption, it goes on from the last checkpoint in ``directory`` to the
    same weights, bit for bit. ``directory`` keeps ``log.jsonl`` (`read_log`), checkpoints and a fingerprint.

    Raises `TrainingError` if a loss is not finite (naming the step; the last good checkpoint is kept) or if the
    directory was made with other settings, `DataError` if the windows do not fill one batch.
    """
    loss = registry.build(registry.LOSSES, stage.loss, f"{directory.name}: loss")
    if loss.needs_target and target is None:
        raise TrainingError(
            f"{directory.name}: the loss {loss.kind!r} needs a target model; use cross_entropy or give one"
        )
    backend.keep_freed_memory()
    batches = Batches(train_rows, stage.batch_size, seed)
    reference, reference_params = loss.bind(target) if hasattr(loss, "bind") else (None, None)
    made_from = (params, None if target is None else target.params, train_rows, held_out_rows)
    made_of = _fingerprint(stage, drafter, seed, *made_from)
    if reference is not None:
        made_of["reference_params"] = fingerprint.digest(reference_params)
    fingerprint.claim(directory, made_of)
    if stage.steps == 0:
        return params
    optimizer = make_optimizer(stage)
    # Copies: the step donates its state, and the caller keeps its parameters.
    params = jax.tree.map(jnp.array, params)
    state = TrainState(params, optimizer.init(params))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state)
        start, state = (0, state) if restored is None else (restored.step, restored.state)
        if start == stage.steps:
            return state.params
        log = Log(directory / LOG, start)
        length = train_rows.length
        rows = microbatch_rows(stage.batch_size, length)
        spec, teacher = (target.spec, target.params) if target is not None and loss.needs_target else (None, None)
        if spec is not None and stage.teacher == "cached":
            numbers = numbers_of(batches, stage.steps)
            kept = cached_rows(directory / "teacher", target, train_rows, numbers, stage.teacher_top_k, rows)
            spec, teacher, batches = None, None, Batches(kept, stage.batch_size, seed)
        update = make_update(drafter, loss, optimizer, spec, rows, reference)
        # Compiled before the clock starts.
        update = update.lower(state, teacher, batches[start], reference_params).compile()
        record, pending, began = {}, [], time.perf_counter()
        for step in range(start + 1, stage.steps + 1):
            state, metrics = update(state, teacher, batches[step - 1], reference_params)
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
                    result = evaluate(drafter, state.params, target, held_out_rows, stage.eval_positions, rows)
                    record["held_out_nll"] = result.nll
                    if target is not None:
                        record["alpha"] = result.alpha
                log.append(record)
                if saves:
                    checkpoints.save(step, state)
                pending, began = [], time.perf_counter()
            if progress is not None:
                progress(step, record)
    return state.params


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
    names = {"loss": "loss", "grad_norm": "grad_norm"}
    names |= {name: f"train_{name}" for name in ("alpha", "alpha_lower", "alpha_estimate", "alpha_upper")}
    return {names[name]: float(np.mean([metrics[name] for metrics in fetched])) for name in names if name in fetched[0]}
