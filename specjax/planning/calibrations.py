"""What the controller of a decoder weighs with, kept beside the costs of plans: measured once for each device, pair of
models, kind of program and bucket of rows."""

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
    """Now; else it was read."""
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
        What the decoder now weighs with, for a batch of as many rows; None if its controller does not weigh.

    Raises:
        DataError: an argument cannot be used; the message names argument, row and value.
    """
    if not decoder.weighs:
        return None
    greedy, rows = where = decoder.program_of(prompts, **sampling)
    dtype = jax.tree.leaves(decoder.target.layout().params)[0].dtype
    key = store.key_of(rows, str(dtype), {"decoder": decoder}, {"greedy": greedy})
    known = None if again else store.read(key, _of_json)
    if known is not None:
        decoder.calibrations[where] = known
        return Kept(known, False, 0.0, store.file_of(key))
    start = time.perf_counter()
    with count_compiles() as count:
        found = decoder.calibrate(prompts, **sampling)
    assert found is not None
    seconds = max(time.perf_counter() - start - count.seconds, 0.0)
    return Kept(found, True, seconds, store.write(key, _to_json(found)))


def _to_json(found: Calibration) -> dict[str, Any]:
    return {name: np.asarray(getattr(found, name)).tolist() for name in ("seconds", "acceptance", "catch_up")}


def _of_json(found: Mapping[str, Any]) -> Calibration:
    seconds, acceptance, late = (np.asarray(found[name], np.float32) for name in ("seconds", "acceptance", "catch_up"))
    if len(seconds) != len(acceptance) + 1 or not (seconds > 0).all():
        raise ValueError("no costs of blocks")
    return Calibration(seconds, acceptance, late)  # type: ignore[arg-type]
