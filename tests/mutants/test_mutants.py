"""A test that cannot fail proves nothing: for each planted error, one test of the suite that finds it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from pathlib import Path

import jax
import pytest

from specjax.decode import programs
from tests.decode.test_lossless import test_the_distribution_of_three_tokens_in_short as short_distribution
from tests.mutants.mutants import MUTANTS, Mutant
from tests.verifiers import test_distributions

TESTS = Path(__file__).parents[1]


def forget_programs() -> None:
    """A compiled program remembers the functions it was made of."""
    programs.compiled_prefill.cache_clear()
    programs.compiled_chunk.cache_clear()
    jax.clear_caches()


@pytest.fixture(autouse=True)
def fresh_programs():
    forget_programs()
    yield
    forget_programs()


def run_killer(mutant: Mutant, **fixtures) -> None:
    with contextlib.ExitStack() as stack:
        if mutant.killer.__module__ == test_distributions.__name__:  # what its fixture sets
            stack.enter_context(jax.enable_x64(True))
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
        wanted = inspect.signature(mutant.killer).parameters
        mutant.killer(**mutant.parameters, **{name: value for name, value in fixtures.items() if name in wanted})


def claimed_by_a_test(error: AssertionError) -> bool:
    """Raised by an assertion of the test, not by one on the way to it."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised_in.is_relative_to(TESTS) or "numpy/testing" in raised_in.as_posix()


def test_every_killer_is_a_test_that_the_suite_runs():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    for mutant in MUTANTS:
        assert mutant.killer.__name__.startswith("test_")
        marks = [mark for mark in getattr(mutant.killer, "pytestmark", []) if mark.name == "parametrize"]
        given: list[str] = []
        for mark in marks:
            names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else [*mark.args[0]]
            values = tuple(mutant.parameters[name] for name in names)
            one = isinstance(mark.args[0], str) and len(names) == 1  # then pytest takes a plain case as it is
            runs = [c.values if hasattr(c, "marks") else (c,) if one else tuple(c) for c in mark.args[1]]
            assert values in runs, mutant.name
            given += names
        given += [name for name in mutant.parameters if name in vars(sys.modules[mutant.killer.__module__])]
        assert sorted(given) == sorted(mutant.parameters), mutant.name


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_planted_error_is_found(mutant: Mutant, monkeypatch, record_property, tmp_path):
    record_property("mutant", (mutant.name, mutant.part, mutant.killed_by))
    mutant.plant(monkeypatch)
    if mutant.lossless:
        short_distribution()
    with pytest.raises(AssertionError) as caught:
        run_killer(mutant, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert claimed_by_a_test(caught.value), "an error in the planted code itself finds nothing"
