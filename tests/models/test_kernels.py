"""A matrix multiplies as it is stored, also one that the package does not know."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import backend
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.models import kernels
from specjax.models.kernels import Dense, Joined, Narrow, Transposed
from specjax.models.layers import Linear
from specjax.models.products import (
    bfloat16_of,
    few_queries_product,
    few_rows_product,
    rounded_matrix_product,
    rows_of,
    several_rows_product,
    split_product,
)
from specjax.testing.toys import ToyModel
from tests.cases import in_proof, transformer


@flax.struct.dataclass
class Int8:
    """Somebody's own: whole numbers, and a scale for each output."""

    numbers: jax.Array
    scale: jax.Array

    @classmethod
    def of(cls, matrix):
        scale = jnp.max(jnp.abs(matrix), axis=0) / 127
        return cls(jnp.round(matrix / scale[None]).astype(jnp.int8), scale)

    def __call__(self, rows, wide=False):
        rows = rows.astype(jnp.float32) if wide else rows
        return (rows @ self.numbers.astype(rows.dtype)) * self.scale[None].astype(rows.dtype)

    @property
    def matrix(self):
        return self.numbers.astype(jnp.float32) * self.scale[None]


def quantised(model: ToyModel, names: tuple[str, ...]) -> tuple[ToyModel, ToyModel]:
    """With `Int8` in place of the kernels of the linears so named, and with what they mean."""
    found = []
    for meaning in (lambda kernel: kernel, lambda kernel: kernel.matrix):

        def replaced(path, leaf, meaning=meaning):
            of = [getattr(key, "key", None) for key in path]
            return meaning(Int8.of(leaf)) if of[-1] == "kernel" and of[-2] in names else leaf

        params = jax.tree_util.tree_map_with_path(replaced, model.params)
        found.append(dataclasses.replace(model, params=params))
    return found[0], found[1]


@pytest.mark.parametrize("queries", [1, 2, 7, 8, 9, 16])
def test_a_product_head_by_head_is_the_librarys(queries):
    rng = np.random.default_rng(queries)
    x, kernel = (rng.normal(size=(3, n, 24)).astype(np.float32) for n in (queries, 10))
    x[0, 0, 3] = np.inf
    found = few_queries_product(jnp.asarray(x), jnp.asarray(kernel))
    np.testing.assert_allclose(found, np.einsum("hqi,hoi->hqo", x, kernel), rtol=1e-5, atol=1e-5)
    assert not np.isfinite(found[0, 0]).any()


@pytest.mark.parametrize("features", [24, backend.SHORT_ROW + 8])
@pytest.mark.parametrize("wide_vectors", [False, True])
def test_products_of_few_rows_are_the_librarys_on_either_kind_of_processor(monkeypatch, wide_vectors, features):
    monkeypatch.setattr(backend, "has_wide_vectors", lambda: wide_vectors)
    rng = np.random.default_rng(0)
    for rows, outputs in ((1, 12), (4, 10), (8, 12), (9, 7), (16, 12)):
        x, kernel = (rng.normal(size=(n, features)).astype(np.float32) for n in (rows, outputs))
        for product in (few_rows_product, several_rows_product):
            found = product(jnp.asarray(x), jnp.asarray(kernel))
            np.testing.assert_allclose(found, x @ kernel.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_a_loop_that_embeds_tokens_holds_no_wide_copy_of_the_table(tokens):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 64)), jnp.bfloat16)

    @jax.jit
    def looped(table, tokens, rounds):
        def step(carry):
            left, tokens, total = carry
            return left - 1, (tokens * 7 + 1) % len(table), total + rows_of(table, tokens, jnp.float32)

        start = rounds, tokens, jnp.zeros((len(tokens), table.shape[1]))
        return jax.lax.while_loop(lambda carry: carry[0] > 0, step, start)[2]

    ids = jnp.arange(tokens, dtype=jnp.int32)
    temporaries = looped.lower(table, ids, jnp.int32(3)).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < table.nbytes / 2
    expected = sum(np.asarray(table, np.float32)[i] for i in (ids, ids * 7 + 1, (ids * 49 + 8) % 4096))
    np.testing.assert_allclose(looped(table, ids, 3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [None, 1])
def test_a_product_in_parts_of_bfloat16_is_as_exact_as_one_in_float32(layer):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(40, 6)) * 10.0 ** rng.integers(-6, 7, size=(40, 6))).astype(np.float32)
    kernels_of_all = jnp.asarray(rng.normal(size=(2, 12, 6)), jnp.bfloat16)
    kernel = kernels_of_all[1]
    stored = kernel if layer is None else jax.lax.bitcast_convert_type(kernels_of_all, jnp.uint16)
    found = jax.jit(lambda x, stored: split_product(x, bfloat16_of(stored, layer)))(x, stored)
    exact, size = (f(x.astype(np.float64)) @ f(np.asarray(kernel, np.float64)).T for f in (np.asarray, np.abs))
    assert np.max(np.abs(found - exact) / size) < 3e-7


def test_a_row_that_overflowed_spoils_no_other_row_of_a_product_in_parts():
    x, kernel = jnp.ones((40, 6)).at[3, 2].set(jnp.inf), jnp.ones((12, 6), jnp.bfloat16)
    found = np.asarray(split_product(x, kernel))
    assert not np.isfinite(found[3]).any()
    np.testing.assert_array_equal(np.delete(found, 3, axis=0), 6.0)


