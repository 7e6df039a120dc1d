"""A cut that leaves out nothing of importance must change nothing: every rotation, scale and index shows up here."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import config
from specjax.errors import ConfigError
from specjax.interfaces import Initial
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.transformer import Model
from specjax.training.init.first_weights import initial_draft
from specjax.training.init.prune import prune
from tests.cases import in_proof
from tests.models.test_families import random_params, read
from tests.models.variants import VARIANTS
from tests.training import toys

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


# Every family with gated MLPs.

GATED = (
    *("llama-tied-biased", "mistral-window", "qwen2-window", "gemma", "gemma2", "phi3-longrope-short"),
    *("smollm3-window", "granite", "qwen3-window-biased"),
)
GATED_QUICK = ("gemma3", "olmo2-biased", "cohere-qk-norm")
VOCAB = 61
SOME_TEXT = toys.Windows(np.random.default_rng(0).integers(0, VOCAB, (16, 33)).astype(np.int32))


def with_dead_weights(name: str) -> tuple[LoadedModel, dict[str, int]]:
    """A variant in which some weights contribute nothing, and the sizes without those. What has no place in other
    directions, a norm's scale of what is written or of a tied head, is one number."""
    spec, rng = Model(read(VARIANTS[name])), np.random.default_rng(3)
    full, params = spec.config, jax.tree.map(np.array, random_params(spec.config))
    sizes = {"hidden_size": 32, "intermediate_size": 45, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    sizes["head_dim"] = full.head_dim
    size, groups = full.hidden_size, full.num_kv_heads
    keep = np.eye(size, dtype=np.float32)
    if full.norm.kind == "rms":
        rotation, _ = np.linalg.qr(rng.normal(size=(size, size)))
        keep, sizes["hidden_size"] = (rotation[:, 4:] @ rotation[:, 4:].T).astype(np.float32), size - 4
    drops_heads = full.qk_norm != "projection"
    if drops_heads:
        sizes |= {"num_heads": 2, "num_kv_heads": 1}
    for i, layer in params["layers"].items():
        out, down = layer["attention"]["o_proj"], layer["mlp"]["down_proj"]
        down["kernel"][[0, 7, 30]] = 0
        if drops_heads:
            out["kernel"][: len(out["kernel"]) // groups] = 0
        for linear in (out, down):
            for weight in linear:
                linear[weight] = linear[weight] @ keep * (i != 1)
        for norm in {"attention_post_norm", "mlp_post_norm"} & layer.keys():
            layer[norm]["scale"][:] = 0.7 - full.norm.offset
    params["embedding"] = params["embedding"] @ keep
    if full.tie_embeddings:
        params["norm"]["scale"][:] = 1.3 - full.norm.offset
    else:
        # What the head reads through the last norm's scale.
        params["head"]["kernel"] = (
            keep @ params["head"]["kernel"] / (full.norm.offset + params["norm"]["scale"])[:, None]
        )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return LoadedModel(spec, params, family=VARIANTS[name]["model_type"]), sizes


def cut(full: LoadedModel, **sizes: int) -> Initial:
    draft = config.Draft(architecture=config.Architecture(**sizes), init="target")
    data = config.Data(path="x", seq_len=8)
    run = config.RunConfig(target=config.Target(path="x"), data=data, draft=draft)
    return initial_draft(run, full, SOME_TEXT)


@pytest.mark.parametrize("name", [*GATED_QUICK, *map(in_proof, GATED)])
def test_a_cut_of_dead_weights_keeps_the_function_of_every_gated_family(name, tmp_path):
    full, sizes = with_dead_weights(name)
    initial = cut(full, **sizes)
    save_model(LoadedModel(initial.drafter.model, initial.params, family=initial.drafter.family), tmp_path / "draft")
    draft = load_model(tmp_path / "draft")
    assert (draft.family, draft.config.num_layers) == (full.family, 3)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 30)).astype(np.int32)
    expected = np.asarray(full.logits(tokens))
    np.testing.assert_allclose(draft.logits(tokens), expected, atol=2e-3 * expected.std())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "its MLPs are mixtures of experts"),
        ("gpt2", "its MLPs have no gate"),
        ("gpt_neox", "its MLPs have no gate"),
    ],
)
def test_a_target_that_nothing_can_be_cut_from_is_refused_with_the_reason(name, reason):
    full = LoadedModel(Model(read(VARIANTS[name])), {}, family=VARIANTS[name]["model_type"])
    with pytest.raises(ConfigError, match=rf"cut from this target, {reason}; keep some of its layers"):
        cut(full, hidden_size=16, num_heads=2, num_kv_heads=1)


def test_a_target_is_never_held_in_float64():
    """12 layers, of which one is kept; what numpy holds is counted."""
    deep = dataclasses.replace(SHAPE, num_layers=12, hidden_size=64, intermediate_size=512)
    full = LoadedModel(Model(deep), random_params(deep))
    copy = 8 * full.parameter_count
    shape = dataclasses.replace(deep, num_layers=1)
    prune(full, shape, TOKENS)  # compiled
    tracemalloc.start()
    try:
        prune(full, shape, TOKENS)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < copy / 4
