from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import config
from specjax.data.rows import take
from specjax.training.evaluate import Evaluation
from specjax.training.layout import Layout
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import Average, make_optimizer, make_schedule
from specjax.training.step import Update, start_state
from tests.training import toys
from tests.training.toys import BigramDraft, Interrupt, assert_same, bigram_params, interrupt_after

PARAMS = {
    "embedding": jax.random.normal(jax.random.key(0), (6, 4)),
    "head": {"kernel": jax.random.normal(jax.random.key(1), (4, 6))},
    "layers": {
        0: {
            "up": {"kernel": jax.random.normal(jax.random.key(2), (4, 8))},
            "experts": {"kernel": jax.random.normal(jax.random.key(3), (3, 4, 8))},
            "norm": {"scale": jnp.ones((4,))},
        }
    },
}
GRADIENT = jax.tree.map(lambda x: jax.random.normal(jax.random.key(4), x.shape), PARAMS)


def stage(steps=100, **settings) -> config.Stage:
    return config.Stage(steps=steps, optimizer=config.Optimizer(**{"warmup_steps": 0, **settings}))


def first_step(gradient=GRADIENT, **settings):
    """What is added to PARAMS, a learning rate of 1."""
    optimizer = make_optimizer(stage(learning_rate=1.0, schedule="constant", clip_norm=1e9, **settings))
    return jax.jit(optimizer.update)(gradient, optimizer.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {10: 1.0, 55: 0.55, 100: 0.1, 200: 0.1}),
        ("linear", {10: 1.0, 55: 0.55, 100: 0.1, 200: 0.1}),
        ("constant", {10: 1.0, 55: 1.0, 100: 1.0, 200: 1.0}),
        ("wsd", {10: 1.0, 55: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 200: 0.1}),
    ],
)
def test_a_schedule_has_its_warm_up_its_shape_and_its_end(schedule, expected):
    rate = make_schedule(config.Optimizer(learning_rate=0.2, warmup_steps=10, final_scale=0.1, schedule=schedule), 100)
    for at, scale in {0: 0.0, 5: 0.5, **expected}.items():
        assert rate(at) == pytest.approx(0.2 * scale, rel=1e-5, abs=1e-9), at


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_stage_shorter_than_its_warm_up_ends_inside_it(schedule):
    rate = make_schedule(config.Optimizer(learning_rate=0.2, warmup_steps=10, schedule=schedule), 4)
    assert [np.asarray(rate(at)).item() for at in range(4)] == pytest.approx([0.0, 0.02, 0.04, 0.06])


def test_the_default_is_clipped_adamw_with_a_cosine():
    """What runs have used before there was a choice: bit for bit."""
    settings = stage(steps=7, warmup_steps=2)
    o = settings.optimizer
    schedule = optax.warmup_cosine_decay_schedule(0.0, o.peak, 2, 7, o.final_scale * o.peak)
    mask = jax.tree.map(lambda x: x.ndim > 1, PARAMS)
    adamw = optax.adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=mask)
    reference, found = optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw), make_optimizer(settings)
    states = [reference.init(PARAMS), found.init(PARAMS)]
    params: list[Any] = [PARAMS, PARAMS]
    with jax.numpy_dtype_promotion("standard"):
        steps = [jax.jit(optimizer.update) for optimizer in (reference, found)]
        for _ in range(4):
            for i, step in enumerate(steps):
                updates, states[i] = step(GRADIENT, states[i], params[i])
                params[i] = optax.apply_updates(params[i], updates)
    assert_same(params[0], params[1])


