from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers.utils import chat_template_utils

import train_draft
from specjax import config
from specjax.cli import run_main
from specjax.data.corpus import Document
from specjax.errors import ConfigError, DataError, ModelError, TrainingError
from specjax.evaluation import figures
from specjax.jobs import distill as job
from specjax.jobs import inputs
from specjax.jobs.generate_data import make_data
from specjax.models import hf
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.runtime import artifact, fingerprint
from specjax.training.assemble import Run
from specjax.training.evaluate import Evaluation
from specjax.training.sources import generated
from specjax.training.sources.on_policy import Mixed
from tests.jobs.conftest import LENGTH
from tests.training.toys import Interrupt


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    """(config, result) of a job that ran through."""
    run = settings(tmp_path_factory.mktemp("finished") / "run")
    return run, job.run(run)


class Recorder:
    """Bars that note each stage's steps and fail at one of them."""

    def __init__(self, fail_at: tuple[str, int] | None = None):
        self.steps: dict[str, list[int]] = {}
        self._fail_at = fail_at

    @contextlib.contextmanager
    def __call__(self, name, steps):
        self.steps[name] = []

        def progress(step, record):
            self.steps[name].append(step)
            if (name, step) == self._fail_at:
                raise Interrupt

        yield progress


def test_the_job_measures_both_drafts_and_the_control_on_the_same_positions(finished):
    _, result = finished
    measures = result.measures
    assert measures.positions == math.ceil(100 / LENGTH) * LENGTH
    assert measures.alpha_ce_control == max(measures.alpha_ce_controls.values())
    assert list(measures.alpha_ce_controls) == ["0.01"]
    assert 0 < measures.alpha_before < measures.alpha_after <= 1
    assert measures.alpha_ce_control != measures.alpha_after
    assert all(math.isfinite(x) for x in (measures.target_nll, measures.draft_nll, measures.draft_nll_after))
    assert [r["step"] for r in result.logs["draft-distill"] if "alpha" in r] == [2, 4, 6]
    assert set(result.logs) == {"draft-pretrain", "draft-distill", "control-0.01"}


def test_an_interrupted_job_resumes_to_the_same_final_weights(finished, settings, tmp_path, monkeypatch):
    """And makes no first weights, which it would throw away."""
    _, expected = finished
    run = settings(tmp_path / "run", control=config.Control())
    with pytest.raises(Interrupt):
        job.run(run, Recorder(fail_at=("draft-distill", 5)))
    monkeypatch.setattr(Run, "first_draft", lambda *given: pytest.fail("made first weights again"))
    recorder = Recorder()
    result = job.run(run, recorder)
    assert recorder.steps == {"draft-pretrain": [], "draft-distill": [5, 6], "evaluation": [1, 2, 3, 4]}
    assert fingerprint.digest(result.draft_after.params) == fingerprint.digest(expected.draft_after.params)
    assert result.measures.alpha_after == expected.measures.alpha_after
    assert result.measures.alpha_ce_control is None


def test_a_second_run_reuses_everything(finished, monkeypatch):
    run, first = finished
    recorder = Recorder()
    monkeypatch.setattr(figures, "evaluate_all", None)
    monkeypatch.setattr(hf, "save_model", None)
    second = job.run(run, recorder)
    assert set(map(tuple, recorder.steps.values())) == {()}
    assert second.measures == first.measures


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_weights_are_hashed_once_a_run(finished, monkeypatch):
    run, first = finished
    hashed, real = [], fingerprint._digest

    def counted(tree):
        found = real(tree)
        hashed.append(found)
        return found

    monkeypatch.setattr(fingerprint, "_digest", counted)
    job.run(run)
    for model in (first.target, first.draft_before, first.draft_after):
        assert hashed.count(fingerprint.digest(model.params)) == 1


def test_a_damaged_export_is_noticed_set_aside_and_written_again(finished, tmp_path, caplog):
    run, expected = finished
    shutil.copytree(run.out, tmp_path / "run")
    weights = tmp_path / "run" / "draft" / "model.safetensors"
    flip_a_byte(weights)
    damaged = weights.read_bytes()
    (tmp_path / "run" / "draft-before" / "tokenizer.json").unlink()
    recorder = Recorder()
    job.run(dataclasses.replace(run, out=str(tmp_path / "run")), recorder)
    assert set(map(tuple, recorder.steps.values())) == {()}
    for name, model in (("draft-before", expected.draft_before), ("draft", expected.draft_after)):
        assert fingerprint.digest(load_model(tmp_path / "run" / name).params) == fingerprint.digest(model.params)
        assert f"{tmp_path / 'run' / name}: damaged (" in caplog.text
    assert (tmp_path / "run" / "draft.damaged" / "model.safetensors").read_bytes() == damaged
    assert (tmp_path / "run" / "draft-before.damaged" / "config.json").exists()


