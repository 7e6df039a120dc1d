"""Suppress the messages of orbax and TensorStore about a failed save, in every thread and task that meets it: specjax
raises one error about it, which shall be the last line."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

_CLOSED = "Event loop is closed"
"""Error of a TensorStore write that ends after orbax gave up on all writes; it goes to `sys.unraisablehook`."""


class Quiet:
    """Suppresses messages until `end`, and for good if a save failed: the tasks left over report it when they are
    collected, the last ones as the process ends."""

    def __init__(self):
        # Filters of its own: a stage may have two directories open.
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
        """Drop errors that name orbax: asyncio logs the task's name, or comes from a file in a directory of orbax."""
        return record.levelno < logging.ERROR or "orbax" not in record.pathname + record.getMessage()
