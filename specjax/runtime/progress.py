"""Progress on a terminal: one bar for each stage, with the newest figures and the reason of a wait beside it."""

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

from specjax.runtime.progress_lines import console_lines

StepProgress = Callable[[int, dict[str, float]], None]
"""Called after every step with the steps done and the newest log record (empty before the first)."""
Bars = Callable[[str, int], AbstractContextManager[StepProgress | None]]
"""Opens the display of one stage, given its name and its number of steps."""

_NARROW = 100
_shown: list[Callable[[str | None], None]] = []
"""Functions that show a wait on each open bar, the innermost bar last."""


@contextlib.contextmanager
def no_bars(name: str, steps: int) -> Iterator[None]:
    """Bars that show nothing."""
    yield None


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on the open bar, if there is one, ``what`` the block waits for, and for how long it has waited."""
    if not wait_for(what):
        yield
        return
    try:
        yield
    finally:
        wait_for(None)


def wait_for(what: str | None) -> bool:
    """Show a wait for ``what`` on the open bar; None ends the newest wait. Returns False if no bar is open."""
    if _shown:
        _shown[-1](what)
    return bool(_shown)


def console_bars(console: Console) -> Bars:
    """One bar for each stage, or lines if the console is no terminal. A stage that was finished before shows as
    complete at once. On a narrow terminal figures are cut, never the count or the time."""
    if not (console.is_terminal or console.is_jupyter):
        return console_lines(console, _figures)

    @contextlib.contextmanager
    def bar(name: str, steps: int) -> Iterator[StepProgress]:
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=15)),
            BarColumn(bar_width=8 if console.width < _NARROW else 24),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Time(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        )
        with Progress(*columns, console=console, expand=True) as display:
            task = display.add_task(name, total=steps, figures="", waits=None, since=0.0)
            figures: dict[str, float] = {}

            def show(step: int, record: dict[str, float]) -> None:
                # Acceptance is not measured at every record: its last value stays.
                figures.update(record)
                display.update(task, completed=step, figures=_figures(figures))

            waits: list[str] = []  # waits nest: an evaluation compiles

            def wait(what: str | None) -> None:
                if what is None:
                    del waits[-1:]
                else:
                    waits.append(what)
                display.update(task, waits=waits[-1] if waits else None, since=time.monotonic())

            _shown.append(wait)
            try:
                yield show
            finally:
                _shown.remove(wait)
                waits.clear()
                wait(None)
            display.update(task, completed=steps)

    return bar


class _Time(ProgressColumn):
    """Column with the time of a wait, the time left in the stage, or the time that a finished stage took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {_clock(task.finished_time)}", style="progress.elapsed")
        if task.fields.get("waits"):
            return Text(f"{task.fields['waits']} {_clock(time.monotonic() - task.fields['since'])}", style="yellow")
        if task.time_remaining is None:
            return Text(f"{_clock(task.elapsed)} so far", style="progress.elapsed")
        return Text(f"{_clock(task.time_remaining)} left", style="progress.remaining")


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _figures(record: dict[str, Any]) -> str:
    formats = {
        "loss": "loss {:.3f}",
        "alpha": "alpha {:.3f}",
        "block_efficiency": "tau {:.2f}",
        "tokens_per_s": "{:,.0f} tok/s",
    }
    return " ".join(text.format(record[name]) for name, text in formats.items() if name in record)
