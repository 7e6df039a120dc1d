"""What of a directory is read and what is refused: files that are no weights, links that lead out, a hub that is away,
weights that are no numbers."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from specjax import cli
from specjax.costs.memory import bytes_on_device
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ModelError
from specjax.models.hf import LoadedModel, load_model, save_model
from tests.cases import transformer
from tests.models.directories import make_tokenizer, rewrite, same_params

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Bomb:
    def __reduce__(self):
        return print, ("unpickled",)


class Opened:
    """Names of the files under ``directory`` that Python opens; hooks cannot be removed, so it is switched off."""

    def __init__(self, directory: Path):
        self.directory, self.names, self.on = str(directory), set(), True
        sys.addaudithook(self)

    def __call__(self, event, args):
        if self.on and event == "open" and str(args[0]).startswith(self.directory):
            self.names.add(Path(args[0]).name)


def test_no_file_but_weights_settings_and_tokenizer_is_opened(llama, capsys):
    llama.write(auto_map={"AutoModelForCausalLM": "modeling_x.X"}, transformers_version="4.0")
    make_tokenizer().save_pretrained(llama.path)
    decoys = ("pytorch_model.bin", "model.pt", "training_args.bin", "model.ckpt", "tokenizer.pkl", "vocab.pkl")
    for name in decoys:
        (llama.path / name).write_bytes(pickle.dumps(Bomb()))
    for name in ("modeling_x.py", "tokenization_x.py", "configuration_x.py", "__init__.py"):
        (llama.path / name).write_text("print('executed')")
    opened = Opened(llama.path)
    model = load_model(llama.path)
    opened.on = False
    assert model.tokenizer is not None
    assert opened.names
    assert opened.names <= {"config.json", "tokenizer.json", "tokenizer_config.json"}  # safetensors opens its own
    assert not {"unpickled", "executed"} & set(capsys.readouterr().out.split())


def test_trust_remote_code_does_not_exist(llama):
    with pytest.raises(TypeError, match="trust_remote_code"):
        load_model(llama.write(), trust_remote_code=True)  # pyright: ignore[reportCallIssue]


# --- the hub's cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def cached(llama, tmp_path, monkeypatch) -> Path:
    """The cache of the hub's own library, in which owner/tiny has the small Llama at one commit; returns the cache."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    repository = cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (snapshot, repository / "blobs", repository / "refs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(llama.write().iterdir()):
        (repository / "blobs" / f"blob{i}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/blob{i}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_a_cached_revision_is_loaded(llama, cached, revision):
    loaded = load_model("owner/tiny", revision=revision)
    assert same_params(loaded.params, load_model(llama.path).params)
    assert loaded.name == "tiny"


@pytest.mark.parametrize("failure", ["ConnectError", "ProxyError"])
@pytest.mark.parametrize("revision", [None, COMMIT])
def test_when_the_network_fails_a_cached_revision_is_loaded(llama, cached, monkeypatch, failure, revision):
    from huggingface_hub import HfApi, constants

    # What the hub's library speaks through depends on its version.
    http = importlib.import_module("httpx2" if "httpx2" in sys.modules else "httpx")

    def fail(*args, **kwargs):
        raise getattr(http, failure)("the network is down")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("repo_info", "list_repo_tree"):
        monkeypatch.setattr(HfApi, name, fail)
    assert load_model("owner/tiny", revision=revision).config == load_model(llama.path).config
    with pytest.raises(ModelError, match=r"owner/other: no such local directory, .* cannot be fetched \("):
        load_model("owner/other", revision=revision)


def test_offline_a_revision_that_is_not_cached_is_one_line(cached):
    with pytest.raises(ModelError, match=r"owner/tiny: .*\(Cannot find an appropriate cached") as refused:
        load_model("owner/tiny", revision="f" * 40)
    assert "\n" not in str(refused.value)


# --- links --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "part-1.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused_by_name(llama, tmp_path, name):
    path = llama.write()
    outside = tmp_path / "secret"
    if (path / name).exists():
        (path / name).rename(outside)
    else:
        outside.write_text("{}")
    (path / name).symlink_to(outside)
    with pytest.raises(ModelError, match=rf"{name}: is a link to .*secret, outside the model directory"):
        load_model(path)


def test_a_link_to_itself_is_one_line(llama):
    (llama.write() / "model.safetensors").unlink()
    (llama.path / "model.safetensors").symlink_to(llama.path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors") as refused:
        load_model(llama.path)
    assert "\n" not in str(refused.value)


def test_a_link_inside_the_directory_and_a_directory_that_is_a_link_are_no_obstacle(llama, tmp_path):
    path = llama.write()
    (path / "model.safetensors").rename(path / "weights")
    (path / "model.safetensors").symlink_to("weights")
    (tmp_path / "alias").symlink_to(path)
    assert same_params(load_model(tmp_path / "alias").params, load_model(path).params)


def test_in_the_hub_s_cache_only_its_own_blobs_are_linked(cached, tmp_path):
    snapshot = cached / "models--owner--tiny" / "snapshots" / COMMIT
    (cached / "models--owner--other").mkdir()
    target = cached / "models--owner--other" / "weights"
    (snapshot / "model.safetensors").resolve().rename(target)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    with pytest.raises(ModelError, match="outside the model directory"):
        load_model("owner/tiny")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "{outside}/secret.safetensors", "..\\secret.safetensors"])
