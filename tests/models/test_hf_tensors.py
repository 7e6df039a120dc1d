"""The tensors of a Hugging Face directory: complete, of the right shape, undamaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax.errors import ModelError
from specjax.models.hf import load_model, save_model
from tests.models.directories import change, rewrite, same_params


def shard(llama, index: dict | None = None) -> None:
    """Two shards; ``index`` replaces entries of the weight map."""
    names = sorted(llama.tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: llama.tensors[name] for name in part}, llama.path / file)
    weight_map = {name: file for file, part in parts.items() for name in part} | (index or {})
    (llama.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (llama.path / "model.safetensors").unlink()


def test_missing_and_unexpected_tensors_are_listed(llama):
    llama.write()
    tensors = dict(llama.tensors)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(llama, tensors)
    with pytest.raises(ModelError) as refused:
        load_model(llama.path)
    assert "missing: model.layers.1.mlp.up_proj.weight; " in str(refused.value)
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in str(refused.value)


def test_a_layer_more_than_the_config_says_is_refused(llama):
    llama.write()
    change(llama.path / "config.json", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\..* and 5 more"):
        load_model(llama.path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama):
    llama.write()
    rewrite(llama, {**llama.tensors, "model.layers.0.mlp.up_proj.weight": np.zeros((16, 24), np.float32)})
    with pytest.raises(ModelError, match=r"up_proj\.weight has shape \[16, 24\], config\.json asks for \[24, 16\]"):
        load_model(llama.path)


def test_quantised_tensors_are_refused(llama):
    llama.write()
    rewrite(llama, {**llama.tensors, "model.norm.weight": np.ones(16, np.int8)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8"):
        load_model(llama.path)


def test_values_beyond_float16_are_refused_and_not_made_infinite(llama):
    llama.write()
    rewrite(llama, {**llama.tensors, "model.norm.weight": np.full(16, 1e6, np.float32)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has values beyond the range of float16"):
        load_model(llama.path, "float16")


def test_a_tied_head_in_the_file_must_equal_the_embedding(llama):
    llama.write(tie_word_embeddings=True)
    embedding = llama.tensors["model.embed_tokens.weight"]
    rewrite(llama, {**llama.tensors, "lm_head.weight": embedding})
    assert "head" not in load_model(llama.path).params
    rewrite(llama, {**llama.tensors, "lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(llama.path)


def test_an_untied_model_without_head_is_refused(llama):
    llama.write(tie_word_embeddings=True)
    change(llama.path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load_model(llama.path)


def test_rotary_buffers_of_old_files_are_not_weights(llama):
    llama.write()
    expected = load_model(llama.path)
    rewrite(llama, {**llama.tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})
    assert same_params(load_model(llama.path).params, expected.params)


def test_shards_load_as_one_file_does(llama):
    llama.write()
    whole = load_model(llama.path)
    shard(llama)
    assert same_params(load_model(llama.path).params, whole.params)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"model.norm.weight": "../llama/one.safetensors"}, "'../llama/one.safetensors' is not a .safetensors file of"),
        ({"model.norm.weight": "weights.bin"}, "'weights.bin' is not a .safetensors file of this directory"),
        ({"model.extra.weight": "three.safetensors"}, "three.safetensors: missing"),
        ({"lm_head.weight": "two.safetensors"}, "holds lm_head.weight, which"),
        ({"model.extra.weight": "one.safetensors"}, "do not hold: model.extra.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_index_that_does_not_tell_the_truth_is_refused(llama, index, message):
    llama.write()
    shard(llama, index)
    with pytest.raises(ModelError) as refused:
        load_model(llama.path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-5], lambda raw: raw[:5], lambda raw: b"\xff" * 64, lambda raw: b""]
)
def test_a_truncated_or_corrupt_file_is_one_clear_line(llama, damage):
    file = llama.write() / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or not a safetensors file") as refused:
        load_model(llama.path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_flipped_bit_is_noticed_where_there_is_a_manifest(llama, tmp_path, name):
    save_model(load_model(llama.write()), tmp_path / "out")
    file = tmp_path / "out" / name
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=f"{name}: differs from its entry in SHA256SUMS"):
        load_model(tmp_path / "out")


def test_an_edited_card_does_not_disturb_the_manifest(llama, tmp_path):
    save_model(load_model(llama.write()), tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("edited")
    load_model(tmp_path / "out")
