"""Block costs that a decoder knows for its batches, and their correction while it decodes.

A batch is meant by (True if all its rows are greedy, number of its rows after padding): each has a program of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specjax.decode.calibration import (
    LEAST_TURNS,
    BlockTimer,
    agree,
    at_each,
    between,
    side_by_side,
    typical,
    with_costs,
)
from specjax.decode.engine import Engine
from specjax.errors import ConfigError
from specjax.interfaces import Calibration, Controller

_HANDED_IN = 64
"""Number of blocks that are decoded with costs handed in before this process measures its own."""
_BLOCKS = 3
"""Number of blocks of the longest length in one turn of a correction."""
_RARELY = 100
"""Decoding time between two measurements, as a multiple of the time that one takes: measuring costs one percent."""
_CHUNK = 512
"""Number of blocks between two checks whether a measurement is due."""


@dataclasses.dataclass
class Correction:
    """Check of the known block costs against the time that decoding takes. A `Decoder` consults it between two chunks.
    It changes no token and no row's state, only the lengths that are chosen afterwards.

    Costs that were handed in are measured after `_HANDED_IN` blocks. Costs that were measured are measured again after
    `_RARELY` times as long as that took, so a wrong cost does not outlive that time.
    """

    known: Calibration
    """Block costs in use."""
    measured: bool
    """True if this process measured them."""
    shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Shapes of the batches in which they were measured."""
    origin: Calibration = dataclasses.field(init=False)
    """Block costs at first, before any correction."""
    blocks: int = 0
    """Number of blocks decoded with these costs."""
    seconds: float = 0.0
    """Seconds of decoding with these costs."""
    took: float = 0.1
    """Seconds that the last measurement took."""

    def __post_init__(self):
        self.origin = self.known

    def wants(self, shapes: tuple[int, ...]) -> bool:
        """True if a batch of these shapes runs the program with drafts although no length pays, so that its costs can
        be measured. Costs that were handed in always need that. Others need it only when a measurement is due, and only
        in shapes measured before, for which that program is compiled."""
        return not self.measured or (self.due and shapes in self.shapes)

    @property
    def due(self) -> bool:
        """True if the costs must be measured before the next block."""
        if not self.measured:
            return self.blocks >= _HANDED_IN
        return self.seconds > _RARELY * self.took

    @property
    def patience(self) -> int:
        """Number of blocks until `due` is checked again."""
        return _CHUNK if self.measured else max(_HANDED_IN - self.blocks, 1)

    def decoded(self, seconds: float, blocks: int) -> None:
        """Record a chunk: its seconds, and the blocks of the row with the most."""
        self.blocks, self.seconds = self.blocks + blocks, self.seconds + seconds

    def corrected(self, timer: BlockTimer, engine: Engine, shapes: tuple[int, ...]) -> Calibration:
        """The corrected calibration. If a turn made now agrees with the known costs, it lies half way between the two;
        otherwise it has the medians of `LEAST_TURNS` turns."""
        self.shapes.add(shapes)
        first = timer.turn(_BLOCKS)
        if first is not None:
            known = side_by_side(self.known)
            seconds = between(known, at_each(first, engine))
            if not agree(at_each(first, engine), known):
                turns = [first, *(turn for _ in range(LEAST_TURNS - 1) if (turn := timer.turn(_BLOCKS)) is not None)]
                seconds = at_each(typical(turns), engine)
            self.known = with_costs(self.known, seconds)
        self.measured, self.took = True, max(timer.seconds, 1e-3)
        self.blocks, self.seconds = 0, 0.0
        return self.known


@dataclasses.dataclass
class KnownCosts:
    """Block costs by batch, and their corrections. ``depth``: the largest depth of the drafter; ``apart``: True if it
    finds some proposals without its model; ``classes``: the number of its match classes."""

    controller: Controller
    depth: int
    apart: bool = False
    classes: int = 1
    calibrations: dict[tuple[bool, int], Calibration] = dataclasses.field(default_factory=dict)
    _corrections: dict[tuple[bool, int], Correction] = dataclasses.field(init=False, default_factory=dict)

    def of(self, where: tuple[bool, int]) -> Calibration | None:
        """The known costs of such batches; None: nothing is known. Raises `ConfigError` for an entry that a user set
        and that does not fit the drafter."""
        known = self.calibrations.get(where)
        if known is not None:
            check_calibration(known, where, self.depth, self.apart, self.classes)
        return known

    def record(self, where: tuple[bool, int], found: Calibration, shapes: tuple[int, ...]) -> None:
        """Record costs that were measured just now in a batch of ``shapes``."""
        self.calibrations[where] = found
        self._corrections[where] = Correction(found, measured=True, shapes={shapes})

    def correction(self, where: tuple[bool, int]) -> Correction | None:
        """The correction of such batches' costs; None if nothing is known or the controller corrects nothing."""
        known = self.of(where)
        if known is None or not self.controller.corrects_costs:
            return None
        found = self._corrections.get(where)
        if found is None or found.known is not known:
            found = self._corrections[where] = Correction(known, measured=False)
        return found

    def never_propose(self, where: tuple[bool, int]) -> bool:
        """True if no draft length pays in such batches, by the costs of now and by those before any correction."""
        known, correction = self.of(where), self.correction(where)
        if known is None:
            return False
        never = self.controller.never_proposes
        return bool(never(known)) and (correction is None or bool(never(correction.origin)))


def check_calibration(calibration: Any, where: tuple[bool, int], depth: int, apart: bool, classes: int) -> None:
    """Raise `ConfigError` for a calibration of the wrong type or shapes, or with numbers out of range."""
    name = f"decoder.calibrations[{where[0]}, {where[1]}]"
    if not isinstance(calibration, Calibration):
        kind = type(calibration).__name__
        raise ConfigError(f"{name}: a {kind}; give a specjax.interfaces.Calibration, or calibrate")
    seconds, acceptance = (np.asarray(x) for x in (calibration.seconds, calibration.acceptance))
    if seconds.shape != (depth + 1,) or acceptance.shape != (depth,):
        raise ConfigError(
            f"{name}: seconds of {list(seconds.shape)} and acceptance of {list(acceptance.shape)}, and the drafter "
            f"proposes up to {depth} tokens; give [{depth + 1}] and [{depth}]"
        )
    found = None if calibration.found is None else [*np.shape(calibration.found)]
    if found != ([depth + 1] if apart else None):
        wanted = f"seconds of the {depth + 1} lengths" if apart else "None"
        raise ConfigError(f"{name}: found={calibration.found}; this drafter takes {wanted}")
    if not (np.all(seconds > 0) and np.isfinite(seconds).any()):  # infinite: a length never chosen
        raise ConfigError(f"{name}: seconds={seconds.tolist()}; give what blocks take, above 0")
    by_class = acceptance[None] if calibration.by_class is None else np.asarray(calibration.by_class)
    if calibration.by_class is not None and by_class.shape != (classes, depth):
        raise ConfigError(f"{name}: by_class of {list(by_class.shape)}; this drafter takes {[classes, depth]}, or None")
    for what, chances in (("acceptance", acceptance), ("by_class", by_class)):
        if not (np.all(chances >= 0) and np.all(chances <= 1)):
            raise ConfigError(f"{name}: {what}={chances.tolist()}; give chances from 0 to 1")
