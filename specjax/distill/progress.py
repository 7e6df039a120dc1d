"""Progress of training stages on a terminal: one bar a stage, with the newest figures beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.distill.progress_lines import console_lines

StepProgress = Callable[[int, dict[str, float]], None]
"""Called after every step with the steps done and the newest log record (empty before the first)."""
Bars = Callable[[str, int], AbstractContextManager[StepProgress | None]]
"""Opens the display of one stage, given its name and its number of steps."""


@contextlib.contextmanager
def no_bars(name: str, steps: int) -> Iterator[None]:
    """Shows nothing."""
    yield None


def console_bars(console: Console) -> Bars:
    """One bar a stage; on what is no terminal, lines. A stage that was finished before shows as complete at once."""
    if not (console.is_terminal or console.is_jupyter):
        return console_lines(console, _figures)

    @contextlib.contextmanager
    def bar(name: str, steps: int) -> Iterator[StepProgress]:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=console) as display:
            task = display.add_task(name, total=steps, figures="")
            figures: dict[str, float] = {}

            def show(step: int, record: dict[str, float]) -> None:
                # Acceptance is not measured at every record: the last one stays.
                figures.update(record)
                display.update(task, completed=step, figures=_figures(figures))

            yield show
            display.update(task, completed=steps)

    return bar


def _figures(record: dict[str, float]) -> str:
    formats = {
        "loss": "loss {:.3f}",
        "alpha": "alpha {:.3f}",
        "block_efficiency": "tau {:.2f}",
        "tokens_per_s": "{:,.0f} tokens/s",
    }
    return "  ".join(text.format(record[name]) for name, text in formats.items() if name in record)
