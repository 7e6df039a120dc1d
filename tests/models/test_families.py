"""Every family without torch: settings and tensors in and out, cached decoding, layouts, strictness. That the numbers
are those of transformers is tested in tests/parity/test_families.py."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.errors import ConfigError, DataError, ModelError
from specjax.models import families
from specjax.models.cache import with_total
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import decode_layout
from specjax.models.families import FAMILIES, Settings, family_of
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.transformer import Model
from tests.cases import in_proof
from tests.models.variants import OLD, VARIANTS, in_old_spelling

ROWS = 3
SAVED = (
    *("llama-tied-biased", "mistral-window", "mixtral", "qwen2-window", "qwen3", "qwen3_moe-some-layers", "gemma"),
    *("gemma2", "gemma3", "phi3-longrope-long", "olmo2-biased", "smollm3-window", "starcoder2", "granite"),
    *("cohere-qk-norm", "gpt2", "gpt_neox"),
)
"""One of each family."""
QUICK = ("mixtral", "gemma3", "phi3-longrope-long", "smollm3-window", "cohere-qk-norm", "gpt_neox")
DECODED = tuple(name for name in SAVED if name not in ("mistral-window", "qwen3", "gemma", "granite"))
"""Without those in which nothing that matters to a cache or a layout is new."""


def read(settings: dict) -> ModelConfig:
    return family_of(settings["model_type"], "test").read_config(Settings(settings, "config.json"))


def written(model_type: str, config: ModelConfig) -> dict:
    return {"model_type": model_type, **FAMILIES[model_type].write_config(config)}


def random_params(config: ModelConfig, seed: int = 0):
    """Every parameter away from what it is initialised to."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        values = rng.normal(size=like.shape)
        if path[-1].key == "kernel":
            values = 1.5 * values * like.shape[-2] ** -0.5
        else:
            values = (config.norm.offset == 0 and path[-1].key == "scale") + 0.4 * values
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(lambda: Model(config).init(jax.random.key(0))))


@functools.cache
def small(name: str) -> tuple[Model, dict]:
    """The variant with one layer of each kind."""
    config = read(VARIANTS[name])
    kinds = tuple(dict.fromkeys(config.layers))
    config = dataclasses.replace(config, num_layers=len(kinds), layers=kinds)
    return Model(config), random_params(config)


def random_tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, shape).astype(np.int32)


def test_every_family_has_a_variant():
    assert {variant["model_type"] for variant in VARIANTS.values()} | {"gemma3"} == set(FAMILIES)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_that_is_written_reads_as_it_was(name):
    config = read(VARIANTS[name])
    again = written(VARIANTS[name]["model_type"], config)
    assert read(again) == config
    assert written(VARIANTS[name]["model_type"], read(again)) == again
    json.dumps(again)


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_loads_and_saves_bit_for_bit(name, tmp_path):
    config = read(VARIANTS[name])
    params = random_params(config)
    save_model(LoadedModel(Model(config), params, family=VARIANTS[name]["model_type"]), tmp_path / "first")
    loaded = load_model(tmp_path / "first")
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    save_model(loaded, tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


@pytest.mark.parametrize("name", [name if name in QUICK else in_proof(name) for name in DECODED])
def test_decoding_in_blocks_at_ragged_positions_equals_the_full_forward(name):
    """The blocks in the layout for decoding, which must not change what is computed."""
    plain, params = small(name)
    tokens = jnp.asarray(random_tokens(1, ROWS, 16))
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32)[None], tokens.shape)

    @jax.jit
    def run(params):
        model, laid_out = decode_layout(plain, params)
        assert model.config.fused_projections
        expected = plain(params, tokens, positions).logits
        cache = with_total(model.init_cache(ROWS, 20), jnp.full((ROWS,), 16))
        cache = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, 1e9), cache)
        # Of the first block, shorter rows overwrite the end.
        differences, start = [], jnp.zeros((ROWS,), jnp.int32)
        for size, kept in ((8, jnp.array([8, 2, 5])), (3, 3), (1, 1)):
            at = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
            out = model(laid_out, jnp.take_along_axis(tokens, at, axis=1), at, at, cache)
            cache, start = out.cache, start + kept
            differences.append(out.logits - jnp.take_along_axis(expected, at[..., None], axis=1))
        return jnp.concatenate(differences, axis=1), expected

    difference, expected = run(params)
    assert np.std(expected) > 0.3
    assert np.abs(difference).max() < 1e-4 * np.std(expected)


