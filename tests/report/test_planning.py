"""What a plan says in words and numbers, for plans made up by hand."""

from __future__ import annotations

import io

import matplotlib
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from specjax.costs.cost_model import GREEDY, BatchCosts, Check, CostModel, DrafterCosts, Line
from specjax.costs.devices import Device
from specjax.costs.prediction import DraftEconomics, Prediction
from specjax.costs.roofline import Pass, Work
from specjax.costs.training import TrainingCost, computed_training
from specjax.report import planning

matplotlib.use("agg")
ECONOMICS = DraftEconomics(Line((1.0,), (1.0,)), 1.0, 1.0)
TO_PAY = {
    "batch": 4,
    "temperature": 1.0,
    "least_alpha_without_cost": 0.25,
    "least_alpha_at_a_tenth": 0.333,
    "beside": "small",
    "alpha": 0.8,
    "cost": 0.2,
    "least_alpha_at_its_cost": 0.45,
    "most_cost_at_its_alpha": 0.5,
}


def shown(table: Table) -> str:
    file = io.StringIO()
    Console(file=file, width=120).print(table)
    return " ".join(file.getvalue().split())


def test_the_fastest_and_the_error_are_in_the_table():
    rows = [
        Prediction("autoregressive", 0, 1, 0.0, 100.0, 1.0, False, measured=125.0),
        Prediction("small", 3, 1, 0.0, 150.0, 1.5, True, measured=150.0),
    ]
    text = shown(planning.predictions_table(rows, measured=True))
    assert "from times measured here" in text
    assert "-20.0%" in text
    assert "computed, not measured" in shown(planning.predictions_table(rows[:0], measured=False))


def test_what_pays_is_said_in_words():
    first, second = planning.to_pay_lines(TO_PAY, 10e6)
    assert first == (
        "batch 4, T = 1: a draft pays with alpha above 0.25 if it cost nothing, above 0.33 at 0.10 passes of the target"
    )
    assert "above 0.45 at 0.20 passes" in second
    assert "less than 0.50 passes of the target (about 5.0M weights" in second
    none = {**TO_PAY, "least_alpha_at_its_cost": None, "most_cost_at_its_alpha": None}
    assert "no alpha is enough; with its alpha of 0.80 no cost is low enough" in planning.to_pay_lines(none, 1.0)[1]
    hopeless = {**TO_PAY, "least_alpha_without_cost": None}
    assert planning.to_pay_lines(hopeless, 1.0) == [
        "batch 4, T = 1: no draft pays, not even one that costs nothing and is always right"
    ]


def test_the_curve_of_no_gain_is_where_alpha_is_the_cost():
    """Passes cost the same for any number of tokens: one draft pays from alpha = c on."""
    [panel] = planning.iso_speed_panels({(1, 0.0): ECONOMICS}, [], measured=False)
    assert "computed, not measured" in panel.title
    axes = Figure().add_subplot()
    panel.draw(axes)
    curve = next(line for line in axes.get_lines() if line.get_label() == "pays")
    assert curve.get_xdata() == pytest.approx(curve.get_ydata(), abs=1e-6)


def test_the_roofline_names_what_bounds_a_pass():
    device = Device("toy", 1e9, 1e10, "float32", True)
    text = shown(planning.passes_table([Pass("target, 1 token", 1, Work(2e6, 1e6), device, 4e-3)]))
    for said in ("Roofline of toy (measured)", "ridge 10.0 FLOP/byte", "memory", "25%"):
        assert said in text


def test_a_calibration_shows_its_errors():
    line = Line((1.0,), (0.002,))
    drafter = DrafterCosts(0.001, 0.0, 0.0, {GREEDY: line}, 0.0)
    costs = BatchCosts(256, line, line, {GREEDY: 0.0}, {"small": drafter}, line, 0.0, (Check("x", 1.0, 0.8),))
    text = shown(planning.calibration_table(CostModel("cpu", "float32", True, {1: costs}), {1: True}))
    for said in ("batch 1 (kept)", "small, a pass", "25.0%"):
        assert said in text


def test_training_is_computed_from_its_arithmetic():
    device = Device("toy", 1e9, 1e12, "bfloat16", False)
    cost = computed_training(100, 10, 2e9, 3600, device)
    assert cost.tokens_per_s == pytest.approx(0.4 * 1e12 / 260)
    assert cost.memory == 2e9
    assert "computed, not measured, at 40% of the device's peak" in planning.training_line(cost)
    measured = planning.training_line(TrainingCost(7200, 2.0, 1e9, True))
    assert "7,200 tokens, 1 h 00 min at 2 tokens/s, 1.00 GB (measured over a few steps)" in measured
