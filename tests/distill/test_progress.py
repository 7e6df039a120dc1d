from __future__ import annotations

import io

from rich.console import Console

from specjax.distill.progress import console_bars
from specjax.distill.progress_lines import console_lines


def lines_of(steps: int, seconds: float, start: int = 0) -> list[str]:
    """What a log file has of a stage whose steps take ``seconds`` each, from step ``start`` on."""
    now, out = 0.0, io.StringIO()
    bars = console_lines(Console(file=out), lambda record: f"loss {record['loss']:.2f}", lambda: now)
    with bars("draft-distill", steps) as show:
        for step in range(start + 1, steps + 1):
            now += seconds
            show(step, {"loss": step / 100})
    return out.getvalue().splitlines()


def test_a_quick_stage_tells_every_twentieth_of_it():
    first, *lines, last = lines_of(steps=400, seconds=0.1)
    assert (first, last) == ("draft-distill: 400 to do", "draft-distill: done in 0:00:40")
    assert [line.split()[1] for line in lines] == [f"{step}/400" for step in range(20, 401, 20)]
    assert lines[4] == "draft-distill: 100/400  loss 1.00  ETA 0:00:30"
    assert "ETA" not in lines[-1]


def test_a_slow_stage_tells_every_half_minute_and_its_time_is_that_of_the_steps_taken_now():
    lines = lines_of(steps=1_000, seconds=10.0, start=500)[1:-1]
    assert [line.split()[1] for line in lines[:3]] == ["501/1,000", "504/1,000", "507/1,000"]
    assert lines[1].endswith("loss 5.04  ETA 1:22:40")


def test_a_log_file_gets_lines_and_a_terminal_a_bar():
    shown = {}
    for terminal in (True, False):
        out = io.StringIO()
        with console_bars(Console(file=out, force_terminal=terminal))("draft-distill", 2) as show:
            assert show is not None
            show(1, {"step": 1, "loss": 0.5, "tokens_per_s": 1234.0})
            shown[terminal] = out.getvalue()
    assert shown[False].splitlines()[1].startswith("draft-distill: 1/2  loss 0.500")
    assert "1,234 tokens/s" in shown[False]
    assert "1/2  loss" not in shown[True]