def test_fused_and_interleaved_tensors_are_cut_as_they_are_stored(tmp_path):
    neox, phi3, gpt2 = (save(name, tmp_path) for name in ("gpt_neox", "phi3", "gpt2"))
    heads, features = 4, 8
    q, k, v = (neox[0]["layers"][1]["attention"][f"{n}_proj"] for n in "qkv")
    stored = neox[1]["gpt_neox.layers.1.attention.query_key_value.weight"].reshape(heads, 3, features, 32)
    bias = neox[1]["gpt_neox.layers.1.attention.query_key_value.bias"].reshape(heads, 3, features)
    for i, part in enumerate((q, k, v)):
        np.testing.assert_array_equal(part["kernel"].T.reshape(heads, features, 32), stored[:, i])
        np.testing.assert_array_equal(part["bias"].reshape(heads, features), bias[:, i])
    attention, mlp = phi3[0]["layers"][0]["attention"], phi3[0]["layers"][0]["mlp"]
    stored = phi3[1]["model.layers.0.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(attention["k_proj"]["kernel"].T, stored[32:48])
    stored = phi3[1]["model.layers.0.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(mlp["up_proj"]["kernel"].T, stored[48:])
    attention = gpt2[0]["layers"][2]["attention"]
    np.testing.assert_array_equal(attention["v_proj"]["kernel"], gpt2[1]["transformer.h.2.attn.c_attn.weight"][:, 64:])


def save(name: str, directory) -> tuple[dict, dict]:
    """(params, stored tensors)."""
    config = read(VARIANTS[name])
    params = random_params(config)
    save_model(LoadedModel(Model(config), params, family=VARIANTS[name]["model_type"]), directory / name)
    return params, load_file(directory / name / "model.safetensors")


def rewrite(directory, tensors: dict) -> None:
    (directory / "SHA256SUMS").unlink()
    save_file(tensors, directory / "model.safetensors")


def test_buffers_of_old_files_and_a_missing_prefix_are_no_obstacle(tmp_path):
    params, stored = save("gpt2", tmp_path)
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), np.float32) for i in range(3)}
    bare = {name.removeprefix("transformer."): value for name, value in stored.items()}
    rewrite(tmp_path / "gpt2", bare | masks)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "gpt2").params, params)
    params, stored = save("gpt2-untied", tmp_path)
    rewrite(tmp_path / "gpt2-untied", {name.removeprefix("transformer."): value for name, value in stored.items()})
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "gpt2-untied").params, params)
    params, stored = save("gpt_neox", tmp_path)
    masks = {
        f"gpt_neox.layers.{i}.attention.{n}": np.ones(1, np.float32) for i in range(4) for n in ("bias", "masked_bias")
    }
    rotary = {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(tmp_path / "gpt_neox", stored | masks | rotary)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "gpt_neox").params, params)