def test_muon_steps_along_the_orthogonal_factor_of_each_matrix_in_the_layers():
    found = first_step(kind="muon", weight_decay=0.0)["layers"][0]
    for name in ("up", "experts"):
        values = np.linalg.svd(np.asarray(found[name]["kernel"]), compute_uv=False)
        # Its root mean square is 0.2, whatever the shape. Five iterations leave singular values within 0.7 .. 1.2.
        assert (values > 0.6 * 0.2 * math.sqrt(8)).all(), name
        assert (values < 1.3 * 0.2 * math.sqrt(8)).all(), name
        assert np.vdot(found[name]["kernel"], GRADIENT["layers"][0][name]["kernel"]) < 0


def test_beside_the_matrices_of_the_layers_muon_steps_as_adam():
    found = first_step(kind="muon", weight_decay=0.0)
    for value in (found["embedding"], found["head"]["kernel"], found["layers"][0]["norm"]["scale"]):
        # Adam's first step has the size of the learning rate in every entry.
        np.testing.assert_allclose(np.abs(value), 1.0, rtol=1e-3)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("embeddings", [True, False])
def test_matrices_decay_vectors_do_not_and_embeddings_if_asked_for(kind, embeddings):
    still = jax.tree.map(jnp.zeros_like, GRADIENT)
    found = first_step(still, kind=kind, weight_decay=0.1, decay_embeddings=embeddings)
    expected = jax.tree.map(lambda x: -0.1 * x if x.ndim > 1 else 0 * x, PARAMS)
    expected["embedding"] = expected["embedding"] if embeddings else 0 * expected["embedding"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_the_average_is_that_of_all_weights_after_a_step_weighted_by_age():
    decay, weights = 0.9, np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    average = Average.start({"w": jnp.asarray(weights[0]) + 5.0})
    for i, w in enumerate(weights):
        average = average.with_step({"w": jnp.asarray(w)}, decay)
        ages = decay ** np.arange(i, -1, -1.0)
        expected = (ages[:, None] * weights[: i + 1]).sum(0) / ages.sum()
        np.testing.assert_allclose(average.params["w"], expected, rtol=1e-5, atol=1e-6)


def test_the_average_counts_the_weights_after_the_step_not_before():
    target, optimizer = toys.target(), make_optimizer(toys.stage())
    state = start_state(bigram_params(1), optimizer, True, Layout(), BigramDraft())
    update = Update(BigramDraft(), ForwardKL(), optimizer, target.spec, 4, ema=0.5).jitted()
    weights = []
    for i in range(3):
        state, _ = update(state, target.params, take(toys.rows(12), range(4 * i, 4 * i + 4)))
        weights.append(np.asarray(state.params["table"]))
    expected = (weights[0] + 2 * weights[1] + 4 * weights[2]) / 7
    np.testing.assert_allclose(state.result["table"], expected, rtol=1e-5, atol=1e-6)


def averaged(**changes):
    return {"optimizer": config.Optimizer(learning_rate=0.1, warmup_steps=2, ema=0.8), **changes}


def test_a_stage_results_in_its_average_which_survives_an_interruption(tmp_path):
    expected = toys.train(tmp_path / "whole", **averaged())
    plain = toys.train(tmp_path / "plain")
    assert np.abs(expected["table"] - plain["table"]).max() > 1e-3
    with pytest.raises(Interrupt):
        toys.train(tmp_path / "stage", interrupt_after(7), **averaged())
    assert_same(toys.train(tmp_path / "stage", **averaged()), expected)
    assert_same(toys.train(tmp_path / "stage", **averaged()), expected)


def test_what_is_measured_during_a_stage_is_the_average(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr("specjax.training.trainer.evaluate", lambda d, params, *rest: measured.append(params) or RESULT)
    result = toys.train(tmp_path / "stage", **averaged(steps=3))
    assert_same(measured[-1], result)


RESULT = Evaluation(nll=1.0, target_nll=1.0, alpha=0.5, positions=1)


def test_the_size_of_a_microbatch_does_not_change_the_stage(tmp_path):
    whole = toys.train(tmp_path / "whole", steps=3)
    parts = toys.train(tmp_path / "parts", steps=3, micro_batch_size=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts, whole)
