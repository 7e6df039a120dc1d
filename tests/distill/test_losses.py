from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill.losses import CrossEntropy, ForwardKL

ROWS, LENGTH, VOCAB = 2, 5, 7


@pytest.fixture
def batch():
    """(draft logits, target logits, tokens, mask) of an uneven mask."""
    rng = np.random.default_rng(0)
    logits = [3 * rng.standard_normal((ROWS, LENGTH, VOCAB)).astype(np.float32) for _ in range(2)]
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    mask = np.array([[1, 1, 0, 1, 1], [0, 1, 0, 0, 0]], bool)
    return tuple(map(jnp.asarray, (*logits, tokens, mask)))


def softmax64(logits) -> np.ndarray:
    exps = np.exp(np.asarray(logits, np.float64) - np.max(np.asarray(logits, np.float64), axis=-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def masked_mean64(values, mask) -> float:
    return float(values[np.asarray(mask)].mean())


def value_and_grad(loss, batch):
    draft, *rest = batch
    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(draft, *rest)
    return float(value), metrics, np.asarray(grads)


def test_forward_kl_is_the_masked_mean_of_sum_p_log_p_over_q(batch):
    draft, target, _, mask = batch
    p, q = softmax64(target), softmax64(draft)
    value, metrics, _ = value_and_grad(ForwardKL(), batch)
    assert value == pytest.approx(masked_mean64((p * np.log(p / q)).sum(-1), mask), rel=1e-5)
    assert float(metrics["loss"]) == value
    assert float(metrics["alpha"]) == pytest.approx(masked_mean64(np.minimum(p, q).sum(-1), mask), rel=1e-5)


def test_gradient_of_forward_kl_is_q_minus_p(batch):
    draft, target, _, mask = batch
    _, _, grads = value_and_grad(ForwardKL(), batch)
    expected = (softmax64(draft) - softmax64(target)) * np.asarray(mask)[..., None] / np.asarray(mask).sum()
    np.testing.assert_allclose(grads, expected, atol=1e-6)


def test_cross_entropy_and_its_gradient_match_the_closed_form(batch):
    draft, _, tokens, mask = batch
    q, mask = softmax64(draft), np.asarray(mask)
    label = np.eye(VOCAB)[np.asarray(tokens)]
    value, metrics, grads = value_and_grad(CrossEntropy(), (draft, None, tokens, batch[3]))
    assert value == pytest.approx(masked_mean64(-np.log((q * label).sum(-1)), mask), rel=1e-5)
    assert set(metrics) == {"loss"}
    np.testing.assert_allclose(grads, (q - label) * mask[..., None] / mask.sum(), atol=1e-6)
    assert "alpha" in CrossEntropy()(*batch)[1]


def test_forward_kl_of_equal_laws_is_zero_with_zero_gradient(batch):
    draft, _, tokens, mask = batch
    value, metrics, grads = value_and_grad(ForwardKL(), (draft, draft + 5.0, tokens, mask))
    assert value == pytest.approx(0, abs=1e-6)
    assert float(metrics["alpha"]) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(grads, 0, atol=1e-6)


def test_tokens_that_the_target_excludes_leave_forward_kl_finite(batch):
    draft, target, tokens, mask = batch
    target = target.at[:, :, 2].set(-jnp.inf)
    value, _, grads = value_and_grad(ForwardKL(), (draft, target, tokens, mask))
    p, q = softmax64(target), softmax64(draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
    assert value == pytest.approx(masked_mean64(expected, mask), rel=1e-5)
    assert np.isfinite(grads).all()


def test_no_gradient_reaches_the_target(batch):
    draft, target, tokens, mask = batch
    grads = jax.grad(lambda logits: ForwardKL()(draft, logits, tokens, mask)[0])(target)
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize("loss", [CrossEntropy(), ForwardKL()])
def test_a_batch_without_predictions_has_zero_loss(loss, batch):
    draft, target, tokens, mask = batch
    value, _, grads = value_and_grad(loss, (draft, target, tokens, jnp.zeros_like(mask)))
    assert value == 0
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize("loss", [CrossEntropy(), ForwardKL()])
def test_bfloat16_logits_are_compared_in_float32(loss, batch):
    draft, target, tokens, mask = batch
    rounded = draft.astype(jnp.bfloat16), target.astype(jnp.bfloat16)
    value, _ = loss(*rounded, tokens, mask)
    expected, _ = loss(*(x.astype(jnp.float32) for x in rounded), tokens, mask)
    assert value.dtype == jnp.float32
    assert float(value) == float(expected)


def test_forward_kl_without_a_target_is_refused(batch):
    draft, _, tokens, mask = batch
    with pytest.raises(ValueError, match="needs the target's logits"):
        ForwardKL()(draft, None, tokens, mask)
