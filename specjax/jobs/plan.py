"""`specjax plan`: which drafter and length give the most tokens a second on a device, what a draft that does not exist
yet must be to pay, and what it costs to train one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.config import RunConfig
from specjax.evaluation.bench import Cell
from specjax.jobs.calibrate import Subject, acceptances, cost_model, counting
from specjax.jobs.training_cost import training_cost
from specjax.metrics import tokens_per_s
from specjax.planning.cost_model import PLAIN, CostModel
from specjax.planning.devices import Device, device_of, this_device
from specjax.planning.prediction import DraftEconomics, Known, Prediction, Shape, computed, predict
from specjax.planning.roofline import Pass, Storage, padded, storage_of, work_of_weights
from specjax.planning.training import TrainingCost
from specjax.runtime.progress import Bars, no_bars

_PROMPT_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class KnownDraft:
    """A drafter that exists, as a point beside the curves of equal speed."""

    drafter: str
    batch: int
    temperature: float
    alpha: float
    cost: float
    """Of a pass, in passes of the target over one token."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that was predicted, and measured where asked for."""

    device: Device
    model: CostModel
    predictions: list[Prediction]
    economics: Mapping[tuple[int, float], DraftEconomics]
    """By batch and temperature."""
    known: list[KnownDraft]
    passes: list[Pass]
    training: TrainingCost
    target_weights: int
    """That a pass of the target multiplies with."""
    assumed_alpha: float | None

    @property
    def measured_here(self) -> bool:
        """Else every time is computed from a datasheet."""
        return self.model.measured

    def to_json(self) -> dict[str, Any]:
        """A JSON object with everything but the curves' points."""
        error = self.model.error
        return {
            "device": {**dataclasses.asdict(self.device), "ridge": self.device.ridge},
            "times": "measured" if self.measured_here else "computed, not measured",
            "assumed_alpha": self.assumed_alpha,
            "fit_error": None if error is None else {"median": error[0], "worst": error[1]},
            "predictions": [prediction.to_json() for prediction in self.predictions],
            "to_pay": [self.to_pay(*group) for group in self.economics],
            "known_drafts": [dataclasses.asdict(draft) for draft in self.known],
            "passes": [found.to_json() for found in self.passes],
            "training": self.training.to_json(),
        }

    def to_pay(self, batch: int, temperature: float) -> dict[str, Any]:
        """What a draft must be to pay, in a batch at a temperature: without cost at all, and beside the known draft
        that is the best there."""
        economics = self.economics[batch, temperature]
        found: dict[str, Any] = {
            "batch": batch,
            "temperature": temperature,
            "least_alpha_without_cost": economics.least_alpha(0.0),
            "least_alpha_at_a_tenth": economics.least_alpha(0.1),
        }
        known = [d for d in self.known if (d.batch, d.temperature) == (batch, temperature) and d.cost > 0]
        if known:
            best = max(known, key=lambda draft: economics.speedup(draft.alpha, draft.cost))
            found |= {
                "beside": best.drafter,
                "alpha": best.alpha,
                "cost": best.cost,
                "least_alpha_at_its_cost": economics.least_alpha(best.cost),
                "most_cost_at_its_alpha": economics.most_cost(best.alpha),
            }
        return found


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
        device: a preset or YAML file (`specjax.planning.devices.device_of`); None: this one, calibrated.
        measure: decode the grid too, on other prompts than the acceptance is of, and train a few steps; here only.
        alpha: assume this acceptance of every drafter, instead of decoding.
        bars: displays of progress.

    Returns:
        The plan.

    Raises:
        SpecjaxError: for what the user can mend.
    """
    elsewhere = None if device is None else device_of(device)
    subject = Subject.of(config, bars)
    target, settings = subject.target, config.bench
    longest = max(subject.ks())
    shapes = {name: Shape.of_drafter(*subject.bench.decoder(name, longest).engine(True)) for name in subject.drafters}
    if elsewhere is None:
        model, machine = cost_model(subject, bars=bars).model, this_device(target)
    else:
        slots = padded(settings.prompt_tokens + settings.new_tokens + settings.max_k + 1)
        model, machine = computed(elsewhere, Shape(target.config), shapes, settings.batch_sizes, slots), elsewhere
    known = acceptances(subject, alpha, bars)
    predictions = _predicted(subject, model, known)
    if measure and elsewhere is None:
        predictions = measured_beside(subject, predictions, bars)
    groups = [(batch, t) for batch in settings.batch_sizes for t in settings.temperatures]
    return Plan(
        machine,
        model,
        predictions,
        {(batch, t): DraftEconomics.of(model, batch, t > 0) for batch, t in groups},
        list(_known_drafts(model, known, groups)),
        list(_passes(subject, model, machine, shapes)),
        training_cost(config, subject.prepared, machine, measure and elsewhere is None),
        int(work_of_weights(target.layout().params, 1).flops) // 2,
        alpha,
    )


def _predicted(subject: Subject, model: CostModel, known: Known) -> list[Prediction]:
    settings, found = subject.config.bench, []
    for batch in settings.batch_sizes:
        own = {cell: a for cell, a in known.items() if cell[1] in settings.ks_of(batch)}
        found += predict(model, own, [batch], settings.prompt_tokens, settings.new_tokens)
    return found


def measured_beside(subject: Subject, predictions: Sequence[Prediction], bars: Bars = no_bars) -> list[Prediction]:
    """The predictions with what decoding the timed prompts gives: cells of one batch and temperature in turns."""
    found, groups = [], list(dict.fromkeys((p.batch, p.temperature) for p in predictions))
    count, prompts = len(subject.timed), subject.timed
    with bars("decoding", sum(-(-count // p.batch) for p in predictions)) as progress:
        tick = counting(progress)
        for group in groups:
            own = [p for p in predictions if (p.batch, p.temperature) == group]
            cells = {p: Cell(p.drafter, p.k, p.batch, p.temperature) for p in own}
            for cell in cells.values():  # compiled, and warm
                subject.bench.run([cell], prompts[:1])
            runs = subject.bench.run(list(cells.values()), prompts, tick)
            for prediction, cell in cells.items():
                speed = tokens_per_s(sum(map(len, runs[cell].tokens)), runs[cell].seconds)
                found.append(dataclasses.replace(prediction, measured=speed))
    return found


def _known_drafts(model: CostModel, known: Known, groups: Sequence[tuple[int, float]]) -> Iterator[KnownDraft]:
    for batch, t in groups:
        for name in dict.fromkeys(name for name, *_ in known):
            longest = max(k for of, k, _ in known if of == name)
            cost = model.draft_seconds(batch, name) / model.target_seconds(batch, 1)
            yield KnownDraft(name, batch, t, known[name, longest, t].alpha, cost)


def _passes(subject: Subject, model: CostModel, device: Device, shapes: Mapping[str, Shape]) -> Iterator[Pass]:
    """Of the target over a token and over the longest block, of every draft with weights, and of prefill."""
    settings, target = subject.config.bench, subject.target
    engine, params = subject.bench.decoder(PLAIN, 0).engine(True)
    size = 2.0 if device.dtype in ("bfloat16", "float16") else 4.0
    storage = storage_of(params.target, engine.target.init_cache(1, 16)) if model.measured else Storage(size, size)
    width = padded(settings.prompt_tokens, _PROMPT_BUCKET)
    for batch in settings.batch_sizes:
        rows, slots = 1 << (batch - 1).bit_length(), model.of_batch(batch).context
        own = Shape(target.config)
        for m in sorted({1, 1 + max(settings.ks_of(batch))}):
            seconds = model.target_seconds(batch, m) if model.measured else None
            name = f"target, {m} token{'' if m == 1 else 's'}"
            yield Pass(name, batch, own.work(rows, m, slots, storage), device, seconds)
        for name, shape in shapes.items():
            if shape.config is not None or shape.weights:
                seconds = model.draft_seconds(batch, name) if model.measured else None
                yield Pass(name, batch, shape.work(rows, 1, slots, storage), device, seconds or None)
        seconds = model.prefill_seconds(batch, settings.prompt_tokens) if model.measured else None
        yield Pass(f"prefill, {width} tokens", batch, own.work(rows, width, slots, storage), device, seconds)
