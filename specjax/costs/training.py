"""Cost of distilling a draft: measured on a few steps, or computed from arithmetic and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.costs.devices import Device

SHARE_OF_PEAK = 0.4
"""Share of a device's FLOP/s that training is assumed to reach where nothing is measured."""


@dataclasses.dataclass(frozen=True)
class TrainingCost:
    """Cost of the distillation that a config asks for."""

    tokens: int
    """Tokens of all steps."""
    tokens_per_s: float
    memory: float | None
    """Bytes at the peak: weights of both models, optimizer, gradients, activations; None: unknown."""
    measured: bool
    """True if measured, False if computed at `SHARE_OF_PEAK` of the device."""

    @property
    def hours(self) -> float:
        """Hours of wall time of the steps, without evaluations and saves."""
        return self.tokens / self.tokens_per_s / 3600

    def to_json(self) -> dict[str, Any]:
        """Fields, and hours."""
        return {**dataclasses.asdict(self), "hours": self.hours}


def computed_training(target: int, draft: int, memory: float | None, tokens: int, device: Device) -> TrainingCost:
    """Cost by arithmetic, at `SHARE_OF_PEAK` of the device: the target runs forward (2 FLOP a weight and token), the
    draft forward and backward (6). ``target``, ``draft``: numbers of weights that a token multiplies with; ``memory``:
    bytes at the peak (`specjax.costs.memory.training`); ``tokens``: tokens of all steps."""
    return TrainingCost(tokens, SHARE_OF_PEAK * device.flops / (2 * target + 6 * draft), memory, measured=False)
