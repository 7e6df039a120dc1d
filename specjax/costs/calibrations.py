"""Block costs and acceptance for the controller of a decoder. Seconds per block are stored beside the costs of plans,
for each device, pair of models, kind of program and bucket of rows; a few turns tell whether they still hold. The share
of accepted proposals depends on weights, text and sampling, and is measured each time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from pydantic import Field

from specjax.costs import store
from specjax.decode.calibration import finds
from specjax.decode.decoder import Decoder
from specjax.interfaces import BoundDrafter, Calibration
from specjax.runtime.compile_cache import count_compiles


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """Seconds of a block at each length, as they are stored."""

    seconds: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]
    """Seconds of a block of 0 .. K proposed tokens."""
    catch_up: float
    """`Calibration.catch_up`."""
    found: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None
    """`Calibration.found`."""

    @classmethod
    def of(cls, known: Calibration) -> BlockCosts:
        seconds, found = (None if x is None else tuple(map(float, x)) for x in (known.seconds, known.found))
        assert seconds is not None
        return cls(seconds, float(known.catch_up), found)

    def calibration(self) -> Calibration:
        """The costs for a decoder, whose acceptance is all zeros."""
        seconds, found = (None if x is None else np.asarray(x, np.float32) for x in (self.seconds, self.found))
        chances = np.zeros(len(self.seconds) - 1, np.float32)
        return Calibration(seconds, chances, np.float32(self.catch_up), found)  # type: ignore[arg-type]

    def fits(self, drafter: BoundDrafter) -> bool:
        """True if these are costs of blocks of ``drafter``."""
        counts = [len(self.seconds), *([] if self.found is None else [len(self.found)])]
        return counts == [drafter.max_depth + 1] * (1 + finds(drafter))


@dataclasses.dataclass(frozen=True)
class StoredCalibration:
    """A calibration, and the origin of its block costs."""

    calibration: Calibration
    measured: bool
    """True if the block costs were measured now; False if they were read and confirmed."""
    seconds: float
    """Seconds of measuring, without compilation."""
    file: Path | None
    """File that holds the block costs; None if it cannot be written."""

    @property
    def summary(self) -> str:
        """One sentence for the user."""
        if not self.measured:
            return f"costs of blocks read from {self.file}"
        place = "not kept" if self.file is None else f"kept in {self.file}"
        return f"costs of blocks measured in {self.seconds:.1f} s, {place}"


def calibrate(
    decoder: Decoder, prompts: Sequence[Any], again: bool = False, **sampling: Any
) -> StoredCalibration | None:
    """`Decoder.calibrate`, with the block costs that this program or another has stored, if there are any.

    Args:
        decoder: decoder whose controller weighs block costs.
        prompts: texts, or lists of token ids, one for each row to be decoded.
        again: measure even if costs are stored.
        sampling: `SamplingOptions`.

    Returns:
        The calibration that the decoder now uses for a batch of as many rows; None if its controller does not weigh
        costs, or if the target has too few positions for a single block.

    Raises:
        DataError: an argument cannot be used; the message names argument, row and value.
    """
    if not decoder.weighs:
        return None
    greedy, rows = decoder.program_of(prompts, **sampling)
    dtype = jax.tree.leaves(decoder.target.layout().params)[0].dtype
    key = store.key_of(rows, str(dtype), {"decoder": decoder}, {"greedy": greedy})
    known = None if again else store.read(key, BlockCosts)
    drafter = decoder.engine(greedy, rows)[0].drafter
    costs = known.calibration() if known is not None and known.fits(drafter) else None
    start = time.perf_counter()
    with count_compiles() as count:
        found = decoder.calibrate(prompts, costs=costs, **sampling)
    if found is None:
        return None
    if costs is not None and found.seconds is costs.seconds:
        return StoredCalibration(found, False, 0.0, store.file_of(key))
    seconds = max(time.perf_counter() - start - count.seconds, 0.0)
    return StoredCalibration(found, True, seconds, store.write(key, BlockCosts.of(found)))
