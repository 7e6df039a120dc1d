"""Every kind of draft that reads hidden states in the whole job: trained, killed, resumed, exported, tested, loaded,
and decoded with under every lossless rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax
from specjax import config, registry
from specjax.data import shards
from specjax.data.rows import Sequences, WholeSequenceRows, take
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import TrainingForm
from specjax.jobs import distill as job
from specjax.jobs import inputs, memory
from specjax.jobs.bench import run_bench
from specjax.jobs.certify import run_certify
from specjax.models.hf import load_model
from specjax.runtime import fingerprint
from specjax.runtime.progress import no_bars
from specjax.training import teacher_cache
from specjax.training.assemble import Run, assemble
from specjax.training.init.cached import cached_start
from specjax.training.init.first_weights import initial_draft
from specjax.training.layout import ONE_DEVICE
from specjax.training.losses import ForwardKL
from specjax.training.sources import on_policy
from specjax.training.step import Update, start_state
from tests.cases import in_proof
from tests.jobs.test_distill import Recorder, on_data
from tests.training.toys import Interrupt

ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 6, 7, 8], [40], [100, 7, 100, 7, 100, 7]]
KINDS = {
    "eagle3": {"depths": 2},
    "mtp": {"depths": 2},
    "p_eagle": {"depths": 2, "draft_vocab_size": 100},
    "medusa": {"heads": 3},
    "dflash": {"block_size": 4, "layers": 1, "anchors": 8},
    "dflash2": {"block_size": 3, "layers": 1, "anchors": 8, "selector_rank": 8, "selector_top_k": 4},
    "dspark": {"block_size": 3, "layers": 1, "anchors": 8, "markov_rank": 8},
    "early_exit": {"adapter": 8},
    "glide": {},
}


@pytest.fixture(scope="module")
def run(settings):
    def make(out, kind, rest=None, fields=None, **stage) -> config.RunConfig:
        base = settings(out, control=config.Control())
        skipped = dataclasses.replace(base.draft.pretrain, steps=0)
        draft = config.Draft(kind=kind, settings={**KINDS[kind], **(fields or {})}, pretrain=skipped)
        if kind == "glide":
            shape = config.Architecture(hidden_size=16, num_layers=2, intermediate_size=24)
            draft = dataclasses.replace(draft, architecture=shape)
        stage = {"eval_every": 3, "save_every": 2, "steps": 6, **stage}
        return dataclasses.replace(
            base, draft=draft, distill=dataclasses.replace(base.distill, **stage), **(rest or {})
        )

    return make


# What resumes, exports and refuses does not know the kinds: one that unrolls its block, one that draws what it trains
# on; glide is in test_glide_job.py, and the others are trained so in `make proof`.
QUICK = "eagle3", "dflash"


@pytest.mark.parametrize("kind", [*QUICK, *(in_proof(kind) for kind in KINDS if kind not in (*QUICK, "glide"))])
def test_killed_and_resumed_it_ends_in_the_same_weights_and_decodes(run, kind, tmp_path, monkeypatch):
    """What it began with is neither drawn nor fitted again; of a draft of fewer ids, the ids are kept as well."""
    fields = {"draft_vocab_size": 100} if kind in ("eagle3", "dflash", "dspark") else {}
    whole = job.run(run(tmp_path / "whole", kind, fields=fields))
    with pytest.raises(Interrupt):
        job.run(run(tmp_path / "parts", kind, fields=fields), Recorder(("draft-distill", 3)))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "first_draft", lambda *given: pytest.fail("made first weights again"))
        found = job.run(run(tmp_path / "parts", kind, fields=fields))
    assert fingerprint.digest(found.draft_after.params) == fingerprint.digest(whole.draft_after.params)
    assert fingerprint.digest(found.draft_after.params) != fingerprint.digest(found.draft_before.params)
    assert found.measures == whole.measures
    tested = found.self_tests["draft"]
    assert tested.largest_difference < 1e-4
    directory = tmp_path / "whole" / "draft"
    with pytest.raises(ModelError, match="load_drafter"):
        load_model(directory)
    drafter = specjax.load_drafter(directory, found.target, k=2)
    assert drafter.kind == kind
    plain = specjax.Decoder(found.target).generate(PROMPTS, max_new_tokens=12).tokens
    for rule in registry.VERIFIERS:
        if registry.resolve(registry.VERIFIERS, rule, "verifier").lossless:
            decoder = specjax.Decoder(found.target, drafter, rule)
            assert decoder.generate(PROMPTS, max_new_tokens=12).tokens == plain, rule


@pytest.fixture(scope="module")
def prepared(run, tmp_path_factory):
    return inputs.prepare(run(tmp_path_factory.mktemp("prepared"), "medusa"))


@pytest.mark.parametrize("kind", [*KINDS, "draft_model"])
def test_a_run_that_goes_on_reads_what_it_began_with(run, settings, prepared, kind, tmp_path, monkeypatch):
    """It makes nothing: it needs no more of its target than the shapes of the weights."""
    begins = settings(tmp_path) if kind == "draft_model" else run(tmp_path, kind)
    begins = dataclasses.replace(begins, draft=dataclasses.replace(begins.draft, init="target"))
    target, rows = prepared.target, prepared.train_rows
    assembled = assemble(begins).with_target(target)
    drafter, first = cached_start(assembled, target, rows)
    began, of_target = fingerprint.digest(first.params), fingerprint.of_model(target)
    monkeypatch.setattr(fingerprint, "of_model", lambda model: of_target)
    monkeypatch.setattr(Run, "first_draft", lambda *given: pytest.fail("made"))
    shapes = dataclasses.replace(target, params=jax.eval_shape(lambda: target.params))
    for in_its_first_stage in (False, True):
        if in_its_first_stage:
            assembled.directory("draft-pretrain").mkdir()
        again, read = cached_start(assembled, shapes, rows)
        assert again == drafter
        assert read.digest({"initial_made_from": read.made_from, "initial_params": "known"}) == "known"
        assert fingerprint.digest(read.params) == began


@pytest.mark.parametrize("kind", ["eagle3", *(in_proof(kind) for kind in (*KINDS, "draft_model") if kind != "eagle3")])
def test_a_step_of_rounded_products_is_near_an_exact_one(run, settings, prepared, kind, tmp_path):
    begins = settings(tmp_path) if kind == "draft_model" else run(tmp_path, kind)
    target, batch = prepared.target, take(prepared.train_rows, range(4))
    drafter, first = cached_start(assemble(begins).with_target(target), target, prepared.train_rows)
    optimizer, moved = optax.sgd(1.0), {}
    for dtype in (None, "bfloat16"):
        form = TrainingForm(matmul_dtype=dtype)
        update = Update(drafter, ForwardKL(), optimizer, target.spec, 4, form=form).jitted()
        state, metrics = update(start_state(first.params, optimizer, False, ONE_DEVICE, drafter), target.params, batch)
        assert metrics["sound"]
        moved[dtype] = np.concatenate(
            [np.ravel(x) for x in jax.tree.leaves(jax.tree.map(jnp.subtract, state.params, first.params))]
        )
    off = np.linalg.norm(moved["bfloat16"] - moved[None])
    assert 0 < off < 0.1 * np.linalg.norm(moved[None])


@pytest.mark.parametrize("kind", ["p_eagle", *map(in_proof, ("glide", "medusa", "dspark"))])
def test_training_goes_on_with_a_stored_draft(run, kind, tmp_path):
    """With what the stored one is, of whatever sizes; what is the target's stays it."""
    first = job.run(run(tmp_path / "first", kind, steps=2))
    directory = str(tmp_path / "first" / "draft")
    settings = run(tmp_path / "second", kind, steps=2)
    of_training = {"depth_decay": 0.5} if kind != "dspark" else {"gamma": 2.0}
    goes_on = {"init": directory, "settings": of_training, "architecture": config.Architecture()}
    settings = dataclasses.replace(settings, draft=dataclasses.replace(settings.draft, **goes_on))
    second = job.run(settings)
    assert fingerprint.digest(second.draft_before.params) == fingerprint.digest(first.draft_after.params)
    assert fingerprint.digest(second.draft_after.params) != fingerprint.digest(first.draft_after.params)
    # Blocks are measured `anchors` at a time, and of those the two jobs have different numbers.
    assert second.measures.alpha_before == pytest.approx(first.measures.alpha_after, rel=1e-6)
    prepared = inputs.prepare(settings)
    begun = initial_draft(settings, prepared.target, prepared.train_rows)
    planned = assemble(settings).initial
    shapes = {name: jax.tree.map(np.shape, begun.params[name]) for name in begun.params}
    assert planned is not None
    assert shapes == {name: jax.tree.map(np.shape, planned.params[name]) for name in begun.params}
    if kind != "glide":
        began: Any = first.draft_after.drafter
        assert begun.drafter.shared == began.shared


