"""A layout changes how weights lie in memory, never what the model computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.backend import compiler_options, decode_layout
from specjax.models.config import ModelConfig
from specjax.models.layers import FEW_ROWS, attend
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


@pytest.mark.parametrize(("fed", "slots"), [(1, 12), (FEW_ROWS // 2, 10), (FEW_ROWS // 2 + 1, 7)])
def test_attention_over_few_rows_is_attention(fed, slots):
    """Two query heads a key-value head; also where the slots have no factor of four."""
    batch, heads, groups, features = 2, 4, 2, 6
    q, k, v = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(
            [(batch, fed, heads, features), (batch * groups, slots, features), (batch * groups, features, slots)]
        )
    )
    visible = jnp.arange(slots)[None, None] <= jnp.arange(3, 3 + fed)[None, :, None]

    def attended(few_rows):
        run = jax.jit(attend, static_argnames="few_rows", compiler_options=compiler_options(decoding=True))
        return run(q, k, v, visible, few_rows=few_rows)

    keys, values = (np.repeat(x, heads // groups, axis=0).reshape(batch, heads, *x.shape[1:]) for x in (k, v))
    scores = np.einsum("bthc,bhsc->bhts", q, keys) * features**-0.5
    weights = jax.nn.softmax(np.where(visible[:, None], scores, -np.inf), axis=-1)
    expected = np.einsum("bhts,bhcs->bthc", weights, values)
    np.testing.assert_allclose(attended(False), expected, atol=1e-5)
    np.testing.assert_allclose(attended(True), expected, atol=1e-5)


def test_the_compiler_knows_its_options():
    assert jax.jit(lambda x: x + 1, compiler_options=compiler_options())(1) == 2
