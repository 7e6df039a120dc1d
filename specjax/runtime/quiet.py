"""Silence for what orbax and TensorStore print of a save that failed, in every thread and task that meets it: it ends
up as one error of ours, which is to be the last line."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

_CLOSED = "Event loop is closed"
"""What a TensorStore write meets that ends after orbax gave up on all of them; it goes to `sys.unraisablehook`."""


class Quiet:
    """From now on until `end`; for good where a save failed: the tasks that are left tell of it when they are
    collected, the last ones as the process ends."""

    def __init__(self):
        # Each its own: a stage may have two directories open.
        self._filters = {"absl": _NotOrbax(), "asyncio": _NotOrbax()}
        for name, one in self._filters.items():
            logging.getLogger(name).addFilter(one)
        self._before, self._hook = sys.unraisablehook, self._not_closed
        sys.unraisablehook = self._hook

    def end(self, failed: bool) -> None:
        if failed:
            warnings.filterwarnings("ignore", "coroutine 'async_serialize", RuntimeWarning)
            return
        for name, one in self._filters.items():
            logging.getLogger(name).removeFilter(one)
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._before

    def _not_closed(self, unraisable: Any) -> None:
        if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != _CLOSED:
            self._before(unraisable)


class _NotOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """asyncio names the task, which is orbax's, or the file, which is in a directory of orbax's."""
        return record.levelno < logging.ERROR or "orbax" not in record.pathname + record.getMessage()
