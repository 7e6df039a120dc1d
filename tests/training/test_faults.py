from __future__ import annotations

import concurrent.futures
import shutil

import pytest

from tests.training import faults


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    faults.train(directory)
    return directory


def test_a_stage_killed_in_a_step_a_save_and_an_evaluation_ends_as_if_it_were_not(uninterrupted, tmp_path):
    kills = faults.kills(3, seed=0)
    assert [kill.phase for kill in kills] == ["step", "save", "evaluation"]
    folders = [tmp_path / kill.phase for kill in kills]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(faults.start, folders, kills)) == [-9, -9, -9]
    expected = faults.left_by(uninterrupted)
    for folder in folders:
        faults.train(folder)
        assert faults.left_by(folder) == expected
        assert not faults.half_written(folder)


@pytest.mark.parametrize(
    ("file", "was", "now"),
    [(faults.ORDER, "[3, [", "[3, [0, "), ("stage/log.jsonl", '"step": 7', '"step": 8')],
)
def test_the_comparison_sees_another_order_and_another_log(file, was, now, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "copy")
    text = (tmp_path / "copy" / file).read_text()
    assert was in text
    (tmp_path / "copy" / file).write_text(text.replace(was, now, 1))
    with pytest.raises(AssertionError):
        assert faults.left_by(tmp_path / "copy") == faults.left_by(uninterrupted)


def test_the_moments_are_drawn_from_the_seed():
    assert faults.kills(20, 0) == faults.kills(20, 0) != faults.kills(20, 1)
    assert {kill.phase for kill in faults.kills(20, 0)} == set(faults.PHASES)
