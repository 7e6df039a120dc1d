"""What the distillation of a config costs, from a few of its own steps or from its shapes."""

from __future__ import annotations

import time

import jax
import numpy as np

from specjax import registry
from specjax.config import RunConfig
from specjax.data.rows import Batches
from specjax.distill.init import Initial, initial_draft
from specjax.distill.optimizer import make_optimizer
from specjax.distill.step import Update, microbatch_rows, start_state
from specjax.distill.trainer import form_of, settled
from specjax.jobs.inputs import Prepared
from specjax.jobs.memory import run_budget
from specjax.planning.devices import Device
from specjax.planning.roofline import work_of_weights
from specjax.planning.training import TrainingCost, computed_training
from specjax.runtime.layout import ONE_DEVICE

_STEPS = 4
"""Timed, after one that is not."""


def training_cost(config: RunConfig, prepared: Prepared, device: Device, measure: bool) -> TrainingCost:
    """Of `distill`, with the teacher that runs beside the draft. ``measure``: on this device, `_STEPS` steps; else
    computed for ``device``."""
    rows, target = prepared.train_rows, prepared.target
    stage = config.distill.over(len(rows))
    initial = initial_draft(config, target, rows)
    tokens = stage.num_steps * stage.batch_size * rows.length
    if measure:
        return _measured(config, prepared, initial, tokens)
    own, draft = (int(work_of_weights(params, 1).flops / 2) for params in (target.params, initial.params))
    footprints = run_budget(config, device, ["draft-distill"]).footprints  # none of a draft that does not say its sizes
    memory = float(footprints[0].total) if footprints else None
    return computed_training(own, draft, memory, tokens, device)


def _measured(config: RunConfig, prepared: Prepared, initial: Initial, tokens: int) -> TrainingCost:
    """The compiled update of the trainer, over batches that lie on the device; data, log and saves add some percent
    (`experiments/training_throughput.py`)."""
    rows, stage, target = prepared.train_rows, config.distill, prepared.target
    order = Batches(rows, stage.batch_size, config.seed)
    batches = [jax.device_put(order[i]) for i in range(_STEPS + 1)]
    loss = registry.build(registry.LOSSES, stage.loss, "distill.loss")
    optimizer, ema = make_optimizer(stage), stage.optimizer.ema
    state = start_state(initial.params, optimizer, ema is not None, ONE_DEVICE, initial.drafter)
    micro = microbatch_rows(stage.batch_size, batches[0].tokens.shape[1])
    stage = settled(stage, initial.drafter)
    form = form_of(stage)
    update = Update(initial.drafter, loss, optimizer, target.spec, micro, form=form, ema=ema)
    compiled = update.jitted().lower(state, target.params, batches[0]).compile()
    memory, seconds = compiled.memory_analysis(), []
    for batch in batches:
        start = time.perf_counter()
        state, metrics = compiled(state, target.params, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    # The state is donated: its outputs lie where its arguments were.
    peak = 0 if memory is None else memory.argument_size_in_bytes + memory.temp_size_in_bytes
    speed = stage.batch_size * rows.length / float(np.median(seconds[1:]))
    return TrainingCost(tokens, speed, float(peak), measured=True)
