"""Hugging Face directories in and out: exact both ways, strict, and never half written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.hf import LoadedModel, check_same_vocabulary, load_model, save_model
from specjax.models.transformer import Model

TOKENS = np.array([[1, 5, 2, 30, 36, 0], [7, 7, 7, 3, 4, 11]], np.int32)


def make_tokenizer(alphabet: str = "abcdefgh", eos: str = "<end>"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {eos: 0, **{c: i for i, c in enumerate(alphabet, 1)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def change(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def same_params(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_save_load_is_bit_identical(llama, tmp_path, dtype, tied):
    first = load_model(llama.write(tie_word_embeddings=tied), dtype)
    save_model(first, tmp_path / "copy")
    second = load_model(tmp_path / "copy", dtype)
    assert first.config == second.config
    assert first.eos_ids == second.eos_ids == (3,)
    assert first.dtype == dtype
    assert same_params(first.params, second.params)
    stored = load_file(tmp_path / "copy" / "model.safetensors")
    assert stored.keys() == llama.tensors.keys()
    assert ("lm_head.weight" in stored) is not tied
    for name, value in llama.tensors.items():
        np.testing.assert_array_equal(stored[name], value.astype(dtype))


def test_loaded_parameters_have_the_structure_of_model_init(llama):
    loaded = load_model(llama.write())
    fresh = Model(loaded.config).init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, loaded.params) == jax.tree.map(jnp.shape, fresh)


def test_bfloat16_storage_loads_as_exactly_those_values_in_float32(llama, tmp_path):
    save_model(load_model(llama.write()), tmp_path / "half", dtype="bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    loaded = load_model(tmp_path / "half")
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(
        loaded.params["head"]["kernel"], llama.tensors["lm_head.weight"].astype(ml_dtypes.bfloat16).T.astype(np.float32)
    )


def test_saving_twice_writes_the_same_bytes(llama, tmp_path):
    model = dataclasses.replace(load_model(llama.write()), tokenizer=make_tokenizer())
    save_model(model, tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b", card=(tmp_path / "a" / "README.md").read_text())
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b


def test_what_is_saved_reads_in_transformers_with_the_same_settings(llama, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

    model = dataclasses.replace(load_model(llama.write(head_dim=6)), tokenizer=make_tokenizer(), eos_ids=(3, 5))
    save_model(model, tmp_path / "out", dtype="bfloat16")
    theirs = LlamaConfig.from_pretrained(tmp_path / "out")
    ours = model.config
    assert theirs.architectures == ["LlamaForCausalLM"]
    assert str(theirs.dtype).endswith("bfloat16")
    assert (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size) == (37, 16, 24)
    assert (theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads) == (2, 4, 2)
    assert (theirs.head_dim, theirs.max_position_embeddings) == (6, 64)
    assert theirs.to_dict()["rope_parameters"]["rope_theta"] == ours.rope_theta
    assert theirs.rms_norm_eps == ours.rms_norm_eps
    assert theirs.tie_word_embeddings is False
    assert theirs.attention_bias is False
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [3, 5]
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["rope_theta"] == 50.0
    assert raw["bos_token_id"] is None
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == [1, 2, 3]
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[8:200]
    assert b'"__metadata__":{"format":"pt"}' in header


def test_the_manifest_lists_the_hash_of_every_file(llama, tmp_path):
    save_model(load_model(llama.write()), tmp_path / "out", card="# mine\n")
    lines = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    files = {f.name: f for f in (tmp_path / "out").iterdir() if f.name != "SHA256SUMS"}
    assert listed == {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    assert files["README.md"].read_text() == "# mine\n"


def test_logits_are_float32_and_compile_once_a_shape(llama):
    loaded = load_model(llama.write(), "bfloat16")
    compiled: Any = hf._logits
    compiled.clear_cache()
    assert loaded.logits(TOKENS).dtype == jnp.float32
    assert load_model(llama.path).logits(TOKENS[::-1]).shape == (2, 6, 37)  # float32 weights: another program
    loaded.logits(TOKENS + 1)
    assert compiled._cache_size() == 2


# --- config.json ----------------------------------------------------------------------------------------------------

ROPES = {
    "old": {"rope_theta": 500.0},
    "old, null scaling": {"rope_theta": 500.0, "rope_scaling": None},
    "new": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "new, type left out": {"rope_parameters": {"rope_theta": 500.0}},
    "new beside old": {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    "new wins over top level": {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}},
    "old default scaling": {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    "scaling replaces parameters": {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"rope_type": "default"}},
    "absent": {},
}


@pytest.mark.parametrize("spelling", ROPES)
def test_every_spelling_of_rotary_settings_is_read_as_transformers_reads_it(llama, spelling):
    from transformers import LlamaConfig

    path = llama.write(rope_theta=None)
    change(path / "config.json", **ROPES[spelling])
    theirs = LlamaConfig.from_pretrained(path).to_dict()["rope_parameters"]["rope_theta"]
    assert load_model(path).config.rope_theta == theirs
    assert theirs == (500.0 if "500" in str(ROPES[spelling]) and "replaces" not in spelling else 10_000.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type='linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type='llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0}}, "rope_parameters.rope_type='yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention="),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor=2.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_is_not_implemented_is_refused_by_name_and_value(llama, settings, named):
    path = llama.write()
    change(path / "config.json", **settings)
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert named in str(refused.value)
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "pretraining_tp": 1, "quantization_config": None, "attention_dropout": 0.0},
        {"layer_types": ["full_attention", "full_attention"]},
        {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)
def test_an_inactive_setting_changes_nothing(llama, settings):
    path = llama.write()
    before = load_model(path)
    change(path / "config.json", **settings)
    assert load_model(path).config == before.config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not implemented; known are llama"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 should be a positive int"),
        ({"vocab_size": "37"}, "vocab_size='37' should be a positive int"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 should be a positive float"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' should be true or false"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"eos_token_id": 37}, "eos_token_id=37 should be token ids in 0 .. 36"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_is_one_line_that_names_it(llama, settings, named):
    path = llama.write()
    change(path / "config.json", **settings)
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_absent_settings_take_the_defaults_of_transformers(llama):
    from transformers import LlamaConfig

    path = llama.write(num_key_value_heads=4)
    absent = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings")
    config = {k: v for k, v in llama.config.items() if k not in absent}
    (path / "config.json").write_text(json.dumps(config))
    ours, theirs = load_model(path).config, LlamaConfig(**config)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim) == (4, 4)
    assert (ours.rms_norm_eps, ours.max_positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.rope_theta, ours.tie_embeddings) == (
        theirs.to_dict()["rope_parameters"]["rope_theta"],
        theirs.tie_word_embeddings,
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [4, 9, 4]}, 3, (4, 9)),
        ({"eos_token_id": 0}, 3, (0,)),
        ({"temperature": 1.0}, 3, (3,)),
        (None, [3, 8], (3, 8)),
        (None, None, ()),
    ],
)
def test_generation_stops_on_generation_config_and_falls_back_to_config(llama, tmp_path, generation, config, expected):
    path = llama.write(eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    loaded = load_model(path)
    assert loaded.eos_ids == expected
    save_model(loaded, tmp_path / "copy")
    assert load_model(tmp_path / "copy").eos_ids == expected


# --- tensors --------------------------------------------------------------------------------------------------------


def rewrite(llama, tensors: dict) -> None:
    save_file(tensors, llama.path / "model.safetensors")


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


# --- where models come from -----------------------------------------------------------------------------------------


def test_a_directory_with_pickled_weights_only_is_refused_with_the_reason(llama):
    path = llama.write()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never read, because unpickling runs code"):
        load_model(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [("./no/such/place", "no such directory"), ("/no/such/place", "no such directory"), ("a/b/c", "no such directory")],
)
def test_a_path_that_is_not_there_is_refused(path, message):
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_a_file_instead_of_a_directory_is_refused(llama):
    with pytest.raises(ModelError, match="is a file"):
        load_model(llama.write() / "model.safetensors")


def test_a_missing_or_broken_config_is_refused(llama):
    file = llama.write() / "config.json"
    file.write_text("{oops")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        load_model(llama.path)
    file.unlink()
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        load_model(llama.path)


def test_a_revision_needs_a_hub_id(llama):
    with pytest.raises(ModelError, match="revision='main' needs a hub id"):
        load_model(llama.write(), revision="main")


def test_an_unknown_dtype_is_refused(llama, tmp_path):
    model = load_model(llama.write())
    with pytest.raises(ModelError, match="dtype='int8'"):
        load_model(llama.path, "int8")
    with pytest.raises(ModelError, match="dtype='int8'"):
        save_model(model, tmp_path / "out", dtype="int8")


def test_a_hub_id_is_fetched_without_pickles_or_code(llama, monkeypatch):
    import fnmatch

    import huggingface_hub

    asked = {}

    def snapshot_download(repo_id, **kwargs):
        asked.update(kwargs, repo_id=repo_id)
        return str(llama.write())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load_model("owner/tiny-llama", revision="abc")
    assert (asked["repo_id"], asked["revision"], loaded.name) == ("owner/tiny-llama", "abc", "tiny-llama")

    def fetched(file: str) -> bool:
        allowed = any(fnmatch.fnmatch(file, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(file, pattern) for pattern in asked["ignore_patterns"])

    for wanted in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"):
        assert fetched(wanted)
    for unwanted in ("pytorch_model.bin", "model.pt", "modeling_llama.py", "original/model.safetensors", "x.gguf"):
        assert not fetched(unwanted)


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch):
    import huggingface_hub

    def snapshot_download(*args, **kwargs):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"owner/x: no such local directory, .*\(no route\)$"):
        load_model("owner/x")


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_directory_without_tokenizer_files_has_no_tokenizer(llama):
    assert load_model(llama.write()).tokenizer is None


def test_a_broken_tokenizer_is_one_line(llama):
    path = llama.write()
    (path / "tokenizer.json").write_text("{oops")
    with pytest.raises(ModelError, match="the tokenizer files cannot be read") as refused:
        load_model(path)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_survives_the_round_trip(llama, tmp_path):
    model = dataclasses.replace(load_model(llama.write()), tokenizer=make_tokenizer())
    save_model(model, tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.tokenizer("hag")["input_ids"] == [8, 1, 7]
    assert loaded.tokenizer.eos_token_id == 0
    stored = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert stored["tokenizer_class"] == "PreTrainedTokenizerFast"  # a name that transformers 4 knows as well
    save_model(loaded, tmp_path / "again")
    assert "local" not in (tmp_path / "again" / "tokenizer_config.json").read_text()


def test_importing_transformers_hides_its_torch_notice_and_nothing_else():
    code = (
        "import logging; from specjax.models import hf; import sys; assert 'transformers' not in sys.modules\n"
        "hf.import_transformers(); logging.getLogger('transformers').warning('a real warning')"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "a real warning" in shown
    assert "PyTorch was not found" not in shown
    assert not logging.getLogger("transformers").filters


@pytest.mark.parametrize("sizes", [(37, 40), (40, 37)])
def test_vocabularies_of_different_size_do_not_pair(llama, sizes):
    config = load_model(llama.write()).config
    target, draft = (LoadedModel(Model(dataclasses.replace(config, vocab_size=size)), {}) for size in sizes)
    with pytest.raises(ModelError, match=f"draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; use"):
        check_same_vocabulary(target, draft)


def test_tokenizers_pair_by_content_not_by_identity(llama):
    model = load_model(llama.write())
    target, same, other = (
        dataclasses.replace(model, tokenizer=make_tokenizer(alphabet)) for alphabet in ("abcd", "abcd", "abdce")
    )
    check_same_vocabulary(target, same)
    check_same_vocabulary(target, model)  # no tokenizer, nothing to compare
    with pytest.raises(
        ModelError, match=r"differ in 3 ids \(target and draft: 3: 'c' and 'd', 4: 'd' and 'c', 5: None"
    ):
        check_same_vocabulary(target, other)


# --- writing --------------------------------------------------------------------------------------------------------


def contents(directory) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_an_existing_directory_is_refused_and_left_alone(llama, tmp_path):
    model = load_model(llama.write())
    before = contents(llama.path)
    with pytest.raises(ModelError, match=r"exists already; .*overwrite=True"):
        save_model(model, llama.path)
    assert contents(llama.path) == before


def test_overwrite_replaces_the_whole_directory(llama, tmp_path):
    model = load_model(llama.write())
    (llama.path / "left-over.txt").write_text("old")
    save_model(model, llama.path, overwrite=True)
    assert "left-over.txt" not in contents(llama.path)
    assert same_params(load_model(llama.path).params, model.params)
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_a_failed_overwrite_keeps_the_old_directory(llama, tmp_path, monkeypatch, failing):
    model = load_model(llama.write())
    before = contents(llama.path)
    if failing == "write":
        monkeypatch.setattr(hf, "write_manifest", lambda directory: (_ for _ in ()).throw(OSError("disk full")))
    else:
        real = type(tmp_path).rename

        def rename(self, target):
            if ".partial-" in self.name:
                raise OSError("disk full")
            return real(self, target)

        monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(ModelError, match=r"cannot be written .*disk full"):
        save_model(model, llama.path, overwrite=True)
    assert contents(llama.path) == before
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


def test_a_failed_save_leaves_nothing_behind(llama, tmp_path):
    model = load_model(llama.write())
    params = {**model.params, "norm": {"scale": jnp.ones(7)}}
    with pytest.raises(ModelError, match=r"norm\.scale should have shape \[16\], found \[7\]"):
        save_model(dataclasses.replace(model, params=params), tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


def test_overwrite_does_not_replace_what_is_not_a_model(llama, tmp_path):
    model = load_model(llama.write())
    for name in ("documents", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    shutil.copy(llama.path / "config.json", tmp_path / "run" / "config.json")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "file").write_text("a file")
    for name in ("documents", "run", "file"):
        with pytest.raises(ModelError, match="is not a plain model directory"):
            save_model(model, tmp_path / name, overwrite=True)
    assert (tmp_path / "documents" / "thesis.txt").exists()
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_saved_directory_is_readable_by_others(llama, tmp_path):
    save_model(load_model(llama.write()), tmp_path / "deep" / "out")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "deep" / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
