from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import config
from specjax.data.rows import ConcatenatedRows, spread
from specjax.evaluation import figures
from specjax.evaluation.simulated import simulated_block_efficiency
from specjax.interfaces import Batch
from specjax.runtime.progress import no_bars
from specjax.training import evaluate as measures
from specjax.training import step
from specjax.training.evaluate import Evaluation, evaluate, evaluate_all
from specjax.training.losses import CrossEntropy, ForwardKL
from specjax.training.step import Update
from tests.cases import in_proof
from tests.drafters import test_features
from tests.training import toys
from tests.training.toys import LENGTH, BigramDraft, bigram_params


def distributions(params, tokens) -> np.ndarray:
    logits = np.asarray(params["table"], np.float64)[tokens] + np.asarray(params["bias"], np.float64)
    exps = np.exp(logits)
    return exps / exps.sum(-1, keepdims=True)


def test_losses_and_alpha_match_a_float64_reference():
    windows, draft, target = toys.windows(5), bigram_params(1), toys.target()
    found = evaluate(BigramDraft(), draft, target, toys.Windows(windows), 10_000, batch_size=2)
    p, q = (distributions(params, windows[:, :-1]) for params in (target.params, draft))
    following = windows[:, 1:, None]
    assert found.positions == 5 * LENGTH
    assert found.nll == pytest.approx(-np.log(np.take_along_axis(q, following, 2)).mean(), rel=1e-5)
    assert found.target_nll == pytest.approx(-np.log(np.take_along_axis(p, following, 2)).mean(), rel=1e-5)
    assert found.alpha == pytest.approx(np.minimum(p, q).sum(-1).mean(), rel=1e-5)
    assert found.agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), rel=1e-6)
    assert 0 < found.agreement < 1


def test_rows_that_fill_up_the_last_batch_do_not_count():
    settings = (BigramDraft(), bigram_params(1), toys.target(), toys.rows(5), 10_000)
    whole, padded = (evaluate(*settings, batch_size=size) for size in (5, 4))
    assert padded.positions == whole.positions
    assert padded.nll == pytest.approx(whole.nll, rel=1e-6)
    assert padded.alpha == pytest.approx(whole.alpha, rel=1e-6)


def test_predictions_that_the_drafter_masks_do_not_count():
    windows = toys.windows(5)
    found = evaluate(
        BigramDraft(ignored=3), bigram_params(1), toys.target(), toys.Windows(windows), 10_000, batch_size=5
    )
    q = np.take_along_axis(distributions(bigram_params(1), windows[:, :-1]), windows[:, 1:, None], 2)[..., 0]
    counted = windows[:, :-1] != 3
    assert found.positions == counted.sum() < counted.size
    assert found.nll == pytest.approx(-np.log(q[counted]).mean(), rel=1e-5)


def test_of_nothing_there_are_no_figures():
    """A loss of 0 would be a perfect one."""
    windows = toys.windows(5)
    nothing = BigramDraft(ignored=int(windows[0, 0]))
    found = evaluate(nothing, bigram_params(1), toys.target(), toys.Windows(0 * windows[:1] + windows[0, 0]), 100, 1)
    assert found.positions == 0
    assert all(math.isnan(x) for x in (found.nll, found.target_nll, found.alpha, found.agreement))


def test_a_draft_equal_to_its_target_has_alpha_one():
    target = toys.target()
    found = evaluate(BigramDraft(), target.params, target, toys.rows(5), 10_000, batch_size=5)
    assert found.alpha == pytest.approx(1, abs=1e-6)
    assert found.nll == found.target_nll


def test_models_measured_together_get_the_figures_they_get_alone():
    settings = (toys.target(), toys.rows(5), 10_000, 5)
    models = [bigram_params(seed) for seed in (1, 2)]
    together = evaluate_all(BigramDraft(), models, *settings)
    assert together == [evaluate(BigramDraft(), model, *settings) for model in models]
    assert together[0].alpha != together[1].alpha


def test_without_a_target_only_the_models_own_loss_is_measured():
    found = evaluate(BigramDraft(), bigram_params(1), None, toys.rows(5), 10_000, batch_size=5)
    assert math.isfinite(found.nll)
    assert math.isnan(found.alpha)
    assert math.isnan(found.target_nll)


@pytest.mark.parametrize(("positions", "rows"), [(1, 1), (LENGTH, 1), (LENGTH + 1, 2), (10_000, 9)])
def test_as_many_windows_are_used_as_hold_the_positions_asked_for(positions, rows):
    chosen = spread(toys.rows(9), positions)
    assert len(chosen.tokens) == rows
    assert len({row.tobytes() for row in np.asarray(chosen.tokens)}) == rows


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """(file, evaluate, how many models each measurement was of)."""
    run = config.RunConfig(config.Target("t"), config.Data("d"), eval=config.Eval(64, 4), out=str(tmp_path))
    measured, real = [], figures.evaluate_all

    def counted(drafter, models, *args):
        measured.append(len(models))
        return real(drafter, models, *args)

    def evaluated(target: Any):
        return figures.evaluate(run, no_bars, BigramDraft(), target, [bigram_params(1)], toys.rows(8, 1))

    monkeypatch.setattr(figures, "evaluate_all", counted)
    return tmp_path / "evaluations.json", evaluated, measured


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: content.replace('"alpha": 0.', '"alpha": 0.9'), "damaged"),
        (lambda content: content[:50], "damaged"),
        (lambda content: "[]", "damaged"),
        (lambda content: "{}", "of an earlier version, or damaged"),
    ],
)
def test_an_evaluation_that_is_not_what_was_written_is_named_and_measured_again(damage, told, kept, caplog):
    file, evaluated, measured = kept
    first = evaluated(toys.target())
    assert evaluated(toys.target()) == first
    assert measured == [1]
    assert not caplog.messages
    file.write_text(damage(file.read_text()))
    assert evaluated(toys.target()) == first
    assert measured == [1, 1]
    assert f"evaluations.json: {told}; what is asked of it is measured again" in caplog.text