TARGET = str(ROOT / "models" / "demo-target")


@pytest.mark.parametrize(
    ("kind", "fields", "init", "error", "message"),
    [
        (
            "eagle3",
            {"depths": 2, "layers": 1},
            "elsewhere",
            ConfigError,
            r"draft\.layers: the draft in elsewhere has it",
        ),
        ("glide", {"reads": [0, 1]}, "elsewhere", ConfigError, r"draft\.reads: the draft in elsewhere has its own; l"),
        ("glide", {}, "elsewhere", ConfigError, r"draft\.architecture: the draft in elsewhere has its own; l"),
        ("dspark", {}, {"kind": "layers", "keep": [0]}, ConfigError, "a draft of kind dspark begins as its `target`, "),
        ("eagle3", {}, TARGET, ModelError, "'llama' is no eagle3 draft"),
        ("mtp", {}, "elsewhere", ModelError, "elsewhere"),
    ],
)
def test_what_training_cannot_go_on_with_is_refused(run, tmp_path, kind, fields, init, error, message):
    settings = run(tmp_path / "run", kind)
    draft = dataclasses.replace(settings.draft, init=init, settings=fields)
    with pytest.raises(error, match=message):
        job.run(dataclasses.replace(settings, draft=draft))


@pytest.mark.parametrize("kind", ["eagle3", *map(in_proof, ("early_exit", "medusa", "dflash2"))])
def test_from_kept_hidden_states_it_is_the_same_training_and_runs_share_them(run, kind, tmp_path, caplog):
    kept = {"teacher": "cached", "teacher_path": str(tmp_path / "shared"), "steps": 4}
    online = job.run(run(tmp_path / "online", kind, steps=4))
    cached = job.run(run(tmp_path / "cached", kind, **kept))
    losses = [[record["loss"] for record in result.logs["draft-distill"]] for result in (online, cached)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert cached.measures.alpha_at_after == pytest.approx(online.measures.alpha_at_after, abs=1e-4)
    [directory] = (file.parent for file in (tmp_path / "shared").glob("*/provenance.json"))
    assert "hidden states in float32" in teacher_cache.summary(directory)
    written = {file: file.stat().st_mtime_ns for file in directory.glob("*.npy")}
    again = job.run(run(tmp_path / "again", kind, **kept))
    assert written == {file: file.stat().st_mtime_ns for file in directory.glob("*.npy")}
    assert fingerprint.digest(again.draft_after.params) == fingerprint.digest(cached.draft_after.params)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("dspark", {"kind": "on_policy"}),
        in_proof("mtp", {"kind": "generated", "sequences": 5, "shard_size": 3, "k": 2}),
        in_proof("eagle3", {"kind": "on_policy"}),
    ],
)
def test_it_is_distilled_on_text_that_the_models_write(run, tmp_path, monkeypatch, kind, data):
    monkeypatch.setattr(on_policy, "_COUNTED", 5)
    fields = {"draft_vocab_size": 100} if kind != "mtp" else {}
    result = job.run(on_data(run(tmp_path / "run", kind, fields=fields), **data))
    assert fingerprint.digest(result.draft_after.params) != fingerprint.digest(result.draft_before.params)


