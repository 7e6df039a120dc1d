from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import backend, config, registry
from specjax.data.rows import Batches, take
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import DataError, Stopped, TrainingError
from specjax.models.vocabulary import DraftVocabulary
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import read_log
from specjax.runtime.signals import stop_requested
from specjax.testing.heads import TrainedHeads
from specjax.training import trainer
from specjax.training.evaluate import evaluate
from specjax.training.init.cached import FirstWeights
from specjax.training.layout import make_layout
from specjax.training.losses import AdaSPEC
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, Update, microbatch_rows
from tests.cases import transformer
from tests.training import toys
from tests.training.toys import BigramDraft, Interrupt, assert_same, bigram_params, interrupt_after, train_stage


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(directory, final weights) of the toy stage."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "stage"
    return directory, toys.train(directory)


def without_speed(log):
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in log]


def test_an_interrupted_stage_resumes_to_the_same_weights_and_log(uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7))
    steps = []
    assert_same(toys.train(tmp_path / "stage", lambda step, record: steps.append(step)), uninterrupted[1])
    assert steps == list(range(6, 13))
    assert without_speed(read_log(tmp_path / "stage")) == without_speed(read_log(uninterrupted[0]))
    assert [record["step"] for record in read_log(tmp_path / "stage")] == [5, 6, 10, 12]


def test_a_stage_interrupted_before_its_first_checkpoint_starts_over(uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(3))
    assert_same(toys.train(tmp_path / "stage"), uninterrupted[1])


def test_a_stage_that_goes_on_makes_no_first_weights(uninterrupted, tmp_path, monkeypatch):
    """Nor a state of them: it restores into shapes. What the weights would be made of is told from another thing."""
    made, states, start = [], [], trainer.start_state
    monkeypatch.setattr(trainer, "start_state", lambda *given: states.append(given) or start(*given))

    def run(progress: Any, made_from: str, seed: int = 1) -> Any:
        def make() -> Any:
            made.append(seed)
            return bigram_params(seed)

        weights = FirstWeights(jax.eval_shape(bigram_params, 1), make, made_from)
        data = toys.target(), toys.rows(40), toys.rows(8, 1), 3
        return train_stage(tmp_path / "stage", toys.stage(), BigramDraft(), weights, *data, progress)

    with pytest.raises(Interrupt):
        run(interrupt_after(7), "a seed")
    assert (len(made), len(states)) == (1, 1)
    assert_same(run(None, "a seed"), uninterrupted[1])
    assert_same(run(None, "a seed"), uninterrupted[1])
    assert (len(made), len(states)) == (1, 1)
    # Said otherwise, the same weights are those that it began with, and others are not.
    assert_same(run(None, "the same in other words"), uninterrupted[1])
    with pytest.raises(TrainingError, match="changed since it was made: the weights that training began with"):
        run(None, "another seed", seed=2)


def test_another_mesh_is_told_where_a_stage_goes_on(tmp_path, caplog):
    """Once, and of steps that are still to be taken."""
    stage, mesh = tmp_path / "stage", make_layout(config.Mesh(data=2, fsdp=2))
    with pytest.raises(Interrupt):
        toys.train(stage, interrupt_after(3))
    with pytest.raises(Interrupt):
        toys.train(stage, interrupt_after(7), layout=mesh)  # from the first step on
    with pytest.raises(Interrupt):
        toys.train(stage, interrupt_after(11), layout=mesh)
    assert not caplog.messages
    toys.train(stage)
    [told] = caplog.messages
    assert "the first 10 steps were taken on the mesh data=2 x fsdp=2 x tensor=1, " in told
    assert "the next ones are taken on data=1 x fsdp=1 x tensor=1" in told
    toys.train(stage, layout=mesh)
    assert caplog.messages == [told]


