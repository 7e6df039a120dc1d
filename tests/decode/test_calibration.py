"""Costs of blocks: measured in the room that there is, never half, and corrected where they are wrong."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from specjax.decode import known_costs
from specjax.decode.calibration import BlockTimer, agree, between, typical
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.interfaces import Calibration
from specjax.runtime.compile_cache import count_compiles
from specjax.testing.toys import prefix_model, related
from tests.cases import transformer
from tests.controllers.choices import of_batch, of_rows, of_total

TARGET = prefix_model(0, vocab_size=5)
CHEAP, DEAR = [1.0, 1.1, 1.2, 1.3], [1.0, 2.2, 3.4, 4.6]
PROMPTS = [[1], [2, 3]]


def handed_in(decoder: Decoder, seconds: list[float], temperature: float, acceptance: float = 0.7) -> None:
    told: Any = Calibration(np.asarray(seconds, np.float32), np.full(len(seconds) - 1, acceptance, np.float32))  # type: ignore[arg-type]
    decoder.calibrations[temperature == 0, 2] = told


def taking(monkeypatch, seconds: list[float]) -> list[int]:
    """As if blocks took so long, however long they take; what is returned has an entry for each turn."""
    turns: list[int] = []

    def turn(self, blocks):
        turns.append(blocks)
        return np.asarray(seconds)

    monkeypatch.setattr(BlockTimer, "turn", turn)
    return turns


FINDING = {
    "draft_model": (DraftModel(related(TARGET, 1), 4), (True,)),
    "ngram": (NGram(4), (True,)),
    "hybrid": (Hybrid(DraftModel(related(TARGET, 1), 4), 4), (True, False)),
}


@pytest.mark.parametrize("drafter", FINDING)
def test_a_timed_block_has_the_length_that_it_is_held_to(drafter, monkeypatch):
    """Whatever the drafter reads; else all lengths seem to cost the same."""
    made, told = FINDING[drafter]
    run, seen = BlockTimer.run, set()

    def counted(self, length, blocks, since, found=True):
        seconds, state = run(self, length, blocks, since, found)
        if blocks and length is not None and self.certain.tokens[0, 0] == since.tokens[0, 0]:
            new = np.asarray(state.counters.drafted_at - since.counters.drafted_at)[0]
            count = int(state.counters.blocks[0] - since.counters.blocks[0])
            assert new.tolist() == [count] * length + [0] * (4 - length)
            seen.add((length, found))
        return seconds, state

    monkeypatch.setattr(BlockTimer, "run", counted)
    Decoder(TARGET, made).calibrate([[1, 2, 3]], blocks=3, seconds=0, temperature=0.0)
    assert seen >= {*itertools.product((0, 1, 2, 3, 4), told)}


@pytest.mark.parametrize("length", [40, 61, 63])
def test_calibration_fits_into_the_positions_that_there_are(length):
    """A prompt that leaves room for a request leaves less than 12 blocks of 4 tokens."""
    target = transformer(0, max_positions=64)
    decoder = Decoder(target, DraftModel(transformer(1), 3))
    prompt = (np.arange(length) % 5).tolist()
    assert decoder.calibrate([prompt], seconds=0, temperature=0.0) is not None
    new = 64 - length
    found = decoder.generate([prompt], max_new_tokens=new, temperature=0.0, ignore_eos=True)
    plain = Decoder(target).generate([prompt], max_new_tokens=new, temperature=0.0, ignore_eos=True)
    assert found.tokens == plain.tokens


def test_where_no_block_fits_nothing_is_measured():
    decoder = Decoder(transformer(0, max_positions=4), DraftModel(transformer(1), 5))
    assert decoder.calibrate([[1]], temperature=0.0) is None
    assert decoder.calibrations == {}
    decoder.generate([[1]], max_new_tokens=3, temperature=0.0)


def test_what_was_interrupted_leaves_nothing(monkeypatch):
    decoder = Decoder(TARGET, DraftModel(related(TARGET, 1), 3))
    before = decoder.generate(PROMPTS, max_new_tokens=20, temperature=0.0)

    def interrupted(self, blocks):
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockTimer, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.calibrate(PROMPTS, blocks=2, seconds=0, temperature=0.0)
    assert decoder.calibrations == {}
    after = decoder.generate(PROMPTS, max_new_tokens=20, temperature=0.0)
    assert (after.tokens, after.stats) == (before.tokens, before.stats)


def test_one_cache_of_the_target_is_there_while_blocks_are_timed(monkeypatch):
    target = transformer(0)
    decoder = Decoder(target, DraftModel(transformer(1), 2))
    run, most = BlockTimer.run, []

    def counted(self, *args):
        found = run(self, *args)
        shape = self.state.cache.layers[0].keys.shape
        most.append(sum(x.shape == shape for x in jax.live_arrays()))
        return found

    monkeypatch.setattr(BlockTimer, "run", counted)
    before = len(jax.live_arrays())
    decoder.calibrate(PROMPTS, blocks=2, seconds=0, temperature=0.0)
    assert before > 0
    layers, drafted = target.config.num_layers, transformer(1).config.num_layers
    # Keys and values of the target's one cache, and of the draft's, which is copied: as it was, and as it is.
    assert max(most) <= 2 * layers + 4 * 2 * drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("told", "true", "k"), [(DEAR, CHEAP, 3), (CHEAP, DEAR, 0)])
def test_costs_that_are_wrong_are_corrected_after_64_blocks(told, true, k, temperature, monkeypatch):
    decoder = Decoder(TARGET, DraftModel(TARGET, 3))
    handed_in(decoder, told, temperature)
    turns = taking(monkeypatch, true)
    found = decoder.generate(PROMPTS, max_new_tokens=400, temperature=temperature, ignore_eos=True)
    believed = 3 - k
    for proposals in found.proposals:
        assert set(proposals[:64]) == {believed}
        # The next block was chosen before, and the first one with proposals is a look.
        assert set(proposals[66:-3]) == {k}
    assert len(turns) == 3, "one that does not agree, and two more"
    np.testing.assert_allclose(decoder.calibrations[temperature == 0, 2].seconds, true, rtol=1e-5)


def test_costs_that_are_right_take_one_turn_and_stay(monkeypatch):
    decoder = Decoder(TARGET, DraftModel(TARGET, 3))
    handed_in(decoder, CHEAP, 0.0)
    turns = taking(monkeypatch, [2 * x for x in CHEAP])  # a machine of half the speed
    decoder.generate(PROMPTS, max_new_tokens=400, temperature=0.0, ignore_eos=True)
    assert len(turns) == 1
    np.testing.assert_allclose(decoder.calibrations[True, 2].seconds, CHEAP, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measuring_between_two_blocks_changes_nothing_of_a_generation(temperature, monkeypatch):
    """Rows, their noise, the draft's cache and the controller's evidence are as they were."""
    target = transformer(0)
    decoder = Decoder(target, DraftModel(transformer(1), 3))
    real, turns, results = BlockTimer.turn, [], []

    def without_effect(self, blocks):
        turns.append(real(self, blocks))

    for turn in (without_effect, lambda self, blocks: None):
        handed_in(decoder, CHEAP, temperature)
        monkeypatch.setattr(BlockTimer, "turn", turn)
        results.append(decoder.generate(PROMPTS, max_new_tokens=200, temperature=temperature, ignore_eos=True))
    assert len(turns) == 1
    assert turns[0].min() > 0
    assert results[0].tokens == results[1].tokens
    assert results[0].stats == results[1].stats


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_the_middle_of_a_generation_blocks_of_every_length_are_timed(temperature, monkeypatch):
    """Whatever the controller has chosen by then."""
    decoder, run, seen = Decoder(TARGET, DraftModel(related(TARGET, 1), 3)), BlockTimer.run, []

    def counted(self, rung, blocks, since, found=True):
        found = run(self, rung, blocks, since, found)
        after, before = (np.asarray(state.counters.drafted_at[0]) for state in (found[1], since))
        seen.append((rung, blocks, (after - before).tolist()))
        return found

    monkeypatch.setattr(BlockTimer, "run", counted)
    handed_in(decoder, DEAR, temperature)
    decoder.generate(PROMPTS, max_new_tokens=100, temperature=temperature, ignore_eos=True)
    assert {rung for rung, _, _ in seen} == {0, 1, 2, 3}
    for rung, blocks, drafted in seen:
        assert drafted == [blocks] * rung + [0] * (3 - rung)


@pytest.mark.parametrize(("told", "true"), [(DEAR, CHEAP), (CHEAP, DEAR), (DEAR, DEAR)])
def test_correcting_compiles_nothing_after_the_warm_up(told, true, monkeypatch):
    target = transformer(0)
    decoder = Decoder(target, DraftModel(target, 3))
    handed_in(decoder, told, 0.0)
    decoder.compile(PROMPTS, max_new_tokens=150, temperature=0.0)
    real = BlockTimer.turn

    def turn(self, blocks):
        assert real(self, blocks) is not None
        return np.asarray(true)

    monkeypatch.setattr(BlockTimer, "turn", turn)
    with count_compiles() as count:
        for _ in range(3):
            decoder.generate(PROMPTS, max_new_tokens=150, temperature=0.0, ignore_eos=True)
    assert count.programs == 0


def test_a_machine_that_is_slow_for_a_while_does_not_change_how_lengths_compare():
    """Turns of another pace, and one length disturbed in one of them."""
    true = np.asarray(CHEAP)
    turns = [true, 3 * true, 1.5 * true, true, 2.5 * true]
    turns[3] = true * [4, 1, 1, 1]
    found = typical(turns)
    np.testing.assert_allclose(found / found[0], true, rtol=0.02)


def test_costs_that_are_not_to_be_corrected_are_kept(monkeypatch):
    monkeypatch.setattr(known_costs, "_HANDED_IN", 1)
    turns = taking(monkeypatch, CHEAP)
    for controller in (of_batch(), of_rows(), of_total(4)):
        decoder = Decoder(TARGET, DraftModel(TARGET, 3), controller=controller)
        handed_in(decoder, DEAR, 0.0)
        decoder.generate(PROMPTS, max_new_tokens=100, temperature=0.0, ignore_eos=True)
    assert turns == []


def test_costs_are_measured_again_after_a_hundred_times_as_long_as_that_took():
    known: Any = Calibration(np.asarray(CHEAP), np.full(3, 0.7))  # type: ignore[arg-type]
    correction = known_costs.Correction(known, measured=True, took=0.03)
    correction.decoded(2.9, blocks=500)
    assert not correction.due
    correction.decoded(0.2, blocks=50)
    assert correction.due


def test_of_two_measurements_that_agree_the_mean_counts():
    one, other = np.asarray([1.0, 1.5, 3.1], np.float32), 2 * np.asarray([1.0, 1.7, 3.85], np.float32)
    assert agree(other, one)
    found = between(one, other)
    np.testing.assert_allclose(found / found[0], [1.0, np.sqrt(1.5 * 1.7), np.sqrt(3.1 * 3.85)], rtol=1e-5)
    assert not agree(np.asarray([1.0, 1.5, 6.2]), one)