@pytest.mark.parametrize(
    "data", [{"kind": "generated", "sequences": 7, "shard_size": 4, "k": 2}, {"kind": "on_policy", "share": 0.25}]
)
def test_a_draft_of_fewer_ids_proposes_those_that_training_asks_for_most(run, tmp_path, monkeypatch, data):
    """Of what the models write, by the weight of its prediction, before there is a draft."""
    monkeypatch.setattr(on_policy, "_COUNTED", 5)
    settings = run(tmp_path / "run", "eagle3", fields={"draft_vocab_size": 20})
    settings = on_data(settings, **data, prompt_weight=0.3)
    prepared = inputs.prepare(settings)
    rows = inputs.start_rows(prepared, no_bars)
    found: Any = initial_draft(settings, prepared.target, rows).drafter
    files = sorted((tmp_path / "run" / "draft-distill-data").glob("shard*.safetensors"))
    sequences = Sequences.joined([shards.read(file) for file in files])
    assert len(sequences) == (7 if data["kind"] == "generated" else 5)
    written = WholeSequenceRows(sequences, prepared.train_rows.length, 0.3)
    parts = [(written, 1.0)] if data["kind"] == "generated" else [(prepared.train_rows, 0.75), (written, 0.25)]
    often = np.zeros(found.model.config.vocab_size)
    for part, share in parts:
        for row in map(part.__getitem__, range(len(part))):
            np.add.at(often, row.labels, share / len(part) * row.weight.astype(np.float64))
    least, ids = np.sort(often)[-20], set(found.model.vocabulary.ids)
    assert set(np.flatnonzero(often > least + 1e-12)) <= ids <= set(np.flatnonzero(often >= least - 1e-12))
    of_text = np.bincount(prepared.train_rows.stream, minlength=len(often))
    assert ids != set(np.argsort(-of_text, kind="stable")[:20])


@pytest.mark.parametrize("kind", ["p_eagle", in_proof("dflash")])
def test_a_chat_is_learnt_from(run, chats, tmp_path, kind):
    """What an assistant said counts, and nothing else."""
    settings = run(tmp_path / "run", kind, chats(), steps=3)
    found = job.run(settings)
    assert found.measures.alpha_after > 0
    rows = inputs.prepare(settings).held_out_rows
    counts = np.asarray(take(rows, range(len(rows))).weight) > 0
    assert 0 < found.measures.positions <= counts.sum() < 0.95 * counts.size


