"""`specjax plan`: predict which drafter and length give the most tokens a second on a device, how accurate and cheap a
new draft must be to pay, and what it costs to train one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.config import RunConfig, Stage
from specjax.costs.cost_model import PLAIN, CostModel, mode_of
from specjax.costs.devices import Device, device_of, this_device
from specjax.costs.prediction import DraftEconomics, Known, KnownDraft, Plan, Prediction, Shape, computed, predict
from specjax.costs.roofline import Pass, Storage, storage_of, work_of_weights
from specjax.costs.training import TrainingCost, computed_training
from specjax.data.rows import Batches
from specjax.decode.request import LEAST_PROMPT, LEAST_SLOTS, bucket
from specjax.evaluation.bench import Cell
from specjax.interfaces import Batch, Initial
from specjax.jobs.bench import counting
from specjax.jobs.calibrate import Subject, acceptances, cost_model
from specjax.jobs.inputs import Prepared
from specjax.jobs.memory import run_budget
from specjax.metrics import tokens_per_s
from specjax.models.hf import LoadedModel
from specjax.runtime.progress import Bars, no_bars
from specjax.training.layout import ONE_DEVICE
from specjax.training.optimizer import make_optimizer
from specjax.training.step import Update, microbatch_rows, start_state
from specjax.training.trainer import form_of, with_defaults

_STEPS = 4
"""Number of timed training steps, after one that is not timed."""


def run_plan(
    config: RunConfig,
    device: str | None = None,
    measure: bool = False,
    alpha: float | None = None,
    bars: Bars = no_bars,
) -> Plan:
    """Predict the grid of a config's benchmark.

    Args:
        config: the run: its target, drafts and `bench`.
        device: a preset or YAML file (`specjax.costs.devices.device_of`); None: this one, calibrated.
        measure: also decode the grid, on other prompts than acceptance is counted on, and train a few steps; only on
            this device.
        alpha: acceptance to assume for every drafter, instead of counting it by decoding.
        bars: displays of progress.

    Returns:
        The plan.

    Raises:
        SpecjaxError: for errors that the user can mend.
    """
    elsewhere = None if device is None else device_of(device)
    subject = Subject.of(config, bars)
    target, settings = subject.target, config.bench
    longest = max(subject.ks())
    shapes = {name: Shape.of_drafter(*subject.bench.decoder(name, longest).engine(True)) for name in subject.drafters}
    if elsewhere is None:
        model, machine = cost_model(subject, bars=bars).model, this_device(target)
    else:
        slots = bucket(settings.prompt_tokens + settings.new_tokens + settings.max_k + 1, LEAST_SLOTS)
        model, machine = computed(elsewhere, Shape(target.config), shapes, settings.batch_sizes, slots), elsewhere
    known = acceptances(subject, alpha, bars)
    predictions = []
    for batch in settings.batch_sizes:
        own = {cell: a for cell, a in known.items() if cell[1] in settings.ks_of(batch)}
        predictions += predict(model, own, [batch], settings.prompt_tokens, settings.new_tokens)
    if measure and elsewhere is None:
        predictions = measured_beside(subject, predictions, bars)
    groups = [(batch, t) for batch in settings.batch_sizes for t in settings.temperatures]
    return Plan(
        machine,
        model,
        predictions,
        {(batch, t): DraftEconomics.of(model.of_batch(batch), mode_of(t)) for batch, t in groups},
        list(_known_drafts(model, known, groups)),
        list(_passes(subject, model, machine, shapes)),
        training_cost(config, subject.prepared, machine, measure and elsewhere is None),
        int(work_of_weights(target.layout().params, 1).flops) // 2,
        alpha,
    )


def measured_beside(subject: Subject, predictions: Sequence[Prediction], bars: Bars = no_bars) -> list[Prediction]:
    """The predictions with measured speeds: the timed prompts, decoded by the cells of one group in turns."""
    found, groups = [], list(dict.fromkeys((p.batch, p.temperature) for p in predictions))
    count, prompts = len(subject.timed), subject.timed
    with bars("decoding", sum(-(-count // p.batch) for p in predictions)) as progress:
        tick = counting(progress)
        for group in groups:
            own = [p for p in predictions if (p.batch, p.temperature) == group]
            cells = {p: Cell(p.drafter, p.k, p.batch, p.temperature) for p in own}
            for cell in cells.values():  # compile and warm up
                subject.bench.run([cell], prompts[:1])
            runs = subject.bench.run(list(cells.values()), prompts, tick)
            for prediction, cell in cells.items():
                speed = tokens_per_s(sum(map(len, runs[cell].tokens)), runs[cell].seconds)
                found.append(dataclasses.replace(prediction, measured=speed))
    return found


def _known_drafts(model: CostModel, known: Known, groups: Sequence[tuple[int, float]]) -> Iterator[KnownDraft]:
    for batch, t in groups:
        costs = model.of_batch(batch)
        for name in dict.fromkeys(name for name, *_ in known):
            longest = max(k for of, k, _ in known if of == name)
            cost = costs.drafter(name).each / costs.target(1)
            yield KnownDraft(name, batch, t, known[name, longest, t].alpha, cost)


def _passes(subject: Subject, model: CostModel, device: Device, shapes: Mapping[str, Shape]) -> Iterator[Pass]:
    """Passes of the target over one token and over the longest block, of every draft with weights, and of prefill."""
    settings, target = subject.config.bench, Shape(subject.target.config)
    engine, params = subject.bench.decoder(PLAIN, 0).engine(True)
    cache = engine.target.init_cache(1, 16)
    storage = storage_of(params.target, cache) if model.measured else Storage.computed(device)
    width = bucket(settings.prompt_tokens, LEAST_PROMPT)
    for batch in settings.batch_sizes:
        costs = model.of_batch(batch)
        longest = 1 + max(settings.ks_of(batch))
        found = [(f"target, {m} token{'' if m == 1 else 's'}", target, m, costs.target(m)) for m in (1, longest)]
        drafts = [name for name, shape in shapes.items() if shape.config is not None or shape.weights]
        found += [(name, shapes[name], 1, costs.drafter(name).each or None) for name in drafts]
        found.append((f"prefill, {width} tokens", target, width, costs.prefill_of(settings.prompt_tokens)))
        for name, shape, tokens, seconds in found:
            work = shape.work(bucket(batch), tokens, costs.context, storage)
            yield Pass(name, batch, work, device, seconds if model.measured else None)


def training_cost(config: RunConfig, prepared: Prepared, device: Device, measure: bool) -> TrainingCost:
    """Cost of the stage `distill`, the target's passes beside the draft included. ``measure``: time `_STEPS` steps on
    this device; else compute the cost for ``device``."""
    rows, target = prepared.train_rows, prepared.target
    stage = config.distill.over(len(rows))
    initial = prepared.run.first_draft(target, rows)
    tokens = stage.num_steps * stage.batch_size * rows.length
    if measure:
        return _measured(config, prepared, initial, tokens)
    own, draft = (int(work_of_weights(params, 1).flops / 2) for params in (target.params, initial.params))
    footprints = run_budget(config, device, ["draft-distill"]).footprints  # none for a draft of unknown sizes
    memory = float(footprints[0].total) if footprints else None
    return computed_training(own, draft, memory, tokens, device)


def _measured(config: RunConfig, prepared: Prepared, initial: Initial, tokens: int) -> TrainingCost:
    seconds, peak = _timed_steps(config, prepared, initial)
    speed = config.distill.batch_size * prepared.train_rows.length / seconds
    return TrainingCost(tokens, speed, peak, measured=True)


def step_seconds(config: RunConfig, prepared: Prepared, initial: Initial) -> float:
    """Seconds of a training step, measured."""
    return _timed_steps(config, prepared, initial)[0]


def _timed_steps(config: RunConfig, prepared: Prepared, initial: Initial) -> tuple[float, float]:
    """Seconds of the trainer's compiled update, over batches that are on the device already, and its peak of memory in
    bytes. Data, log and saves add some percent (`experiments/training_throughput.py`)."""
    rows, target = prepared.train_rows, prepared.target
    stage = config.distill.over(len(rows))
    order = Batches(rows, stage.batch_size, config.seed)
    batches = [jax.device_put(_with_streams(order[i], stage, initial.drafter, target)) for i in range(_STEPS + 1)]
    loss = registry.build(registry.LOSSES, stage.loss, "distill.loss")
    optimizer, ema = make_optimizer(stage), stage.optimizer.ema
    state = start_state(initial.params, optimizer, ema is not None, ONE_DEVICE, initial.drafter)
    micro = microbatch_rows(stage.batch_size, batches[0].tokens.shape[1])
    stage = with_defaults(stage, initial.drafter)
    form = form_of(stage)
    update = Update(initial.drafter, loss, optimizer, target.spec, micro, form=form, ema=ema)
    compiled = update.jitted().lower(state, target.params, batches[0]).compile()
    memory, seconds = compiled.memory_analysis(), []
    for batch in batches:
        start = time.perf_counter()
        state, metrics = compiled(state, target.params, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    # The state is donated: its outputs take the memory of its arguments.
    peak = 0 if memory is None else memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return float(np.median(seconds[1:])), float(peak)


def _with_streams(batch: Batch, stage: Stage, drafter: Any, target: LoadedModel) -> Batch:
    """The batch with zeros for the target's streams, where the stage caches them: they take as long as any numbers."""
    if stage.teacher != "cached" or not drafter.reads.hidden_layers:
        return batch
    shape = (*batch.tokens.shape, target.config.hidden_size)
    streams: Any = tuple(np.zeros(shape, target.dtype) for _ in (*drafter.reads.hidden_layers, None))
    logsumexp: Any = np.zeros(batch.tokens.shape, np.float32)
    return dataclasses.replace(batch, streams=streams, logsumexp=logsumexp)
