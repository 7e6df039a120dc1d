"""Attention block by block against all scores at once, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.models import products
from specjax.models.attention import blocks as attention
from specjax.models.attention.sight import AttentionMask, Tree

ROWS, HEADS, KV_HEADS, FEATURES, KEYS = 2, 4, 2, 8, 37


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    make_small(monkeypatch)


def make_small(monkeypatch):
    """Blocks of 5 queries and 6 keys."""
    monkeypatch.setattr(backend, "block_queries", lambda: 5)
    monkeypatch.setattr(backend, "block_keys", lambda queries: 6)
    monkeypatch.setattr(backend, "score_count", lambda: 1)


def arrays(fed: int, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(fed), 3)
    shapes = ((ROWS, fed, HEADS, FEATURES), (ROWS * KV_HEADS, KEYS, FEATURES), (ROWS * KV_HEADS, FEATURES, KEYS))
    q, k, v = (2.0 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v


def places(*starts: int, fed: int) -> jax.Array:
    return jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(fed, dtype=jnp.int32)[None]


def sights() -> dict[str, tuple[int, AttentionMask]]:
    """How many tokens are fed, and what they see."""
    random = np.random.default_rng(0)
    row = jnp.arange(KEYS, dtype=jnp.int32)[None]
    segments = jnp.asarray(np.sort(random.integers(0, 4, (ROWS, KEYS)), axis=1), jnp.int32)
    at = jnp.broadcast_to(row, (ROWS, KEYS))
    start = jnp.asarray([3, 19], jnp.int32)
    mask = jnp.asarray(np.tril(random.random((ROWS, 7, 7)) < 0.5) | np.eye(7, dtype=bool))
    return {
        "a chain in a cache": (7, AttentionMask(places(3, 20, fed=7))),
        "one token": (1, AttentionMask(places(0, 36, fed=1))),
        "a chain through a window": (7, AttentionMask(places(12, 21, fed=7)).within(4, places(12, 21, fed=7))),
        "a tree": (7, AttentionMask(places(3, 19, fed=7), Tree(start, mask))),
        "whole rows": (KEYS, AttentionMask(row)),
        "documents": (KEYS, AttentionMask(row, segments=(segments, segments))),
        "documents through a window": (KEYS, AttentionMask(row, segments=(segments, segments)).within(3, at, at)),
    }


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("which", sights())
def test_block_by_block_is_all_at_once(which, soft_cap, monkeypatch):
    """What is read, and the gradient of it."""
    make_small(monkeypatch)
    fed, sight = sights()[which]
    q, k, v = arrays(fed)
    towards = jax.random.normal(jax.random.key(9), q.shape)

    def read(how, q, k, v):
        return jnp.sum(how(q, k, v) * towards)

    def whole(q, k, v):
        return products.attend(q, k, v, sight.all(KEYS), 0.4, soft_cap)

    blocks = functools.partial(attention.attend, sight=sight, scale=0.4, soft_cap=soft_cap)
    np.testing.assert_allclose(jax.jit(blocks)(q, k, v), whole(q, k, v), atol=1e-5)
    found, expected = (jax.jit(jax.grad(functools.partial(read, how), (0, 1, 2)))(q, k, v) for how in (blocks, whole))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("which", ["a chain in a cache", "a chain through a window"])
def test_blocks_that_nobody_sees_are_not_read(which):
    """What lies there may be anything."""
    fed, sight = sights()[which]
    q, k, v = arrays(fed)
    seen: np.ndarray = np.any(np.asarray(sight.all(KEYS)), axis=(0, 1))
    unread = [i for i in range(0, KEYS - 6, 6) if not seen[i : i + 6].any()]
    assert unread
    first, end = (int(x) for x in sight.ends(KEYS))
    assert not any(first // 6 <= i // 6 < -(-end // 6) for i in unread)
    poisoned = k.at[:, jnp.asarray(unread)].set(jnp.nan)
    np.testing.assert_array_equal(attention.attend(q, poisoned, v, sight), attention.attend(q, k, v, sight))


def test_a_key_that_is_not_finite_reaches_those_who_see_it_alone():
    fed, sight = sights()["a chain in a cache"]
    q, k, v = arrays(fed)
    at = 4  # of the first row: the second token on sees it
    out = attention.attend(q, k.at[0, at].set(jnp.nan), v, sight)
    clean = attention.attend(q, k, v, sight)
    heads = HEADS // KV_HEADS
    assert np.isnan(out[0, 1:, :heads]).all()
    np.testing.assert_array_equal(out[0, :1], clean[0, :1])
    np.testing.assert_array_equal(out[1], clean[1])


def test_a_low_precision_is_added_up_in_float32():
    fed, sight = sights()["documents"]
    q, k, v = arrays(fed, "bfloat16")
    exact = attention.attend(q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32), sight)
    out = attention.attend(q, k, v, sight)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.05)


@pytest.mark.parametrize(("fed", "each"), [(1, False), (7, False), (7, True)])
def test_keys_of_a_query_s_own_are_merged_with_those_of_all(fed, each):
    """Also where it sees none of the latter, and ``each`` query its own share of the former."""
    q, k, v = arrays(fed)
    one, other = (jax.random.normal(jax.random.key(i), (ROWS, fed, 3, KV_HEADS, FEATURES)) for i in (3, 4))
    sight, reached = AttentionMask(places(-1, 20, fed=fed)), jnp.arange(3) < 2
    if each:
        reached = jnp.arange(3)[None] <= jnp.arange(fed)[:, None] % 3
    own = products.OwnKV(one, other, reached)
    out = attention.attend(q, k, v, sight, soft_cap=4.0, own=own)
    expected = products.attend(q, k, v, sight.all(KEYS), soft_cap=4.0, own=own)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    if each:  # one after the other
        for i in range(fed):
            of_one = products.OwnKV(one[:, i : i + 1], other[:, i : i + 1], reached[i])
            seen = sight.all(KEYS)[:, i : i + 1]
            one_by_one = products.attend(q[:, i : i + 1], k, v, seen, soft_cap=4.0, own=of_one)
            np.testing.assert_allclose(out[:, i : i + 1], one_by_one, atol=1e-5)