@pytest.mark.parametrize("kind", ["eagle3", in_proof("dspark")])
def test_over_a_mesh_it_is_the_same_training(run, kind, tmp_path):
    one = job.run(run(tmp_path / "one", kind, batch_size=4, steps=3))
    mesh = {"mesh": config.Mesh(data=2, tensor=2)}
    many = job.run(run(tmp_path / "many", kind, mesh, batch_size=4, steps=3))
    assert many.measures.alpha_at_after == pytest.approx(one.measures.alpha_at_after, abs=1e-3)
    losses = [[record["loss"] for record in result.logs["draft-distill"]] for result in (one, many)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields", "stage", "error", "message"),
    [
        (
            "mtp",
            {},
            {"teacher": "cached", "teacher_gb": 1e-6},
            ConfigError,
            r"would take .* and teacher_gb is 1e-06; ra",
        ),
        ("mtp", {}, {"scan_layers": True}, ConfigError, "scan_layers: mtp drafts run layer by layer; set it false"),
        ("eagle3", {"reads": [1, 3]}, {}, ConfigError, r"draft\.reads: \[1, 3\]; name some of the target's streams 0"),
        ("eagle3", {"num_kv_heads": 3}, {}, ConfigError, r"draft\.num_kv_heads: 3 does not divide the target's"),
        ("dflash", {"mask_token": 999}, {}, ConfigError, r"draft\.mask_token: 999, and the target has ids 0"),
        (
            "dflash2",
            {"conv_group_size": 48},
            {},
            ConfigError,
            r"draft\.conv_group_size: 48 does not divide the target's",
        ),
        (
            "dflash2",
            {"draft_vocab_size": 9},
            {},
            ConfigError,
            r"draft\.draft_vocab_size: a dflash2 draft chooses among",
        ),
        ("early_exit", {"layers": 2}, {}, ConfigError, r"draft\.layers: 2, and the target has 2; leave it earlier"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(run, tmp_path, kind, fields, stage, error, message):
    with pytest.raises(error, match=message):
        job.run(run(tmp_path / "run", kind, None, fields, **stage))


RECIPES = sorted((ROOT / "configs" / "drafters").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_measured_with_lengths_that_its_draft_has_places_for(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = config.load_config(recipe)
    assert (settings.draft.kind, settings.out) == (recipe.stem, f"runs/drafters/{recipe.stem}")
    initial = assemble(settings).initial
    assert initial is not None
    assert settings.bench.max_k <= (initial.drafter.model.most or settings.bench.max_k)


def test_more_tokens_than_a_draft_has_places_for_are_refused(run, tmp_path):
    settings = run(tmp_path / "run", "medusa", {"bench": config.Bench(ks=(2, 7))}, steps=1)
    # By the decoder that is to propose them, and not by what is told of memory: other jobs have lengths of their own.
    assert memory.footprints(assemble(settings), [memory.DECODING])
    found = job.run(settings)
    drafter = specjax.load_drafter(Path(tmp_path / "run" / "draft"), found.target, k=4)
    with pytest.raises(ModelError, match="medusa: k=4, and this draft proposes at most 3; lower k"):
        specjax.Decoder(found.target, drafter).generate(PROMPTS, max_new_tokens=4)
    # A drafter of a config names a directory, since YAML has no drafts.
    loaded = specjax.load_drafter(tmp_path / "run" / "draft", found.target, k=2)
    decoders = (
        specjax.Decoder(found.target, d) for d in ({"kind": "medusa", "model": str(tmp_path / "run"), "k": 2}, loaded)
    )
    by_path, by_draft = (decoder.generate(PROMPTS, max_new_tokens=4, temperature=0.0) for decoder in decoders)
    assert by_path.tokens == by_draft.tokens
    assert [stats.drafted for stats in by_path.stats] == [stats.drafted for stats in by_draft.stats]
    asked = dataclasses.replace(settings.selection, prompts=1, k=4)
    with pytest.raises(ConfigError, match=r"selection\.k: 4, and this draft proposes at most 3; lower it"):
        job.run(run(tmp_path / "other", "medusa", {"selection": asked}, steps=1))
    assert not (tmp_path / "other/draft-distill").exists()
    with pytest.raises(ConfigError, match=r"bench\.ks, bench\.batch_ks: 7, and this draft proposes at most 3"):
        run_bench(settings)
    with pytest.raises(ConfigError, match=r"certify\.k: 4, and this draft proposes at most 3"):
        run_certify(dataclasses.replace(settings, certify=dataclasses.replace(settings.certify, k=4)))