def test_an_export_of_other_weights_is_kept_beside_the_new_one(finished, tmp_path, caplog):
    run, expected = finished
    shutil.copytree(run.out, tmp_path / "run")
    other = load_model(tmp_path / "run" / "draft-before")
    shutil.rmtree(tmp_path / "run" / "draft")
    shutil.copytree(tmp_path / "run" / "draft-before", tmp_path / "run" / "draft")
    job.run(dataclasses.replace(run, out=str(tmp_path / "run")))
    assert f"{tmp_path / 'run' / 'draft'}: does not hold these weights; it is kept as draft.replaced" in caplog.text
    found = [load_model(tmp_path / "run" / name).params for name in ("draft", "draft.replaced")]
    assert list(map(fingerprint.digest, found)) == list(
        map(fingerprint.digest, (expected.draft_after.params, other.params))
    )


def test_the_exported_drafts_are_the_trained_ones_with_a_card_that_says_how(finished):
    run, result = finished
    for name, model in (("draft-before", result.draft_before), ("draft", result.draft_after)):
        loaded = load_model(f"{run.out}/{name}")
        assert fingerprint.digest(loaded.params) == fingerprint.digest(model.params)
        card = (Path(run.out) / name / "README.md").read_text()
        digests = (model.params, result.target.params)
        for text in (*map(fingerprint.digest, digests), result.prepared.corpus.digest, "`target`", "learning_rate"):
            assert text in card
    assert f"{result.measures.alpha_after:.4f}" in card
    assert fingerprint.digest(result.draft_before.params) != fingerprint.digest(result.draft_after.params)


def test_no_held_out_document_is_trained_on(finished):
    prepared = finished[1].prepared
    train, held_out = ({d.digest for d in side} for side in (prepared.corpus.train, prepared.corpus.held_out))
    assert train
    assert held_out
    assert not train & held_out
    text = prepared.target.tokenizer.decode(
        np.concatenate([row.tokens for row in map(prepared.train_rows.__getitem__, range(len(prepared.train_rows)))])
    )
    for document in prepared.corpus.held_out:
        assert document.text.splitlines()[2] not in text
    assert prepared.corpus.train[0].text.splitlines()[2] in text


def test_other_settings_in_the_same_directory_are_refused(finished):
    run, _ = finished
    longer = dataclasses.replace(run, distill=dataclasses.replace(run.distill, steps=8))
    with pytest.raises(TrainingError, match=r"draft-distill: .*stage\.steps \(6 then, 8 now\)"):
        job.run(longer)


def test_a_job_in_a_directory_in_use_is_refused(finished):
    run, _ = finished
    with artifact.exclusive(run.out), pytest.raises(TrainingError, match="in use"):
        job.run(run)


def test_a_target_is_trained_from_nothing_and_kept_as_a_model_directory(settings, documents, tmp_path, monkeypatch):
    shape = config.Architecture(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1)
    run = settings(tmp_path, target=config.Target(architecture=shape, vocab_size=280, steps=4, batch_size=2))
    first = inputs.prepare(run)
    kept = load_model(tmp_path / "target")
    assert fingerprint.digest(kept.params) == fingerprint.digest(first.target.params)
    assert kept.eos_ids == (kept.tokenizer.eos_token_id,)
    assert kept.vocab_size == len(kept.tokenizer) == 280
    assert kept.config.max_positions >= 1024
    flip_a_byte(tmp_path / "tokenizer" / "files" / "tokenizer.json")
    recorder, random = Recorder(), inputs.TrainedDraftModel.init_params

    def only_shapes(self: Any, key: Any, target: Any) -> Any:
        assert isinstance(key, jax.core.Tracer), "made first weights again"
        return random(self, key, target)

    monkeypatch.setattr(inputs.TrainedDraftModel, "init_params", only_shapes)
    second = inputs.prepare(run, recorder)
    monkeypatch.undo()
    assert recorder.steps == {"target-train": []}
    assert (tmp_path / "tokenizer" / "files.damaged").exists()
    assert fingerprint.digest(second.target.params) == fingerprint.digest(first.target.params)
    assert first.train_rows.digest == second.train_rows.digest
    other = dataclasses.replace(run, target=dataclasses.replace(run.target, vocab_size=270))
    with pytest.raises(TrainingError, match=r"vocab_size \(280 then, 270 now\)"):
        inputs.prepare(other)


