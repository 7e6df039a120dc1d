"""A layout changes how weights lie in memory, never what the model computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.backend import compiler_options, decode_layout
from specjax.models.config import ModelConfig
from specjax.models.layers import FEW_ROWS
from specjax.models.transformer import Model
from tests.cases import in_proof

CONFIG = ModelConfig(
    65, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=10, max_positions=64
)


@pytest.mark.parametrize(
    ("tokens", "tie"),
    [(1, True), (3, False), (FEW_ROWS - 1, True), in_proof(8, True), in_proof(FEW_ROWS + 1, False)],
)
def test_a_layout_keeps_the_logits(tokens, tie):
    """Also where a kernel's size has no factor of four."""
    model = Model(dataclasses.replace(CONFIG, tie_embeddings=tie))
    params = jax.jit(model.init)(jax.random.key(0))
    spec, laid_out = decode_layout(model, params)
    fed = jnp.arange(tokens, dtype=jnp.int32)[None]
    logits = jax.jit(spec.__call__, compiler_options=compiler_options(decoding=True))(laid_out, fed, fed).logits
    np.testing.assert_allclose(logits, jax.jit(model.__call__)(params, fed, fed).logits, atol=1e-5)
    assert not spec.config.tie_embeddings
    if jax.default_backend() == "cpu":
        assert laid_out["head"]["kernel"].shape == (65, 24, 1)


def test_the_compiler_knows_its_options():
    assert jax.jit(lambda x: x + 1, compiler_options=compiler_options())(1) == 2
