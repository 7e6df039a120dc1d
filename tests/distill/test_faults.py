from __future__ import annotations

import concurrent.futures

import pytest

from tests.distill import faults


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    faults.train(directory)
    return faults.left_by(directory)


def test_a_stage_killed_in_a_step_a_save_and_an_evaluation_ends_as_if_it_were_not(expected, tmp_path):
    kills = faults.kills(3, seed=0)
    assert [kill.phase for kill in kills] == ["step", "save", "evaluation"]
    folders = [tmp_path / kill.phase for kill in kills]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(faults.start, folders, kills)) == [-9, -9, -9]
    for folder in folders:
        faults.train(folder)
        assert faults.left_by(folder) == expected
        assert not faults.half_written(folder)


def test_the_comparison_sees_another_order_another_state_and_another_log(expected, tmp_path):
    faults.train(tmp_path)
    assert faults.left_by(tmp_path) == expected
    order = tmp_path / faults.ORDER
    order.write_text(order.read_text().replace("[3, [", "[3, [0, ", 1))
    with pytest.raises(AssertionError):
        assert faults.left_by(tmp_path) == expected


def test_the_moments_are_drawn_from_the_seed():
    assert faults.kills(20, 0) == faults.kills(20, 0) != faults.kills(20, 1)
    assert {kill.phase for kill in faults.kills(20, 0)} == set(faults.PHASES)
