"""Other libraries' decoding (experiments/peers.py) and the files that they read (experiments/requantise.py)."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import peers
import pytest
import requantise

from specjax.errors import DataError
from specjax.models.hf import load_model
from tests.models.test_gguf import config_of, write_gguf


class Model:
    """Goes on with 1, 2, 3, ... behind each prompt, as often as it was reset."""

    def __init__(self, **settings: Any):
        self.settings, self.calls = settings, []

    def reset(self) -> None:
        self.calls.append("reset")

    def set_seed(self, seed: int) -> None:
        self.calls.append(seed)

    def generate(self, prompt, **sampling):
        self.calls.append((prompt, sampling["temp"]))
        yield from range(1, 100)


def test_llama_cpp_reads_each_prompt_anew_and_ends_as_ours_does():
    model = Model()
    for ends, expected in (({5}, [1, 2, 3, 4, 5]), (set(), [*range(1, 9)])):
        decoder = peers.LlamaCpp(model, frozenset(ends))
        assert decoder.generate([[7, 8]], seed=3, max_new_tokens=8, temperature=0.5).tokens == [expected]
    assert model.calls == ["reset", 3, ([7, 8], 0.5)] * 2


def test_llama_cpp_decodes_each_file_plain_and_with_lookup(monkeypatch):
    lookup = types.SimpleNamespace(LlamaPromptLookupDecoding=lambda num_pred_tokens: num_pred_tokens)
    modules = {"llama_cpp": types.SimpleNamespace(Llama=Model), "llama_cpp.llama_speculative": lookup}
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    found = dict(peers.llama_cpp_of([Path("a/F16.gguf"), Path("a/Q8_0.gguf")], [2]))
    ways = {name: decoder.model.settings["draft_model"] for name, decoder in found.items()}
    assert ways == {
        f"llama.cpp {name}{way}": draft
        for name in ("F16", "Q8_0")
        for way, draft in (("", None), (", prompt lookup", peers.LOOKUP_TOKENS))
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda: peers.transformers_of(Path("x"), None, ["float32"]), "run `make parity-setup`"),
        (lambda: peers.llama_cpp_of([Path("x")], [2]), "run pip install llama-cpp-python"),
    ],
)
def test_a_library_that_is_not_there_is_one_line(asked, message, monkeypatch):
    def none(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", none)
    with pytest.raises(DataError, match=message):
        next(asked())


def test_a_file_of_another_type_holds_the_same_weights_in_it(tmp_path):
    config, type_ = config_of("llama")
    file, _ = write_gguf(tmp_path, config, type_)
    requantise.requantised(file, tmp_path / "F16.gguf", gguf.GGMLQuantizationType.F16)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "F16.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16"
    assert kinds["output_norm.weight"] == "F32"
    before, after = (load_model(each, "float32") for each in (file, tmp_path / "F16.gguf"))
    assert before.config == after.config
    q = before.params["layers"][0]["attention"]["q_proj"]["kernel"]
    rounded = np.asarray(q).astype(ml_dtypes.bfloat16).astype(np.float16)
    np.testing.assert_array_equal(after.params["layers"][0]["attention"]["q_proj"]["kernel"], rounded)
