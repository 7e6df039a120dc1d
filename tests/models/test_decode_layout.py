"""A layout changes how weights lie in memory, never what the model computes."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.backend import FEW_ROWS, compiler_options
from specjax.costs.memory import bytes_on_device
from specjax.decode.decoder import Decoder
from specjax.models import kernels
from specjax.models.config import Experts, ModelConfig
from specjax.models.decode_layout import DecodeLayout, abstract_layout, decode_layout
from specjax.models.kernels import Dense, Kernel, Narrow, Transposed
from specjax.models.transformer import Model
from tests.cases import in_proof, transformer

CONFIG = ModelConfig(
    65, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=10, max_positions=64
)


def kernels_of(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Kernel))
    return [leaf for leaf in leaves if isinstance(leaf, Kernel)]


@pytest.mark.parametrize(
    ("tokens", "tie"),
    [(1, True), (3, False), (FEW_ROWS - 1, True), in_proof(8, True), in_proof(FEW_ROWS + 1, False)],
)
def test_a_layout_keeps_the_logits(tokens, tie):
    """Also where a kernel's size has no factor of four."""
    model = Model(dataclasses.replace(CONFIG, tie_embeddings=tie))
    params = model.init(jax.random.key(0))
    spec, laid_out = decode_layout(model, params)
    fed = jnp.arange(tokens, dtype=jnp.int32)[None]
    logits = jax.jit(spec.__call__, compiler_options=compiler_options(decoding=True))(laid_out, fed, fed).logits
    np.testing.assert_allclose(logits, jax.jit(model.__call__)(params, fed, fed).logits, atol=1e-5)
    assert not spec.config.tie_embeddings
    if jax.default_backend() == "cpu":
        assert isinstance(laid_out["head"]["kernel"], Transposed)
        assert laid_out["head"]["kernel"].value.shape == (65, 24)


