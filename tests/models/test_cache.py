"""The cache as an object: what it attends to, takes in and has room for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.attention.kv_source import kv_sources
from specjax.models.attention.stored import LayerKV
from specjax.models.cache import KVCache, insert
from specjax.models.products import attend

ROWS, SLOTS, HEADS, FEATURES, FED = 3, 8, 2, 4, 3


def random_cache(seed: int, rows: int = ROWS) -> KVCache:
    cache = KVCache.zeros(2, rows, SLOTS, HEADS, FEATURES, "float32")
    leaves, structure = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten([jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def random_block(seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (2 * HEADS, HEADS, HEADS)
    return tuple(jax.random.normal(k, (ROWS, FED, n, FEATURES)) for k, n in zip(keys, heads, strict=True))


def test_a_cache_is_read_alike_folded_or_not():
    cache = random_cache(0)
    folded = cache.fold()
    assert folded.is_folded
    assert folded.fold() is folded
    assert folded.num_slots == cache.num_slots == SLOTS
    jax.tree.map(np.testing.assert_array_equal, folded.unfold(ROWS), cache)
    jax.tree.map(np.testing.assert_array_equal, cache.written(folded.layers), cache)
    jax.tree.map(np.testing.assert_array_equal, cache.grow(12).fold(), folded.grow(12))


def test_inserted_rows_take_the_place_of_rows_and_change_no_other():
    cache, other = random_cache(0), random_cache(1)
    tree = insert({"cache": cache, "x": jnp.zeros(ROWS)}, jnp.array([2, ROWS, 0]), {"cache": other, "x": jnp.ones(3)})
    np.testing.assert_array_equal(tree["x"], [1, 0, 1])
    for found, old, new in zip(*map(jax.tree.leaves, (tree["cache"], cache, other)), strict=True):
        np.testing.assert_array_equal(found, jnp.stack([new[2], old[1], new[0]]))


@pytest.mark.parametrize(("longest", "fits"), [(SLOTS - FED, True), (SLOTS - FED + 1, False)])
def test_there_is_room_up_to_the_last_slot(longest, fits):
    assert bool(random_cache(0).has_room(jnp.array([0, longest, 1]), FED)) is fits


@pytest.mark.parametrize("window", [None, 2])
def test_a_block_attends_to_itself_as_it_does_at_the_start_of_a_cache(window):
    q, k, v = random_block(0)
    at = jnp.broadcast_to(jnp.arange(FED, dtype=jnp.int32)[None], (ROWS, FED))
    alone = kv_sources(None, at, None, None, (window,))[window]
    cache = random_cache(1)
    cached = kv_sources(cache, at, at, None, (window,))[window].over(cache.fold().layers[0])
    (out, layer), (other, written) = alone.attend(q, k, v), cached.attend(q, k, v)
    np.testing.assert_allclose(out, other, rtol=0, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, layer, LayerKV.of(k, v))
    np.testing.assert_array_equal(written.keys[:, :FED], layer.keys)
    np.testing.assert_array_equal(written.keys[:, FED:], cache.fold().layers[0].keys[:, FED:])


def test_a_block_attends_to_its_slots_and_to_those_before_it():
    q, k, v = random_block(0)
    start, cache = np.array([4, 1, 5]), random_cache(1)
    at = jnp.asarray(start[:, None] + np.arange(FED), jnp.int32)
    out, _ = kv_sources(cache, at, at, None, (None,))[None].over(cache.fold().layers[1]).attend(q, k, v, scale=0.3)
    keys, values = cache.layers[1].keys.transpose(0, 2, 1, 3), cache.layers[1].values.transpose(0, 3, 1, 2)
    for row, first in enumerate(start):
        own = [jnp.concatenate([x[row, :first], y[row]])[None] for x, y in ((keys, k), (values, v))]
        visible = jnp.tril(jnp.ones((FED, first + FED), bool), int(first))[None]
        expected = attend(q[row : row + 1], *LayerKV.of(own[0], own[1]), visible, 0.3)
        np.testing.assert_allclose(out[row : row + 1], expected, rtol=0, atol=1e-6)


def test_masks_are_made_once_for_each_window():
    at = jnp.zeros((ROWS, FED), jnp.int32)
    assert [*kv_sources(None, at, None, None, (None, 3, None, 3))] == [None, 3]