def rounded(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("features", [24, 7])
@pytest.mark.parametrize("matrix_units", [False, True])
def test_a_rounded_product_and_its_gradients_are_those_of_rounded_operands(by_row, features, matrix_units, monkeypatch):
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: matrix_units)
    rng = np.random.default_rng(0)
    x, kernel, dy = (rng.normal(size=size).astype(np.float32) for size in ((40, features), (features, 10), (40, 10)))
    stored = kernel.T if by_row else kernel
    found, backward = jax.vjp(jax.jit(lambda x, stored: rounded_matrix_product(x, stored, by_row)), x, stored)
    of_x, of_kernel = backward(jnp.asarray(dy))
    assert {found.dtype, of_x.dtype, of_kernel.dtype} == {jnp.dtype("float32")}
    np.testing.assert_allclose(found, rounded(x) @ rounded(kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x, rounded(dy) @ rounded(kernel).T, rtol=1e-5, atol=1e-5)
    of_kernel = of_kernel.T if by_row else of_kernel
    np.testing.assert_allclose(of_kernel, rounded(x).T @ rounded(dy), rtol=1e-5, atol=1e-5)


def test_operands_are_rounded_where_it_is_asked_for_and_nowhere_else():
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(24, 10)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 3, 24)), jnp.float32)
    exact = np.asarray(kernels.multiply(x, matrix))
    np.testing.assert_allclose(exact, np.asarray(x, np.float64) @ np.asarray(matrix, np.float64), rtol=1e-5, atol=1e-5)
    for dtype, expected in (("bfloat16", rounded(x) @ rounded(matrix)), (None, exact)):
        with kernels.operands_in(dtype):
            for kernel in (matrix, Dense(matrix.T, by_row=True)):
                np.testing.assert_allclose(kernels.multiply(x, kernel), expected, rtol=1e-5, atol=1e-5)
            of_others = kernels.multiply(x, Transposed(matrix.T))
            np.testing.assert_allclose(of_others, exact, rtol=1e-5, atol=1e-5)
            half = kernels.multiply(x.astype(jnp.bfloat16), matrix)
            assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernels.multiply(x, matrix), exact)
    assert np.max(np.abs(exact - rounded(x) @ rounded(matrix))) > 1e-3


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 192, 193])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("matrix_units", [False, True])
def test_every_kernel_is_its_dense_matrix(rows, wide, matrix_units, monkeypatch):
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: matrix_units)
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(rng.normal(size=(24, 10)), jnp.bfloat16).astype(jnp.float32)
    x = jnp.asarray(rng.normal(size=(rows, 24)), jnp.float32)
    ours = (
        Dense(matrix),
        Dense(matrix.T, by_row=True),
        Transposed(matrix.T),
        Narrow(matrix.T.astype(jnp.bfloat16)),
    )
    for kernel in (*ours, Joined((Dense(matrix[:, :3]), Transposed(matrix[:, 3:].T)))):
        np.testing.assert_allclose(kernel(x, wide), x @ matrix, rtol=1e-5, atol=1e-5)
        assert kernel(x.astype(jnp.bfloat16), wide).dtype == (jnp.float32 if wide else jnp.bfloat16)
    for kernel in ours:
        np.testing.assert_array_equal(kernels.plain(kernel), matrix)
        assert kernel.dense().dtype == jnp.float32


def test_what_is_joined_comes_apart_again():
    arrays = [jnp.full((4, n), float(n)) for n in (2, 3, 1)]
    for values in (arrays, [arrays[0], Int8.of(arrays[1]), arrays[2]]):
        again = kernels.split(kernels.join(values), (2, 3, 1))
        jax.tree.map(np.testing.assert_array_equal, again, values)


def test_a_linear_takes_a_strangers_kernel():
    linear = Linear(8, 6, bias=True, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8))
    kernel = Int8.of(linear.kernel[...])
    graph, state = nnx.split(linear)
    stored, dense = (
        nnx.merge(graph, nnx.State({**nnx.to_pure_dict(state), "kernel": k})) for k in (kernel, kernel.matrix)
    )
    np.testing.assert_allclose(stored(x), dense(x), rtol=1e-5, atol=1e-5)


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "head")


@pytest.mark.parametrize("names", [ALL, in_proof(("k_proj", "down_proj"))], ids=["all", "some"])
def test_a_model_of_a_strangers_kernels_decodes_as_what_they_mean(names):
    stored, dense = quantised(transformer(0, tie_embeddings=False), names)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 12))
    np.testing.assert_allclose(stored.logits(tokens), dense.logits(tokens), rtol=0, atol=1e-3)
    options = {"max_new_tokens": 16, "temperature": [0.0, 0.9], "seed": 2}
    draft = transformer(1, num_layers=1)
    for drafter in (None, DraftModel(draft, 3)):
        found, expected = (
            Decoder(model, drafter).generate([[1, 2, 3], [4]], **options).tokens for model in (stored, dense)
        )
        assert found == expected
    again = stored.layout().originals()
    assert jax.tree.structure(again) == jax.tree.structure(stored.params)
    jax.tree.map(np.testing.assert_array_equal, again, stored.params)
