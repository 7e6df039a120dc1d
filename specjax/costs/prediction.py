"""Predictions of what pays: tokens a second of known drafters from costs and acceptance, and, for drafts that do not
exist yet, the accuracy that one needs for its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.costs.acceptance import Acceptance
from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, BatchCosts, CostModel, DrafterCosts, Line, mode_of
from specjax.costs.devices import Device
from specjax.costs.roofline import Pass, Storage, Work, pass_work, work_of_weights
from specjax.costs.training import TrainingCost
from specjax.decode.engine import Engine, EngineParams
from specjax.decode.request import bucket
from specjax.metrics import expected_emitted
from specjax.models.config import ModelConfig

MOST_K = 16
"""Largest draft length of a draft that does not exist yet."""
_BISECTIONS = 40


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted speed at one point of the grid; ``k`` 0 is plain decoding."""

    drafter: str
    k: int
    batch: int
    temperature: float
    tokens_per_s: float
    speedup: float
    """Speedup over plain decoding of the same batch and temperature, which is predicted too."""
    best: bool
    """True for the fastest point of its batch and temperature."""
    measured: float | None = None
    """Measured tokens a second."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction against the measured speed."""
        return None if self.measured is None else self.tokens_per_s / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """Fields, and the error."""
        return {**dataclasses.asdict(self), "error": self.error}


Known = Mapping[tuple[str, int, float], Acceptance]
"""Acceptance by drafter, k and temperature."""


def predict(model: CostModel, known: Known, batches: Sequence[int], prompt: int, tokens: int) -> list[Prediction]:
    """Predictions for every drafter and length of ``known`` in every batch, and for plain decoding: all batches at one
    temperature, then at the next."""
    found = []
    for temperature in dict.fromkeys(t for *_, t in known):
        cells = {(PLAIN, 0): Acceptance(())} | {(name, k): a for (name, k, t), a in known.items() if t == temperature}
        for batch in batches:
            costs, speeds = model.of_batch(batch), dict[tuple[str, int], float]()
            for cell, acceptance in cells.items():
                seconds = costs.generation(prompt, acceptance.blocks(tokens, batch), *cell, mode_of(temperature))
                speeds[cell] = batch * tokens / seconds
            fastest, plain = max(speeds, key=lambda cell: speeds[cell]), speeds[PLAIN, 0]
            found += [
                Prediction(*cell, batch, temperature, speed, speed / plain, cell == fastest)
                for cell, speed in speeds.items()
            ]
    return found


@dataclasses.dataclass(frozen=True)
class DraftEconomics:
    """Speedup of a draft that does not exist yet, in a batch. Each of its tokens is accepted with chance alpha, its
    pass costs ``c`` passes of the target over one token, and its blocks have the best length.

    If passes of the target cost the same for any number of tokens, and nothing costs time beyond the passes, the
    speedup is `metrics.walltime_speedup` (2211.17192, section 3.3) at its best k."""

    block: Line
    """Seconds of a block without the draft's passes, by k."""
    step: float
    """Seconds of a step of plain decoding."""
    target: float
    """Seconds of a pass of the target over one token."""

    @classmethod
    def of(cls, costs: BatchCosts, mode: str) -> DraftEconomics:
        """Economics from the costs of a batch, `GREEDY` or `SAMPLED`. The time of a block beyond its passes is that of
        the known draft with the least, or of plain decoding if no draft is known."""
        beyond = [(d.beyond[mode], d.once) for d in costs.drafters.values() if d.each > 0 and mode in d.beyond]

        def more(k: int) -> float:
            return min((line(k) + once for line, once in beyond), default=costs.plain[mode])

        at = range(1, MOST_K + 1)
        block = Line.through({k: costs.target(k + 1) + more(k) for k in at})
        return cls(block, costs.target(1) + costs.plain[mode], costs.target(1))

    def speedup(self, alpha: float, c: float) -> float:
        """Speedup over plain decoding at the best k from 1 to `MOST_K`."""
        return max(self.at_k(alpha, c, k) for k in range(1, MOST_K + 1))

    def at_k(self, alpha: float, c: float, k: int) -> float:
        """Speedup over plain decoding at draft length ``k``."""
        return expected_emitted(alpha, k) * self.step / (self.block(k) + k * c * self.target)

    def least_alpha(self, c: float, speed: float = 1.0) -> float | None:
        """Smallest alpha at which a draft of cost ``c`` reaches a speedup of ``speed``; None: no alpha does."""
        return _last(lambda alpha: self.speedup(alpha, c) >= speed, 1.0, 0.0)

    def most_cost(self, alpha: float, speed: float = 1.0) -> float | None:
        """Largest cost at which a draft of that alpha reaches a speedup of ``speed``; None: not even cost 0 does."""
        return _last(lambda c: self.speedup(alpha, c) >= speed, 0.0, 64.0)