def test_sigterm_saves_the_step_under_way_and_the_rest_goes_on_as_if_nothing_was(uninterrupted, tmp_path):
    def terminate(step, record):
        if step in (6, 8):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"stage: stopped by SIGTERM; step 7 is saved"):
        toys.train(tmp_path / "stage", terminate)
    with pytest.raises(Stopped, match="step 9 is saved"):
        toys.train(tmp_path / "stage", terminate)
    steps = []
    assert_same(toys.train(tmp_path / "stage", lambda step, record: steps.append(step)), uninterrupted[1])
    assert steps == [10, 11, 12]
    assert without_speed(read_log(tmp_path / "stage")) == without_speed(read_log(uninterrupted[0]))


def test_a_sigterm_in_the_last_step_keeps_the_next_stage_from_beginning(uninterrupted, tmp_path):
    def progress(step, record):
        if step == 11:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="step 12 is saved"):
        toys.train(tmp_path / "stage", progress)
    assert_same(toys.train(tmp_path / "stage"), uninterrupted[1])


def test_a_sigterm_during_the_last_evaluation_ends_the_run_too(uninterrupted, tmp_path, monkeypatch):
    real = trainer.evaluate

    def terminated(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(trainer, "evaluate", terminated)
    with pytest.raises(Stopped, match="step 6 is saved"):
        toys.train(tmp_path / "stage")
    with pytest.raises(Stopped, match="step 12 is saved"):
        toys.train(tmp_path / "stage")
    assert_same(toys.train(tmp_path / "stage"), uninterrupted[1])
    assert without_speed(read_log(tmp_path / "stage")) == without_speed(read_log(uninterrupted[0]))


def test_the_second_sigterm_does_what_it_did_before_training():
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with stop_requested() as stops:
            assert not stops(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stops(2)
            assert came == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(11))
    (tmp_path / "stage" / "checkpoints" / "10" / "sha256.json").write_text("{}")
    steps = []
    assert_same(toys.train(tmp_path / "stage", lambda step, record: steps.append(step)), uninterrupted[1])
    assert steps[0] == 6
    assert [record["step"] for record in read_log(tmp_path / "stage")] == [5, 6, 10, 12]


def remove_the_manifest(checkpoint):
    (checkpoint / "sha256.json").unlink()


def flip_a_byte(checkpoint):
    file = max((f for f in checkpoint.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip_a_byte, remove_the_manifest])
@pytest.mark.parametrize("known", [True, False])
def test_training_does_not_start_over_where_every_checkpoint_is_damaged(damage, known, uninterrupted, tmp_path):
    stage, expected = tmp_path / "stage", uninterrupted[1]
    with pytest.raises(Interrupt):
        toys.train(stage, interrupt_after(11))
    for name in ("5", "10"):
        shutil.copytree(stage / "checkpoints" / name, tmp_path / name)
        damage(stage / "checkpoints" / name)
    if not known:  # as a directory of an earlier version
        (stage / "checkpoints.json").unlink()
    log = (stage / "log.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"its log shows progress, .*10\.damaged, 5\.damaged .*from a copy"):
            toys.train(stage)
    assert (stage / "log.jsonl").read_bytes() == log
    # The remedy in the message.
    shutil.copytree(tmp_path / "10", stage / "checkpoints" / "10")
    assert_same(toys.train(stage), expected)


@pytest.mark.parametrize("known", [True, False])
def test_training_does_not_start_over_where_the_checkpoints_are_gone(known, tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7))
    shutil.rmtree(tmp_path / "stage" / "checkpoints")
    if not known:
        (tmp_path / "stage" / "checkpoints.json").unlink()
    log = (tmp_path / "stage" / "log.jsonl").read_bytes()
    was = "of step 5 was whole, " if known else r"left \("
    for _ in range(2):
        with pytest.raises(TrainingError, match=rf"{was}.*checkpoints holds none.*move .*elsewhere"):
            toys.train(tmp_path / "stage")
    assert (tmp_path / "stage" / "log.jsonl").read_bytes() == log


def test_a_stage_that_has_logged_but_not_saved_starts_over(tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7), save_every=12)
    assert [record["step"] for record in read_log(tmp_path / "stage")] == [6]
    toys.train(tmp_path / "stage", save_every=12)
    assert [record["step"] for record in read_log(tmp_path / "stage")] == [6, 10, 12]


