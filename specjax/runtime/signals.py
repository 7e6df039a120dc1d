"""Signals at safe moments: SIGTERM, which schedulers send before they take a machine away, is noticed between two
training steps, and Ctrl-C waits for the end of a block that it must not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_requested() -> Iterator[Callable[[int], bool]]:
    """Gives a function to call with every finished step; it returns True once a SIGTERM has come. The next SIGTERM acts
    as it would without this block: as a rule it ends the process at once.

    In several processes all functions return True at the same step, whichever process got the signal: JAX's preemption
    service listens there. Outside the main thread, which alone may listen, the function returns False.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    came = threading.Event()

    def note(number, frame) -> None:
        came.set()
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, note) or signal.SIG_DFL
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay a Ctrl-C until this block has ended, such as one in which a new state takes over the old one's arrays. A
    SIGTERM whose handler raises (`specjax.cli.entry`) is delayed too."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread alone
        return
    came: list[tuple[signal.Signals, Any]] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, lambda number, frame: came.append((signal.Signals(number), frame)))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for number, frame in came[:1]:
            handled[number](number, frame)
