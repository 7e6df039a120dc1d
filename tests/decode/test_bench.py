"""The benchmark's bookkeeping on toys: what is compared with what, and how the figures follow from the runs."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

from specjax import config
from specjax.decode import bench as bench_lib
from specjax.decode import costs
from specjax.decode.bench import AUTOREGRESSIVE, Bench, Cell
from specjax.decode.decoder import Decoder
from specjax.distill import job, measure
from specjax.distill.corpus import Document
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import ConfigError, DataError
from specjax.testing.toys import prefix_model, related

TARGET = prefix_model(0, scale=1.2)
DRAFT = related(TARGET, 1)
SETTINGS = config.Bench(
    prompts=3, prompt_tokens=2, new_tokens=12, batch_sizes=(2,), temperatures=(0.0, 1.0), ks=(1, 3), repeats=2
)
PROMPTS, TUNING = [[1, 2], [3], [0, 1]], [[2], [1, 3], [0]]


def pair(k: int) -> list[tuple[str, int | None]]:
    """The two points of a headline."""
    return [(AUTOREGRESSIVE, None), ("draft_after", k)]


def make(**changes) -> Bench:
    drafters = {"draft_after": lambda k: DraftModel(DRAFT, k), "ngram": lambda k: NGram(k, min_n=1)}
    return Bench(TARGET, drafters, dataclasses.replace(SETTINGS, **changes), PROMPTS, TUNING, "speculative", seed=0)


@pytest.fixture(scope="module")
def measured():
    return make().measure("draft_after")


def test_every_point_of_the_grid_is_there_once_and_batch_1_for_the_headline(measured):
    points = [(r["drafter"], r["k"], r["batch_size"], r["temperature"]) for r in measured["decoding"]]
    assert len(set(points)) == len(points)
    asked = {
        (name, k, 2, t)
        for t in (0.0, 1.0)
        for name, k in [(AUTOREGRESSIVE, None), *((d, k) for d in ("draft_after", "ngram") for k in (1, 3))]
    }
    headline = {(name, k, 1, t) for t, best in measured["best_k"].items() for name, k in pair(best)}
    assert set(points) == asked | headline
    for row in measured["decoding"]:
        assert row["repeats"] == (2 if row["batch_size"] == 1 else 1)
        # Whole batches: three prompts at batch 2 are four rows.
        assert row["tokens"] == 12 * (3 if row["batch_size"] == 1 else 4)
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])


def test_speedups_are_ratios_of_wall_times_at_the_same_batch_and_temperature(measured):
    seconds = {(r["drafter"], r["k"], r["batch_size"], r["temperature"]): r["seconds"] for r in measured["decoding"]}
    for row in measured["decoding"]:
        plain = seconds[AUTOREGRESSIVE, None, row["batch_size"], row["temperature"]]
        assert row["speedup"] == pytest.approx(plain / row["seconds"])
    for temperature, headline in measured["headline"].items():
        best = measured["best_k"][temperature]
        assert headline["k"] == best
        plain, fast = (seconds[name, k, 1, temperature] for name, k in pair(best))
        assert headline["speedup"] == pytest.approx(plain / fast)
        assert headline["ar_tokens_per_s"] == pytest.approx(36 / plain)


def test_greedy_rows_are_compared_and_sampled_ones_are_not(measured):
    for row in measured["decoding"]:
        assert row["identical"] is (True if row["temperature"] == 0 else None)


def test_a_token_that_differs_is_found_with_the_targets_margin_there():
    bench = make()
    plain = bench.run(Cell(AUTOREGRESSIVE, 0, 1, 0.0), PROMPTS)
    assert bench._differences(plain, plain) == []
    changed = [list(tokens) for tokens in plain.tokens]
    changed[1][4] = (changed[1][4] + 1) % TARGET.config.vocab_size
    [found] = bench._differences(dataclasses.replace(plain, tokens=changed), plain)
    logits = TARGET.logits(np.asarray([[*PROMPTS[1], *plain.tokens[1][:4]]], np.int32))[0, -1]
    top = np.sort(np.asarray(logits))
    assert (found["prompt"], found["position"]) == (1, 4)
    assert found["margin"] == pytest.approx(float(top[-1] - top[-2]), abs=1e-6)


def test_the_prediction_is_the_ratio_of_the_parts(monkeypatch):
    """tau 1.75 (acceptance .5 and .25), a block of 2 units against plain steps of 1, prefill 3 and 4 units."""
    bench = make(new_tokens=14)
    stats = dataclasses.replace(
        bench.run(Cell("draft_after", 1, 1, 1.0), TUNING).stats, blocks=4, drafted_at=(4, 4), accepted_at=(2, 1)
    )
    steps = {AUTOREGRESSIVE: costs.StepCosts(1.0, 0.0, 1.0), "draft_after": costs.StepCosts(1.0, 0.5, 2.0)}
    monkeypatch.setattr(bench, "_all_costs", lambda name, k: {1.0: steps[name]})
    monkeypatch.setattr(bench, "_prefill_seconds", lambda name, k, t: 3.0 if name == AUTOREGRESSIVE else 4.0)
    assert bench._predict("draft_after", 2, 1.0, stats) == pytest.approx((3 + 14) / (4 + 2 * 14 / 1.75))


def test_k_is_the_fastest_on_the_tuning_prompts(monkeypatch):
    bench, asked = make(), []

    def run(cell, prompts):
        asked.append(prompts)
        return bench_lib.Run({1: 3.0, 3: 2.0}[cell.k], [], None)  # type: ignore[arg-type]

    monkeypatch.setattr(bench, "run", run)
    assert bench._choose_k("draft_after", 1.0)[0] == 3
    assert asked == [TUNING, TUNING]


def test_costs_of_a_step_are_more_than_those_of_its_passes_and_a_lost_bench_is_freed():
    bench = make()
    found = bench._all_costs("draft_after", 3)
    assert set(found) == {0.0, 1.0}
    for cost in found.values():
        assert cost.target > 0
        assert cost.draft > 0
        assert cost.overhead == pytest.approx(cost.step / (cost.target + cost.draft))
    gone = weakref.ref(bench)
    del bench
    gc.collect()
    assert gone() is None


def test_recompiles_are_counted_where_there_are_some(monkeypatch):
    assert bench_lib.count_recompiles(TARGET, DraftModel(DRAFT, 2), "speculative", prompts=12) == 0
    # Nothing seen before: every bucket is compiled inside the count.
    monkeypatch.setattr(Decoder, "compile", lambda *_, **__: None)
    assert bench_lib.count_recompiles(prefix_model(5), DraftModel(prefix_model(6), 3), "speculative", prompts=4) > 0


def test_the_memory_floor_counts_each_weight_once(monkeypatch, tiny_target):
    monkeypatch.setattr(costs, "stream_bandwidth", lambda num_bytes: 1e6)
    share, bandwidth = bench_lib.memory_floor_share(tiny_target, tokens_per_s=2.0)
    parameters = sum(x.size for x in jax.tree.leaves(tiny_target.params))
    assert share == pytest.approx(2.0 * 4 * parameters / 1e6)
    assert bandwidth == pytest.approx(1e-3)


def documents(count: int, words: int) -> list[Document]:
    return [Document(str(i), f"def function_{i}(value): return value\n" * words) for i in range(count)]


def test_prompts_come_from_held_out_text_and_do_not_repeat(tiny_target):
    prompts = measure.held_out_prompts(documents(4, 20), tiny_target, 8, 6)
    assert [len(p) for p in prompts] == [8] * 6
    with pytest.raises(DataError, match=r"gives \d+ prompts of 8 tokens, bench needs 60"):
        measure.held_out_prompts(documents(2, 20), tiny_target, 8, 60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"new_tokens": 250}, "need 261 positions, the target has 256"), ({"prompts": 90}, "bench needs 180")],
)
def test_what_could_not_be_decoded_is_refused_before_training(tiny_target, changes, message):
    settings = config.Bench(**{"prompts": 2, "prompt_tokens": 8, "new_tokens": 16, "ks": (3,), **changes})
    run = config.RunConfig(target=config.Target(path="x"), data=config.Data(path="x"), bench=settings)
    empty = np.zeros((0, 9), np.int32)
    prepared = job.Prepared(tiny_target, job.Corpus([], documents(4, 20)), empty, empty)
    with pytest.raises(DataError, match=message):
        measure.check(run, prepared)


def test_a_registered_drafter_takes_part_by_its_name(monkeypatch):
    assert config.Bench(drafters=()).drafters == ()
    assert measure._registered("ngram")(4) == NGram(k=4)
    with pytest.raises(ConfigError, match="min_n=5"):
        NGram(min_n=5, max_n=2)
    with pytest.raises(DataError, match="at least one proposal"):
        Decoder(TARGET, NGram(k=0))
