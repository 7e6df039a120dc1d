"""Rows of target and draft that no token has change nothing of what is learned and measured, however large their
logits and however many there are of them on either side."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import registry
from specjax.data.rows import take
from specjax.errors import ConfigError
from specjax.interfaces import FullLogits, LossContext
from specjax.models.vocabulary import TokenRows
from specjax.training.chunked_loss import Matching, Teacher
from specjax.training.evaluate import evaluate
from specjax.training.step import TrainState, Update
from specjax.training.teacher_cache import Logits, TeacherCache
from tests.training import toys
from tests.training.toys import VOCAB, BigramDraft, BigramTarget, bigram_params

HUGE = 40.0
TARGET_ROWS = 15
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "lk_alpha", "lk_lambda")


class Letters:
    def get_vocab(self):
        return {chr(ord("a") + i): i for i in range(VOCAB)}


def padded(params, rows: int):
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, rows - VOCAB)] * x.ndim, constant_values=HUGE if x.ndim == 1 else 0.0), params
    )


def padded_target():
    config = types.SimpleNamespace(vocab_size=TARGET_ROWS)
    params = padded(bigram_params(0), TARGET_ROWS)
    return types.SimpleNamespace(spec=BigramTarget(), params=params, tokenizer=Letters(), config=config)


def real(params):
    return jax.tree.map(lambda x: np.asarray(x[(slice(VOCAB),) * x.ndim]), params)


def test_every_comparison_is_over_tokens_alone():
    """And so is its gradient: rows that are no tokens have none."""
    target = toys.target()
    batch = jax.tree.map(jnp.asarray, take(toys.rows(2), range(2)))
    every = [registry.build(registry.LOSSES, kind, "loss") for kind in KINDS]
    context = LossContext(jnp.float32(0.4), jnp.ones(batch.tokens.shape))

    @functools.partial(jax.jit, static_argnums=2)
    def found(draft, target_params, tokens=None):
        def values(draft):
            (prediction,) = BigramDraft().predictions(draft, batch, None)
            teacher = FullLogits(BigramTarget()(target_params, batch.tokens, None).logits)
            m = Matching.of(prediction, Teacher(teacher), batch.labels, tokens).whole
            return jnp.stack([loss(m.draft_logits, m.teacher, m.tokens, context).sum() for loss in every])

        return values(draft), jax.jacrev(values)(draft)

    values, slopes = found(bigram_params(1), target.params)
    start, target = padded(bigram_params(1), 14), padded_target()
    padded_values, padded_slopes = found(start, target.params, TokenRows.of(target))
    np.testing.assert_allclose(padded_values, values, rtol=1e-5)
    np.testing.assert_allclose(padded_slopes["bias"][:, :VOCAB], slopes["bias"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(padded_slopes["bias"][:, VOCAB:], 0)


@pytest.mark.parametrize("online", [True, False])
def test_a_step_compares_over_tokens_alone(online):
    """AdaSPEC, which compares with a draft beside the target, and nothing."""
    loss = {"kind": "adaspec", "reference": "unread"} if online else "cross_entropy"
    built, optimizer = registry.build(registry.LOSSES, loss, "loss"), optax.sgd(1.0)
    spec, tokens = BigramTarget() if online else None, TokenRows.of(padded_target())

    def stepped(tokens, target_params, draft, reference):
        update = Update(BigramDraft(), built, optimizer, spec, 4, {"unread": BigramDraft()}, tokens=tokens).jitted()
        state = TrainState(draft, optimizer.init(draft), jnp.float32(0.3))
        state, metrics = update(state, target_params, take(toys.rows(4), range(4)), {"unread": reference})
        return jax.device_get((state.params, metrics))

    start = jax.device_get(padded(bigram_params(1), 14))
    given = (padded_target().params, jax.tree.map(jnp.asarray, start), padded(bigram_params(2), 17))
    moved, metrics = stepped(tokens, *given)
    if online:
        expected, plain = stepped(None, toys.target().params, bigram_params(1), bigram_params(2))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), real(moved), expected)
        assert metrics["alpha"] == pytest.approx(plain["alpha"], rel=1e-5)
    else:  # text teaches a draft not to choose padding: who serves it elsewhere may not know what that is
        assert (moved["bias"][VOCAB:] < start["bias"][VOCAB:]).all()


@pytest.mark.parametrize("draft_rows", [VOCAB, 17])
def test_measured_figures_are_over_tokens_alone(draft_rows):
    settings = (toys.rows(5), 10_000, 5)
    plain = evaluate(BigramDraft(), bigram_params(1), toys.target(), *settings)
    found = evaluate(BigramDraft(), padded(bigram_params(1), draft_rows), padded_target(), *settings)
    for name in ("nll", "target_nll", "alpha", "positions"):
        assert getattr(found, name) == pytest.approx(getattr(plain, name), rel=1e-5), name


def test_cached_logits_are_of_tokens_alone(tmp_path):
    rows = toys.rows(2)

    def cached(name: str, target: Any, k: int) -> Any:
        return TeacherCache(target, rows, np.arange(2), Logits.of(k, target, rows), 2).at(tmp_path / name)

    plain, found = (
        cached(name, target, VOCAB - 2)[1].teacher
        for name, target in (("plain", toys.target()), ("padded", padded_target()))
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3), found, plain)
    with pytest.raises(ConfigError, match=r"teacher_top_k=13 exceeds the target's 12 tokens"):
        cached("more", padded_target(), VOCAB + 1)