def test_of_a_model_that_also_sees_the_text_part_is_read(tmp_path):
    params, stored = save("gemma3", tmp_path)
    seeing = {f"language_model.{name}": value for name, value in stored.items()}
    seeing |= {name: np.ones(2, np.float32) for name in ("vision_tower.x.weight", "multi_modal_projector.y.weight")}
    rewrite(tmp_path / "gemma3", seeing)
    sparse = {key: value for key, value in VARIANTS["gemma3"].items() if key != "num_attention_heads"}
    settings = {"model_type": "gemma3", "text_config": sparse, "vision_config": {}}
    assert read(settings).num_heads == 8
    settings["text_config"] = VARIANTS["gemma3"]
    (tmp_path / "gemma3" / "config.json").write_text(json.dumps(settings))
    loaded = load_model(tmp_path / "gemma3")
    assert (loaded.config, loaded.family) == (read(VARIANTS["gemma3"]), "gemma3_text")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_every_expert_is_needed(tmp_path):
    _, stored = save("mixtral", tmp_path)
    del stored["model.layers.3.block_sparse_moe.experts.4.w3.weight"]
    rewrite(tmp_path / "mixtral", stored)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.3\.block_sparse_moe\.experts\.4\.w3\.weight; "):
        load_model(tmp_path / "mixtral")


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2, "short_factor": "x"}}, "short_factor='x'"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("mixtral", {"num_local_experts": 2.5}, "num_local_experts=2.5"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types="),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types="),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types has sliding_attention, and there is no"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta=5.0"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 and 1 entries",
        ),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers=[1, 2, 0, 1]"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt_neox", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("cohere", {"hidden_act": "mish"}, "hidden_act='mish'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_is_not_implemented_is_refused_by_name_and_value(name, settings, named):
    with pytest.raises(ModelError) as refused:
        read({**VARIANTS[name], **settings})
    assert named in str(refused.value)
    assert "config.json" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OLD)
def test_old_spellings_read_as_the_same_model(name):
    assert read(in_old_spelling(name)) == read(VARIANTS[name])


def test_the_first_name_of_longrope_is_known():
    """transformers 5 refuses it, the first Phi 3 releases have it."""
    settings = in_old_spelling("phi3-longrope-short")
    settings["rope_scaling"] = {**settings["rope_scaling"], "type": "su"}
    assert read(settings) == read(VARIANTS["phi3-longrope-short"])