def test_a_draft_can_start_from_a_model_directory(settings, tiny_draft, tmp_path):
    save_model(tiny_draft, tmp_path / "start")
    still = config.Stage(loss="cross_entropy", steps=0)
    run = settings(
        tmp_path / "run",
        draft=config.Draft(init=str(tmp_path / "start"), pretrain=still, dtype="float32"),
        distill=dataclasses.replace(still, loss="forward_kl"),
        control=config.Control(),
    )
    result = job.run(run)
    assert fingerprint.digest(result.draft_after.params) == fingerprint.digest(tiny_draft.params)
    assert result.measures.alpha_before == result.measures.alpha_after


def test_a_starting_draft_of_another_vocabulary_is_refused(settings, tiny_draft, tmp_path):
    spec = dataclasses.replace(tiny_draft.spec, config=dataclasses.replace(tiny_draft.config, vocab_size=301))
    save_model(LoadedModel(spec, spec.init(jax.random.key(0))), tmp_path / "start")
    with pytest.raises(ModelError, match="301"):
        job.run(settings(tmp_path / "run", draft=config.Draft(init=str(tmp_path / "start"))))


def test_a_starting_draft_of_other_padding_has_the_acceptance_it_has_without(settings, tiny_draft, tmp_path):
    spec = dataclasses.replace(tiny_draft.spec, config=dataclasses.replace(tiny_draft.config, vocab_size=303))
    embedding = np.pad(np.asarray(tiny_draft.params["embedding"]), ((0, 3), (0, 0)), constant_values=9.0)
    starts = {"plain": tiny_draft, "padded": LoadedModel(spec, {**tiny_draft.params, "embedding": embedding})}
    still = config.Stage(loss="cross_entropy", steps=0)
    found = []
    for name, model in starts.items():
        save_model(dataclasses.replace(model, tokenizer=tiny_draft.tokenizer), tmp_path / name)
        draft = config.Draft(init=str(tmp_path / name), pretrain=still)
        changes = {
            "draft": draft,
            "distill": dataclasses.replace(still, loss="forward_kl"),
            "control": config.Control(),
        }
        found.append(job.run(settings(tmp_path / f"run-{name}", **changes)))
    assert found[0].measures.alpha_after == pytest.approx(found[1].measures.alpha_after, rel=1e-5)
    assert load_model(tmp_path / "run-padded" / "draft").vocab_size == 303


def test_windows_longer_than_the_targets_positions_are_refused(settings, documents, tmp_path):
    data = config.Data(path=str(documents), held_out=0.25, seq_len=257)
    with pytest.raises(ConfigError, match=r"data\.seq_len: 257 exceeds the target's 256 positions"):
        job.run(settings(tmp_path, data=data))


def test_a_corpus_of_one_document_cannot_be_split(settings, tmp_path):
    (tmp_path / "one.txt").write_text("a single document\n" * 100)
    data = config.Data(path=str(tmp_path / "one.txt"), seq_len=LENGTH)
    with pytest.raises(DataError, match=r"one\.txt.*data\.held_out"):
        job.run(settings(tmp_path / "run", data=data))


def test_a_part_too_short_for_one_window_is_named(settings, tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"- {i}")
    data = config.Data(path=str(tmp_path / "corpus"), held_out=0.25, seq_len=250)
    with pytest.raises(DataError, match=r"its training part: the corpus has \d+ tokens.*data\.seq_len"):
        job.run(settings(tmp_path / "run", data=data))


