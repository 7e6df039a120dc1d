"""What is computed another way on an accelerator gives what a CPU gives: run here as it is traced there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend, sampling
from specjax.models import kernels, products
from specjax.models.attention import blocks
from specjax.models.attention.sight import AttentionMask
from specjax.models.attention.stored import Int8Layer, LayerKV
from specjax.models.cache import KVCache
from specjax.models.kernels.quantised import SCHEMES, Quantised

PLATFORMS = ("cuda", "tpu")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_single_row_is_multiplied_as_two(platform):
    x = jax.random.normal(jax.random.key(0), (1, 1, 256), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (256, 24), jnp.bfloat16)
    seen = []

    def remembering(rows, wide=False):
        seen.append(rows.shape)
        return kernels.Dense(w)(rows, wide)

    with backend.lowering_for(platform):
        matrices = [w, *(Quantised.of(w, scheme) for scheme in SCHEMES.values())]
        for matrix in matrices:
            both = kernels.multiply(jnp.repeat(x, 2, axis=1), matrix)
            np.testing.assert_array_equal(kernels.multiply(x, matrix), both[:, :1])
        kernels.multiply(x, FakeKernel(remembering))
    kernels.multiply(x, FakeKernel(remembering))
    assert seen == [(2, 256), (1, 256)]


class FakeKernel:
    def __init__(self, product):
        self.product = product

    def __call__(self, rows, wide=False):
        return self.product(rows, wide)


def test_the_best_token_and_whether_there_is_one_come_of_one_reduction():
    random = np.random.default_rng(0)
    rows = random.normal(size=(9, 3, 700)).astype(np.float32).round(1)  # with ties
    rows[0, 0, 5], rows[1, 1, 0], rows[2, 2] = np.nan, np.inf, -np.inf
    rows[3, 0, ::2], rows[4, 1] = -np.inf, np.nan
    found = [(sampling.argmax(jnp.asarray(rows)), sampling.has_distribution(jnp.asarray(rows)))]
    for platform in PLATFORMS:
        with backend.lowering_for(platform):
            found.append((sampling.argmax(jnp.asarray(rows)), sampling.has_distribution(jnp.asarray(rows))))
    expected = np.isfinite(rows.max(axis=-1)) & ~np.isnan(rows).any(axis=-1)
    for best, whole in found:
        np.testing.assert_array_equal(whole, expected)
        np.testing.assert_array_equal(np.asarray(best)[expected], rows.argmax(axis=-1)[expected])
        assert ((np.asarray(best) >= 0) & (np.asarray(best) < 700)).all()


@pytest.mark.parametrize("platform", ["cpu", *PLATFORMS])
def test_a_token_that_overflowed_reaches_those_that_see_it_alone(platform):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 4, 2, 8)) for key in keys)
    with backend.lowering_for(platform):
        k, v = products.isolate_nonfinite_kv(k, v.at[0, 2, 1, 3].set(jnp.inf))
    causal = jnp.tril(jnp.ones((1, 4, 4), bool))
    found = products.attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1), causal)
    wrong = np.isnan(np.asarray(found)).any(axis=-1)
    np.testing.assert_array_equal(wrong, [[[False, False]] * 2 + [[False, True]] * 2])


def rows_of_a_cache(dtype: str = "float32", batch: int = 6, fed: int = 3, slots: int = 40):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, fed, 4, 8))
    own_keys, own_values = (jax.random.normal(key, (batch, slots, 2, 8)) for key in keys[1:])
    layer = LayerKV.of(own_keys, own_values)
    if dtype == "int8":
        layer = KVCache.zeros(1, batch, slots, 2, 8, "int8").fold().layers[0].write(jnp.zeros(batch, jnp.int32), layer)
    at = jnp.arange(slots - fed, slots, dtype=jnp.int32)[None] - 3 * jnp.arange(batch, dtype=jnp.int32)[:, None]
    return q, layer, AttentionMask(at)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_attend_in_groups_as_they_do_together(dtype, rows, monkeypatch):
    q, layer, sight = rows_of_a_cache(dtype)
    together = blocks.attend(q, layer.keys, layer.values, sight, scales=layer.scales)
    calls = []
    monkeypatch.setattr(backend, "attended_rows", lambda scores: calls.append(scores) or rows)
    in_groups = blocks.attend(q, layer.keys, layer.values, sight, scales=layer.scales)
    np.testing.assert_allclose(in_groups, together, rtol=1e-6, atol=1e-6)
    assert calls == [4 * 3 * 40]


@pytest.mark.parametrize(("scores", "rows"), [(2**10, 4096), (32 * 8 * 4096, 4), (2**24, None)])
def test_as_many_rows_attend_together_as_stay_near(scores, rows):
    assert backend.attended_rows(scores) is None  # a CPU's attend together
    with backend.lowering_for("tpu"):
        assert backend.attended_rows(scores) is None
    with backend.lowering_for("cuda"):
        assert backend.attended_rows(scores) == rows


def test_scales_of_a_cache_in_8_bits_may_multiply_scores_and_weights():
    q, layer, sight = rows_of_a_cache("int8")
    assert isinstance(layer, Int8Layer)
    read = blocks.attend(q, *layer.read(), sight)
    np.testing.assert_allclose(
        blocks.attend(q, layer.keys, layer.values, sight, scales=layer.scales), read, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_accepted_path_of_a_tree_is_the_same_from_the_pass_as_from_the_slots(dtype):
    batch, nodes, slots = 3, 7, 16
    start, path = jnp.array([2, 0, 8], jnp.int32), jnp.array([[1, 4, 6], [2, 2, 2], [3, 5, 0]], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    old_keys, old_values = (jax.random.normal(key, (batch, slots, 2, 8)) for key in keys[:2])
    new_keys, new_values = (jax.random.normal(key, (batch, nodes, 2, 8)) for key in keys[2:])
    old, block = LayerKV.of(old_keys, old_values), (new_keys, new_values)
    empty = KVCache.zeros(1, batch, slots, 2, 8, dtype).fold()
    layer = empty.layers[0].write(jnp.zeros(batch, jnp.int32), old).write(start, LayerKV.of(*block))
    from_pass = empty.written([layer], [block]).keep(start, path)
    assert from_pass.block is None
    jax.tree.map(np.testing.assert_array_equal, from_pass, empty.written([layer]).keep(start, path))
