"""`specjax calibrate` and `specjax plan` on a tiny pair: what is measured once, what is told, and what is only
computed."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from specjax import cli
from specjax.config import Bench
from specjax.costs.cost_model import PLAIN
from specjax.jobs import calibrate as calibrate_job
from specjax.jobs import plan as plan_job
from specjax.jobs.calibrate import Subject, cost_model
from specjax.models.hf import save_model

BENCH = {
    "prompts": 2,
    "prompt_tokens": 8,
    "new_tokens": 12,
    "batch_sizes": (1,),
    "temperatures": (0.0,),
    "ks": (1, 2),
}


@pytest.fixture(scope="module")
def config(settings, tmp_path_factory, tiny_draft):
    draft = tmp_path_factory.mktemp("models") / "draft"
    save_model(tiny_draft, draft)
    return settings(tmp_path_factory.mktemp("runs") / "none", bench=Bench(**BENCH, drafts={"small": str(draft)}))


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        patch.setattr(calibrate_job, "_TURNS", 1)
        yield directory


@pytest.fixture(scope="module")
def measured(config, caches):
    """A subject and its calibration, the first one."""
    subject = Subject.of(config)
    return subject, cost_model(subject)


def test_costs_are_measured_once(measured, caches, monkeypatch):
    subject, first = measured
    assert first.kept == {1: False}
    assert first.compile_seconds > 0
    assert caches in first.directory.parents
    assert set(first.model.batches[1].drafters) == {"small", "ngram"}
    assert first.model.dtype == "float32"
    assert "measured in" in first.summary
    assert first.to_json()["kept"] == []
    monkeypatch.setattr(calibrate_job, "_measured", lambda *_: pytest.fail("measured again"))
    again = cost_model(subject)
    assert (again.model, again.kept) == (first.model, {1: True})
    assert again.summary.startswith("read; ")


def test_what_is_known_is_measured_again_when_asked(measured, monkeypatch):
    subject, first = measured
    monkeypatch.setattr(calibrate_job, "_measured", lambda *_: (first.model.batches[1], 1.0, 2.0))
    found = cost_model(subject, again=True)
    assert (found.kept, found.seconds, found.compile_seconds) == ({1: False}, 1.0, 2.0)


def test_a_plan_of_this_device_predicts_and_measures_the_grid(config, measured):
    plan = plan_job.run_plan(config, measure=True)
    cells = [(p.drafter, p.k, p.temperature) for p in plan.predictions]
    lengths = [(name, k) for name in ("small", "ngram") for k in (1, 2)]
    assert sorted(cells) == sorted((*cell, 0.0) for cell in [(PLAIN, 0), *lengths])
    assert sum(p.best for p in plan.predictions) == 1
    assert all(p.measured and p.measured > 0 for p in plan.predictions)
    assert plan.measured_here
    assert plan.training.measured
    assert plan.training.tokens == 6 * 2 * 16
    assert plan.training.memory
    names = [found.name for found in plan.passes]
    assert names == ["target, 1 token", "target, 3 tokens", "small", "prefill, 16 tokens"]
    assert all(found.share is not None and found.share > 0 for found in plan.passes)
    told = json.loads(json.dumps(plan.to_json()))
    assert told["times"] == "measured"
    assert {draft["drafter"] for draft in told["known_drafts"]} == {"small", "ngram"}
    assert told["predictions"][0]["error"] is not None


def test_acceptance_of_a_shorter_block_is_that_of_the_longest(measured):
    subject, _ = measured
    known = calibrate_job.acceptances(subject)
    assert list(known) == [(name, k, 0.0) for name in ("small", "ngram") for k in (1, 2)]
    for name in ("small", "ngram"):
        assert known[name, 1, 0.0] == known[name, 2, 0.0].first(1)
    assert len(known["small", 2, 0.0].rows) == len(subject.tuning)


def test_a_preset_is_marked_as_computed_and_measures_nothing(config, caches, monkeypatch):
    for module, name in ((plan_job, "cost_model"), (plan_job, "this_device"), (plan_job, "measured_beside")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("measured"))
    plan = plan_job.run_plan(config, device="h100-sxm", alpha=0.7)
    told = plan.to_json()
    assert told["times"] == "computed, not measured"
    assert not plan.measured_here
    assert not plan.training.measured
    assert (told["device"]["name"], told["assumed_alpha"]) == ("h100-sxm", 0.7)
    assert all(p.measured is None for p in plan.predictions)
    assert all(found.share is None for found in plan.passes)


@pytest.fixture
def file(config, tmp_path):
    """The config as a file."""
    bench = {**BENCH, "drafts": dict(config.bench.drafts)}
    found = {
        "target": {"path": config.target.path},
        "data": {"path": config.data.path, "held_out": 0.25, "seq_len": 16},
        "draft": {"architecture": {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1}},
        "distill": {"steps": 6, "batch_size": 2},
        "bench": {key: list(value) if isinstance(value, tuple) else value for key, value in bench.items()},
        "out": str(tmp_path / "none"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_says_what_passes_cost_and_how_far_off_the_fit_is(file, measured):
    text = run("calibrate", file)
    for said in ("target, 1 token", "n-gram lookup, a pass", "error of the fit, median", "read; error at points left"):
        assert said in text


@pytest.mark.more
def test_calibrate_prints_json(file, measured):
    told = json.loads(run("calibrate", file, "--json"))
    assert (told["kept"], told["measured"], list(told["batches"])) == ([1], True, ["1"])


def test_the_plan_is_printed_and_written(file, tmp_path, caches):
    out = tmp_path / "plan"
    text = run("plan", file, "--device", "tpu-v5e", "--alpha", "0.8", "--out", out)
    for said in ("computed, not measured", "Roofline of tpu-v5e (datasheet)", "a draft pays with alpha above"):
        assert said in " ".join(text.split())
    assert json.loads((out / "plan.json").read_text())["times"] == "computed, not measured"
    assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(run("plan", file, "--device", "l4", "--alpha", "0.8", "--json"))
    assert told["device"]["name"] == "l4"
