"""When tokens were committed, and the metrics of a generation made of it: `GenerationResult.metrics`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from typing import Any

import jax
import numpy as np
import pytest

from specjax.decode import decoder as decoder_lib
from specjax.decode.decoder import Decoder
from specjax.decode.result import HostSync, commit_times
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import DataError
from specjax.interfaces import ACCEPTED, BONUS, CORRECTED, ORIGINS
from specjax.metrics import DecodeStats, cost_per_1k_tokens
from specjax.runtime.compile_cache import count_compiles
from specjax.testing.toys import prefix_model

TARGET, DRAFT = prefix_model(0), prefix_model(1)
PROMPTS = [[1, 2, 3], [0], [1, 3] * 20]


def codes(*blocks: int, cut: bool = False) -> np.ndarray:
    """Origin codes of blocks of so many tokens each; ``cut``: the last one has no token of the target's own."""
    found = [code for size in blocks for code in [ACCEPTED + 4 * len(ORIGINS)] * (size - 1) + [CORRECTED]]
    return np.asarray([*found[:-1], ACCEPTED if cut else BONUS])


def looks(*seen: tuple[float, list[int]]) -> list[HostSync]:
    return [HostSync(seconds, np.asarray(lengths)) for seconds, lengths in seen]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by a second whenever it is asked for: at the start, at every look, at the end."""
    ticks = itertools.count()
    monkeypatch.setattr(decoder_lib, "time", types.SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def test_times_between_two_looks_are_those_of_equally_long_blocks():
    # One block, three until the second look, one more; prompts of 2 and 5 tokens, and a row that pads the batch.
    rows = [codes(2, 1, 3, 1, 2), codes(1, 4, cut=True)]
    seen = looks((1.0, [4, 6, 1]), (4.0, [9, 10, 1]), (4.5, [11, 10, 1]))
    first, second = commit_times(rows, [2, 5], seen)
    assert first == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.5, 4.5]
    assert second == [1.0, 2.0, 2.0, 2.0, 2.0], "its second block is the batch's second, though it ends there"


def test_rows_of_one_token_and_of_none():
    none = np.zeros(0, np.int32)
    assert commit_times([codes(1), none], [3, 4], looks((0.5, [4, 4]))) == [[0.5], []]
    assert commit_times([none], [3], looks((0.5, [3]))) == [[]]
    # A look after a block that committed nothing moves no token.
    assert commit_times([codes(1, 1)], [0], looks((1.0, [1]), (2.0, [2]), (3.0, [2]))) == [[1.0, 2.0]]


@pytest.mark.usefixtures("clock")
def test_the_first_block_and_the_end_are_measured():
    result = Decoder(TARGET, DraftModel(TARGET, 3)).generate(PROMPTS, max_new_tokens=[12, 1, 6], temperature=0.0)
    # The target drafts for itself: blocks of four tokens, cut by the budgets.
    assert result.looks == [1.0, 2.0]
    assert result.seconds == 3.0
    assert result.commit_times == [[1.0] * 4 + [1.5] * 4 + [2.0] * 4, [1.0], [1.0] * 4 + [1.5] * 2]
    assert [result.metrics(row).interpolated for row in range(3)] == [4, 0, 2]


@pytest.mark.usefixtures("clock")
def test_an_end_in_the_first_block_and_several_buckets_of_the_cache():
    [free] = Decoder(TARGET).generate([[1, 2]], max_new_tokens=4, temperature=0.0).tokens
    stopping = prefix_model(0, eos_ids=(free[0],))
    result = Decoder(stopping, DraftModel(TARGET, 3)).generate([[1, 2]], max_new_tokens=9, temperature=0.0)
    assert result.looks == result.commit_times[0] == [1.0]
    assert result.metrics().to_json()["tpot"] is None
    long = Decoder(TARGET, DraftModel(TARGET, 3)).generate([[1, 2]], max_new_tokens=600, temperature=0.0)
    assert long.looks == [1.0, 2.0, 3.0, 4.0], "after a block, at 256 and 512 slots, and at the end"


@pytest.mark.parametrize("drafter", [None, DraftModel(DRAFT, 3), NGram(4, max_n=3, min_n=1)])
def test_every_token_has_its_time_within_the_call(drafter):
    result = Decoder(TARGET, drafter).generate(PROMPTS, max_new_tokens=[40, 1, 23], temperature=1.0, seed=3)
    assert [len(times) for times in result.commit_times] == [len(row) for row in result.tokens]
    for times in result.commit_times:
        assert times == sorted(times)
        assert times[0] == result.looks[0] > 0
    assert result.commit_times[0][-1] == result.looks[-1] <= result.seconds
    for row, stats in enumerate(result.stats):
        used = collections.Counter(result.proposals[row])
        assert [used[k] for k in range(len(stats.k_used))] == list(stats.k_used)
        assert sum(stats.k_used) == stats.blocks == len(set(result.commit_times[row]))
        assert stats.blocks_without_draft == used[0]


def test_no_draft_and_short_drafts_are_seen():
    result = Decoder(TARGET, NGram(4, max_n=3, min_n=2)).generate([[0]], max_new_tokens=30, temperature=1.0)
    found = result.metrics().to_json()
    assert 0 < found["blocks_without_draft"] < found["target_calls"]
    assert found["blocks_without_draft"] == result.proposals[0].count(0)
    assert Decoder(TARGET).generate([[0]], max_new_tokens=7).metrics().stats.k_used == (7,)


def test_rows_and_the_sum_are_of_the_same_numbers():
    result = Decoder(TARGET, DraftModel(DRAFT, 3)).generate(PROMPTS, max_new_tokens=[40, 1, 23], temperature=1.0)
    rows, total = [result.metrics(row, 3.6) for row in range(3)], result.metrics(price_per_hour=3.6)
    assert [row.tokens for row in rows] == [40, 1, 23]
    assert [row.seconds for row in rows] == [times[-1] for times in result.commit_times]
    assert (total.requests, total.tokens, total.seconds) == (3, 64, result.looks[-1])
    assert total.tokens_per_s == 64 / result.looks[-1]
    assert total.stats == sum(result.stats[1:], result.stats[0])
    assert total.latencies.ttft == [result.looks[0]] * 3
    assert total.cost == pytest.approx(0.001 * result.looks[-1])
    assert total.cost_per_1k_tokens == pytest.approx(cost_per_1k_tokens(3.6, total.tokens_per_s))
    blocks = [stats.blocks for stats in result.stats]
    assert [row.cost for row in rows] == pytest.approx([(total.cost or 0) * count / sum(blocks) for count in blocks])
    assert result.metrics(0).cost is None
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="price_per_hour"):
            result.metrics(price_per_hour=price)


def test_a_single_request_is_its_own_sum():
    result = Decoder(TARGET, DraftModel(DRAFT, 3)).generate([[1, 2]], max_new_tokens=20, temperature=1.0)
    assert result.metrics(0, 2.0).to_json() == result.metrics(price_per_hour=2.0).to_json()


@pytest.mark.parametrize("committed", [False, True])
def test_looking_after_the_first_block_compiles_nothing(committed):
    """Nor where training left the draft's weights committed to a device, and so all that comes of them."""
    draft = DRAFT
    if committed:
        draft = dataclasses.replace(DRAFT, params=jax.device_put(DRAFT.params, jax.devices()[0]))
    decoder = Decoder(TARGET, DraftModel(draft, 2))
    decoder.compile([[1] * 9], max_new_tokens=300, temperature=1.0)
    with count_compiles() as count:
        result = decoder.generate([[2] * 8], max_new_tokens=300, temperature=1.0)
        result.metrics(0, 1.0)
    assert count.programs == 0
    assert len(result.looks) > 1


def test_events_tell_when_their_tokens_came_and_are_those_of_generate():
    decoder = Decoder(TARGET, DraftModel(DRAFT, 3))
    options: dict[str, Any] = {"max_new_tokens": 25, "temperature": 1.0}
    result = decoder.generate([[1, 2]], seed=5, **options)
    for every in (1, 4):
        events = list(decoder.stream([1, 2], seed=5, steps_per_event=every, **options))
        seconds = [event.seconds for event in events]
        assert len(seconds) == -(-result.stats[0].blocks // every)
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert [token for event in events for token in event.tokens] == result.tokens[0]
        assert isinstance(events[-1].stats, DecodeStats)
        assert events[-1].stats == result.stats[0]
