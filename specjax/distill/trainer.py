"""One training stage: windows and a loss in, trained parameters, a log and checkpoints out. Teacher and student share
one jitted, donated step. A stage is resumable: batch i is a function of (seed, i), so the step is the whole cursor.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from specjax import backend, config, registry
from specjax.distill import corpus, fingerprint
from specjax.distill.checkpoint import Checkpoints
from specjax.distill.evaluate import evaluate, matched, target_output
from specjax.distill.progress import StepProgress
from specjax.errors import TrainingError
from specjax.types import Loss, Params, Trainable

MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch on CPU: its activations stay in cache, 1.35x over the whole batch at once on 2 cores."""
LOG_EVERY = 10
"""Steps between two looks at the metrics; in between, the host never waits for the device."""
LOG = "log.jsonl"


@flax.struct.dataclass
class TrainState:
    params: Params
    opt: optax.OptState


@flax.struct.dataclass
class _Sums:
    """Gradient and metrics, weighted by the number of predictions that count."""

    count: jax.Array
    grads: Params
    metrics: dict[str, jax.Array]


def train_stage(
    directory: Path,
    stage: config.Stage,
    drafter: Trainable,
    params: Params,
    target: Any,
    train_windows: np.ndarray,
    held_out_windows: np.ndarray,
    seed: int,
    progress: StepProgress | None = None,
) -> Params:
    """Train ``params`` as ``stage`` says and return the result; a finished stage returns its own at once.

    ``target``: a `LoadedModel`, or None where the loss needs none (then no acceptance is measured). Windows: int32
    ``[N, T + 1]``. Called again after an interruption, it goes on from the last checkpoint in ``directory`` to the
    same weights, bit for bit. ``directory`` keeps ``log.jsonl`` (`read_log`), checkpoints and a fingerprint.

    Raises `TrainingError` if a loss is not finite (naming the step; the last good checkpoint is kept) or if the
    directory was made with other settings, `DataError` if the windows do not fill one batch.
    """
    loss = registry.resolve(registry.LOSSES, stage.loss, f"{directory.name}: loss")()
    if loss.needs_target and target is None:
        raise TrainingError(
            f"{directory.name}: the loss {stage.loss!r} needs a target model; use cross_entropy or give one"
        )
    backend.keep_freed_memory()
    batches = corpus.batches(train_windows, stage.batch_size, seed)
    made_from = (params, None if target is None else target.params, train_windows, held_out_windows)
    fingerprint.claim(directory, _fingerprint(stage, drafter, seed, *made_from))
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
        log = _Log(directory / LOG, start)
        length = train_windows.shape[1] - 1
        rows = microbatch_rows(stage.batch_size, length)
        spec, teacher = (target.spec, target.params) if target is not None and loss.needs_target else (None, None)
        update = make_update(drafter, loss, optimizer, spec, rows)
        # Compiled before the clock starts.
        update = update.lower(state, teacher, batches[start]).compile()
        record, pending, began = {}, [], time.perf_counter()
        for step in range(start + 1, stage.steps + 1):
            state, metrics = update(state, teacher, batches[step - 1])
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
                    result = evaluate(drafter, state.params, target, held_out_windows, stage.eval_positions, rows)
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