def test_a_stage_killed_in_its_first_save_starts_over(uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", lambda self, step: self._manager.wait_until_finished())
        with pytest.raises(Interrupt):
            toys.train(tmp_path / "stage", interrupt_after(7))
    assert_same(toys.train(tmp_path / "stage"), uninterrupted[1])
    assert not list((tmp_path / "stage" / "checkpoints").glob("*.damaged"))


def test_a_log_line_cut_short_by_a_kill_is_dropped(uninterrupted, tmp_path):
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7))
    with (tmp_path / "stage" / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    toys.train(tmp_path / "stage")
    assert without_speed(read_log(tmp_path / "stage")) == without_speed(read_log(uninterrupted[0]))


@pytest.mark.parametrize("nested", [False, True])
def test_the_reference_draft_of_a_loss_is_part_of_what_a_stage_is(nested, tmp_path, monkeypatch):
    seed = 2
    monkeypatch.setattr(
        AdaSPEC, "references", lambda loss, target: {loss.reference: (BigramDraft(), bigram_params(seed))}
    )
    loss = {"kind": "adaspec", "reference": "elsewhere", "keep": 0.5}
    loss = {"kind": "sum", "of": [{"kind": "sum", "of": [loss]}]} if nested else loss
    first = toys.train(tmp_path / "stage", loss=loss)
    assert read_log(tmp_path / "stage")[-1]["alpha"] > read_log(tmp_path / "stage")[1]["alpha"]
    assert_same(toys.train(tmp_path / "stage", loss=loss), first)
    seed = 3
    with pytest.raises(TrainingError, match="changed since it was made: the reference's weights"):
        toys.train(tmp_path / "stage", loss=loss)


def test_a_finished_stage_returns_its_weights_at_once(uninterrupted):
    directory, expected = uninterrupted
    steps = []
    assert_same(toys.train(directory, lambda step, record: steps.append(step)), expected)
    assert steps == []


def test_distillation_raises_alpha_and_lowers_the_loss(uninterrupted):
    first, last = (read_log(uninterrupted[0])[i] for i in (0, -1))
    before = evaluate(BigramDraft(), bigram_params(1), toys.target(), toys.rows(8, 1), 32, 4)
    assert last["alpha"] > before.alpha + 0.05
    assert last["loss"] < first["loss"]
    assert last["tokens"] == 12 * 4 * toys.LENGTH
    measured = [record["step"] for record in read_log(uninterrupted[0]) if "held_out_nll" in record]
    assert measured == [6, 12]


def test_the_callers_parameters_survive_the_donated_step(tmp_path):
    params = bigram_params(1)
    settings = (toys.target(), toys.rows(40), toys.rows(8, 1), 3)
    train_stage(tmp_path / "stage", toys.stage(steps=1), BigramDraft(), params, *settings)
    assert_same(params, bigram_params(1))


def poisoned(*steps: int) -> tuple:
    """(rows whose batches of these steps hold a token of NaN logits, the batches as they are drawn).

    Within an epoch of 10 steps every window is seen once."""
    windows = toys.windows(40)
    batches = Batches(toys.Windows(windows), 4, 3)
    for number in steps:
        windows[batches.indices(number - 1)[0], 2] = toys.VOCAB - 1
    return toys.Windows(windows), batches


def train_on(rows, directory, **changes):
    settings = (bigram_params(1), toys.target(), rows, toys.rows(8, 1), 3)
    return train_stage(directory, toys.stage(**changes), BigramDraft(poison=toys.VOCAB - 1), *settings)


def restored(directory):
    like = TrainState(bigram_params(1), make_optimizer(toys.stage()).init(bigram_params(1)))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        return checkpoints.restore_latest(like)


def test_a_nan_loss_stops_with_its_step_and_rows_and_keeps_the_last_good_checkpoint(tmp_path):
    rows, batches = poisoned(7)
    message = r"step 7: the loss is nan.*rows (.*) of the training data; the checkpoint of step 5 is kept.*rate below"
    with pytest.raises(TrainingError, match=message) as error:
        train_on(rows, tmp_path / "stage")
    named = re.search(message, str(error.value))
    assert named is not None
    assert [int(row) for row in named[1].split(", ")] == batches.indices(6).tolist()
    kept = restored(tmp_path / "stage")
    assert kept is not None
    assert kept.step == 5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((kept.state.params, kept.state.opt)))
    assert [record["step"] for record in read_log(tmp_path / "stage")] == [5, 6]