def test_a_bad_override_of_the_command_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("target: {path: nowhere}\ndata: {path: nowhere}\n")
    with pytest.raises(SystemExit) as exit_:
        run_main(train_draft.main, "", argv=[str(tmp_path / "run.yaml"), "distill.stepz=3"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "stepz" in error


def test_a_draft_cut_from_its_target_has_the_target_s_conventions(settings, tmp_path):
    run = settings(tmp_path / "cut", control=config.Control())
    shape = load_model(run.target.path).config
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    whole = config.Architecture(**{name: getattr(shape, name) for name in names})
    skipped = dataclasses.replace(run.draft.pretrain, steps=0)
    result = job.run(
        dataclasses.replace(run, draft=config.Draft(whole, init="target", pretrain=skipped, dtype="float32"))
    )
    # Nothing was cut and nothing trained yet: the target itself, in other directions.
    assert result.measures.alpha_before == pytest.approx(1, abs=1e-3)
    assert load_model(str(tmp_path / "cut" / "draft")).config == shape


def test_a_shared_draft_is_chosen_by_decoding_and_exported_whole(settings, documents, tmp_path):
    often: dict[str, Any] = {"batch_size": 2, "eval_every": 2, "save_every": 2, "eval_positions": LENGTH}
    start = {"kind": "layers", "keep": [1], "share": True}
    run = settings(
        tmp_path / "run",
        draft=config.Draft(init=start, pretrain=config.Stage(loss="cross_entropy", steps=2, **often)),
        distill=config.Stage(steps=6, **often, optimizer=config.Optimizer(learning_rate=0.1)),
        control=config.Control(),
        selection=config.Selection(prompts=2, prompt_tokens=8, new_tokens=8, k=2, temperatures=(0.0,), select="best"),
    )
    result = job.run(run)
    assert not any("block_efficiency" in record for record in result.logs["draft-pretrain"])
    scores = {r["step"]: r["block_efficiency"] for r in result.logs["draft-distill"]}
    assert list(scores) == [2, 4, 6]
    best = max(scores, key=lambda step: (scores[step], step))
    before, after = result.comparison
    assert (before.drafter, after.drafter, after.source, after.k) == ("draft_before", "draft_after", documents.name, 2)
    assert after.block_efficiency == scores[best]
    assert after.alpha == result.measures.alpha_after
    exported = load_model(tmp_path / "run" / "draft")
    assert exported.config.num_layers == 1
    np.testing.assert_array_equal(exported.params["embedding"], result.target.params["embedding"])
    assert not np.array_equal(exported.params["norm"]["scale"], result.target.params["norm"]["scale"])
    card = (tmp_path / "run" / "draft" / "README.md").read_text()
    assert f"| block efficiency, k=2, greedy | {after.block_efficiency:.2f} (95% " in card
    by_training = f"{after.block_efficiency:.2f} by its training forward on the same texts"
    assert f"2 held-out prompts, which chose this draft); {by_training}; accepted at depth 1 .. k: " in card
    assert "which chose" not in (tmp_path / "run" / "draft-before" / "README.md").read_text()
    recorder = Recorder()
    assert job.run(run, recorder).comparison == result.comparison
    assert set(map(tuple, recorder.steps.values())) == {()}


def test_alpha_is_told_apart_by_source_where_a_source_fills_a_row(settings, tiny_target, tmp_path):
    target = dataclasses.replace(tiny_target, eos_ids=(0,))
    sizes = {"code": 40, "prose": 20, "short": 1}
    held_out = [Document(name, f"{name} " * size, name) for name, size in sizes.items()]

    def evaluate(drafts, rows):
        return [Evaluation(0.0, 0.0, len(rows) + draft, 0) for draft in drafts]

    whole = [Evaluation(0.0, 0.0, alpha, 0) for alpha in (0.3, 0.4)]
    found = figures.alphas_by_source(settings(tmp_path), target, held_out, evaluate, [0.1, 0.2], whole)
    before, after = found["draft_before"], found["draft_after"]
    assert set(before) == set(after) == {"code", "prose", "all"}
    assert (before["all"], after["all"]) == (0.3, 0.4)
    assert after["code"] - before["code"] == pytest.approx(0.1)
    assert before["code"] > before["prose"] + 1
    assert figures.alphas_by_source(settings(tmp_path), target, held_out[:1], evaluate, [0.1, 0.2], whole) == {
        "draft_before": {"code": 0.3},
        "draft_after": {"code": 0.4},
    }


def test_a_cut_that_does_not_fit_names_the_field(settings, tmp_path):
    run = settings(tmp_path / "cut")
    cut = dataclasses.replace(run.draft, init="target", architecture=config.Architecture(hidden_size=4096))
    with pytest.raises(ConfigError, match=r"draft\.architecture, cut from the target: hidden_size=4096 exceeds"):
        job.run(dataclasses.replace(run, draft=cut))


def test_a_job_without_distillation_does_not_replace_a_distilled_draft(finished):
    run, result = finished
    before = fingerprint.digest(load_model(str(Path(run.out) / "draft")).params)
    with pytest.raises(TrainingError, match=r"draft-distill.*stage.steps \(6 then, 0 now\)"):
        job.run(dataclasses.replace(run, distill=dataclasses.replace(run.distill, steps=0)))
    assert fingerprint.digest(load_model(str(Path(run.out) / "draft")).params) == before
    assert fingerprint.digest(result.draft_after.params) == before


def test_a_model_of_the_users_own_is_not_replaced(settings, tmp_path):
    mine = tmp_path / "run" / "draft" / "model.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"precious")
    with pytest.raises(DataError, match="holds something else"):
        job.run(settings(tmp_path / "run"))
    assert mine.read_bytes() == b"precious"


def on_data(run: config.RunConfig, **data) -> config.RunConfig:
    """Two steps on this data, without pretraining."""
    sampled = {"prompt_tokens": 4, "new_tokens": 12, "batch_size": 2, **data}
    return dataclasses.replace(
        run,
        draft=dataclasses.replace(run.draft, pretrain=dataclasses.replace(run.draft.pretrain, steps=0)),
        distill=dataclasses.replace(run.distill, steps=2, data=sampled),
        control=config.Control(),
    )


def test_a_draft_is_distilled_on_what_its_target_wrote_before(settings, tmp_path, monkeypatch):
    decoding, make = [], generated.make
    monkeypatch.setattr(generated, "make", lambda *args: decoding.append(args[2].holds_originals) or make(*args))
    shared = str(tmp_path / "data")
    run = on_data(settings(tmp_path / "run"), kind="generated", sequences=5, shard_size=3, k=2, path=shared)
    made = make_data(run, None, None)
    assert decoding == [False], "the target is in memory once"
    assert (made["directory"], made["sequences"], len(made["shards"])) == (shared, 5, 2)
    assert made["shards"][0]["draft"] is None
    before = {file.name: file.stat().st_mtime_ns for file in Path(shared).glob("shard*")}
    recorder = Recorder()
    result = job.run(run, recorder)
    assert recorder.steps["draft-distill-data"] == [3, 5]
    assert {file.name: file.stat().st_mtime_ns for file in Path(shared).glob("shard*")} == before
    assert fingerprint.digest(result.draft_after.params) != fingerprint.digest(result.draft_before.params)
    (tmp_path / "prompts.txt").write_text("def add\n")
    data = {**run.distill.data, "prompts": str(tmp_path / "prompts.txt")}
    asked = dataclasses.replace(run, distill=dataclasses.replace(run.distill, data=data))
    with pytest.raises(TrainingError, match=r"the prompts \(data\.prompts: '.*/prompts\.txt'\)"):
        make_data(asked, None, None)
    with pytest.raises(ConfigError, match=r"distill\.data: the kind is 'text'; set distill\.data="):
        make_data(settings(tmp_path / "other"), None, None)


def test_a_draft_is_distilled_on_its_own_text(settings, tmp_path):
    run = on_data(settings(tmp_path / "run"), kind="on_policy", every=1)
    result = job.run(run)
    assert fingerprint.digest(result.draft_after.params) != fingerprint.digest(result.draft_before.params)
    made_from = json.loads((tmp_path / "run" / "draft-distill" / "fingerprint.json").read_text())
    assert made_from["train_rows"] == Mixed(result.prepared.train_rows, 1.0).digest  # prompts count: forward KL
    pools = sorted((tmp_path / "run" / "draft-distill" / "pools").glob("*.safetensors"))
    assert len(pools) == 2
    assert pools[0].read_bytes() != pools[1].read_bytes()


def test_what_a_corpus_skipped_is_kept_with_what_was_prepared(settings, documents, tmp_path, caplog):
    for file in documents.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "short.txt").write_bytes(b"a")
    data = config.Data(path=str(tmp_path), held_out=0.25, seq_len=LENGTH, on_bad="skip")
    prepared = inputs.prepare(settings(tmp_path / "run", data=data))
    assert prepared.bad.counts == {"not UTF-8": 1, "documents shorter than two tokens": 1}
    (message,) = caplog.messages
    assert "1 skipped, not UTF-8 (first: " in message


def test_a_chat_is_the_same_text_when_its_run_goes_on_after_midnight(settings, chats, tmp_path, monkeypatch):
    """The template prints the date, which is that of the day on which the run began."""
    run = settings(tmp_path / "run", **chats("{{ strftime_now('%d %b %Y') }}"))

    def prepared_on(day: int) -> inputs.Prepared:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2030, 1, day)

            today = now

        module = types.SimpleNamespace(date=Clock, datetime=Clock, time=datetime.time)
        monkeypatch.setattr(inputs, "datetime", module, raising=False)
        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        return inputs.prepare(run)

    first, later = prepared_on(1), prepared_on(2)
    assert "01 Jan 2030" in first.corpus.train[0].text
    assert [d.text for d in later.corpus.train] == [d.text for d in first.corpus.train]
    assert later.train_rows.digest == first.train_rows.digest
    (tmp_path / "run" / "chat_date.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"chat_date\.json: damaged; write the day that the run began"):
        inputs.prepare(run)
