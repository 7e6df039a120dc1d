from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import registry
from specjax.distill.laws import top_k_logits
from specjax.distill.rows import take
from specjax.distill.step import ALPHA_MEMORY, TrainState, make_update
from specjax.types import Batch
from tests.distill import toys
from tests.distill.test_losses import kl64, log_softmax64, total_variation64
from tests.distill.toys import BigramDraft, BigramTarget, bigram_params

WEIGHTS = np.random.default_rng(5).choice([0.0, 0.25, 1.0, 3.0], (4, toys.LENGTH)).astype(np.float32)
REFERENCE = bigram_params(2)


def uneven() -> Batch:
    """4 rows whose predictions count unevenly."""
    return take(toys.rows(4), range(4)).replace(weight=WEIGHTS)


def stepped(loss, rows: int = 4, batch: Batch | None = None, online: bool = True, alpha: float | None = None):
    """(state, metrics) after one plain gradient step, in microbatches of ``rows``."""
    optimizer, target = optax.sgd(1.0), toys.target()
    loss = registry.build(registry.LOSSES, loss, "loss")
    reference = (BigramDraft(), REFERENCE) if loss.kind == "adaspec" else (None, None)
    update = make_update(BigramDraft(), loss, optimizer, target.spec if online else None, rows, reference[0])
    params = bigram_params(1)
    state = TrainState(params, optimizer.init(params))
    state = state if alpha is None else state.replace(alpha=jnp.float32(alpha))
    state, metrics = update(
        state, target.params if online else None, uneven() if batch is None else batch, reference[1]
    )
    return jax.device_get((state, metrics))


def logits64(params, tokens) -> np.ndarray:
    table, bias = (np.asarray(params[name], np.float64) for name in ("table", "bias"))
    return table[tokens] + bias


def test_uneven_weights_give_the_weighted_mean_and_its_gradient():
    batch = uneven()
    log_p, log_q = (log_softmax64(logits64(bigram_params(seed), batch.tokens)) for seed in (0, 1))
    share = WEIGHTS.astype(np.float64) / WEIGHTS.sum(dtype=np.float64)
    moved = (np.exp(log_q) - np.exp(log_p)) * share[..., None]
    table = np.zeros((toys.VOCAB, toys.VOCAB))
    np.add.at(table, batch.tokens, moved)
    for rows in (4, 2, 1):
        state, metrics = stepped("forward_kl", rows)
        before = bigram_params(1)
        np.testing.assert_allclose(before["table"] - state.params["table"], table, atol=1e-6)
        np.testing.assert_allclose(before["bias"] - state.params["bias"], moved.sum((0, 1)), atol=1e-6)
        assert metrics["loss"] == pytest.approx((share * kl64(log_p, log_q)).sum(), rel=1e-5)
        assert metrics["alpha"] == pytest.approx(1 - (share * total_variation64(log_p, log_q)).sum(), rel=1e-5)


SPECS = [
    "lk_lambda",
    {"kind": "adaspec", "reference": "unused"},
    {"kind": "sum", "of": [{"kind": "lk_alpha", "weight": 0.5}, "cross_entropy"]},
]


@pytest.mark.parametrize("loss", SPECS, ids=lambda loss: loss if isinstance(loss, str) else loss["kind"])
def test_a_step_does_not_depend_on_its_microbatches(loss):
    whole, micro = stepped(loss, 4, alpha=0.3), stepped(loss, 1, alpha=0.3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, micro)


def test_lk_lambda_takes_the_running_alpha_from_before_the_step_and_leaves_it_moved():
    kl, rejection = (stepped(loss)[1]["loss"] for loss in ("forward_kl", "total_variation"))
    blend = np.exp(-3 * 0.3)
    state, metrics = stepped("lk_lambda", alpha=0.3)
    assert metrics["loss"] == pytest.approx(blend * kl + (1 - blend) * rejection, rel=1e-5)
    assert state.alpha == pytest.approx(ALPHA_MEMORY * 0.3 + (1 - ALPHA_MEMORY) * metrics["alpha"], rel=1e-6)
    assert metrics["alpha"] != pytest.approx(0.3, abs=0.05)


def test_a_batch_without_predictions_leaves_the_running_alpha_and_the_weights():
    state, _ = stepped("lk_lambda", batch=uneven().replace(weight=np.zeros_like(WEIGHTS)), alpha=0.3)
    assert state.alpha == np.float32(0.3)
    toys.assert_same(state.params, bigram_params(1))


def with_logits(k: int) -> Batch:
    batch = uneven()
    logits = BigramTarget()(toys.target().params, jnp.asarray(batch.tokens), None).logits
    return batch.replace(teacher=top_k_logits(logits, k))


@pytest.mark.parametrize("rows", [4, 2])
def test_all_logits_in_the_batch_give_the_step_of_the_target_itself(rows):
    online, cached = stepped("lk_lambda", alpha=0.3), stepped("lk_lambda", rows, with_logits(toys.VOCAB), False, 0.3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), online[0], cached[0])
    assert cached[1]["alpha_lower"] == pytest.approx(online[1]["alpha"], rel=1e-5)


def test_cached_logits_measure_an_interval_that_holds_alpha_and_its_upper_end_runs():
    alpha = stepped("forward_kl")[1]["alpha"]
    state, metrics = stepped("forward_kl", 2, with_logits(3), online=False)
    assert "alpha" not in metrics
    assert metrics["alpha_lower"] < alpha < metrics["alpha_upper"]
    assert state.alpha == pytest.approx((1 - ALPHA_MEMORY) * metrics["alpha_upper"], rel=1e-5)
