"""A trained drafter from outside the tables in the whole job: `specjax.testing.heads`, which reads the target's hidden
states, has two predictions a position and its own format on disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import config
from specjax.errors import ConfigError
from specjax.evaluation.certify import Subject, certify
from specjax.interfaces import Batch, TargetView
from specjax.jobs import certify as certify_job
from specjax.jobs import distill as job
from specjax.runtime import fingerprint
from specjax.sampling import fresh_noise
from specjax.testing.heads import BoundHeads, TrainedHeads
from specjax.testing.toys import context, neutral_sampling
from specjax.training.teacher import target_output
from specjax.verifiers.speculative import Speculative
from tests.jobs.conftest import LENGTH
from tests.jobs.test_distill import Recorder
from tests.training.toys import Interrupt

KIND = "specjax.testing.heads:Heads"
LOW = config.Certify(new_tokens=8, total_variation=0.06, power=0.95)
PROMPTS = [[5, 6, 7, 8], [40, 41], [100, 7, 100, 7, 100, 7]]


@pytest.fixture(scope="module")
def run(settings):
    def make(out, **stage) -> config.RunConfig:
        base = settings(out, control=config.Control())
        skipped = dataclasses.replace(base.draft.pretrain, steps=0)
        draft = config.Draft(kind=KIND, settings={"rank": 8}, pretrain=skipped)
        selection = config.Selection(prompts=2, prompt_tokens=8, new_tokens=8, k=2, temperatures=(0.0, 1.0))
        return dataclasses.replace(
            base, draft=draft, distill=dataclasses.replace(base.distill, **stage), selection=selection
        )

    return make


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    settings = run(tmp_path_factory.mktemp("heads") / "run", steps=12)
    return settings, job.run(settings)


def test_its_depths_are_logged_evaluated_and_learn(trained):
    _, result = trained
    log = result.logs["draft-distill"]
    last = [record for record in log if "alpha" in record][-1]
    assert {"loss_at_1", "loss_at_2", "train_alpha_at_1", "train_alpha_at_2", "alpha_at_1", "alpha_at_2"} <= last.keys()
    assert last["loss_at_1"] < log[0]["loss_at_1"]
    assert result.measures.alpha_after > result.measures.alpha_before
    assert {"block_efficiency_t0", "block_efficiency_t1"} <= last.keys()


def test_it_is_saved_in_its_own_format_and_decodes_what_the_target_says(trained):
    settings, result = trained
    directory = Path(settings.out) / "draft"
    assert {file.name for file in directory.iterdir()} == {"README.md", "config.json", "heads.safetensors"}
    assert fingerprint.digest(result.draft_after.params) in (directory / "README.md").read_text()
    loaded = specjax.load_drafter(directory, result.target, k=2, kind=KIND)
    plain = specjax.Decoder(result.target).generate(PROMPTS, max_new_tokens=20)
    for drafter in (loaded, result.draft_after.of(1), result.draft_after.of(2)):
        decoder = specjax.Decoder(result.target, drafter, "block")
        assert decoder.generate(PROMPTS, max_new_tokens=20).tokens == plain.tokens
        found = decoder.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=3)
        alone = decoder.generate(PROMPTS[1:2], max_new_tokens=20, temperature=1.0, seed=found.seeds[1:2])
        assert alone.tokens == found.tokens[1:2]
    with pytest.raises(ConfigError, match="k=3 exceeds its 2 heads"):
        specjax.Decoder(result.target, result.draft_after.of(3))


def test_it_is_certified_by_name(trained, monkeypatch):
    """The command finds what the job left, by the kind in the config."""
    settings, result = trained
    low = config.Certify(prompts=4, prompt_tokens=4, new_tokens=4, k=2)
    seen = []
    monkeypatch.setattr(certify_job.certify_lib, "certify", lambda subject: seen.append(subject.drafter))
    certify_job.run_certify(dataclasses.replace(settings, certify=low))
    assert fingerprint.digest(seen[0].params) == fingerprint.digest(result.draft_after.params)


def test_an_interrupted_training_ends_in_the_same_weights(trained, run, tmp_path):
    settings, expected = trained
    again = dataclasses.replace(settings, out=str(tmp_path / "run"))
    with pytest.raises(Interrupt):
        job.run(again, Recorder(("draft-distill", 4)))
    found = job.run(again)
    assert fingerprint.digest(found.draft_after.params) == fingerprint.digest(expected.draft_after.params)
    assert found.measures == expected.measures


def test_its_decoding_is_its_training_forward(trained):
    """Teacher-forced: the logits of every head after every prefix."""
    _, result = trained
    target, params, k = result.target, result.draft_after.params, 2
    trainable = result.draft_after.drafter
    assert isinstance(trainable, TrainedHeads)
    bound = BoundHeads(k, trainable.layer, target.config.hidden_size)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, LENGTH + 1)), jnp.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((2, LENGTH)))
    out = jax.jit(target_output, static_argnums=(0, 3))(target.spec, target.params, batch, trainable.reads)
    wanted = [prediction.logits for prediction in trainable.predictions(params, batch, out)]
    for length in (2, 3, 7, LENGTH):
        lengths = jnp.full(2, length, jnp.int32)
        state = bound.extend(params, bound.init(2, 32), batch.tokens, lengths - 1, out)
        noise = fresh_noise(jnp.zeros((2, 2), jnp.uint32), lengths, k)
        seen = context(tokens, lengths, neutral_sampling(2, target.vocab_size), noise)
        draft, _ = bound.draft(params, TargetView({}), state, seen)
        assert draft.logits is not None
        for j in range(k):  # the state of token length - 2 has the root after it
            np.testing.assert_allclose(draft.logits[:, j], wanted[j][:, length - 2], atol=1e-5)


def test_it_learns_from_what_it_writes_while_its_target_reads(run, tmp_path):
    result = job.run(run(tmp_path / "run", data={"kind": "on_policy", "prompt_tokens": 4, "new_tokens": 8}))
    assert fingerprint.digest(result.draft_after.params) != fingerprint.digest(result.draft_before.params)


def test_it_learns_the_same_from_kept_hidden_states(run, tmp_path):
    online, kept = (job.run(run(tmp_path / teacher, teacher=teacher)) for teacher in ("online", "cached"))
    found, expected = (x.measures.alpha_after for x in (kept, online))
    assert found == pytest.approx(expected, abs=1e-4)


def test_what_it_cannot_do_is_refused_with_the_reason(run, tmp_path):
    with pytest.raises(ConfigError, match="TrainedHeads has no transformer of its own"):
        job.run(run(tmp_path / "run", remat=True))


def test_a_config_names_it_and_its_fields_beside_the_kind(tmp_path, target_directory, documents):
    file = tmp_path / "run.yaml"
    lines = {
        "target": {"path": str(target_directory)},
        "data": {"path": str(documents)},
        "draft": {"kind": KIND, "rank": 4, "pretrain": {"steps": 0}},
    }
    file.write_text(json.dumps(lines))
    loaded = specjax.load_config(file)
    assert (loaded.draft.kind, loaded.draft.settings, loaded.draft.pretrain.steps) == (KIND, {"rank": 4}, 0)
    for field, problem in {
        "rnak": "unknown key of .*did you mean 'rank'",
        "settings": "unknown key of 'draft_model'",
    }.items():
        draft = {"kind": KIND, field: 3} if field != "settings" else {"settings": {"rank": 3}}
        file.write_text(json.dumps({**lines, "draft": draft}))
        with pytest.raises(ConfigError, match=problem):
            specjax.load_config(file)
    file.write_text(json.dumps({**lines, "draft": {"kind": "nowhere.at_all:Heads"}}))
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        specjax.load_config(file)
    with pytest.raises(ConfigError, match="'dflash_' is unknown, known are dflash, dflash2, draft_model"):
        specjax.load_drafter(tmp_path, None, kind="dflash_")


@pytest.mark.more
def test_its_law_is_the_targets(trained):
    _, result = trained
    drafter = result.draft_after.of(2)
    certificate = certify(Subject(result.target, drafter, Speculative(), PROMPTS, {}, LOW, 0))
    assert all(check.passed for check in certificate.checks)
