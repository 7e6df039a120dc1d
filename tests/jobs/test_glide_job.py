"""A draft that reads its target's keys and values in the whole job: trained, killed, resumed, exported, found by every
command, over text of every source and over a mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import config
from specjax.drafters.glide import Glide
from specjax.errors import ConfigError, ModelError, TrainingError
from specjax.interfaces import Initial
from specjax.jobs import bench as bench_job
from specjax.jobs import certify as certify_job
from specjax.jobs import distill as job
from specjax.jobs.generate_data import make_data
from specjax.models.hf import load_model, save_model
from specjax.runtime import fingerprint
from specjax.training.assemble import Run
from specjax.training.init.cached import FILE
from tests.jobs.test_distill import Recorder, on_data
from tests.training.toys import Interrupt

PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 7, 100, 7, 100, 7]]
SHAPE = config.Architecture(hidden_size=16, intermediate_size=24, num_layers=1)


@pytest.fixture(scope="module")
def run(settings):
    def make(out, draft=None, rest=None, **stage) -> config.RunConfig:
        base = settings(out, control=config.Control())
        skipped = dataclasses.replace(base.draft.pretrain, steps=0)
        glide = config.Draft(SHAPE, kind="glide", settings={"reads": [1], **(draft or {})}, pretrain=skipped)
        stage = {"eval_every": 3, "save_every": 2, **stage}
        distill = dataclasses.replace(base.distill, **stage)
        return dataclasses.replace(base, draft=glide, distill=distill, **(rest or {}))

    return make


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    selection = config.Selection(prompts=2, prompt_tokens=8, new_tokens=8, k=2, temperatures=(0.0, 1.0))
    settings = run(tmp_path_factory.mktemp("glide") / "run", rest={"selection": selection}, steps=12)
    settings = dataclasses.replace(settings, control=config.Control(learning_rates=(1e-3,)))
    return settings, job.run(settings)


def test_it_learns_and_every_depth_is_logged(trained):
    _, result = trained
    log = result.logs["draft-distill"]
    last = [record for record in log if "alpha" in record][-1]
    assert {"loss_at_1", "loss_at_2", "train_alpha_at_1", "train_alpha_at_2", "alpha_at_1", "alpha_at_2"} <= last.keys()
    assert {"block_efficiency_t0_simulated", "block_efficiency_t1_simulated"} <= last.keys()
    assert result.measures.alpha_after > result.measures.alpha_before
    assert len(result.measures.alpha_at_after) == 5
    assert result.measures.alpha_after == result.measures.alpha_at_after[0]
    assert result.measures.alpha_ce_control is not None


def test_its_export_is_tested_and_its_card_says_who_can_serve_it(trained):
    settings, result = trained
    assert set(result.self_tests) == {"draft-before", "draft"}
    found = result.self_tests["draft"]
    assert found.largest_difference < 1e-4
    assert found.blocks > 0
    card = (Path(settings.out) / "draft" / "README.md").read_text()
    assert "library_name: specjax" in card
    assert "neither vLLM nor transformers" in card
    assert "| alpha by depth in a block |" in card
    assert "| loss of the draft by depth in a block |" in card
    (Path(settings.out) / "self_tests.json").write_text("{}")
    assert job.run(settings).self_tests == result.self_tests


def test_every_command_finds_it(trained, monkeypatch, tmp_path):
    settings, result = trained
    directory = Path(settings.out) / "draft"
    plain = specjax.Decoder(result.target).generate(PROMPTS, max_new_tokens=20)
    for drafter in (specjax.load_drafter(directory, result.target, k=2), result.draft_after.of(3)):
        assert isinstance(drafter, Glide)
        decoder = specjax.Decoder(result.target, drafter, "block")
        assert decoder.generate(PROMPTS, max_new_tokens=20).tokens == plain.tokens
    low = config.Certify(prompts=4, prompt_tokens=4, new_tokens=4, k=2)
    seen = []
    monkeypatch.setattr(certify_job.certify_lib, "certify", lambda subject: seen.append(subject.drafter))
    certify_job.run_certify(dataclasses.replace(settings, certify=low))
    assert isinstance(seen[0], Glide)
    small = config.Bench(prompts=1, prompt_tokens=8, new_tokens=8, batch_sizes=(1,), temperatures=(0.0,), ks=(2,))
    small = dataclasses.replace(small, drafters=(), repeats=1)
    found = bench_job.run_bench(dataclasses.replace(settings, bench=small))
    names = {row["drafter"] for row in found["decoding"]}
    assert names == {"autoregressive", "draft_before", "draft_after", "adaptive"}
    assert found["figures"]["greedy_identical"]
    generated = on_data(settings, kind="generated", sequences=3, shard_size=3, k=2, path=str(tmp_path / "data"))
    assert make_data(generated, None, None)["shards"][0]["draft"] is not None


def test_an_interrupted_training_ends_in_the_same_weights(trained, tmp_path):
    settings, expected = trained
    again = dataclasses.replace(settings, out=str(tmp_path / "run"))
    with pytest.raises(Interrupt):
        job.run(again, Recorder(("draft-distill", 5)))
    found = job.run(again)
    assert fingerprint.digest(found.draft_after.params) == fingerprint.digest(expected.draft_after.params)
    assert found.measures == expected.measures


def test_it_goes_on_from_what_it_began_with_where_its_cut_has_other_last_bits(trained, tmp_path, monkeypatch):
    settings, expected = trained
    again = dataclasses.replace(settings, out=str(tmp_path / "run"))
    with pytest.raises(Interrupt):
        job.run(again, Recorder(("draft-distill", 5)))
    here = Run.first_draft

    def elsewhere(*given):
        drafter, params = here(*given)
        return Initial(drafter, jax.tree.map(lambda x: x * (1 + 1e-6), params))

    monkeypatch.setattr(Run, "first_draft", elsewhere)
    found = job.run(again)
    assert fingerprint.digest(found.draft_after.params) == fingerprint.digest(expected.draft_after.params)
    assert found.measures == expected.measures
    (tmp_path / "run" / FILE).write_bytes(b"another")
    with pytest.raises(TrainingError, match="the weights that training began with"):
        job.run(again)


# Other kinds do so in `make test`, and over a mesh.
@pytest.mark.more
@pytest.mark.parametrize(
    "data", [{"kind": "generated", "sequences": 5, "shard_size": 3, "k": 2}, {"kind": "on_policy"}]
)
def test_it_is_distilled_on_text_that_the_models_write(run, tmp_path, data):
    result = job.run(on_data(run(tmp_path / "run"), **data))
    assert fingerprint.digest(result.draft_after.params) != fingerprint.digest(result.draft_before.params)


@pytest.mark.more
def test_over_a_mesh_it_is_the_same_training(run, tmp_path):
    one = job.run(run(tmp_path / "one", batch_size=4, steps=3))
    mesh = config.Mesh(data=2, tensor=2)
    many = job.run(run(tmp_path / "many", rest={"mesh": mesh}, batch_size=4, steps=3))
    assert many.measures.alpha_at_after == pytest.approx(one.measures.alpha_at_after, abs=1e-3)
    losses = [[record["loss"] for record in result.logs["draft-distill"]] for result in (one, many)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.more
def test_for_a_target_in_bfloat16(run, tiny_target, tmp_path):
    save_model(dataclasses.replace(tiny_target, eos_ids=(0,)), tmp_path / "target")
    selection = config.Selection(prompts=2, prompt_tokens=8, new_tokens=8, k=2)
    rest = {"target": config.Target(path=str(tmp_path / "target"), dtype="bfloat16"), "selection": selection}
    found = job.run(run(tmp_path / "run", rest=rest, steps=3))
    assert found.measures.alpha_after > 0
    assert found.self_tests["draft"].positions > 0


def test_a_chat_is_learnt_from(run, chats, tmp_path):
    assert job.run(run(tmp_path / "run", rest=chats(), steps=3)).measures.alpha_after > 0


@pytest.mark.parametrize(
    ("draft", "stage", "error", "message"),
    [
        ({}, {"teacher": "cached"}, TrainingError, "the draft reads its keys and values; set teacher=online"),
        ({}, {"scan_layers": True}, ConfigError, "scan_layers: the layers of a glide draft read"),
        ({"reads": [2]}, {}, ConfigError, r"draft\.reads: \[2\] for 1 layers of a draft and 2 of its target"),
        ({"reads": [0, 1]}, {}, ConfigError, r"draft\.reads: \[0, 1\] for 1 layers"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(run, tmp_path, draft, stage, error, message):
    with pytest.raises(error, match=message):
        job.run(run(tmp_path / "run", draft, **stage))


def test_its_directory_is_no_model(trained):
    settings, _ = trained
    with pytest.raises(ModelError, match="load_drafter"):
        load_model(Path(settings.out) / "draft")
