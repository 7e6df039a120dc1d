"""What the controller of a decoder weighs with. What blocks cost is kept beside the costs of plans, for each device,
pair of models, kind of program and bucket of rows, and one turn tells whether it still holds; how often proposals are
kept belongs to weights, text and sampling, and is measured each time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.decode.decoder import Decoder
from specjax.evaluation.costs import count_compiles
from specjax.planning import store
from specjax.types import Calibration


@dataclasses.dataclass(frozen=True)
class Kept:
    """A calibration, and what it took to know it."""

    calibration: Calibration
    measured: bool
    """Its costs, now; else they were read, and confirmed."""
    seconds: float
    """Of measuring, beside compilation."""
    file: Path | None
    """Where it is kept; None: nowhere, which cannot be written."""

    @property
    def summary(self) -> str:
        """A sentence."""
        if not self.measured:
            return f"costs of blocks read from {self.file}"
        place = "not kept" if self.file is None else f"kept in {self.file}"
        return f"costs of blocks measured in {self.seconds:.1f} s, {place}"


def calibrate(decoder: Decoder, prompts: Sequence[Any], again: bool = False, **sampling: Any) -> Kept | None:
    """`Decoder.calibrate`, unless that was done before: by this program or another.

    Args:
        decoder: whose controller is to weigh.
        prompts: texts, or lists of token ids, as many as there will be rows.
        again: measured in any case.
        sampling: `SamplingOptions`.

    Returns:
        What the decoder now weighs with, for a batch of as many rows; None if its controller does not weigh, or if the
        target has too few positions for a single block.

    Raises:
        DataError: an argument cannot be used; the message names argument, row and value.
    """
    if not decoder.weighs:
        return None
    greedy, rows = decoder.program_of(prompts, **sampling)
    dtype = jax.tree.leaves(decoder.target.layout().params)[0].dtype
    key = store.key_of(rows, str(dtype), {"decoder": decoder}, {"greedy": greedy})
    depth = decoder.engine(greedy, rows)[0].max_depth
    costs = None if again else store.read(key, lambda kept: _of_json(kept, depth))
    start = time.perf_counter()
    with count_compiles() as count:
        found = decoder.calibrate(prompts, costs=costs, **sampling)
    if found is None:
        return None
    if costs is not None and found.seconds is costs.seconds:
        return Kept(found, False, 0.0, store.file_of(key))
    seconds = max(time.perf_counter() - start - count.seconds, 0.0)
    return Kept(found, True, seconds, store.write(key, _to_json(found)))


def _to_json(found: Calibration) -> dict[str, Any]:
    return {name: np.asarray(getattr(found, name)).tolist() for name in ("seconds", "catch_up")}


def _of_json(found: Mapping[str, Any], depth: int) -> Calibration:
    """Costs alone, of up to ``depth`` proposals."""
    seconds, late = (np.asarray(found[name], np.float32) for name in ("seconds", "catch_up"))
    if seconds.shape != (depth + 1,) or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError("no costs of blocks")
    return Calibration(seconds, np.zeros(depth, np.float32), late)  # type: ignore[arg-type]
