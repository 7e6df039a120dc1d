"""A cut that leaves out nothing of importance must change nothing: every rotation, scale and index shows up here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill.prune import prune
from specjax.errors import ConfigError
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from tests.cases import in_proof

SHAPE = ModelConfig(
    64, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (4, 32)).astype(np.int32)


def target(tie: bool, dead_neurons=(), dead_heads=(), dead_layers=(), dead_directions: int = 0) -> LoadedModel:
    """Random weights and norm scales; what is dead contributes nothing to the stream."""
    model = Model(dataclasses.replace(SHAPE, tie_embeddings=tie))
    key = jax.random.key(1)
    params = jax.tree.map(np.array, jax.jit(model.init)(key))
    params["embedding"] = params["embedding"] * 50
    rng = np.random.default_rng(2)
    for i, layer in params["layers"].items():
        for name in ("attention_norm", "mlp_norm"):
            layer[name]["scale"] = rng.uniform(0.5, 2.0, SHAPE.hidden_size).astype(np.float32)
        layer["mlp"]["down_proj"]["kernel"][list(dead_neurons)] = 0
        per_group = SHAPE.num_heads // SHAPE.num_kv_heads * SHAPE.head_dim
        for head in dead_heads:
            layer["attention"]["o_proj"]["kernel"][head * per_group : (head + 1) * per_group] = 0
        if i in dead_layers:
            layer["mlp"]["down_proj"]["kernel"][:] = 0
            layer["attention"]["o_proj"]["kernel"][:] = 0
    # A tied head keeps the last scale's diagonal only, so there it is one number.
    params["norm"]["scale"] = (
        params["norm"]["scale"] * 1.5 if tie else params["norm"]["scale"] * rng.uniform(0.5, 2, 24)
    )
    if dead_directions:
        rotation, _ = np.linalg.qr(rng.normal(size=(24, 24)))
        keep = (rotation[:, dead_directions:] @ rotation[:, dead_directions:].T).astype(np.float32)
        params["embedding"] = params["embedding"] @ keep
        for layer in params["layers"].values():
            for block, name in (("mlp", "down_proj"), ("attention", "o_proj")):
                layer[block][name]["kernel"] = layer[block][name]["kernel"] @ keep
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return LoadedModel(model, params, tokenizer=None, eos_ids=(), name="toy")


def logits(spec: Model, params) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1], dtype=jnp.int32)[None], TOKENS.shape)
    return np.asarray(jax.jit(spec.__call__)(params, jnp.asarray(TOKENS), positions).logits)


@pytest.mark.parametrize(
    ("tie", "dead", "cut"),
    [
        (True, {}, {}),
        in_proof(False, {}, {}),
        (False, {"dead_neurons": (0, 7, 30)}, {"intermediate_size": 37}),
        (True, {"dead_heads": (0,)}, {"num_heads": 2, "num_kv_heads": 1}),
        in_proof(False, {"dead_layers": (1,)}, {"num_layers": 2}),
        in_proof(True, {"dead_layers": (1, 2)}, {"num_layers": 1}),
        (True, {"dead_directions": 6}, {"hidden_size": 18}),
    ],
)
def test_a_cut_of_dead_weights_keeps_the_function(tie, dead, cut):
    full = target(tie, **dead)
    shape = dataclasses.replace(full.config, **cut)
    params = prune(full, shape, TOKENS)
    expected = jax.eval_shape(Model(shape).init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, expected)
    np.testing.assert_allclose(logits(Model(shape), params), logits(full.spec, full.params), atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size=32 exceeds the target's 24"),
        ({"num_layers": 4}, "num_layers=4 exceeds the target's 3"),
        ({"head_dim": 4}, "head_dim=4, the target's heads have 8"),
        ({"num_heads": 2}, "1 query heads a key-value head, the target has 2; set num_heads=4"),
    ],
)
def test_a_shape_that_is_no_part_of_the_target_is_refused(change, message):
    full = target(True)
    with pytest.raises(ConfigError, match=message):
        prune(full, dataclasses.replace(full.config, **change), TOKENS)