@pytest.mark.parametrize(
    ("name", "absent", "expected"),
    [
        ("mixtral", "rope_parameters", lambda c: c.ropes[0].theta == 1e6),
        ("smollm3", "rope_parameters", lambda c: c.ropes[0].theta == 2e6),
        ("cohere", "rope_parameters", lambda c: c.ropes[0].theta == 5e5 and c.ropes[0].interleaved),
        ("gemma3", "rope_parameters", lambda c: {rope.theta for rope in c.ropes} == {1e4, 1e6}),
        ("gpt_neox", "rope_parameters", lambda c: c.ropes[0].partial == 0.25),
        *((name, "tie_word_embeddings", lambda c: c.tie_embeddings) for name in ("gemma", "gemma2", "gpt2", "cohere")),
        *((name, "tie_word_embeddings", lambda c: not c.tie_embeddings) for name in ("llama", "qwen2", "gpt_neox")),
        ("qwen3", "head_dim", lambda c: c.head_dim == 128),
        ("gemma2", "head_dim", lambda c: c.head_dim == 256),
        ("mistral", "sliding_window", lambda c: c.layers[0].window == 4096),
        ("mixtral-window", "sliding_window", lambda c: c.layers[0].window is None),
        ("qwen2", "use_sliding_window", lambda c: c.layers[0].window is None),
        (
            "smollm3",
            "no_rope_layers",
            lambda c: [kind.rope is None for kind in c.layers] == [False, False, False, True],
        ),
        ("gemma2", "attn_logit_softcapping", lambda c: c.attention_soft_cap == 50),
        ("phi3", "original_max_position_embeddings", lambda c: True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_absent_setting_takes_the_default_of_its_family(name, absent, expected):
    settings = dict(VARIANTS[name])
    settings.pop(absent, None)
    assert expected(read(settings))


def test_a_family_that_is_not_known_is_named_with_the_nearest():
    with pytest.raises(ModelError, match=r"model_type='gpt_neo' is not implemented \(nearest: gpt_neox\); known are "):
        family_of("gpt_neo", "config.json")


@pytest.mark.parametrize("model_type", sorted(families.MISSING))
def test_what_others_have_that_no_family_has_is_named(model_type):
    with pytest.raises(ModelError, match=rf"model_type='{model_type}' is not implemented: (its|most of its) \w+"):
        family_of(model_type, "config.json")


def test_a_family_of_ones_own_is_named_where_one_is_missing():
    with pytest.raises(ModelError, match=r"one of your own is added by specjax\.models\.families\.register"):
        family_of("mine", "config.json")


def test_a_family_of_ones_own_is_registered_once_and_takes_nobodys_place(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", dict(FAMILIES))
    mine = dataclasses.replace(FAMILIES["llama"], model_type="mine")
    assert families.register(mine) is families.register(dataclasses.replace(mine)) is family_of("mine", "config.json")
    with pytest.raises(ConfigError, match=r"model_type='mine' is LlamaForCausalLM already"):
        families.register(dataclasses.replace(mine, prefix="other."))
    with pytest.raises(ConfigError, match=r"model_type='gpt2' is GPT2LMHeadModel already"):
        families.register(dataclasses.replace(mine, model_type="gpt2"))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere_to_be_found:FAMILY", "no module 'nowhere_to_be_found'; install it, or put its folder"),
        ("specjax.models.families.llama:MISSING", "specjax.models.families.llama has no MISSING"),
        ("specjax.models.families.llama:TENSORS", "is no Family; make one with"),
        ("specjax.models.families.llama", "should be package.module:NAME"),
    ],
)
def test_what_is_no_family_is_named(where, said):
    with pytest.raises(ConfigError, match=said):
        families.register(where)


def test_a_model_is_not_saved_as_a_family_that_cannot_say_what_it_computes(tmp_path):
    model, params = small("gemma2")
    with pytest.raises(ModelError, match="cannot be saved as 'llama'"):
        save_model(LoadedModel(model, params), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_rows_choose_their_long_frequencies_by_the_length_they_will_reach():
    config = dataclasses.replace(read(VARIANTS["phi3-longrope-long"]), num_layers=1)
    model, params = Model(config), random_params(config)
    run = jax.jit(model.__call__)
    tokens = jnp.asarray(random_tokens(3, 2, 12))
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], tokens.shape)
    long, short = run(params, tokens, positions).logits, run(params, tokens[:, :8], positions[:, :8]).logits
    assert np.abs(long[:, :8] - short).max() > 0.1
    cache = with_total(model.init_cache(2, 16), jnp.array([8, 12]))
    mixed = run(params, tokens, positions, positions, cache).logits
    np.testing.assert_allclose(mixed[0, :8], short[0], atol=1e-4)
    np.testing.assert_allclose(mixed[1], long[1], atol=1e-4)


def test_decoding_past_the_boundary_of_dynamic_scaling_is_refused_before_it_starts():
    config = dataclasses.replace(read(VARIANTS["llama-dynamic-past"]), num_layers=1)
    decoder = specjax.Decoder(LoadedModel(Model(config), random_params(config)))
    with pytest.raises(DataError, match=r"exceeds the target's 24 positions .*dynamic rotary scaling"):
        decoder.generate([[1] * 10], max_new_tokens=15)


def test_a_window_counts_positions_not_slots_in_a_tree():
    """Siblings share a position: a node sees the same past whether its sibling is fed before it or not."""
    config = dataclasses.replace(read(VARIANTS["mistral-window"]), num_layers=2)
    model, params = jax.jit(Model(config).__call__), random_params(config)
    prompt, nodes = jnp.asarray(random_tokens(4, 1, 9)), jnp.asarray(random_tokens(5, 1, 3))
    at = jnp.arange(9, dtype=jnp.int32)[None]
    cache = model(params, prompt, at, at, Model(config).init_cache(1, 20)).cache
    slots = jnp.array([[9, 10, 11]], jnp.int32)
    mask = jnp.array([[[1, 0, 0], [0, 1, 0], [0, 1, 1]]], bool)  # two siblings, and a child of the second
    tree = model(params, nodes, jnp.array([[9, 9, 10]], jnp.int32), slots, cache, mask).logits
    chain = model(params, nodes[:, 1:], slots[:, :2], slots[:, :2], cache).logits
    np.testing.assert_allclose(tree[:, 1:], chain, atol=1e-5)