def test_an_index_that_names_an_outside_file_is_refused_by_name(llama, tmp_path, shard):
    path = llama.write()
    save_file(llama.tensors, tmp_path / "secret.safetensors")
    (path / "model.safetensors").unlink()
    shard = shard.format(outside=tmp_path)
    index = {"weight_map": dict.fromkeys(llama.tensors, shard)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as refused:
        load_model(path)
    assert f"shard {shard!r} is not a .safetensors file of this directory" in str(refused.value)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_with_their_tensor_and_number(llama, dtype, bad):
    llama.write()
    tensors = {name: value.astype(dtype) for name, value in llama.tensors.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3:5, 7] = bad
    rewrite(llama, tensors)
    load_model(llama.path, check_finite=False)  # not looked at
    where = r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has 2 of 384 values that are NaN or inf"
    with pytest.raises(ModelError, match=where) as refused:
        load_model(llama.path)
    assert "\n" not in str(refused.value)


def test_finite_weights_pass_the_check(llama):
    assert same_params(load_model(llama.write()).params, load_model(llama.path, check_finite=False).params)


@pytest.mark.parametrize(("stored", "expected"), [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2])
def test_dtype_auto_is_the_stored_one(llama, tmp_path, stored, expected):
    save_model(load_model(llama.write()), tmp_path / "out", dtype=stored)
    assert load_model(tmp_path / "out", "auto").dtype == expected


@pytest.mark.parametrize(("device", "expected"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_without_a_dtype_it_is_the_one_the_device_is_fast_in(llama, monkeypatch, device, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert load_model(llama.write()).dtype == expected
    assert load_model(llama.path, "float32").dtype == "float32"


def test_a_draft_named_by_its_path_computes_as_its_target_does(llama):
    target = load_model(llama.write(), "bfloat16")
    _, params = DraftModel(str(llama.path)).bind(target)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_dtype_auto_of_several_loses_nothing(llama):
    llama.write()
    half = llama.tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
    rewrite(llama, {**llama.tensors, "lm_head.weight": half})
    model = load_model(llama.path, "auto")
    assert {str(leaf.dtype) for leaf in (model.params["embedding"], model.params["head"]["kernel"])} == {"float32"}
    np.testing.assert_array_equal(model.params["embedding"], llama.tensors["model.embed_tokens.weight"])


# --- the command line ---------------------------------------------------------------------------------------------


def generate(path, *options: str):
    return CliRunner().invoke(cli.app, ["generate", "--target", str(path), "--prompt", "abc", *options])


def test_a_prompt_of_text_needs_a_tokenizer(llama):
    result = generate(llama.write())
    assert result.exit_code == 2
    [line] = [line for line in result.stderr.splitlines() if not line.startswith("note: memory: ")]
    assert line.startswith(f"error: {llama.path}: holds no tokenizer, which a prompt of text needs; put ")


def test_generate_checks_weights_when_asked_to(llama):
    llama.write()
    make_tokenizer().save_pretrained(llama.path)
    tensors = {**llama.tensors, "model.norm.weight": np.full(16, np.nan, np.float32)}
    rewrite(llama, tensors)
    result = generate(llama.path, "--check-finite")
    assert result.exit_code == 2
    assert "tensor model.norm.weight has 16 of 16 values that are NaN" in result.stderr


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_that_only_decodes_is_held_once_and_in_the_bytes_of_its_file(tmp_path, tie):
    toy = transformer(0, tie_embeddings=tie)
    save_model(LoadedModel(toy.spec, toy.params), tmp_path / "model", dtype="bfloat16")
    whole, once = load_model(tmp_path / "model"), load_model(tmp_path / "model", decoding_only=True)
    assert (whole.holds_originals, once.holds_originals) == (True, False)
    assert once.dtype == whole.dtype
    assert bytes_on_device(once.layout().params) == 2 * whole.parameter_count
    assert same_params(once.params, whole.params)
    assert {x.dtype for x in jax.tree.leaves(once.params)} == {jnp.dtype(jnp.float32)}
    tokens = [Decoder(each).generate([[1, 2, 3]], max_new_tokens=12).tokens for each in (whole, once)]
    assert tokens[0] == tokens[1]
