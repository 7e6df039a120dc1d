"""The benchmark's bookkeeping on toys: what is compared with what, and how the figures follow from the runs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from specjax import config
from specjax.costs import timer as costs
from specjax.data.corpus import Document
from specjax.decode import programs
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.errors import ConfigError, DataError
from specjax.evaluation import bench as bench_lib
from specjax.evaluation.bench import AUTOREGRESSIVE, Bench, Cell, Run
from specjax.jobs import bench as measure
from specjax.jobs import inputs
from specjax.metrics import DecodeStats, expected_blocks
from specjax.models import hf
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.testing.toys import prefix_model, related
from specjax.verifiers.speculative import Speculative

TARGET = prefix_model(0, scale=1.2)
DRAFT = related(TARGET, 1)
SETTINGS = config.Bench(
    prompts=3,
    prompt_tokens=2,
    new_tokens=12,
    batch_sizes=(2,),
    temperatures=(0.0, 1.0),
    ks=(2,),
    repeats=2,
    adaptive=False,
)
PROMPTS, TUNING = [[1, 2], [3], [0, 1]], [[2], [1, 3], [0], [3, 1]]


def pair(k: int) -> list[tuple[str, int | None]]:
    """The two points of a headline."""
    return [(AUTOREGRESSIVE, None), ("draft_after", k)]


def make(sampling=None, prompts=PROMPTS, **changes) -> Bench:
    drafters = {"draft_after": lambda k: DraftModel(DRAFT, k), "ngram": lambda k: NGram(k, min_n=1)}
    settings = dataclasses.replace(SETTINGS, **changes)
    return Bench(TARGET, drafters, settings, prompts, TUNING, Speculative(), sampling or {}, seed=0)


@pytest.fixture(scope="module")
def measured():
    bench, ticks = make(adaptive=True), []
    found = bench.measure("draft_after", lambda: ticks.append(None))
    assert len(ticks) == bench.num_ticks
    return found


def at_once(bench: Bench, monkeypatch) -> None:
    """Nothing is decoded or timed: what is asked for is there, in seconds that make a k of 1 the best."""
    new = SETTINGS.new_tokens

    def decode(cell: Cell, batch, seed) -> Run:
        k = cell.k
        stats = DecodeStats(new, new, (new,) * k, (new,) * k, (0,) * k)
        rows = len(batch)
        return Run(1.0 + k, [[0] * new] * rows, dataclasses.replace(stats, blocks=rows * new), [(1.0, stats)] * rows)

    costs_of = [[costs.StepCosts(1.0, 0.5, 1.5, 2.0)]]
    timer = SimpleNamespace(turn=lambda: None, costs=lambda: costs_of)
    monkeypatch.setattr(Decoder, "compile", lambda *_, **__: None)
    monkeypatch.setattr(bench, "_decode", decode)
    monkeypatch.setattr(bench, "timer", lambda *_: timer)
    monkeypatch.setattr(costs, "median_seconds", lambda *_: 1.0)


@pytest.mark.parametrize("batch_sizes", [(1, 2), (2,)])
def test_other_drafts_than_the_favourite_are_decoded_at_its_best_k_and_batch_1_alone(batch_sizes, monkeypatch):
    drafters = {name: lambda k: DraftModel(DRAFT, k) for name in ("draft_before", "draft_after", "shipped")}
    settings = dataclasses.replace(SETTINGS, batch_sizes=batch_sizes, ks=(1, 2), temperatures=(0.0,), repeats=1)
    settings = dataclasses.replace(settings, batch_ks=(2, 3))
    settings, ticks = dataclasses.replace(settings, drafts={"shipped": "where"}), []
    bench = Bench(TARGET, drafters | {"ngram": NGram}, settings, PROMPTS, TUNING, Speculative(), {}, seed=0)
    at_once(bench, monkeypatch)
    found = bench.measure("draft_after", lambda: ticks.append(None))
    assert len(ticks) == bench.num_ticks
    rows = {(row["drafter"], row["k"], row["batch_size"]) for row in found["decoding"]}
    best = found["best_k"][0.0]
    assert {row for row in rows if row[0] in ("shipped", "draft_before")} == {
        ("shipped", best, 1),
        ("draft_before", best, 1),
    }
    assert {(name, k) for name, k, size in rows if size == 2} == {
        (AUTOREGRESSIVE, None),
        *((name, k) for name in ("draft_after", "ngram") for k in (2, 3)),
    }
    compared = measure.comparison(found, ["text"] * len(PROMPTS))
    assert {row["drafter"] for row in compared} == {AUTOREGRESSIVE, *drafters, "ngram"}


def test_a_k_is_chosen_on_all_tuning_prompts_and_the_slow_ones_drop_out(monkeypatch):
    """Seconds are given: k = 2 looks best on the first prompts, k = 1 is within reach of it and best on all."""
    bench, asked, ticks = make(prompts=PROMPTS[:2], ks=(1, 2, 3)), [], []

    def run(cells, prompts, tick):
        asked.append(([cell.k for cell in cells], list(prompts)))
        first = prompts == TUNING[:2]
        seconds = {1: 10.5, 2: 10.0, 3: 11.5} if first else {1: 9.0, 2: 10.0, 3: 1.0}
        for _ in range(len(cells) * len(prompts)):
            tick()
        return {cell: Run(seconds[cell.k], [], DecodeStats(1, 1, (), (), ())) for cell in cells}

    monkeypatch.setattr(bench, "run", run)
    best, found = bench.tune("draft_after", lambda: ticks.append(None))
    assert best == {0.0: 1, 1.0: 1}
    assert asked[:2] == [([1, 2, 3], TUNING[:2]), ([1, 2], TUNING[2:])]
    assert len(ticks) == 2 * 3 * 4, "those that dropped out are counted as done"
    assert found[Cell("draft_after", 1, 1, 0.0)].seconds == 19.5


def test_every_point_of_the_grid_is_there_once_and_batch_1_for_the_headline(measured):
    points = [(r["drafter"], r["k"], r["batch_size"], r["temperature"]) for r in measured["decoding"]]
    assert len(set(points)) == len(points)
    asked = {
        (name, k, 2, t)
        for t in (0.0, 1.0)
        for name, k in [(AUTOREGRESSIVE, None), ("draft_after", 2), ("ngram", 2), ("adaptive", 2)]
    }
    headline = {(name, k, 1, t) for t, best in measured["best_k"].items() for name, k in [*pair(best), ("ngram", best)]}
    assert set(points) == asked | headline
    for row in measured["decoding"]:
        compared = row["drafter"] in (AUTOREGRESSIVE, "adaptive")
        assert row["repeats"] == (2 if compared or (row["batch_size"] == 1 and row["drafter"] != "ngram") else 1)
        # Whole batches: three prompts at batch 2 are four rows.
        assert row["tokens"] == 12 * (3 if row["batch_size"] == 1 else 4)
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])


def test_the_comparison_by_source_is_of_the_prompts_of_that_source(measured):
    rows = measure.comparison(measured, ["a", "b", "a"])
    assert [(r["source"], r["prompts"]) for r in rows if r["drafter"] == AUTOREGRESSIVE and r["temperature"] == 0] == [
        ("a", 2),
        ("b", 1),
        ("all", 3),
    ]
    grid = {(r["drafter"], r["temperature"]): r for r in measured["decoding"] if r["batch_size"] == 1}
    assert {r["drafter"] for r in rows} == {AUTOREGRESSIVE, "draft_after", "ngram"}
    for row in (r for r in rows if r["source"] == "all"):
        whole = grid[row["drafter"], row["temperature"]]
        assert row["block_efficiency"] == whole["block_efficiency"]
        assert row["tokens_per_s"] == pytest.approx(whole["tokens_per_s"])
        if row["k"]:
            assert [row["low"], row["high"]] == whole["block_efficiency_interval"]


def test_speedups_are_ratios_of_wall_times_at_the_same_batch_and_temperature(monkeypatch):
    """Every batch takes 1, 2, 3, ... units in the order decoded, so each ratio tells which runs it compares."""
    bench, clock = make(batch_sizes=(1,), ks=(1,), temperatures=(0.0,)), itertools.count(1)
    # The benchmark looks at the clock before and after each batch.
    looks = (float(time) for n in clock for time in (0, n))
    monkeypatch.setattr(bench_lib, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    measured = bench.measure("draft_after")
    seconds = {row["drafter"]: row["seconds"] for row in measured["decoding"]}
    # Four tuning prompts; then three prompts with three cells in turns; then the pair alone in turns.
    first = {AUTOREGRESSIVE: 5 + 8 + 11, "draft_after": 6 + 9 + 12, "ngram": 7 + 10 + 13}
    second = {AUTOREGRESSIVE: 14 + 16 + 18, "draft_after": 15 + 17 + 19}
    median = {name: (first[name] + second[name]) / 2 for name in second}
    assert seconds == {**median, "ngram": first["ngram"]}
    speedups = {row["drafter"]: row["speedup"] for row in measured["decoding"]}
    expected = median[AUTOREGRESSIVE] / median["draft_after"]
    assert speedups == {AUTOREGRESSIVE: 1, "draft_after": expected, "ngram": first[AUTOREGRESSIVE] / first["ngram"]}
    headline = measured["headline"][0.0]
    assert (headline["k"], headline["speedup"]) == (1, expected)
    assert headline["ar_tokens_per_s"] == 36 / median[AUTOREGRESSIVE]
    assert headline["spec_tokens_per_s"] == 36 / median["draft_after"]


def test_answers_may_end_where_the_target_ends_them(monkeypatch):
    """Speeds and predictions are then those of a token, and the greedy answers of all decoders end alike."""
    target = prefix_model(0, scale=1.2, eos_ids=(2, 3))
    drafters = {"draft_after": lambda k: DraftModel(DRAFT, k), "hybrid": lambda k: Hybrid(DraftModel(DRAFT, k), k)}
    settings = dataclasses.replace(SETTINGS, batch_sizes=(1,), ignore_eos=False, drafters=("hybrid",))
    bench = Bench(target, drafters, settings, PROMPTS, TUNING, Speculative(), {}, seed=0)
    ticks: list[None] = []
    found = bench.measure("draft_after", lambda: ticks.append(None))
    assert len(ticks) == bench.num_ticks
    rows = {(row["drafter"], row["temperature"]): row for row in found["decoding"]}
    for temperature in (0.0, 1.0):
        plain = rows[AUTOREGRESSIVE, temperature]
        assert plain["tokens"] < 36
        for name in drafters:
            row = rows[name, temperature]
            per_token = plain["seconds"] / plain["tokens"] * row["tokens"] / row["seconds"]
            assert row["speedup"] == pytest.approx(per_token)
            assert row["repeats"] == 2
        headline = found["headline"][temperature]
        assert headline["ar_tokens_per_s"] == pytest.approx(plain["tokens_per_s"])
    assert {rows[name, 0.0]["tokens"] for name in drafters} == {rows[AUTOREGRESSIVE, 0.0]["tokens"]}
    assert all(rows[name, 0.0]["identical"] for name in drafters)


def test_greedy_rows_are_compared_and_sampled_ones_are_not(measured):
    for row in measured["decoding"]:
        assert row["identical"] is (True if row["temperature"] == 0 else None)


def test_a_token_that_differs_is_found_with_the_targets_margin_there():
    bench = make(sampling={"logit_bias": {3: 0.5}})
    [plain] = bench.run([Cell(AUTOREGRESSIVE, 0, 1, 0.0)], PROMPTS).values()
    assert bench.differences(plain, plain) == []
    changed = [list(tokens) for tokens in plain.tokens]
    changed[1][4] = (changed[1][4] + 1) % TARGET.config.vocab_size
    [found] = bench.differences(dataclasses.replace(plain, tokens=changed), plain)
    logits = TARGET.logits(np.asarray([[*PROMPTS[1], *plain.tokens[1][:4]]], np.int32))[0, -1]
    top = np.sort(np.asarray(logits) + np.where(np.arange(TARGET.config.vocab_size) == 3, 0.5, 0.0))
    assert (found["prompt"], found["position"]) == (1, 4)
    assert found["margin"] == pytest.approx(float(top[-1] - top[-2]), abs=1e-6)


def test_the_prediction_is_the_ratio_of_the_parts():
    """Both drafts are always accepted: 5 blocks of 2 units for 14 tokens, 14 steps of 1, prefill 3 and 4 units."""
    plain, fast = costs.StepCosts(1.0, 0.0, 1.0, 1.0), costs.StepCosts(1.0, 0.5, 1.7, 2.0)
    found = bench_lib.predicted_speedup((3.0, 4.0), ([plain], [fast]), (1.0, 1.0), 14)
    assert found == pytest.approx((3 + 14) / (4 + 2 * 5))


def test_the_headline_predicts_from_its_own_costs_and_the_acceptance_on_the_tuning_prompts(monkeypatch):
    """As above, with one draft in four accepted on the timed prompts: 14 tokens then take other numbers of blocks."""
    bench = make(new_tokens=14, batch_sizes=(1,), temperatures=(1.0,), drafters=())
    steps = {0: costs.StepCosts(1.0, 0.0, 1.0, 1.0), 2: costs.StepCosts(1.0, 0.5, 1.7, 2.0)}

    def run(cells, prompts, tick=None):
        accepted = (4, 4) if prompts[0] in TUNING[:1] + TUNING[3:] else (1, 0)
        stats = {0: DecodeStats(14, 14, (), (), ()), 2: DecodeStats(4, 12, (4, 4), (4, 4), accepted)}
        return {c: Run(1.0, [[0] * 14] * len(prompts), stats[c.k], [(1.0, stats[c.k])] * len(prompts)) for c in cells}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(
        bench, "timer", lambda _, k, draft=True: SimpleNamespace(turn=lambda: None, costs=lambda: [[steps[k]]])
    )
    # A start gives the state after prefill, whose counters are as wide as its blocks are long.
    monkeypatch.setattr(costs, "median_seconds", lambda start, _: 4.0 if start().counters.drafted_at.size else 3.0)
    headline = bench.measure("draft_after")["headline"][1.0]
    assert headline["speedup_predicted"] == pytest.approx((3 + 14) / (4 + 2 * 5))
    in_sample = (3 + 14) / (4 + 2 * expected_blocks((0.25, 0.0), 14))
    assert headline["speedup_predicted_in_sample"] == pytest.approx(in_sample)


def test_the_expected_number_of_blocks_counts_the_one_that_the_budget_cuts():
    assert expected_blocks((), 7) == expected_blocks((0.0, 0.0), 7) == 7
    assert [expected_blocks((1.0, 1.0), n) for n in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    # One draft, accepted half of the time: two tokens take one block or two.
    assert expected_blocks((0.5,), 2) == 1.5
    rng, counts = np.random.default_rng(0), []
    for _ in range(4000):
        left, blocks = 20, 0
        while left > 0:
            left, blocks = left - 1 - np.sum(rng.random() < np.array([0.8, 0.5, 0.3])), blocks + 1
        counts.append(blocks)
    assert expected_blocks((0.8, 0.5, 0.3), 20) == pytest.approx(np.mean(counts), abs=5 * np.std(counts) / 4000**0.5)


def test_k_is_the_fastest_on_other_prompts_and_its_acceptance_is_counted_on_all_of_them(monkeypatch):
    bench, asked = make(ks=(1, 3)), []

    def run(cells, prompts, tick):
        asked.append(([cell.k for cell in cells], prompts))
        stats = DecodeStats(1, 1, (1,), (1,), (0,))
        return {cell: bench_lib.Run({1: 3.0, 3: 2.0}[cell.k], [], stats) for cell in cells}

    monkeypatch.setattr(bench, "run", run)
    best, runs = bench.tune("draft_after")
    assert best == {0.0: 3, 1.0: 3}
    assert asked == [([1, 3], TUNING[:3]), ([3], TUNING[3:])] * 2
    assert {(cell.k, run.stats.blocks) for cell, run in runs.items()} == {(1, 1), (3, 2)}


def test_costs_of_a_step_are_more_than_those_of_its_passes_and_a_lost_bench_is_freed():
    bench = make()
    bench.timer("draft_after", 3).turn()
    for temperature in (0.0, 1.0):
        [cost] = bench.costs(Cell("draft_after", 3, 1, temperature))
        assert cost.target > 0
        assert cost.draft > 0
        assert cost.overhead == pytest.approx(cost.step / cost.passes)
        assert cost.overhead_apart == pytest.approx(cost.step / (cost.target + cost.draft))
    bench.timer("draft_after", 2, draft=False).turn()
    [short] = bench.costs(Cell("draft_after", 2, 1, 0.0))
    assert min(short.target, short.step) > 0
    assert all(map(math.isnan, (short.draft, short.overhead)))
    gone = weakref.ref(bench)
    del bench
    gc.collect()
    assert gone() is None


def test_recompiles_are_counted_where_there_are_some(monkeypatch):
    assert bench_lib.count_recompiles(TARGET, DraftModel(DRAFT, 2), Speculative(), prompts=12) == 0
    # Nothing seen before: every bucket is compiled inside the count.
    monkeypatch.setattr(Decoder, "compile", lambda *_, **__: None)
    assert bench_lib.count_recompiles(prefix_model(5), DraftModel(prefix_model(6), 3), Speculative(), prompts=4) > 0


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
    [({"new_tokens": 250}, "need 261 positions, the target has 256"), ({"prompts": 90}, "bench needs 360")],
)
def test_what_could_not_be_decoded_is_refused_before_training(tiny_target, changes, message):
    settings = config.Bench(**{"prompts": 2, "prompt_tokens": 8, "new_tokens": 16, "ks": (3,), **changes})
    run = config.RunConfig(target=config.Target(path="x"), data=config.Data(path="x"), bench=settings)
    unread: Any = None
    prepared = inputs.Prepared(unread, tiny_target, inputs.Corpus([], documents(4, 20)), unread, unread)
    with pytest.raises(DataError, match=message):
        measure.check(run, prepared)


def test_a_benchmark_of_trained_drafts_keeps_each_weight_once(monkeypatch, tmp_path, tiny_config):
    for name in ("draft", "draft-before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    spec = Model(tiny_config)
    params = jax.jit(spec.init)(jax.random.key(0))
    models = iter([LoadedModel(spec, params) for _ in range(3)])
    unread: Any = None
    prepared = inputs.Prepared(unread, next(models), inputs.Corpus([], []), unread, unread)
    monkeypatch.setattr(measure.inputs, "prepare", lambda *_: prepared)
    monkeypatch.setattr(hf, "load_model", lambda *_, **options: next(models))
    monkeypatch.setattr(measure, "decoding_figures", lambda config, target, drafts, *_: [target, *drafts.values()])
    run = config.RunConfig(target=config.Target(path="x"), data=config.Data(path="x"), out=str(tmp_path))
    decoded: Any = measure.run_bench(run)
    kept = [decoded[0], *(drafter.model for drafter in decoded[1:])]
    assert [model.holds_originals for model in kept] == [False] * 3


def test_the_programs_of_a_large_batch_are_freed_before_the_next_ones(monkeypatch):
    """A grid's programs together were the most of the demo's memory. Weak references to the jitted chunks tell."""
    bench, made, alive = make(batch_sizes=(2, 3), temperatures=(0.0,)), [], []

    class Tuned(Exception):
        pass

    def run(cells, prompts, tick):
        gc.collect()
        alive.append([ref() is not None for ref in made])
        if cells[0].batch_size == 1:
            raise Tuned
        for cell in cells:
            engine, _ = bench.decoder(cell.drafter, cell.k).engine(True)
            made.append(weakref.ref(programs.compiled_chunk(engine)))
        return {cell: Run(1.0, [], DecodeStats(1, 1, (), (), ())) for cell in cells}

    monkeypatch.setattr(Decoder, "compile", lambda *_, **__: None)
    monkeypatch.setattr(bench, "run", run)
    with pytest.raises(Tuned):
        bench.measure("draft_after")
    assert alive == [[], [False] * 3, [False] * 6]


@pytest.mark.more
def test_figures_of_a_lossy_rule_say_so_and_how_far_it_is(tiny_target, tiny_draft):
    settings = config.Bench(
        prompts=4,
        prompt_tokens=8,
        new_tokens=16,
        batch_sizes=(1,),
        temperatures=(1.0,),
        ks=(3,),
        repeats=1,
        drafters=(),
    )
    run = config.RunConfig(
        target=config.Target(path="x"),
        data=config.Data(path="x"),
        bench=settings,
        sampling=config.Sampling(top_k=20),
        certify=config.Certify(total_variation=0.05),
        verifier={"kind": "top_k", "k": 40},
    )
    figures = measure.decoding_figures(run, tiny_target, {"draft_after": DraftModel(tiny_draft)}, documents(4, 60))
    rule = figures["verifier"]
    assert (rule["kind"], rule["lossless"]) == ("top_k", False)
    assert 0 < rule["total_variation"] < 1
    assert 0 < rule["total_variation_of_exact_sampling"] < 1


def test_a_registered_drafter_takes_part_by_its_name(monkeypatch):
    assert config.Bench(drafters=()).drafters == ()
    assert measure.registered("ngram")(4) == NGram(k=4)
    first, last = DraftModel(TARGET, 2), DraftModel(DRAFT, 2)
    assert measure.registered("hybrid", [first, last])(4) == Hybrid(DraftModel(DRAFT, 4), 4)
    with pytest.raises(ConfigError, match="a hybrid needs a draft"):
        measure.registered("hybrid")
    with pytest.raises(ConfigError, match="min_n=5"):
        NGram(min_n=5, max_n=2)
    with pytest.raises(ConfigError, match="greater than or equal to 1"):
        Decoder(TARGET, NGram(k=0))


def test_the_comparison_of_all_prompts_is_the_grids_own_number():
    """The median turn: medians of single prompts, added up, would be another one."""
    cell = bench_lib.Cell("autoregressive", 0, 1, 0.0)
    turns = [(1.0, 5.0), (2.0, 2.0), (4.0, 1.0)]  # seconds of two prompts; medians 2 and 2, the median turn takes 5
    stats = DecodeStats(blocks=10, emitted=10, drafted_at=(), reached_at=(), accepted_at=())
    by_prompt = [([turn[i] for turn in turns], stats) for i in range(2)]
    measured = {"by_prompt": {cell: by_prompt}, "best_k": {0.0: 3}}
    [row] = measure.comparison(measured, ["text", "text"])
    assert row["tokens_per_s"] == 20 / 5.0


def test_an_interruption_of_one_prompt_in_one_repeat_is_not_counted():
    def run(*seconds: float) -> Run:
        one = DecodeStats(1, 1, (), (), ())
        return Run(sum(seconds), [], one, [(s, one) for s in seconds])

    assert bench_lib._seconds([run(1.0, 9.0, 3.0), run(1.0, 2.0, 3.0), run(8.0, 2.0, 3.0)]) == 6.0