def test_an_evaluation_is_of_a_target_s_config_too(kept):
    _, evaluated, measured = kept
    assert evaluated(toys.target(config=0.5)) != evaluated(toys.target(config=1.0))
    assert measured == [1, 1]


def test_alpha_is_told_by_depth_where_there_is_more_than_one():
    settings = (bigram_params(1), toys.target(), toys.rows(4), 10_000, 4)
    one, two = evaluate(BigramDraft(), *settings), evaluate(toys.TwoDepths(), *settings)
    assert one.alpha_at == ()
    assert not {"alpha_at", "nll_at"} & one.to_json().keys()
    assert Evaluation.from_json(json.loads(json.dumps(two.to_json()))) == two
    assert two.nll_at[0] == pytest.approx(one.nll, rel=1e-6)
    assert two.nll_at[1] != pytest.approx(one.nll, rel=1e-2)
    assert two.alpha_at[0] == pytest.approx(one.alpha, rel=1e-6)
    assert two.alpha_at[1] != pytest.approx(one.alpha, rel=1e-2)
    first, second = one.positions, two.positions - one.positions
    assert two.alpha == pytest.approx((first * two.alpha_at[0] + second * two.alpha_at[1]) / two.positions, rel=1e-6)


@pytest.mark.parametrize("name", ["dflash2", "fewer_ids"])
def test_the_loss_of_a_draft_that_cannot_propose_every_id_is_what_cross_entropy_has_in_training(name):
    """At every depth of a block, of a draft that draws from a few candidates (all others have no chance, and no finite
    loss) and of one of fewer ids."""
    target = test_features.target_of()
    trained, params = test_features.made(name, target)
    windows = np.random.default_rng(2).integers(0, 61, (3, 13)).astype(np.int32)
    found = evaluate(trained, params, target, toys.Windows(windows), 10_000, batch_size=2)
    batch = Batch(jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:]), jnp.ones((3, 12), jnp.float32))
    every = trained.unrolled(test_features.DEPTHS if name == "dflash2" else 5)
    update = Update(every, CrossEntropy(), optax.identity(), target.spec, rows=3)
    _, (_, metrics) = jax.jit(update.summed_loss)(params, step._Given(target.params, {}, jnp.float32(0)), batch)
    expected = [float(place["loss"] / place["weight"]) for place in metrics["by_depth"]]
    np.testing.assert_allclose(found.nll_at, expected, rtol=1e-5)
    assert found.nll == found.nll_at[0]
    assert max(found.nll_at) < 50


@pytest.mark.parametrize("name", ["dflash2", *map(in_proof, ("dflash", "dspark_confident"))])
def test_blocks_at_every_position_take_no_more_memory_than_a_training_step(name):
    """In XLA's count; as many as in a step are there at a time."""
    target, length, rows = test_features.target_of(max_positions=512), 512, 2
    trained, params = test_features.made(name, target)
    ids, weight = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(ids, ids, weight, ids, ids)
    optimizer = optax.sgd(1.0)
    state = jax.eval_shape(lambda params: step.TrainState(params, optimizer.init(params)), params)
    update = Update(trained, ForwardKL(), optimizer, target.spec, rows).jitted()
    drawn = batch.replace(number=jax.ShapeDtypeStruct((rows,), jnp.int32))
    trains = update.lower(state, target.params, drawn, {}).compile().memory_analysis()
    deep = measures.as_evaluated(trained)
    out = jax.eval_shape(lambda batch: measures._target_output(target.spec, deep.reads, target.params, batch), batch)
    sums = measures._sums.lower(deep, target.spec, None, params, target.params, out, batch)
    evaluates = sums.compile().memory_analysis()
    assert evaluates.temp_size_in_bytes < trains.temp_size_in_bytes


@pytest.mark.parametrize("name", ["dflash2", *map(in_proof, ("dflash", "dspark_confident"))])
def test_blocks_a_part_at_a_time_give_the_figures_of_all_at_once(name):
    """Of rows of several documents, whose length the parts do not divide."""
    target = test_features.target_of()
    trained, params = test_features.made(name, target)
    text = np.random.default_rng(2).integers(0, 61, 200).astype(np.int32)
    rows = ConcatenatedRows(text, np.asarray([0, 30, 31, 70]), 23)
    found = [
        evaluate(dataclasses.replace(trained, anchors=anchors), params, target, rows, 10_000, batch_size=3)
        for anchors in (None, 5, 64)
    ]
    assert found[0].positions == found[1].positions == found[2].positions
    for one in found[1:]:
        for name, value in found[0].to_json().items():
            np.testing.assert_allclose(one.to_json()[name], value, rtol=2e-5)
    texts, prompts = [text[:40].tolist(), text[50:77].tolist()], [3, 5]
    simulated = [
        simulated_block_efficiency(
            dataclasses.replace(trained, anchors=anchors), params, target, texts, prompts, 3, 1.0, "block"
        )
        for anchors in (None, 5)
    ]
    assert simulated[1] == pytest.approx(simulated[0], rel=1e-5)
