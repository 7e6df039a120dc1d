"""Bars on a terminal of 80 columns, lines elsewhere."""

from __future__ import annotations

import io
import re
import time
from typing import Any

from rich.console import Console

from specjax.runtime.progress import console_bars, no_bars, wait_for, waiting


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


def test_the_time_left_is_that_of_the_steps_after_the_first_which_compiles():
    now, screen = 0.0, io.StringIO()
    bars = console_bars(Console(file=screen, force_terminal=True, width=80), lambda: now)
    with bars("evaluation", 10) as show:
        assert show is not None
        now = 100.0
        show(1, {})
        now = 110.0
        show(2, {})
        time.sleep(0.6)
    assert any("2/10 1:20 left" in line for line in lines(screen)), lines(screen)


def test_without_a_bar_nothing_waits_aloud():
    with no_bars("x", 1), waiting("evaluating"):
        assert not wait_for("compiling")


def lines_of(steps: int, seconds: float, start: int = 0) -> list[str]:
    """What a log file has of a stage whose steps take ``seconds`` each, from step ``start`` on."""
    now, out = 0.0, io.StringIO()
    bars = console_bars(Console(file=out), lambda: now)
    with bars("draft-distill", steps) as show:
        assert show is not None
        for step in range(start + 1, steps + 1):
            now += seconds
            show(step, {"loss": step / 100})
    return out.getvalue().splitlines()


def test_a_quick_stage_tells_every_twentieth_of_it():
    first, *lines, last = lines_of(steps=400, seconds=0.1)
    assert (first, last) == ("draft-distill: 400 to do", "draft-distill: done in 0:00:40")
    assert [line.split()[1] for line in lines] == [f"{step}/400" for step in range(20, 401, 20)]
    assert lines[4] == "draft-distill: 100/400  loss 1.000  ETA 0:00:30"
    assert "ETA" not in lines[-1]


def test_a_slow_stage_tells_every_half_minute_and_its_time_is_that_of_the_steps_taken_now():
    lines = lines_of(steps=1_000, seconds=10.0, start=500)[1:-1]
    assert [line.split()[1] for line in lines[:3]] == ["501/1,000", "504/1,000", "507/1,000"]
    assert lines[1].endswith("loss 5.040  ETA 1:22:40")


def test_a_log_file_gets_lines_and_a_terminal_a_bar():
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        with console_bars(Console(file=out, force_terminal=terminal))("draft-distill", 2) as show:
            assert show is not None
            show(1, {"step": 1, "loss": 0.5, "tokens_per_s": 1234.0})
            shown[terminal] = out.getvalue()
    assert shown[False].splitlines()[1].startswith("draft-distill: 1/2  loss 0.500")
    assert "1,234 tok/s" in shown[False]
    assert "1/2  loss" not in shown[True]