def _last(reaches: Callable[[float], bool], inside: float, outside: float) -> float | None:
    """The number nearest to ``outside`` that reaches, by bisection; None: not even ``inside`` does."""
    if not reaches(inside):
        return None
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if reaches(middle) else (inside, middle)
    return inside


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the target or a draft, from which its costs on another device are computed."""

    config: ModelConfig | None
    """Config of the model; None: only ``weights`` is known."""
    weights: int = 0
    """Number of weights that a pass multiplies with; 0 for a drafter without any, whose passes count as free."""

    @classmethod
    def of_drafter(cls, engine: Engine, params: EngineParams) -> Shape:
        """Sizes of a drafter: the config of the `Model` that makes its passes, if one does, and its weights."""
        config = engine.drafter.model_config
        weights = int(work_of_weights(params.drafter, 1).flops) // 2
        return cls(config if isinstance(config, ModelConfig) else None, weights)

    def work(self, batch: int, tokens: int, slots: int, storage: Storage) -> Work:
        """Work of one pass over ``tokens`` tokens in each row."""
        if self.config is not None:
            return pass_work(self.config, batch, tokens, slots, storage)
        return Work(2.0 * batch * tokens * self.weights, storage.weights * self.weights)


def computed(
    device: Device, target: Shape, drafters: Mapping[str, Shape], batches: Sequence[int], slots: int
) -> CostModel:
    """Costs on a device that is not here: every pass runs at its roofline, and nothing costs time beyond the passes. No
    program is faster, so predictions from these costs are bounds. Speedups are nearer the truth than seconds."""
    storage, nothing = Storage.computed(device), {mode: Line((1.0,), (0.0,)) for mode in (GREEDY, SAMPLED)}

    def seconds(shape: Shape, rows: int, tokens: int, slots: int = slots) -> float:
        return shape.work(rows, tokens, slots, storage).least_seconds(device)

    def costs(rows: int) -> BatchCosts:
        fed, widths, slope, drafts = (1, 2, 4, 8, 16, 32, 64), (16, 64, 256, 1024), {}, {}
        for m in (1, fed[-1]):
            slope[m] = (seconds(target, rows, m, 2 * slots) - seconds(target, rows, m)) / slots
        for name, shape in drafters.items():
            each, wide = seconds(shape, rows, 1), seconds(shape, rows, 1, 2 * slots)
            prefill_each = rows * shape.work(1, 1, 0, storage).flops / device.flops
            drafts[name] = DrafterCosts(each, 0.0, (wide - each) / slots, nothing, prefill_each)
        line, prefill = (Line.through({m: seconds(target, rows, m) for m in sizes}) for sizes in (fed, widths))
        return BatchCosts(slots, line, Line.through(slope), {GREEDY: 0.0, SAMPLED: 0.0}, drafts, prefill, 0.0)

    return CostModel(
        device.name, device.dtype, False, {rows: costs(rows) for rows in sorted(set(map(bucket, batches)))}
    )


@dataclasses.dataclass(frozen=True)
class KnownDraft:
    """An existing drafter, as a point beside the curves of equal speed."""

    drafter: str
    batch: int
    temperature: float
    alpha: float
    cost: float
    """Cost of a pass of the draft, in passes of the target over one token."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Predictions for a config, with measurements if they were asked for."""

    device: Device
    model: CostModel
    predictions: list[Prediction]
    economics: Mapping[tuple[int, float], DraftEconomics]
    """(batch, temperature) -> acceptance and cost with which a draft pays."""
    known: list[KnownDraft]
    passes: list[Pass]
    training: TrainingCost
    target_weights: int
    """Number of weights that a pass of the target multiplies with."""
    assumed_alpha: float | None

    @property
    def measured_here(self) -> bool:
        """True if times were measured on this device; else all are computed from a datasheet."""
        return self.model.measured

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the plan, without the points of the curves."""
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
        """Acceptance and cost with which a draft pays, in a batch at a temperature: the least alpha without cost and at
        a tenth of the target's, and the limits at the cost and the alpha of the best known draft."""
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
