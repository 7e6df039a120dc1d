"""Model directories that cannot be read, written or exported."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.errors import ModelError
from specjax.models.export import export_model
from specjax.models.hf import load_model, save_model

from .table import Row, World, check, row


def setting(*says: str, **settings: Any) -> Row:
    """A directory whose config.json has ``settings``."""
    return row(ModelError, lambda world: world.load(**settings), "{tmp}/model/config.json", *says)


def weights(change: Any, *says: str) -> Row:
    """A directory whose tensors went through ``change``."""

    def call(world: World):
        path = world.model()
        file = path / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return load_model(path)

    return row(ModelError, call, "{tmp}/model", *says)


def written(name: str, content: str | bytes, *says: str, without: tuple[str, ...] = ()) -> Row:
    """A directory with another file of that name."""

    def call(world: World):
        world.model(without=without)
        world.file(f"model/{name}", content)
        return load_model(world.tmp / "model")

    return row(ModelError, call, *says)


NORM = "model.norm.weight"


def _put(name: str, index: int, value: float):
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.array(tensors[name])
        tensors[name].flat[index] = value

    return change


def _index(shard: str) -> str:
    return json.dumps({"weight_map": {NORM: shard}})


def _damaged_manifest(world: World):
    world.model()
    world.file("model/SHA256SUMS", f"{'0' * 64}  config.json\n")
    return load_model(world.tmp / "model")


READ = {
    "no directory": row(ModelError, lambda w: load_model(w.tmp / "none"), "{tmp}/none", "no such directory", "hub id"),
    "an empty directory": row(ModelError, lambda w: load_model(w.tmp), "{tmp}/config.json", "missing"),
    "a file": row(ModelError, lambda w: load_model(w.file("model.bin")), "{tmp}/model.bin", "is a file", "directory"),
    "an empty path": row(ModelError, lambda w: load_model(""), "''", "directory"),
    "None as path": row(ModelError, lambda w: load_model(None), "None", "directory"),  # type: ignore
    "a number as path": row(ModelError, lambda w: load_model(7), "7", "directory"),  # type: ignore
    "a loaded model as path": row(ModelError, lambda w: load_model(w.target), "LoadedModel", "directory"),  # type: ignore
    "an unknown dtype": row(ModelError, lambda w: load_model(w.saved, dtype="int4"), "dtype='int4'", "float32"),
    "a revision of a directory": row(ModelError, lambda w: load_model(w.saved, revision="main"), "revision='main'"),
    "a run without a draft": row(
        ModelError, lambda w: load_model(w.file("run/results.json").parent), "{tmp}/run/config.json", "missing"
    ),
    "a run in place of its draft": row(
        ModelError, lambda w: load_model(w.file("run/draft/config.json").parents[1]), "{tmp}/run", "{tmp}/run/draft"
    ),
    "no JSON": written("config.json", "{", "config.json", "JSON"),
    "a list as config": written("config.json", "[]", "config.json", "list", "object"),
    "a config that is not UTF-8": written("config.json", b"\xff", "config.json", "JSON"),
    "an unknown model type": setting("model_type='lama'", "nearest: llama", model_type="lama"),
    "no model type": setting("model_type", "missing", model_type=None),
    "no hidden size": setting("hidden_size is missing", hidden_size=None),
    "a hidden size of 0": setting("hidden_size=0", "positive int", hidden_size=0),
    "a hidden size of text": setting("hidden_size='32'", "positive int", hidden_size="32"),
    "a fraction of layers": setting("num_hidden_layers=1.5", "positive int", num_hidden_layers=1.5),
    "a truth value as layers": setting("num_hidden_layers=True", "positive int", num_hidden_layers=True),
    "too many layers": setting("num_hidden_layers=99999", "10,000", num_hidden_layers=99999),
    "heads that key-value heads do not divide": setting(
        "num_attention_heads=4", "num_key_value_heads=3", "multiple", num_key_value_heads=3
    ),
    "an odd head dimension": setting("head_dim=7", "pairs", head_dim=7),
    "a vocabulary below 0": setting("vocab_size=-1", "positive int", vocab_size=-1),
    "an epsilon of text": setting("rms_norm_eps='a'", "positive float", rms_norm_eps="a"),
    "a theta of null bytes": setting("rope_theta=[]", "positive float", rope_theta=[]),
    "tied as text": setting("tie_word_embeddings='yes'", "true or false", tie_word_embeddings="yes"),
    "an unknown activation": setting("hidden_act='tanhh'", "not implemented", "silu", hidden_act="tanhh"),
    "an unknown rotary scaling": setting("rope_type", "'magic'", rope_scaling={"rope_type": "magic", "factor": 2.0}),
    "quantised weights": setting(
        "stored quantised (gptq)", "quantize='int8'", quantization_config={"quant_method": "gptq", "bits": 4}
    ),
    "positions of 0": setting("max_position_embeddings=0", "positive int", max_position_embeddings=0),
    "an end of sequence past the vocabulary": row(
        ModelError, lambda w: ending(w, 300), "generation_config.json", "eos_token_id=300", "0 .. 299"
    ),
    "an end of sequence of text": row(
        ModelError, lambda w: ending(w, "</s>"), "generation_config.json", "eos_token_id='</s>'", "token ids"
    ),
    "a damaged generation config": written("generation_config.json", "{]", "generation_config.json", "JSON"),
    "a damaged tokenizer": written("tokenizer.json", "{]", "{tmp}/model/tokenizer.json", "JSON"),
    "a tokenizer of nothing": written("tokenizer.json", "{}", "{tmp}/model", "tokenizer files"),
    "pickled weights only": written(
        "pytorch_model.bin", b"", "model.safetensors", "never read", without=("*.safetensors",)
    ),
    "truncated weights": written("model.safetensors", b"\x08", "model.safetensors", "truncated"),
    "weights of zero bytes": written("model.safetensors", b"", "model.safetensors", "truncated"),
    "an index without a map": written(
        "model.safetensors.index.json", "{}", "index.json", "weight_map", without=("*.safetensors",)
    ),
    "an index to a shard elsewhere": written(
        "model.safetensors.index.json", _index("../a.safetensors"), "'../a.safetensors'", without=("*.safetensors",)
    ),
    "an index to a shard that is not there": written(
        "model.safetensors.index.json", _index("a.safetensors"), "a.safetensors", "missing", without=("*.safetensors",)
    ),
    "a tensor that is missing": weights(lambda t: t.pop(NORM), "missing: model.norm.weight"),
    "a tensor too many": weights(lambda t: t.update(extra=np.zeros(1, np.float32)), "unexpected: extra"),
    "a tensor of another shape": weights(
        lambda t: t.update({NORM: np.zeros(3, np.float32)}), NORM, "shape [3]", "asks for [32]"
    ),
    "a tensor of integers": weights(
        lambda t: t.update({NORM: np.zeros(32, np.int8)}), NORM, "stored as I8", "readable are"
    ),
    "a weight that is NaN": weights(_put(NORM, 3, np.nan), NORM, "1 of 32", "NaN", "check_finite=False"),
    "an infinite weight": weights(_put("model.embed_tokens.weight", 5, np.inf), "embed_tokens", "1 of", "infinite"),
    "a weight of minus infinity in bfloat16": weights(
        lambda t: t.update({NORM: np.full(32, -np.inf, ml_dtypes.bfloat16)}), NORM, "32 of 32", "infinite"
    ),
    "a weight past float16": row(ModelError, lambda w: overflowing(w), NORM, "float16", "bfloat16"),
    "a file that differs from the manifest": row(ModelError, _damaged_manifest, "config.json", "SHA256SUMS", "fetch"),
    "a manifest of words": written("SHA256SUMS", "abc\n", "SHA256SUMS, line 1", "'abc'"),
    "a manifest that names what is not there": written("SHA256SUMS", f"{'0' * 64}  none\n", "none", "missing", "fetch"),
}


def ending(world: World, eos: Any):
    world.model()
    world.file("model/generation_config.json", json.dumps({"eos_token_id": eos}))
    return load_model(world.tmp / "model")


def overflowing(world: World):
    path = world.model()
    tensors = load_file(path / "model.safetensors")
    _put(NORM, 0, 1e6)(tensors)
    save_file(tensors, path / "model.safetensors")
    return load_model(path, dtype="float16")


WRITTEN = {
    "what is there already": row(
        ModelError, lambda w: save_model(w.target, w.tmp), "{tmp}", "exists", "overwrite=True"
    ),
    "what is no model": row(
        ModelError, lambda w: save_model(w.target, w.file("a/b").parent, overwrite=True), "{tmp}/a", "not a plain model"
    ),
    "in a dtype that is unknown": row(
        ModelError, lambda w: save_model(w.target, w.tmp / "a", dtype="int8"), "dtype='int8'", "float32"
    ),
    "in shards of nothing": row(
        ModelError, lambda w: save_model(w.target, w.tmp / "a", max_shard_bytes=0), "max_shard_bytes=0", "positive"
    ),
    "below a file": row(
        ModelError, lambda w: save_model(w.target, w.file("file") / "a"), "{tmp}/file/a", "cannot be written"
    ),
    "a path instead of a model": row(
        ModelError,
        lambda w: save_model("models/x", w.tmp / "a"),  # type: ignore
        "'models/x'",
        "specjax.load_model",
    ),
    "an export of nothing": row(
        ModelError, lambda w: export_model(w.tmp / "none", w.tmp / "a"), "{tmp}/none", "no such directory"
    ),
    "an export of a run without a draft": row(
        ModelError, lambda w: export_model(w.file("run/x").parent, w.tmp / "a"), "{tmp}/run", "no draft", "train"
    ),
}
ROWS = {**READ, **{f"written: {name}": found for name, found in WRITTEN.items()}}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_model_is_told_in_one_line(name, world):
    check(ROWS[name], world)
