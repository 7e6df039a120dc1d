"""Bars on a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import time
from typing import Any

from rich.console import Console

from specjax.distill.progress import console_bars, no_bars, wait_for, waiting


def bar(screen: io.StringIO, name: str, steps: int) -> Any:
    return console_bars(Console(file=screen, force_terminal=True, width=80))(name, steps)


def lines(screen: io.StringIO) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())) if line]


def test_a_bar_of_80_columns_keeps_its_count_and_time_and_cuts_figures():
    screen = io.StringIO()
    record = {"loss": 0.4123, "alpha": 0.6681, "block_efficiency": 2.934, "tokens_per_s": 21_104.0}
    with bar(screen, "draft-distill", 700) as show:
        for step in (1, 120, 700):
            show(step, record)
            time.sleep(0.6)
    last = lines(screen)[-1]
    assert max(map(len, lines(screen))) <= 80
    assert re.search(r"700/700 took 0:0\d loss 0\.412 alpha 0\.668", last)
    assert any(re.search(r" (1|120)/700 \d:\d\d (left|so far)", line) for line in lines(screen)), lines(screen)


def test_a_bar_that_stands_says_what_it_waits_for():
    screen = io.StringIO()
    with bar(screen, "draft-distill", 10) as show:
        show(3, {})
        with waiting("evaluating"):
            time.sleep(0.7)
            wait_for("compiling")
            time.sleep(0.7)
            wait_for(None)
            time.sleep(0.7)
            assert "evaluating" in lines(screen)[-1]
        show(4, {})
        time.sleep(0.6)
    told = [line for line in lines(screen) if "evaluating 0:00" in line]
    assert told
    assert "3/10" in told[0]
    assert any("compiling 0:00" in line for line in lines(screen))
    assert "evaluating" not in lines(screen)[-1]


def test_without_a_bar_nothing_waits_aloud():
    with no_bars("x", 1), waiting("evaluating"):
        assert not wait_for("compiling")
