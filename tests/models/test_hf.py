"""Hugging Face directories in and out: exact both ways, strict, and never half written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.hf import load_model, save_model
from specjax.models.transformer import Model
from tests import processes
from tests.models.directories import TOKENS, make_tokenizer, same_params

# --- round trips --------------------------------------------------------------------------------------------------


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
    assert theirs.to_dict()["rope_parameters"]["rope_theta"] == ours.ropes[0].theta
    assert theirs.rms_norm_eps == ours.norm.eps
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
    loaded.logits(TOKENS[:, ::-1])
    assert compiled._cache_size() == 2


# --- where models come from ---------------------------------------------------------------------------------------


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
    file.write_text("[" * 100_000)
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


# --- tokenizers ---------------------------------------------------------------------------------------------------


def test_a_directory_without_tokenizer_files_has_no_tokenizer(llama):
    assert load_model(llama.write()).tokenizer is None


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "{oops", r"llama/tokenizer\.json: cannot be read as JSON"),
        ("tokenizer_config.json", "", r"llama/tokenizer_config\.json: cannot be read as JSON"),
        ("tokenizer.json", "{}", "llama: the tokenizer files cannot be read"),
    ],
)
def test_a_broken_tokenizer_is_one_line(llama, file, text, message):
    make_tokenizer().save_pretrained(llama.write())
    (llama.path / file).write_text(text)
    with pytest.raises(ModelError, match=message) as refused:
        load_model(llama.path)
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
        "import logging; from specjax.models import files, hf; import sys; assert 'transformers' not in sys.modules\n"
        "files.import_transformers(); logging.getLogger('transformers').warning('a real warning')"
    )
    done = processes.run([sys.executable, "-c", code])
    shown = done.stderr
    assert done.returncode == 0, shown
    assert "a real warning" in shown
    assert "PyTorch was not found" not in shown
    assert not logging.getLogger("transformers").filters


# --- writing ------------------------------------------------------------------------------------------------------


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