def test_a_stage_that_failed_goes_on_once_such_steps_may_be_skipped(tmp_path):
    rows, batches = poisoned(3, 7)
    bad = [any(toys.VOCAB - 1 in rows[i].tokens for i in batches.indices(step)) for step in range(12)]
    with pytest.raises(TrainingError, match="step 3"):
        train_on(rows, tmp_path / "stage")
    # The count is part of the state: the step skipped before the checkpoint of step 5 counts after it.
    with pytest.raises(TrainingError, match=r"step 7: the loss is nan.*after 1 skipped steps"):
        train_on(rows, tmp_path / "stage", skip_non_finite=1)
    params = train_on(rows, tmp_path / "stage", skip_non_finite=sum(bad))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    log = read_log(tmp_path / "stage")
    assert [(r["step"], r["skipped"]) for r in log] == [(step, sum(bad[:step])) for step in (5, 6, 10, 12)]
    assert all(np.isfinite(record["loss"]) for record in log)
    assert_same(train_on(rows, tmp_path / "at-once", skip_non_finite=sum(bad)), params)


@pytest.mark.parametrize("poison", [True, False])
def test_a_skipped_step_leaves_the_state_as_it_was_and_another_is_not_touched(poison):
    target, optimizer = toys.target(), make_optimizer(toys.stage())
    windows = toys.windows(4)
    windows[1, 2] = toys.VOCAB - 1 if poison else 0
    drafter, loss = BigramDraft(poison=toys.VOCAB - 1), registry.resolve(registry.LOSSES, "forward_kl", "")()
    moved = {}
    for skip in (True, False):
        params = bigram_params(1)
        state = TrainState(params, optimizer.init(params))
        update = Update(drafter, loss, optimizer, target.spec, 2, skip=skip).jitted()
        moved[skip], metrics = update(state, target.params, take(toys.Windows(windows), range(4)))
        assert bool(metrics["sound"]) is not poison
        assert int(moved[skip].skipped) == poison
    before = (bigram_params(1), optimizer.init(bigram_params(1)))
    expected = before if poison else (moved[False].params, moved[False].opt)
    assert_same((moved[True].params, moved[True].opt), expected)


def test_the_steps_asked_for_are_traced(tmp_path):
    toys.train(tmp_path / "stage", profile=(3, 4))
    assert list((tmp_path / "stage" / "profile").rglob("*.xplane.pb"))


def slowing(schedule: str, **changes) -> config.Optimizer:
    return config.Optimizer(learning_rate=0.1, warmup_steps=2, schedule=schedule, **changes)  # pyright: ignore