@pytest.mark.parametrize("tokens", [1, FEW_ROWS, in_proof(FEW_ROWS + 1)])
def test_weights_that_are_bfloat16_numbers_are_read_as_such_and_lose_nothing(tokens):
    model = Model(CONFIG)
    params = model.init(jax.random.key(0))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    spec, laid_out = decode_layout(model, rounded)
    on_cpu = jax.default_backend() == "cpu"
    assert {type(x) for x in kernels_of(laid_out)} == {Narrow if on_cpu else Dense}
    narrow = jnp.dtype(jnp.bfloat16 if on_cpu else jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(kernels_of(laid_out))} == {narrow}
    assert laid_out["embedding"].dtype == narrow
    fed = jnp.arange(tokens, dtype=jnp.int32)[None]
    logits = jax.jit(spec.__call__, compiler_options=compiler_options(decoding=True))(laid_out, fed, fed).logits
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, jax.jit(model.__call__)(rounded, fed, fed).logits, atol=1e-5)
    # One number that is none, and all stay as they are.
    rounded["layers"][1]["mlp"]["down_proj"]["kernel"] += jnp.zeros((40, 24)).at[3, 5].set(2.0**-20)
    _, laid_out = decode_layout(model, rounded)
    assert {x.dtype for x in jax.tree.leaves(laid_out)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": True},
        {"tie_embeddings": False, "qkv_bias": True},
        {"gated": False},
        {"experts": Experts(4, 2, 8, True)},
    ],
)
def test_the_originals_come_back_from_a_layout_bit_for_bit(changes, rounded):
    model = Model(dataclasses.replace(CONFIG, **changes))
    params = model.init(jax.random.key(0))
    if rounded:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    again = DecodeLayout.of(model, params).originals()
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert {x.dtype for x in jax.tree.leaves(again)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("tie", [False, True])
def test_where_kernels_are_not_turned_they_are_fused_and_stay_as_they_are(monkeypatch, tie):
    monkeypatch.setattr(backend, "transposes_kernels", lambda: False)
    model = Model(dataclasses.replace(CONFIG, tie_embeddings=tie))
    params = model.init(jax.random.key(0))
    layout = DecodeLayout.of(model, params)
    assert {type(x) for x in kernels_of(layout.params)} == {Dense}
    assert ("head" in layout.params) is not tie
    fed = jnp.arange(3, dtype=jnp.int32)[None]
    logits = jax.jit(layout.spec.__call__)(layout.params, fed, fed).logits
    np.testing.assert_allclose(logits, jax.jit(model.__call__)(params, fed, fed).logits, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, layout.originals(), params)


def test_a_layout_follows_what_is_replaced_in_a_model():
    """Decoding and `logits` are of the same weights, also after one array of them was replaced in its place."""
    model = transformer(0, tie_embeddings=False)
    first = model.layout()
    assert model.layout() is first
    model.params["head"]["kernel"] = -model.params["head"]["kernel"]
    turned = model.layout()
    jax.tree.map(np.testing.assert_array_equal, turned.originals(), model.params)
    model.free_originals()
    assert model.layout() is turned
    model.spec = Model(dataclasses.replace(model.spec.config, logit_soft_cap=5.0))
    assert model.layout().spec.config.logit_soft_cap == 5.0
    jax.tree.map(np.testing.assert_array_equal, model.layout().originals(), turned.originals())


def test_where_memory_is_dear_no_weight_is_there_twice(monkeypatch):
    """Beside the originals the layout is the same arrays; without them projections are fused, a layer at a time."""
    monkeypatch.setattr(backend, "keeps_copies", lambda: False)
    monkeypatch.setattr(backend, "transposes_kernels", lambda: False)
    model, prompts = transformer(0, tie_embeddings=False), [[1, 2, 3], [4]]
    before = jax.tree.map(np.array, model.params)
    beside = model.layout()
    assert {id(x) for x in jax.tree.leaves(beside.params)} == {id(x) for x in jax.tree.leaves(model.params)}
    tokens = Decoder(model).generate(prompts, max_new_tokens=12).tokens
    first = weakref.ref(model.params["layers"][0]["attention"]["q_proj"]["kernel"])
    join, alive = kernels.join, []

    def seen(*args, **options):
        alive.append(first() is not None)
        return join(*args, **options)

    monkeypatch.setattr(kernels, "join", seen)
    del beside
    gc.collect()
    model.free_originals()
    assert (alive[0], alive[-1]) == (True, False)
    assert model.layout().spec.config.fused_projections
    assert Decoder(model).generate(prompts, max_new_tokens=12).tokens == tokens
    jax.tree.map(np.testing.assert_array_equal, model.params, before)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_tied_embedding_and_its_head_are_one_array(rounded):
    if not backend.transposes_kernels():
        pytest.skip("kernels are not turned on this device")
    model = Model(dataclasses.replace(CONFIG, tie_embeddings=True))
    params = model.init(jax.random.key(0))
    if rounded:
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    _, laid_out = decode_layout(model, params)
    assert laid_out["embedding"] is laid_out["head"]["kernel"].value
    assert laid_out["embedding"].dtype == (jnp.bfloat16 if rounded else jnp.float32)
    # Norms and biases stay in the dtype of the parameters.
    kernels_and_table = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    others = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim < 2)
    assert bytes_on_device(laid_out) - others == sum(x.nbytes for x in kernels_and_table) // (2 if rounded else 1)


def test_the_shapes_of_a_layout_are_those_of_the_weights_that_are_kept_in_bfloat16():
    if not backend.transposes_kernels():
        pytest.skip("kernels are not turned on this device")
    model = Model(dataclasses.replace(CONFIG, tie_embeddings=True))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(jax.random.key(0)))
    _, laid_out = decode_layout(model, narrow)
    _, shapes = abstract_layout(model, stored="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(laid_out)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.tree.structure(shapes) == jax.tree.structure(laid_out)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(laid_out)
    ]
    assert bytes_on_device(shapes) == bytes_on_device(laid_out) == sum(x.nbytes for x in jax.tree.leaves(narrow))
