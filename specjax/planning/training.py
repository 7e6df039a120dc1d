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
    memory: float | None
    """Bytes at the peak: weights of both models, optimizer, gradients, activations; None: unknown."""
    measured: bool
    """Else computed, at `SHARE_OF_PEAK` of the device."""

    @property
    def hours(self) -> float:
        """Wall time of the steps, without evaluations and saves."""
        return self.tokens / self.tokens_per_s / 3600

    def to_json(self) -> dict[str, Any]:
        """Fields, and hours."""
        return {**dataclasses.asdict(self), "hours": self.hours}


def computed_training(target: int, draft: int, memory: float | None, tokens: int, device: Device) -> TrainingCost:
    """The target runs forward (2 FLOP a weight and token), the draft forward and backward (6).

    Args:
        target: weights that a token multiplies with.
        draft: the same of the draft.
        memory: bytes at the peak (`specjax.planning.memory.training`).
        tokens: of all steps.
        device: what it runs on.

    Returns:
        The cost, at `SHARE_OF_PEAK` of the device.
    """
    return TrainingCost(tokens, SHARE_OF_PEAK * device.flops / (2 * target + 6 * draft), memory, measured=False)