@pytest.mark.parametrize(
    ("optimizer", "stopped_at"),
    [
        (slowing("constant"), None),
        (slowing("constant"), 7),
        (slowing("wsd", decay_share=0.4), 7),
    ],
)
def test_a_stage_prolonged_is_one_that_was_longer_from_the_start(optimizer, stopped_at, tmp_path):
    settings = {"optimizer": optimizer, "save_every": 2}
    longer = toys.train(tmp_path / "longer", steps=20, **settings)
    with contextlib.nullcontext() if stopped_at is None else pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", None if stopped_at is None else interrupt_after(stopped_at), **settings)
    steps = []
    assert_same(toys.train(tmp_path / "stage", lambda step, record: steps.append(step), steps=20, **settings), longer)
    assert steps[0] == (13 if stopped_at is None else stopped_at)
    # From then on it is one of 20 steps.
    assert_same(toys.train(tmp_path / "stage", steps=20, **settings), longer)
    with pytest.raises(TrainingError, match=r"stage\.steps \(20 then, 12 now\); steps can .*than those taken, 20"):
        toys.train(tmp_path / "stage", **settings)


@pytest.mark.parametrize(
    "optimizer", [slowing("cosine"), slowing("linear"), slowing("wsd", decay_share=0.4)], ids=lambda o: o.schedule
)
def test_a_stage_that_has_slowed_down_towards_its_end_is_not_prolonged(optimizer, tmp_path):
    toys.train(tmp_path / "stage", optimizer=optimizer)
    message = rf"steps \(12 then, 20 now\); the schedule {optimizer.schedule} .*, 12 of which are taken; .*constant"
    with pytest.raises(TrainingError, match=message):
        toys.train(tmp_path / "stage", optimizer=optimizer, steps=20)


def test_steps_that_were_raised_by_mistake_can_be_lowered_again(tmp_path, monkeypatch):
    def stopped(*args, **kwargs):
        raise Interrupt

    settings: dict[str, Any] = {"optimizer": slowing("constant"), "save_every": 2, "eval_every": 4}
    first = toys.train(tmp_path / "stage", steps=4, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Update", stopped)
        with pytest.raises(Interrupt):
            toys.train(tmp_path / "stage", steps=8_000, **settings)
    assert_same(toys.train(tmp_path / "stage", steps=4, **settings), first)
    longer = toys.train(tmp_path / "longer", steps=8, **settings)
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7), steps=8_000, **settings)
    # Step 6 is saved, but it was not the last: nothing is measured of it.
    with pytest.raises(TrainingError, match=r"no fewer than those taken, 6, of which the last is measured"):
        toys.train(tmp_path / "stage", steps=6, **settings)
    assert_same(toys.train(tmp_path / "stage", steps=8, **settings), longer)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_steps_of_a_stage_that_has_taken_none_may_be_any(schedule, tmp_path, monkeypatch):
    settings = {"optimizer": slowing(schedule)}
    expected = toys.train(tmp_path / "other", **settings)
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(1), steps=12_000, **settings)
    assert_same(toys.train(tmp_path / "stage", **settings), expected)


def test_steps_are_not_raised_while_the_checkpoints_that_say_how_far_it_came_are_damaged(tmp_path):
    stage, settings = tmp_path / "stage", {"optimizer": slowing("wsd", decay_share=0.5), "save_every": 2}
    expected = toys.train(stage, steps=6, **settings)
    made_of = (stage / "fingerprint.json").read_bytes()
    for name in ("4", "6"):
        shutil.copytree(stage / "checkpoints" / name, tmp_path / name)
        flip_a_byte(stage / "checkpoints" / name)
    with pytest.raises(TrainingError, match="no undamaged checkpoint is left"):
        toys.train(stage, steps=6, **settings)
    with pytest.raises(TrainingError, match="6 of which are taken"):
        toys.train(stage, steps=12, **settings)
    (stage / "checkpoints.json").unlink()  # as a directory of an earlier version
    with pytest.raises(TrainingError, match="no undamaged checkpoint is left"):
        toys.train(stage, steps=12, **settings)
    assert (stage / "fingerprint.json").read_bytes() == made_of
    shutil.copytree(tmp_path / "6", stage / "checkpoints" / "6")
    assert_same(toys.train(stage, steps=6, **settings), expected)


