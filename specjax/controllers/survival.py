"""For each row the length that its own acceptance makes the best (2211.17192, section 3.3)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from specjax.controllers.weighing import Weighing


@dataclasses.dataclass(frozen=True)
class Survival(Weighing):
    """For each row (2211.17192, section 3.3), the length of the most tokens for what a block of all rows at that length
    would cost, by how often its own proposals were kept. A row's choices depend on that row and the calibration alone,
    so it replays alone from its seed with the same calibration."""

    kind: Literal["survival"] = "survival"
