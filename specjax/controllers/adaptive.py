"""The default: a ladder once blocks were measured, the drafter's own length before."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from specjax.controllers.fixed import Fixed
from specjax.controllers.ladder import Pooled


@dataclasses.dataclass(frozen=True)
class Adaptive(Pooled):
    """`Ladder` (2406.14066) wherever a `Decoder` knows what blocks cost (`Decoder.calibrate`; jobs and commands do that
    by themselves). Where it does not, every block is as long as the drafter's: a row then replays alone from its seed,
    and nothing depends on a clock."""

    uncalibrated: ClassVar[Fixed] = Fixed()
    """Decodes where nothing was measured."""
    corrects: ClassVar[bool] = True
    """What blocks cost is measured again while they are decoded, where it is doubtful: see
    `specjax.decode.calibration.Correction`."""
    kind: Literal["adaptive"] = "adaptive"