def test_epochs_are_so_many_passes_over_the_rows(uninterrupted, tmp_path):
    # 40 rows, 4 a step.
    assert_same(toys.train(tmp_path / "stage", steps=None, epochs=1.2), uninterrupted[1])
    assert_same(toys.train(tmp_path / "stage"), uninterrupted[1])


def test_a_directory_of_other_settings_is_refused_with_the_fields_that_differ(uninterrupted):
    directory, _ = uninterrupted
    with pytest.raises(TrainingError) as error:
        toys.train(directory, steps=13, loss="cross_entropy")
    for text in (str(directory), "stage.steps (12 then, 13 now)", "stage.loss", "another `out`"):
        assert text in str(error.value)
    assert "batch_size" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("seed", {"seed": 4}),
        ("weights that training began with", {"params": bigram_params(2)}),
        ("target's weights", {"target": toys.target(5)}),
        ("target's config", {"target": toys.target(config=0.5)}),
        ("training text", {"train_rows": toys.rows(40, 7)}),
        ("held-out text", {"held_out_rows": toys.rows(8, 7)}),
        ("drafter.ignored", {"drafter": BigramDraft(ignored=2)}),
    ],
)
def test_another_start_than_the_directorys_is_refused(field, change, uninterrupted):
    settings = {
        "drafter": BigramDraft(),
        "params": bigram_params(1),
        "target": toys.target(),
        "train_rows": toys.rows(40),
        "held_out_rows": toys.rows(8, 1),
        "seed": 3,
    }
    with pytest.raises(TrainingError, match=f"other settings: {field} |changed since it was made: the {field}"):
        train_stage(uninterrupted[0], toys.stage(), **settings | change)


def test_how_often_a_stage_saves_and_measures_may_change(uninterrupted):
    directory, expected = uninterrupted
    assert_same(toys.train(directory, save_every=2, eval_every=3, eval_positions=64), expected)


def test_a_directory_of_unknown_origin_is_refused_and_left_alone(tmp_path):
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "thesis.txt").write_text("keep")
    with pytest.raises(TrainingError, match=r"no fingerprint\.json"):
        toys.train(tmp_path / "stage")
    assert [f.name for f in (tmp_path / "stage").iterdir()] == ["thesis.txt"]


def test_a_corpus_too_small_for_one_batch_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match="too few for one batch of 64"):
        toys.train(tmp_path / "stage", batch_size=64)
    assert not (tmp_path / "stage").exists()


def test_a_loss_that_needs_a_target_is_refused_without_one(tmp_path):
    settings = (None, toys.rows(40), toys.rows(8, 1), 3)
    with pytest.raises(TrainingError, match="'forward_kl' needs a target"):
        train_stage(tmp_path / "stage", toys.stage(), BigramDraft(), bigram_params(1), *settings)


def test_without_a_target_the_log_has_the_held_out_loss_but_no_alpha(tmp_path):
    settings = (None, toys.rows(40), toys.rows(8, 1), 3)
    train_stage(tmp_path / "s", toys.stage(steps=2, loss="cross_entropy"), BigramDraft(), bigram_params(1), *settings)
    (record,) = read_log(tmp_path / "s")
    assert "held_out_nll" in record
    assert "alpha" not in record
    assert "NaN" not in (tmp_path / "s" / "log.jsonl").read_text()


def test_a_stage_of_no_steps_returns_what_it_was_given(tmp_path):
    assert_same(toys.train(tmp_path / "stage", steps=0), bigram_params(1))
    assert read_log(tmp_path / "stage") == []


def updated(rows: int, loss: str = "forward_kl", drafter=None):
    """Metrics and parameters after one plain gradient step on 4 windows, in microbatches of ``rows``."""
    drafter, target = drafter or BigramDraft(ignored=3), toys.target()
    optimizer = optax.sgd(1.0)
    update = Update(drafter, registry.resolve(registry.LOSSES, loss, "loss")(), optimizer, target.spec, rows).jitted()
    params = bigram_params(1)
    state, metrics = update(TrainState(params, optimizer.init(params)), target.params, take(toys.rows(4), range(4)))
    return metrics, state.params


