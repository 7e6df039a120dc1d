"""Progress of training stages in output that is no terminal, such as a log file: a line from time to time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console

SHARE, SECONDS = 0.05, 30.0
"""Share of a stage's steps, and seconds, after which the next line is due, whichever comes first."""


def console_lines(
    console: Console, figures: Callable[[dict[str, float]], str], clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int], AbstractContextManager[Callable[[int, dict[str, float]], None]]]:
    """`specjax.runtime.progress.Bars` that print lines with the ``figures`` of the newest records."""

    @contextlib.contextmanager
    def lines(name: str, steps: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
        def tell(*parts: str) -> None:
            text = "  ".join(part for part in parts if part)
            console.print(text, soft_wrap=True, highlight=False, markup=False)

        began = told = clock()
        tell(f"{name}: {steps:,} to do")
        first: tuple[int, float] | None = None
        told_step = 0
        known: dict[str, float] = {}

        def show(step: int, record: dict[str, float]) -> None:
            nonlocal first, told, told_step
            known.update(record)
            now = clock()
            if first is None:
                first = step, now
            due = now - told >= SECONDS or step - told_step >= SHARE * steps or step == steps
            if not due or step == told_step:
                return
            done, since = step - first[0], now - first[1]
            left = f"ETA {_clock(since / done * (steps - step))}" if done and step < steps else ""
            tell(f"{name}: {step:,}/{steps:,}", figures(known), left)
            told, told_step = now, step

        yield show
        tell(f"{name}: done in {_clock(clock() - began)}")

    return lines


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
