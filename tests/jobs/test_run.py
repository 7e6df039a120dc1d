"""What the main job tells on its way."""

from __future__ import annotations

import dataclasses
import io
import json
import types
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.config import load_config
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.evaluation import bench
from specjax.jobs import bench as measure
from specjax.jobs import run as pipeline
from specjax.jobs.distill import TrainedDraft
from specjax.runtime.progress import no_bars

ROOT = Path(__file__).resolve().parents[2]


def test_every_stage_says_how_long_the_whole_run_still_takes_and_adds_its_seconds(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: clock[0])
    screen, file = io.StringIO(), tmp_path / "seconds.json"
    file.write_text('{"draft-pretrain": 5.0}')
    planned = {"draft-pretrain": 10.0, "draft-distill": 20.0, "decoding": 30.0}
    stages = pipeline.Stages(file, no_bars, planned, Console(file=screen, width=80))
    # The first takes twice what was planned; the second was finished by an earlier run and says nothing about speed.
    for name, seconds in (("draft-pretrain", 20.0), ("draft-distill", 0.1), ("elsewhere", 0.0), ("decoding", 1.0)):
        with stages.bars(name, 1):
            clock[0] += seconds
    assert screen.getvalue().splitlines() == [
        "[1/3] draft-pretrain: about 1 min 00 s left in all, 0.0 s gone",
        "[2/3] draft-distill: about 1 min 40 s left in all, 20.0 s gone",
        "[3/3] decoding: about 1 min 00 s left in all, 20.1 s gone",
    ]
    expected = {"draft-pretrain": 25.0, "draft-distill": 0.1, "elsewhere": 0.0, "decoding": 1.0}
    assert json.loads(file.read_text()) == stages.seconds == expected


def test_the_plan_of_the_demo_has_every_stage_and_all_of_the_benchmark(tiny_target):
    config = load_config(ROOT / "configs/demo_full.yaml")
    stages = ["draft-distill", "control-0.001"]
    assert list(pipeline.plan(config)) == [*stages, "evaluation", "held-out decoding", "decoding"]
    for rows in (1000, 3000):
        epochs = load_config(ROOT / "configs/demo_full.yaml", ["distill.epochs=0.5", "distill.steps=null"])
        seconds = pipeline.plan(epochs, rows)
        assert seconds["draft-distill"] == rows / 4 * pipeline._STEP_SECONDS["target"]
        assert seconds["control-0.001"] == rows / 4 * pipeline._STEP_SECONDS["target"]
    prompts = [[0]] * config.bench.prompts
    drafters = dict.fromkeys(["draft_before", "draft_after", *config.bench.drafts, *config.bench.drafters])
    args = (drafters, config.bench, prompts, prompts * measure._TUNING, None, {}, 0)
    assert bench.Bench(tiny_target, *args).num_ticks == measure.num_ticks(config)  # pyright: ignore


def test_a_damaged_benchmark_is_named_and_measured_again(tiny_target, tiny_draft, monkeypatch, tmp_path, caplog):
    measured = []

    def figures(*args):
        measured.append(args)
        return {"figures": {"speedup_greedy": 1.5}}

    monkeypatch.setattr(pipeline, "decoding_figures", figures)
    monkeypatch.setattr(pipeline.jax, "clear_caches", lambda: None)
    target = dataclasses.replace(tiny_target)
    trained = TrainedDraft("draft", TrainedDraftModel(tiny_draft.spec), tiny_draft.params, target)
    monkeypatch.setattr(type(tiny_target), "free_originals", lambda model: None)
    prepared = types.SimpleNamespace(corpus=types.SimpleNamespace(held_out=[]))
    distilled: Any = types.SimpleNamespace(prepared=prepared, target=target, draft_before=trained, draft_after=trained)
    config, file = load_config(ROOT / "configs" / "demo.yaml"), tmp_path / "decoding.json"

    def decoding():
        return pipeline._decoding(config, distilled, file, no_bars)["figures"]

    assert decoding() == decoding() == {"speedup_greedy": 1.5}
    assert len(measured) == 1
    file.write_text(file.read_text().replace("1.5", "9.5"))
    assert decoding() == {"speedup_greedy": 1.5}
    assert len(measured) == 2
    assert "decoding.json: damaged; it is measured again" in caplog.text
