from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill.losses import CrossEntropy, ForwardKL
from specjax.types import FullLogits

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
    """Of the mean over the mask."""
    draft, target, tokens, mask = batch
    teacher = None if target is None else FullLogits(target)

    def mean(draft):
        return jnp.sum(jnp.where(mask, loss(draft, teacher, tokens), 0.0)) / mask.sum().astype(jnp.float32)

    value, grads = jax.value_and_grad(mean)(draft)
    return float(value), np.asarray(grads)


def test_forward_kl_is_sum_p_log_p_over_q(batch):
    draft, target, _, mask = batch
    p, q = softmax64(target), softmax64(draft)
    value, _ = value_and_grad(ForwardKL(), batch)
    assert value == pytest.approx(masked_mean64((p * np.log(p / q)).sum(-1), mask), rel=1e-5)


def test_gradient_of_forward_kl_is_q_minus_p(batch):
    draft, target, _, mask = batch
    _, grads = value_and_grad(ForwardKL(), batch)
    expected = (softmax64(draft) - softmax64(target)) * np.asarray(mask)[..., None] / np.asarray(mask).sum()
    np.testing.assert_allclose(grads, expected, atol=1e-6)


def test_cross_entropy_and_its_gradient_match_the_closed_form(batch):
    draft, _, tokens, mask = batch
    q, mask = softmax64(draft), np.asarray(mask)
    label = np.eye(VOCAB)[np.asarray(tokens)]
    value, grads = value_and_grad(CrossEntropy(), (draft, None, tokens, batch[3]))
    assert value == pytest.approx(masked_mean64(-np.log((q * label).sum(-1)), mask), rel=1e-5)
    np.testing.assert_allclose(grads, (q - label) * mask[..., None] / mask.sum(), atol=1e-6)


def test_forward_kl_of_equal_laws_is_zero_with_zero_gradient(batch):
    draft, _, tokens, mask = batch
    value, grads = value_and_grad(ForwardKL(), (draft, draft + 5.0, tokens, mask))
    assert value == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(grads, 0, atol=1e-6)


def test_tokens_that_the_target_excludes_leave_forward_kl_finite(batch):
    draft, target, tokens, mask = batch
    target = target.at[:, :, 2].set(-jnp.inf)
    value, grads = value_and_grad(ForwardKL(), (draft, target, tokens, mask))
    p, q = softmax64(target), softmax64(draft)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
    assert value == pytest.approx(masked_mean64(expected, mask), rel=1e-5)
    assert np.isfinite(grads).all()


def test_no_gradient_reaches_the_target(batch):
    draft, target, tokens, _ = batch
    grads = jax.grad(lambda logits: ForwardKL()(draft, FullLogits(logits), tokens).sum())(target)
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize("loss", [CrossEntropy(), ForwardKL()])
def test_bfloat16_logits_are_compared_in_float32(loss, batch):
    draft, target, tokens, _ = batch
    draft, target = draft.astype(jnp.bfloat16), target.astype(jnp.bfloat16)
    value = loss(draft, FullLogits(target), tokens)
    expected = loss(draft.astype(jnp.float32), FullLogits(target.astype(jnp.float32)), tokens)
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, expected)


def test_forward_kl_without_a_target_is_refused(batch):
    draft, _, tokens, _ = batch
    with pytest.raises(ValueError, match="needs the target's logits"):
        ForwardKL()(draft, None, tokens)
