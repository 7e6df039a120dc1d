"""Progress of a command's stages: on a terminal one bar for each, with the newest figures and the reason of a wait
beside it; elsewhere, as in a log file, a line from time to time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

StepProgress = Callable[[int, dict[str, float]], None]
"""Called after every step with the steps done and the newest log record (empty before the first)."""
Bars = Callable[[str, int], AbstractContextManager[StepProgress | None]]
"""Opens the display of one stage, given its name and its number of steps."""

_NARROW = 100
SHARE, SECONDS = 0.05, 30.0
"""Share of a stage's steps, and seconds, after which the next line is due, whichever comes first."""
_open: list[list[tuple[str, float]]] = []
"""Waits of each open bar, and since when; innermost and newest last. Waits nest: an evaluation compiles."""


class _Pace:
    """Pace of a stage since its first step, which also compiles: minutes that would be taken for every step's."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = 0, 0.0

    def reached(self, step: int) -> None:
        self._last = step, self._clock()
        self._first = self._first or self._last

    def left(self, steps: int) -> float | None:
        """Seconds until ``steps`` steps are done; None: not known yet."""
        (step, at), (first, began) = self._last, self._first or self._last
        if step == first:
            return None
        return max(0.0, (at - began) / (step - first) * (steps - step) - (self._clock() - at))


@contextlib.contextmanager
def no_bars(name: str, steps: int) -> Iterator[None]:
    """Bars that show nothing."""
    yield None


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on the open bar, if there is one, ``what`` the block waits for, and for how long it has waited."""
    shown = wait_for(what)
    try:
        yield
    finally:
        if shown:
            wait_for(None)


def wait_for(what: str | None) -> bool:
    """Show a wait for ``what`` on the open bar; None ends the newest wait. Returns False if no bar is open."""
    if _open and what is None:
        del _open[-1][-1:]
    elif _open and what is not None:
        _open[-1].append((what, time.monotonic()))
    return bool(_open)


def console_bars(console: Console, clock: Callable[[], float] = time.monotonic) -> Bars:
    """One bar for each stage, or lines if the console is no terminal. A stage that was finished before shows as
    complete at once. On a narrow terminal figures are cut, never the count or the time."""
    if not (console.is_terminal or console.is_jupyter):
        return _lines(console, clock)

    @contextlib.contextmanager
    def bar(name: str, steps: int) -> Iterator[StepProgress]:
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=15)),
            BarColumn(bar_width=8 if console.width < _NARROW else 24),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Time(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        )
        figures: dict[str, float] = {}
        waits: list[tuple[str, float]] = []
        with Progress(*columns, console=console, expand=True) as display:
            pace = _Pace(clock)
            task = display.add_task(name, total=steps, figures="", waits=waits, pace=pace)

            def show(step: int, record: dict[str, float]) -> None:
                # Acceptance is not measured at every record: its last value stays.
                figures.update(record)
                pace.reached(step)
                display.update(task, completed=step, figures=_figures(figures))

            _open.append(waits)
            try:
                yield show
            finally:
                _open.pop()
                waits.clear()
            display.update(task, completed=steps)

    return bar


class _Time(ProgressColumn):
    """Column with the time of a wait, the time left in the stage, or the time that a finished stage took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {_clock(task.finished_time)}", style="progress.elapsed")
        for what, since in task.fields["waits"][-1:]:
            return Text(f"{what} {_clock(time.monotonic() - since)}", style="yellow")
        left = task.fields["pace"].left(task.total)
        if left is None:
            return Text(f"{_clock(task.elapsed)} so far", style="progress.elapsed")
        return Text(f"{_clock(left)} left", style="progress.remaining")


def _lines(console: Console, clock: Callable[[], float]) -> Bars:
    """Lines for a log file, each with the figures of the newest records."""

    @contextlib.contextmanager
    def lines(name: str, steps: int) -> Iterator[StepProgress]:
        def tell(*parts: str) -> None:
            console.print("  ".join(filter(None, parts)), soft_wrap=True, highlight=False, markup=False)

        began = told = clock()
        pace = _Pace(clock)
        tell(f"{name}: {steps:,} to do")
        told_step = 0
        known: dict[str, float] = {}

        def show(step: int, record: dict[str, float]) -> None:
            nonlocal told, told_step
            known.update(record)
            now = clock()
            pace.reached(step)
            due = now - told >= SECONDS or step - told_step >= SHARE * steps or step == steps
            if not due or step == told_step:
                return
            left = pace.left(steps) if step < steps else None
            eta = "" if left is None else f"ETA {_clock(round(left), hours=True)}"
            tell(f"{name}: {step:,}/{steps:,}", _figures(known), eta)
            told, told_step = now, step

        yield show
        tell(f"{name}: done in {_clock(round(clock() - began), hours=True)}")

    return lines


def _clock(seconds: float | None, hours: bool = False) -> str:
    """Text like `1:05`, `1:02:05`, or with ``hours`` always like the latter."""
    minutes, rest = divmod(int(seconds or 0), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if hours or minutes >= 60 else f"{minutes}:{rest:02}"


def _figures(record: dict[str, Any]) -> str:
    formats = {
        "loss": "loss {:.3f}",
        "alpha": "alpha {:.3f}",
        "block_efficiency": "tau {:.2f}",
        "tokens_per_s": "{:,.0f} tok/s",
    }
    return " ".join(text.format(record[name]) for name, text in formats.items() if name in record)
