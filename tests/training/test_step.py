from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import registry
from specjax.data.rows import take
from specjax.interfaces import Batch
from specjax.training.distributions import top_k_logits
from specjax.training.step import ALPHA_MEMORY, TrainState, Update
from tests.training import toys
from tests.training.test_losses import kl64, log_softmax64, total_variation64
from tests.training.toys import BigramDraft, BigramTarget, bigram_params

WEIGHTS = np.random.default_rng(5).choice([0.0, 0.25, 1.0, 3.0], (4, toys.LENGTH)).astype(np.float32)
REFERENCES = {"near": bigram_params(2), "far": bigram_params(3)}


def uneven() -> Batch:
    """4 rows whose predictions count unevenly."""
    return dataclasses.replace(take(toys.rows(4), range(4)), weight=WEIGHTS)


@functools.cache
def update_of(loss: str, rows: int, online: bool):
    """The step on a loss given as JSON, which a test of another batch can use again."""
    built = registry.build(registry.LOSSES, json.loads(loss), "loss")
    spec = BigramTarget() if online else None
    return Update(
        BigramDraft(), built, optax.sgd(1.0), spec, rows, {"near": BigramDraft(), "far": BigramDraft()}
    ).jitted()


def stepped(loss, rows: int = 4, batch: Batch | None = None, online: bool = True, alpha: float = 0.3):
    """(state, metrics) after one plain gradient step from ``alpha``, in microbatches of ``rows``."""
    params = bigram_params(1)
    state = TrainState(params, optax.sgd(1.0).init(params), jnp.float32(alpha))
    target = toys.target().params if online else None
    batch = uneven() if batch is None else batch
    state, metrics = update_of(json.dumps(loss), rows, online)(state, target, batch, REFERENCES)
    return jax.device_get((state, metrics))


def logits64(params, tokens) -> np.ndarray:
    table, bias = (np.asarray(params[name], np.float64) for name in ("table", "bias"))
    return table[tokens] + bias


SHARE = WEIGHTS.astype(np.float64) / WEIGHTS.sum(dtype=np.float64)
LOG_P, LOG_Q = (log_softmax64(logits64(bigram_params(seed), uneven().tokens)) for seed in (0, 1))
ALPHA = 1 - (SHARE * total_variation64(LOG_P, LOG_Q)).sum()


def test_uneven_weights_give_the_weighted_mean_and_its_gradient():
    moved = (np.exp(LOG_Q) - np.exp(LOG_P)) * SHARE[..., None]
    table = np.zeros((toys.VOCAB, toys.VOCAB))
    np.add.at(table, uneven().tokens, moved)
    before = bigram_params(1)
    for rows in (4, 1):
        state, metrics = stepped("forward_kl", rows)
        np.testing.assert_allclose(before["table"] - state.params["table"], table, atol=1e-6)
        np.testing.assert_allclose(before["bias"] - state.params["bias"], moved.sum((0, 1)), atol=1e-6)
        assert metrics["loss"] == pytest.approx((SHARE * kl64(LOG_P, LOG_Q)).sum(), rel=1e-5)
        assert metrics["alpha"] == pytest.approx(ALPHA, rel=1e-5)


def test_a_step_does_not_depend_on_its_microbatches():
    """With every loss that looks at more than the prediction."""
    adaspec = [{"kind": "adaspec", "reference": name, "of": "lk_lambda"} for name in ("near", "far")]
    loss = {"kind": "sum", "of": [*adaspec, {"kind": "lk_alpha", "weight": 0.5}, "cross_entropy"]}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), stepped(loss, 4), stepped(loss, 1)
    )


def test_lk_lambda_takes_the_running_alpha_from_before_the_step_and_leaves_it_moved():
    blend = np.exp(-3 * 0.3)
    state, metrics = stepped("lk_lambda")
    expected = blend * (SHARE * kl64(LOG_P, LOG_Q)).sum() + (1 - blend) * (1 - ALPHA)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert state.alpha == pytest.approx(ALPHA_MEMORY * 0.3 + (1 - ALPHA_MEMORY) * ALPHA, rel=1e-5)
    assert abs(ALPHA - 0.3) > 0.05


def test_a_batch_without_predictions_leaves_the_running_alpha_and_the_weights():
    state, _ = stepped("lk_lambda", batch=dataclasses.replace(uneven(), weight=np.zeros_like(WEIGHTS)))
    assert state.alpha == np.float32(0.3)
    toys.assert_same(state.params, bigram_params(1))


def with_logits(k: int) -> Batch:
    return dataclasses.replace(uneven(), teacher=top_k_logits(jnp.asarray(LOG_P.astype(np.float32)), k))


def test_all_logits_in_the_batch_give_the_step_of_the_target_itself():
    online, cached = stepped("lk_lambda"), stepped("lk_lambda", 2, with_logits(toys.VOCAB), online=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), online[0], cached[0])
    assert cached[1]["alpha_lower"] == pytest.approx(ALPHA, rel=1e-5)


def test_cached_logits_measure_an_interval_that_holds_alpha_and_its_upper_end_runs():
    state, metrics = stepped("lk_lambda", 2, with_logits(3), online=False)
    assert "alpha" not in metrics
    assert metrics["alpha_lower"] < ALPHA < metrics["alpha_upper"]
    expected = ALPHA_MEMORY * 0.3 + (1 - ALPHA_MEMORY) * metrics["alpha_upper"]
    assert state.alpha == pytest.approx(expected, rel=1e-6)


def by_hand() -> list[dict[str, float]]:
    """Loss and alpha of each depth of `toys.TwoDepths`, whose second one begins at the second token."""
    place = np.arange(toys.LENGTH)
    rows = np.minimum(place[None] + np.arange(4)[:, None] % 2, toys.LENGTH - 1)
    second_p = np.take_along_axis(LOG_P, rows[..., None], axis=1)
    second_q, counts = np.roll(LOG_Q, 1, axis=1), WEIGHTS * (place > 0)
    found = []
    for log_p, log_q, weight in ((LOG_P, LOG_Q, WEIGHTS), (second_p, second_q, counts)):
        share = weight.astype(np.float64) / weight.sum(dtype=np.float64)
        alpha = 1 - (share * total_variation64(log_p, log_q)).sum()
        found.append({"loss": (share * kl64(log_p, log_q)).sum(), "alpha": alpha, "weight": weight.sum()})
    return found


@pytest.mark.parametrize("rows", [4, 2])
def test_predictions_at_several_depths_are_told_apart_and_weighed_by_their_share(rows):
    """Each is compared with the rows of the target that it names, in every row of the batch."""
    params, loss = bigram_params(1), registry.build(registry.LOSSES, "forward_kl", "loss")
    state = TrainState(params, optax.sgd(1.0).init(params), jnp.float32(0.3))
    update = Update(toys.TwoDepths(), loss, optax.sgd(1.0), BigramTarget(), rows).jitted()
    _, metrics = update(state, toys.target().params, uneven(), None)
    first, second = by_hand()
    for depth, wanted in enumerate((first, second), 1):
        for name in ("loss", "alpha"):
            assert metrics[f"{name}_at_{depth}"] == pytest.approx(wanted[name], rel=1e-5)
    parts = first["weight"], 0.5 * second["weight"]
    for name in ("loss", "alpha"):
        mean = np.average([first[name], second[name]], weights=parts)
        assert metrics[name] == pytest.approx(mean, rel=1e-5)


def test_one_prediction_is_logged_without_a_depth():
    _, metrics = stepped("forward_kl")
    assert not any("_at_" in name for name in metrics)
