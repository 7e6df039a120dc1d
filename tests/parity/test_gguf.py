"""GGUF files against transformers' own reader of them, on torch. Needs the `parity` extra."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers

from specjax.models.hf import load_model
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import READ, config_of
from tests.parity.test_families import TOLERANCE, error, their_logits

_HEADS = {"head_dim": 256, "query_pre_attn_scalar": 256}
WHAT_THEY_READ = {
    "llama": {},
    "qwen2": {"hidden_size": 128},  # heads times their size
    "qwen3": {"head_dim": 128},
    "gemma2": {**_HEADS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**READ["gemma3"], **_HEADS},
    "phi3": {
        "hidden_size": 128,
        "vocab_size": 32_064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
}
"""Variant -> settings of it. transformers takes those that it does not read from a file for its own defaults."""


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
@pytest.mark.parametrize("name", WHAT_THEY_READ)
def test_logits_are_those_of_transformers(name, kind, tmp_path):
    config, type_ = config_of(name, **WHAT_THEY_READ[name])
    file, _ = write_gguf(
        tmp_path,
        config,
        type_,
        {"proj.weight": kind, "embed": kind},
        lambda writer: writer.add_vocab_size(config.vocab_size),
    )
    ours = load_model(file, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    fed = np.random.default_rng(0).integers(0, config.vocab_size, (2, 20), np.int32)
    assert error(np.asarray(ours.logits(fed)), their_logits(theirs.eval(), fed)) < TOLERANCE
