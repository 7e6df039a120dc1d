"""The bookkeeping of experiments/cost_model.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cost_model
import pytest

from specjax.evaluation.bench import Run
from specjax.metrics import DecodeStats
from specjax.planning.cost_model import CostModel
from specjax.planning.prediction import Prediction

from . import test_cost_model as law


def point(batch: int, *errors: float) -> cost_model.Point:
    """Whose processes were off by so much."""
    predicted, from_blocks = ([1.0 + part * error for error in errors] for part in (1.0, 0.5))
    return cost_model.Point("d", 1, batch, 0.0, predicted, from_blocks, [1.0] * len(errors))


def test_errors_are_medians_and_worst_of_both_signs():
    found = cost_model.figures([point(1, -0.3), point(1, 0.1), point(4, 0.02)])
    assert found["error"] == pytest.approx([0.1, 0.3])
    assert found["costs_error"] == pytest.approx([0.05, 0.15])
    assert found["by_batch"]["4"]["error"] == pytest.approx([0.02, 0.02])


def test_of_a_point_the_median_of_all_processes_counts():
    rows = [point(1, 0.5, -0.1).to_json(), point(4, 0.7).to_json()]
    found = point(1, 0.2)
    [earlier] = [row for row in rows if cost_model.is_of(row, found)]
    assert found.and_of(earlier).error == pytest.approx(0.2)
    assert len(found.and_of(earlier).measured) == 3
    assert found.and_of(None) == found


def test_the_costs_alone_are_those_of_the_slowest_row_of_each_batch():
    model: CostModel = law.model()
    rows = [(0.0, DecodeStats(blocks, 8, (), (), ())) for blocks in (3, 5, 4, 2)]
    subject: Any = SimpleNamespace(config=SimpleNamespace(bench=SimpleNamespace(prompt_tokens=40)))
    cell = Prediction("d", 3, 2, 1.0, 1.0, 1.0, False)
    found = cost_model.seconds_of(subject, model, cell, Run(1.0, [], rows[0][1], rows))
    start = 0.125 + law.prefill(64) + 0.32
    assert found == pytest.approx(2 * start + (5 + 4) * law.block(3, law.SAMPLED))
