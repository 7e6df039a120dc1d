"""A `jax.profiler` trace of some steps of a stage, for TensorBoard's profile tab or Perfetto."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax


class Profile(contextlib.AbstractContextManager):
    """Traces the steps from ``steps[0]`` to ``steps[1]``, both included, into ``directory``; None: no trace. A stage
    that goes on between these steps traces the rest of them."""

    def __init__(self, directory: Path, steps: tuple[int, int] | None):
        self._directory, self._steps, self._on = directory, steps, False

    def __exit__(self, *exception) -> None:
        if self._on:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        if self._steps is not None and not self._on and self._steps[0] <= step <= self._steps[1]:
            jax.profiler.start_trace(self._directory)
            self._on = True

    def after(self, step: int, state: Any) -> None:
        """End the trace after its last step, once ``state``, the result of the step, is computed."""
        if self._on and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._on = False