@pytest.mark.parametrize("rows", [1, 2])
def test_microbatches_of_uneven_masks_give_the_gradient_of_the_whole_batch(rows):
    counts = (toys.windows(4)[:, :-1] != 3).sum(axis=1)
    assert len(set(counts)) > 1
    whole, micro = updated(4), updated(rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, micro)


def test_weights_are_arguments_of_the_step_not_constants():
    target, optimizer = toys.target(), make_optimizer(toys.stage())
    update = Update(
        BigramDraft(), registry.resolve(registry.LOSSES, "forward_kl", "")(), optimizer, target.spec, 2
    ).jitted()
    params = bigram_params(1)
    state = TrainState(params, optimizer.init(params))
    traced = update.trace(state, target.params, take(toys.rows(4), range(4))).jaxpr
    assert all(np.size(constant) < toys.VOCAB for constant in traced.consts)
    assert f"f32[{toys.VOCAB},{toys.VOCAB}]" in str(traced.in_avals).replace("float32", "f32")


@pytest.mark.parametrize(("tokens", "rows"), [(8, 1), (24, 3), (10_000, 6), (32, 3), (1, 1)])
def test_a_microbatch_divides_the_batch(tokens, rows, monkeypatch):
    monkeypatch.setattr(backend, "MICRO_TOKENS_CPU", tokens)
    assert microbatch_rows(6, 8) == rows


def test_only_matrices_decay():
    optimizer = make_optimizer(toys.stage())
    params = bigram_params(1)
    state = optimizer.init(params)
    moved: Any = params
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, moved)
        moved = optax.apply_updates(moved, updates)
    np.testing.assert_array_equal(moved["bias"], params["bias"])
    assert np.abs(moved["table"]).sum() < np.abs(params["table"]).sum()


def test_the_log_is_json_lines(uninterrupted):
    lines = (uninterrupted[0] / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == read_log(uninterrupted[0])
    assert {"step", "tokens", "loss", "tokens_per_s"} <= set(json.loads(lines[0]))


def test_what_a_stage_leaves_open_is_said_by_the_device(monkeypatch):
    """And is in its fingerprint, so that it does not go on in another way elsewhere."""
    trained, heads = TrainedDraftModel(transformer(0).spec), TrainedHeads(2, 4, 1)
    open_, said = config.Stage(), config.Stage(compute_dtype="bfloat16", remat=False)
    for stage, drafter, expected in ((open_, trained, ("float32", False)), (said, trained, ("bfloat16", False))):
        found = trainer.with_defaults(stage, drafter)
        assert (found.compute_dtype, found.remat) == expected
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for stage, drafter, expected in (
        (open_, trained, ("bfloat16", True)),
        (open_, heads, ("bfloat16", False)),
        (said, trained, ("bfloat16", False)),
    ):
        found = trainer.with_defaults(stage, drafter)
        assert (found.compute_dtype, found.remat) == expected


@dataclasses.dataclass(frozen=True)
class Restricted:
    vocabulary: DraftVocabulary


@dataclasses.dataclass(frozen=True)
class RestrictedDraft:
    model: Restricted


def test_a_draft_vocabulary_is_named_as_runs_that_have_begun_name_it():
    rows = toys.rows(4)
    data = trainer.StageData(rows, rows, seed=0)
    drafter = RestrictedDraft(Restricted(DraftVocabulary([1, 3], 5)))
    told = trainer._fingerprint(config.Stage(steps=1), drafter, None, data)["drafter"]
    assert list(told["model"]) == ["kept"]
    assert told["model"]["kept"].startswith("Kept(2 of 5) ")