def make_optimizer(stage: config.Stage) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm; matrices decay, norm scales do not."""
    o = stage.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=o.learning_rate,
        warmup_steps=o.warmup_steps,
        # A stage shorter than its warm-up ends inside it.
        decay_steps=max(stage.steps, o.warmup_steps + 1),
        end_value=o.final_scale * o.learning_rate,
    )
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)

    def update(updates, state, params=None):
        # Optax raises floats to integer powers, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def microbatch_rows(batch_size: int, length: int) -> int:
    """Rows of one microbatch: a divisor of ``batch_size``; the whole batch on an accelerator."""
    if jax.default_backend() != "cpu":
        return batch_size
    most = max(1, MICRO_TOKENS_CPU // length)
    return max(rows for rows in range(1, min(most, batch_size) + 1) if batch_size % rows == 0)


def make_update(drafter: Trainable, loss: Loss, optimizer: optax.GradientTransformation, spec: Any, rows: int):
    """The jitted step ``(state, target_params, windows[B, T + 1]) -> (state, metrics)``; ``state`` is donated.

    ``spec``: the target's static half, None where the loss needs no target. The target's parameters are an argument:
    closed over, they would be compiled in as constants.
    """

    def stage_loss(params, target_params, windows):
        tokens, following = windows[:, :-1], windows[:, 1:]
        target_out = None if spec is None else target_output(spec, target_params, tokens)
        out = drafter.train_output(params, tokens, jnp.ones(tokens.shape, bool), target_out)
        total, metrics = jnp.float32(0), {}
        share = out.weight / jnp.sum(out.weight)
        for j in range(out.logits.shape[2]):
            m = matched(out, target_out, following, j)
            value, measured = loss(m.draft_logits, m.target_logits, m.tokens, m.mask)
            total += share[j] * value
            metrics = {name: metrics.get(name, 0.0) + share[j] * x for name, x in measured.items()}
        # Microbatches are added up as sums over their predictions and divided once, at the end.
        count = jnp.sum(out.mask.astype(jnp.float32))
        return count * total, (count, jax.tree.map(lambda x: count * x, metrics))

    def sums(params, target_params, windows) -> _Sums:
        (_, (count, metrics)), grads = jax.value_and_grad(stage_loss, has_aux=True)(params, target_params, windows)
        return _Sums(count, grads, metrics)

    def update(state: TrainState, target_params: Params, windows: Int[Array, "B T1"]):
        micro = windows.reshape(-1, rows, windows.shape[1])
        if len(micro) == 1:
            total = sums(state.params, target_params, micro[0])
        else:
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, state.params, target_params, micro[0])
            )

            def add(total: _Sums, windows):
                return jax.tree.map(jnp.add, total, sums(state.params, target_params, windows)), None

            total, _ = jax.lax.scan(add, zeros, micro)
        count = jnp.maximum(total.count, 1.0)
        grads, metrics = jax.tree.map(lambda x: x / count.astype(x.dtype), (total.grads, total.metrics))
        updates, opt = optimizer.update(grads, state.opt, state.params)
        # A step is sound if what it adds to sound weights is finite.
        metrics |= {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        return TrainState(optax.apply_updates(state.params, updates), opt), metrics

    return jax.jit(update, donate_argnums=0, compiler_options=backend.compiler_options())


def read_log(directory: Path) -> list[dict[str, float]]:
    """The records of a stage: step, tokens (so far), tokens_per_s, loss and grad_norm (means since the record before);
    held_out_nll and alpha where they were measured. Empty if the stage has not begun."""
    file = directory / LOG
    return _parse(file.read_text()) if file.exists() else []


def _fingerprint(stage, drafter, seed, params, target_params, train_windows, held_out_windows) -> dict[str, Any]:
    settings = dataclasses.asdict(stage)
    for name in ("eval_every", "eval_positions", "save_every"):  # they change no weight
        del settings[name]
    return {
        "stage": settings,
        "drafter": dataclasses.asdict(drafter),
        "seed": seed,
        "initial_params": fingerprint.digest(params),
        "target_params": None if target_params is None else fingerprint.digest(target_params),
        "train_windows": fingerprint.digest(train_windows),
        "held_out_windows": fingerprint.digest(held_out_windows),
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


class _Log:
    """JSON lines, one a record; what an interrupted run wrote past its last checkpoint is dropped."""

    def __init__(self, file: Path, step: int):
        self._file = file
        kept = [r for r in _parse(file.read_text()) if r["step"] <= step] if file.exists() else []
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(partial, file)

    def append(self, record: dict[str, float]) -> None:
        with self._file.open("a") as log:
            log.write(json.dumps(record) + "\n")


def _parse(text: str) -> list[dict[str, float]]:
    # A kill can cut the last line short.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
