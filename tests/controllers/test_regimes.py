"""Lengths where acceptance changes: within 5% of the best fixed length of each regime, once 64 blocks have passed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.interfaces import Calibration
from specjax.testing.toys import prefix_model, related
from tests.cases import in_proof
from tests.controllers.choices import of_batch, of_rows
from tests.controllers.regimes import DEPTH, after_blocks, after_blocks_of, costs, rows_of, shares_of_the_best

COSTS = {"1.1": costs(1.1), "1.5": costs(1.5), "2": costs(2.0), "2, the first .5": costs(2.0, 0.5), "3": costs(3.0)}
REGIMES = {
    "good, bad, good": (0.9, 0.1, 0.9),
    "bad, good, bad": (0.3, 0.95, 0.3),
    "middling": (0.7, 0.4, 0.8),
    "bad at first": (0.1, 0.9, 0.5),
}
EXPECTED = (0.3, 0.7, 0.9)
QUICK = [("2", "bad at first", 0.3), ("1.5", "middling", 0.9), ("3", "good, bad, good", 0.7)]
CASES = [
    *QUICK,
    *(in_proof(*case) for case in itertools.product(COSTS, REGIMES, EXPECTED) if case not in QUICK),
]


@pytest.mark.parametrize("controller", [of_batch(), of_rows()])
@pytest.mark.parametrize(("cost", "regimes", "expected"), CASES)
def test_one_row_is_near_the_best_length_of_each_regime(controller, cost, regimes, expected):
    chances = np.stack([rows_of(chance) for chance in REGIMES[regimes]])
    assert shares_of_the_best(controller, chances, COSTS[cost], expected).min() > 0.95


@pytest.mark.parametrize(
    ("cost", "regimes", "expected"),
    [QUICK[0], *(in_proof(*case) for case in itertools.product(COSTS, REGIMES, EXPECTED) if case != QUICK[0])],
)
def test_rows_that_are_alike_are_near_the_best_length_of_each_regime(cost, regimes, expected):
    chances = np.stack([rows_of(*[chance] * 4) for chance in REGIMES[regimes]])
    assert shares_of_the_best(of_batch(), chances, COSTS[cost], expected).min() > 0.95


@pytest.mark.parametrize("cost", ["1.5", in_proof("1.1"), in_proof("2")])
def test_rows_that_differ_end_as_soon_as_the_slowest_of_them_can(cost):
    """The batch takes as long as that row, which gets no more proposals than pay for it."""
    rows = [(0.9, 0.9, 0.9, 0.9), (0.95, 0.8, 0.5, 0.3), (0.9, 0.9, 0.9, 0.3)]
    chances = np.stack([rows_of(*row) for row in rows])
    assert shares_of_the_best(of_batch(), chances, COSTS[cost], 0.7).min() > 0.95


def test_a_draft_that_was_given_up_is_taken_up_again_however_bad_it_was_expected_to_be():
    """Expected .3, and always kept from the first look on: 1.79 times plain decoding is possible."""
    chances = np.stack([rows_of(1.0)])
    seconds = costs(1.0 + 5 * 0.47)
    for controller in (of_batch(), of_rows()):
        assert shares_of_the_best(controller, chances, seconds, 0.3, settled=0).min() > 0.85
        assert shares_of_the_best(controller, chances, seconds, 0.3).min() > 0.95


@pytest.mark.parametrize("controller", [of_batch(), of_rows()])
def test_lengths_do_not_flap_where_nothing_changes(controller):
    """A draft of the demo at temperature 1: all lengths are within 3% of each other, and 13% better than none."""
    chances = np.asarray([[[0.80, 0.85, 0.86, 0.87, 0.87]]], np.float32)
    seconds = np.asarray([1, 1.61, 2.16, 2.68, 3.1, 3.52], np.float32)
    assert shares_of_the_best(controller, chances, seconds, 0.8, settled=0, runs=64).min() > 0.97


@pytest.mark.parametrize("controller", [of_batch(), of_rows()])
def test_one_rejection_of_a_draft_that_is_nearly_always_kept_changes_little(controller):
    """The first block of a request is rejected now and then: it threw away what was known, and kept sixteen plain."""
    seconds = costs(3.1, 0.5)
    assert after_blocks(controller, [5, 5, 5], seconds, 0.97) == [5, 5, 5, 5]
    assert min(after_blocks(controller, [0, 5, 5, 5, 5, 5], seconds, 0.97)) >= 3
    assert min(after_blocks(controller, [0] * 8, seconds, 0.97)) <= 1, "eight in a row are a change"


def test_the_first_looks_come_soon_and_further_ones_ever_later():
    found = after_blocks(of_batch(), [0] * 200, costs(2.0, 0.5), 0.3)
    looks = [i for i, k in enumerate(found) if k]
    between = [b - a for a, b in itertools.pairwise(looks)]
    assert looks[0] == 4
    assert between[:2] == [9, 17]
    assert all(gap <= 65 for gap in between)


def test_what_was_found_at_places_that_are_not_tried_is_forgotten():
    """Blocks of one proposal that is always kept become longer again soon, whatever was found behind it before."""
    found = after_blocks(of_batch(), [1] * 12 + [5] * 20, costs(2.4, 0.3), 0.9)
    assert found[0] == 5
    assert 5 in found[-10:]


def test_nobody_looks_where_even_a_draft_that_is_always_kept_gains_little():
    """A look takes more than its block in a row does, and there are many of them."""
    assert set(after_blocks(of_batch(), [0] * 100, costs(5.8), 0.3)) == {0}
    assert len(set(after_blocks(of_batch(), [0] * 100, costs(5.6), 0.3))) > 1


TOY = prefix_model(0)
TEXT_OR_MODEL = Hybrid(DraftModel(related(TOY, 1), DEPTH), DEPTH).bind(TOY).spec
TEXT, MODEL = 0, TEXT_OR_MODEL.model_class


def told(**known) -> Calibration:
    """Blocks whose proposals a model makes cost more than those of the text."""
    return Calibration(costs(2.4, 0.3), np.full(DEPTH, 0.3, np.float32), found=costs(1.8), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("controller", [of_batch(), of_rows()])
def test_a_text_that_is_right_does_not_keep_a_model_that_was_wrong_waiting(controller):
    """Every other block is of the text, which is always right; the model is wrong at first, and right from then on."""
    blocks = [(TEXT, 5), (MODEL, 0)] * 12 + [(TEXT, 5), (MODEL, 5)] * 24
    found = after_blocks_of(controller, TEXT_OR_MODEL, blocks, told())
    of_text, of_model = found[::2], found[1::2]
    assert min(of_text) >= 1
    assert of_model[6:12].count(0) >= 4, "a model that is wrong rests"
    assert min(of_model[-6:]) > 1, "and is asked again"


def test_each_match_class_begins_with_its_own_expected_acceptance():
    by_class = np.full((TEXT_OR_MODEL.match_classes, DEPTH), 0.1, np.float32)
    by_class[MODEL] = 0.9
    blocks = [(TEXT, 5), (MODEL, 5)]
    assert after_blocks_of(of_batch(), TEXT_OR_MODEL, blocks, told(by_class=by_class)) == [0, DEPTH]
    assert after_blocks_of(of_batch(), TEXT_OR_MODEL, blocks, told(by_class=by_class[::-1])) == [DEPTH, 0]
