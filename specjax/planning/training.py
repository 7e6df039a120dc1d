"""What it costs to distill a draft: measured on a few steps, or computed from arithmetic and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.planning.devices import Device

SHARE_OF_PEAK = 0.4
"""Of a device's FLOP/s that training is assumed to reach where nothing is measured."""


@dataclasses.dataclass(frozen=True)
class TrainingCost:
    """The distillation that a config asks for."""

    tokens: int
    """Of all steps."""
    tokens_per_s: float
    memory: float
    """Bytes at the peak: weights of both models, optimizer, gradients, activations."""
    measured: bool
    """Else computed, at `SHARE_OF_PEAK` of the device."""

    @property
    def hours(self) -> float:
        """Wall time of the steps, without evaluations and saves."""
        return self.tokens / self.tokens_per_s / 3600

    def to_json(self) -> dict[str, Any]:
        """Fields, and hours."""
        return {**dataclasses.asdict(self), "hours": self.hours}


@dataclasses.dataclass(frozen=True)
class TrainingShape:
    """What decides the cost of a step."""

    target: int
    """Weights that a token multiplies with."""
    draft: int
    rows: int
    """Of a batch."""
    length: int
    """Tokens a row."""
    vocab_size: int


def computed_training(shape: TrainingShape, tokens: int, device: Device) -> TrainingCost:
    """The target runs forward (2 FLOP a weight and token), the draft forward and backward (6); in memory are the
    target's weights, the draft's in float32 with gradient and two moments, and the logits of both with their
    gradients."""
    flops = 2 * shape.target + 6 * shape.draft
    size = 2 if device.dtype in ("bfloat16", "float16") else 4
    logits = 4 * 4 * shape.rows * shape.length * shape.vocab_size
    memory = size * shape.target + 4 * 4 * shape.draft + logits
    return TrainingCost(tokens, SHARE_OF_PEAK * device.flops / flops, float(memory), measured=False)
