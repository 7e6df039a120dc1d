"""The throughput benchmark's bookkeeping: what counts as training, what is taken off, and what is compared."""

from __future__ import annotations

import time

import pytest
import training_throughput
from training_throughput import Turn, Turns, figures

from tests.training import toys


def test_figures_are_medians_of_plain_turns_with_saves_spread_and_evaluations_apart():
    """Steps of 1 s, of 2 s in one slow turn; a save takes 6 s of its own turn and 2 of the next, evaluations 30 and 20
    s. The other loops take 0.9 and 0.8 of the trainer's time at the same moment."""
    stage = toys.stage(steps=100, eval_every=50, save_every=40)
    turns = []
    for last in range(20, 101, 10):
        step = 2.0 if last == 30 else 1.0
        extra = {40: 6.0, 50: 2.0 + 30.0, 80: 6.0, 90: 2.0, 100: 20.0}.get(last, 0.0)
        others = {} if last % 40 == 0 else {"bare": 0.9 * step, "hand-written": 0.8 * step}
        turns.append(Turn(last - 9, last, 10 * step + extra, others))
    found = figures(turns, stage)
    assert found["turns"] == 4
    # Two saves, of which one's second turn is evaluated too and does not count.
    assert found["save_s"] == pytest.approx((6 + 6 + 2) / 2)
    assert found["saving_share"] == pytest.approx(7 / 47)
    assert found["step_s"] == pytest.approx({"trainer": 47 / 40, "bare": 0.9, "hand-written": 0.8})
    assert found["ratios"]["trainer / bare"] == pytest.approx([0.9 * 40 / 47] * 3)
    assert found["ratios"]["bare / hand-written"] == pytest.approx([0.8 / 0.9] * 3)
    assert found["evaluation_s"] == pytest.approx([32.0, 20.0])
    assert found["evaluation_share"] == pytest.approx(20 / (20 + 50 * 47 / 40))


def test_the_other_loops_take_turns_where_the_trainer_waits_and_nothing_is_being_saved(monkeypatch, tmp_path):
    """Each of their turns moves the clock by an hour, and none of that is the trainer's."""
    waited, now = [0.0], time.perf_counter

    def loop(seconds):
        waited[0] += 3600.0
        return seconds

    monkeypatch.setattr(training_throughput.time, "perf_counter", lambda: waited[0] + now())
    turns = Turns({"bare": lambda: loop(1.0), "hand-written": lambda: loop(2.0)}, toys.stage(save_every=20))
    toys.train(tmp_path, progress=turns, steps=40, save_every=20, eval_every=25)
    assert [(t.first, t.last) for t in turns.turns] == [(11, 20), (21, 25), (26, 30), (31, 40)]
    assert [t.others for t in turns.turns] == [{}, *[{"bare": 1.0, "hand-written": 2.0}] * 2, {}]
    assert all(0 < t.seconds < 3600 for t in turns.turns)
