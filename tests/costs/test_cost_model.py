"""The cost model on a law that is known: what is fitted comes back, and what follows from it is worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from specjax.costs import store
from specjax.costs.acceptance import Acceptance, Row, blocks_distribution
from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, BatchCosts, CostModel, Line, fit
from specjax.costs.measuring import CostTimer, Wanted, spread_lengths, temperatures_of
from specjax.costs.prediction import predict
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import SpecjaxError
from specjax.metrics import DecodeStats, expected_blocks
from specjax.testing.toys import prefix_model, related

CONTEXT, WIDE = 256, 512
BEYOND = {GREEDY: 0.2, SAMPLED: 0.3}


def target(m: int, slots: int = CONTEXT) -> float:
    return 1.0 + 0.1 * m + 0.001 * m * (slots - CONTEXT)


def draft(k: int, slots: int = CONTEXT) -> float:
    return 0.05 + k * (0.25 + 0.0005 * (slots - CONTEXT))


def block(k: int, mode: str) -> float:
    return target(k + 1) + (draft(k) if k else 0.0) + BEYOND[mode] * (1 + 0.1 * k)


def prefill(width: int) -> float:
    return 0.5 + 0.01 * width


def table(**changes) -> dict[tuple, float]:
    lengths = (1, 3, 5)
    found = {
        "target": {m: target(m) for m in (1, 2, 4, 5, 6)},
        "wide_target": {m: target(m, WIDE) for m in (1, 6)},
        "draft": {("d", k): draft(k) for k in (1, 5)},
        "wide_draft": {("d", 5): draft(5, WIDE)},
        "block": {
            **{(PLAIN, 0, mode): block(0, mode) for mode in BEYOND},
            **{("d", k, mode): block(k, mode) for k in lengths for mode in BEYOND},
        },
        "prefill": {(PLAIN, 16): prefill(16), (PLAIN, 64): prefill(64), ("d", 64): prefill(64) + 0.32},
        "shortest": {(): prefill(64) + 2 * block(0, GREEDY) + 0.125},
        **changes,
    }
    keys = {
        part: {where if isinstance(where, tuple) else (where,): where for where in of} for part, of in found.items()
    }
    return {(part, *key): found[part][where] for part, of in keys.items() for key, where in of.items()}


def model(**changes) -> CostModel:
    return CostModel("toy", "float32", True, {2: fit(table(**changes), CONTEXT, WIDE, left_out=[5])})


def test_the_fit_recovers_the_law_at_points_that_it_has_not_seen():
    known = model()
    found = known.of_batch(2)
    assert known.error == pytest.approx((0, 0), abs=1e-9)
    assert [check.name for _, check in known.checks] == ["target, 5 tokens", "d, k = 3, greedy", "d, k = 3, sampled"]
    for k in range(1, 8):
        for mode in BEYOND:
            assert found.block("d", k, mode) == pytest.approx(block(k, mode))
    assert found.block("d", 0) == found.block(PLAIN, 0) == pytest.approx(block(0, GREEDY))
    assert found.at(1024).target(3) == pytest.approx(target(3, 1024))
    assert found.at(1024).drafter("d").each == pytest.approx(0.25 + 0.0005 * 768)
    wider = target(4, 1024) - target(4) + draft(3, 1024) - draft(3)
    assert found.at(1024).block("d", 3) == pytest.approx(block(3, GREEDY) + wider)
    # Prompts are padded to 16 tokens at least, then to powers of two.
    assert found.prefill_of(5) == pytest.approx(prefill(16))
    assert found.prefill_of(33) == pytest.approx(prefill(64))
    assert found.prefill_of(33, "d") == pytest.approx(prefill(64) + 0.32)
    assert found.host == pytest.approx(0.125)


def test_points_off_the_law_are_told_as_errors():
    worse = {**table(), ("block", "d", 3, GREEDY): 2 * block(3, GREEDY)}
    found = CostModel("toy", "float32", True, {2: fit(worse, CONTEXT, WIDE, left_out=[5])})
    assert found.error == (pytest.approx(0, abs=1e-9), pytest.approx(0.5))


def test_one_length_and_one_cache_are_enough():
    few = table(
        draft={("d", 2): 0.5},
        wide_draft={},
        wide_target={},
        block={(PLAIN, 0, GREEDY): 1.2, ("d", 2, GREEDY): 2.0},
        prefill={(PLAIN, 16): 1.0, ("d", 16): 1.0},
    )
    found = fit(few, CONTEXT, CONTEXT)
    assert CostModel("toy", "float32", True, {1: found}).error is None
    assert found.block("d", 2) == pytest.approx(2.0)
    assert found.drafter("d").each == found.at(4096).drafter("d").each == pytest.approx(0.25)


def test_tokens_a_second_by_hand():
    """Every draft is kept: 7 tokens are 2 blocks of 4."""
    known = {("d", 3, 0.7): Acceptance((1.0, 1.0, 1.0))}
    plain, fast = predict(model(), known, [2], prompt=40, tokens=7)
    seconds = 0.125 + prefill(64) + 0.32 + 2 * block(3, SAMPLED)
    assert (fast.drafter, fast.tokens_per_s) == ("d", pytest.approx(14 / seconds))
    seconds = 0.125 + prefill(64) + 7 * block(0, SAMPLED)
    assert (plain.drafter, plain.tokens_per_s) == (PLAIN, pytest.approx(14 / seconds))


def test_costs_survive_json():
    costs = model().batches[2]
    assert TypeAdapter(BatchCosts).validate_json(json.dumps(dataclasses.asdict(costs))) == costs


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m.of_batch(3), "batch 3 is decoded as 4 rows, and only 2 are known; calibrate"),
        (lambda m: m.of_batch(2).block("e", 1), "drafter 'e' was not calibrated, known here are d"),
    ],
)
def test_what_is_not_known_is_said(call, says):
    with pytest.raises(SpecjaxError, match=says):
        call(model())


def test_a_line_goes_on_beyond_its_ends():
    line = Line.through({4: 3.0, 1: 0.0, 2: 1.0})
    assert [line(x) for x in (0, 1, 1.5, 3, 6)] == pytest.approx([-1, 0, 0.5, 2, 5])


def test_blocks_of_a_batch_are_those_of_its_slowest_row():
    at = (0.8, 0.5, 0.3)
    chances = blocks_distribution(at, 20)
    assert chances.sum() == pytest.approx(1)
    assert chances @ np.arange(21) == pytest.approx(expected_blocks(at, 20))
    alike = Acceptance(at)
    assert alike.blocks(20) == pytest.approx(expected_blocks(at, 20))
    within = np.cumsum(chances)
    assert alike.blocks(20, 8) == pytest.approx(np.sum(1 - within**8))
    # Of two rows that take 4 and 6 blocks, the slower of two drawn takes 4 once in four times.
    counted = Acceptance(at, rows=(Row(at, 6, 20), Row(at, 4, 20)))
    assert counted.blocks(20) == pytest.approx(5)
    assert counted.blocks(20, 2) == pytest.approx(0.25 * 4 + 0.75 * 6)
    assert counted.blocks(40) == pytest.approx(5 * expected_blocks(at, 40) / expected_blocks(at, 20))


def test_acceptance_counts_blocks_that_proposed_less():
    rows = [DecodeStats(4, 8, (2, 1), (2, 1), (2, 1)), DecodeStats(6, 8, (2, 2), (2, 2), (2, 0))]
    found = Acceptance.counted(rows)
    assert found.at == (0.4, 0.1)
    assert [row.blocks for row in found.rows] == [4, 6]
    assert found.alpha == pytest.approx(5 / 7)
    assert Acceptance.of_alpha(0.5, 3).at == (0.5, 0.25, 0.125)
    assert Acceptance.of_alpha(0.5, 3).first(1).at == (0.5,)


def test_shorter_blocks_are_worked_out_row_by_row():
    """12 tokens: one row keeps both drafts of every block, the other none. In blocks of one draft the first takes 6."""
    rows = [DecodeStats(4, 12, (4, 4), (4, 4), (4, 4)), DecodeStats(12, 12, (12, 12), (12, 0), (0, 0))]
    found = Acceptance.counted(rows)
    assert found.at == (0.25, 0.25)
    assert found.blocks(12) == pytest.approx(8)
    short = found.first(1)
    assert [row.blocks for row in short.rows] == pytest.approx([6, 12])
    assert short.at == pytest.approx((6 / 18,))
    assert short.blocks(12) == pytest.approx(9)
    assert short.blocks(12, 2) == pytest.approx(0.25 * 6 + 0.75 * 12)


def test_lengths_that_are_measured():
    assert spread_lengths((1, 2, 3, 5, 7)) == [1, 3, 7]
    assert spread_lengths((1, 3)) == [1, 2, 3]
    assert spread_lengths((2, 3)) == [2, 3]
    assert spread_lengths((4,)) == [4]
    wanted = Wanted([[1, 2]], 8, {"d": (1, 5)}, temperatures_of((0.7, 0.0)), {})
    assert wanted.temperatures == {GREEDY: 0.0, SAMPLED: 0.7}
    assert (wanted.fed, wanted.left_out) == ([1, 2, 4, 6], [5])
    assert Wanted([[1]], 8, {}, {}, {}).left_out == []


TARGET = prefix_model(0, scale=1.2)
DRAFT = related(TARGET, 1)


def toys(name: str, k: int) -> Decoder:
    drafters = {PLAIN: lambda k: None, "d": lambda k: DraftModel(DRAFT, k), "ngram": lambda k: NGram(k, min_n=1)}
    return Decoder(TARGET, drafters[name](k))


def test_every_point_is_timed_on_the_programs_that_decode():
    wanted = Wanted([[1, 2], [3, 0]], 8, {"d": (1, 2), "ngram": (1, 2)}, temperatures_of((0.0, 1.0)), {})
    timer = CostTimer(toys, wanted)
    timer.turn()
    found = timer.medians()
    assert (timer._context, timer._wide) == (256, 512)
    assert [key[1] for key in found if key[0] == "target"] == [1, 2, 3]
    assert {key[1:] for key in found if key[0] == "draft"} == {(name, k) for name in ("d", "ngram") for k in (1, 2)}
    assert sum(key[0] == "block" for key in found) == 2 * (1 + 2 * 2)
    assert all(s > 0 for s in found.values())
    costs = timer.costs()
    assert set(costs.drafters) == {"d", "ngram"}
    assert costs.block("d", 2) > 0


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def key(rows=2, dtype="float32", drafter=None, **settings):
    decoder = Decoder(TARGET, drafter or DraftModel(DRAFT, 2))
    return store.key_of(rows, dtype, {"d": decoder}, {"new_tokens": 8, **settings})


def read(known):
    return store.read(known, BatchCosts)


def test_costs_are_kept_for_their_device_model_dtype_and_rows(caches, monkeypatch):
    costs = model().batches[2]
    assert read(key()) is None
    file = store.write(key(), costs)
    assert file is not None
    assert caches in file.parents
    assert read(key()) == costs
    # The same shapes with other weights cost the same.
    assert read(key(drafter=DraftModel(related(TARGET, 2), 2))) == costs
    assert read(key(drafter=NGram(2))) is None
    assert read(key(rows=4)) is None
    assert read(key(dtype="bfloat16")) is None
    assert read(key(new_tokens=9)) is None
    known = key()
    assert read({**known, "device": "another"}) is None
    assert read({**known, "jax": "0.0.1"}) is None


def test_costs_that_are_damaged_are_measured_again(caches, caplog):
    file = store.write(key(), model().batches[2])
    assert file is not None
    file.write_text(file.read_text().replace('"seconds"', '"sceonds"'))
    assert read(key()) is None
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert store.write(key(), model().batches[2]) is None
    assert "not kept" in caplog.text
