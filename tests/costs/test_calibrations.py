"""What controllers weigh with, kept from one program to the next."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from specjax.costs import store
from specjax.costs.calibrations import calibrate
from specjax.decode import calibration
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.testing.toys import prefix_model, related

TARGET = prefix_model(0)
PROMPTS = [[1], [2, 3]]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Decoder, "calibrate", functools.partialmethod(Decoder.calibrate, blocks=2, seconds=0.0))


def decoder(seed=1, **changes):
    return Decoder(TARGET, DraftModel(related(TARGET, seed), k=2), **changes)


def hybrid(seed=1):
    return Decoder(TARGET, Hybrid(DraftModel(related(TARGET, seed), k=2), k=2))


@pytest.mark.parametrize("decoder", [decoder, hybrid])
def test_it_is_measured_once_and_read_by_the_next_program(decoder, monkeypatch):
    first = decoder()
    found = calibrate(first, PROMPTS, temperature=0.0)
    assert found is not None
    assert found.measured
    assert found.summary == f"costs of blocks measured in {found.seconds:.1f} s, kept in {found.file}"
    monkeypatch.setattr(calibration, "agree", lambda found, known: True)
    # The weights of the second draft are others, the shapes are not.
    for program in (first, decoder(seed=2)):
        again = calibrate(program, PROMPTS, temperature=0.0)
        assert again is not None
        assert (again.measured, again.summary) == (False, f"costs of blocks read from {found.file}")
        for name in ("seconds", "catch_up", "found"):
            np.testing.assert_array_equal(getattr(again.calibration, name), getattr(found.calibration, name))
    assert decoder().calibrations == {}
    assert list(program.calibrations) == [(True, 2)]


def test_acceptance_is_that_of_the_draft_the_prompts_and_the_temperature(monkeypatch):
    """Of a draft that equals its target, after one of the same shape that does not, and the other way round."""
    monkeypatch.setattr(calibration, "agree", lambda found, known: True)
    monkeypatch.setattr(Decoder, "calibrate", functools.partialmethod(Decoder.calibrate, blocks=24, seconds=0.0))
    same, other = (Decoder(TARGET, DraftModel(model, k=2)) for model in (TARGET, related(TARGET, 1, 0.0)))
    found = [calibrate(program, PROMPTS, temperature=0.0) for program in (other, same, other)]
    assert [kept is not None and kept.measured for kept in found] == [True, False, False]
    bad, good, again = (kept.calibration.acceptance for kept in found if kept is not None)
    assert good.min() > 0.9
    assert bad[0] < 0.7
    np.testing.assert_array_equal(bad, again)


def test_costs_of_a_bad_moment_are_measured_again(monkeypatch):
    """They were read, and no turn confirms them."""
    found = calibrate(decoder(), PROMPTS, temperature=0.0)
    assert found is not None
    monkeypatch.setattr(calibration, "agree", lambda found, known: False)
    again = calibrate(decoder(), PROMPTS, temperature=0.0)
    assert again is not None
    assert (again.measured, again.file) == (True, found.file)


def test_one_slow_moment_does_not_make_a_program_measure_again(monkeypatch):
    """The second turn confirms what the first did not."""
    found, verdicts = calibrate(decoder(), PROMPTS, temperature=0.0), [False, True]
    monkeypatch.setattr(calibration, "agree", lambda found, known: verdicts.pop(0))
    again = calibrate(decoder(), PROMPTS, temperature=0.0)
    assert found is not None
    assert again is not None
    assert not again.measured
    assert verdicts == []


@pytest.mark.parametrize(
    ("changes", "prompts", "temperature"),
    [
        ({}, PROMPTS, 1.0),
        ({}, [*PROMPTS, [1]], 0.0),
        ({"controller": {"kind": "adaptive", "per": "row"}}, PROMPTS, 0.0),
    ],
)
def test_other_programs_batches_and_controllers_measure_their_own(changes, prompts, temperature, monkeypatch):
    calibrate(decoder(), PROMPTS, temperature=0.0)
    other = decoder(**changes)
    found = calibrate(other, prompts, temperature=temperature)
    assert found is not None
    assert found.measured


def test_what_is_damaged_is_measured_again_and_so_is_what_is_asked_for():
    found = calibrate(decoder(), PROMPTS, temperature=0.0)
    assert found is not None
    assert found.file is not None
    again = calibrate(decoder(), PROMPTS, again=True, temperature=0.0)
    found.file.write_text(found.file.read_text().replace("catch_up", "catch_ups"))
    damaged = calibrate(decoder(), PROMPTS, temperature=0.0)
    assert again is not None
    assert damaged is not None
    assert (again.measured, damaged.measured) == (True, True)


def test_what_does_not_weigh_is_left_alone():
    for program in (decoder(controller="fixed"), Decoder(TARGET)):
        assert calibrate(program, PROMPTS) is None
        assert program.calibrations == {}


def test_another_rule_or_controller_is_another_program():
    programs = [decoder(), decoder(verifier="block"), decoder(controller={"kind": "adaptive", "per": "row"})]
    assert len({store.shape_of(program) for program in programs}) == 3
    assert store.shape_of(decoder(seed=2)) == store.shape_of(decoder())
