"""A draft of some of its target's layers, written by specjax and read by transformers on torch. Needs the `parity`
extra (torch)."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers

from specjax.models.hf import LoadedModel, save_model
from tests.models.test_families import random_tokens
from tests.training.test_init import drafted, model


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("llama-tied-biased", (0, 3)),
        ("gemma2", (0, 2)),  # with windows only
        ("gemma2", (1, 3)),  # with none
        ("gemma3", (2,)),
        ("qwen2-window", (2, 3)),
        ("smollm3-window", (1, 2)),
        ("qwen3_moe-some-layers", (0, 2)),  # without experts
        ("qwen3_moe-some-layers", (3,)),
        ("phi3-longrope-short", (1,)),
        ("cohere-qk-norm", (0, 3)),
        ("gpt2", (0, 2)),
    ],
)
@pytest.mark.parametrize("share", [False, True])
def test_transformers_computes_the_same_logits(name, keep, share, tmp_path):
    target = model(name)
    initial = drafted(target, keep=list(keep), share=share)
    params = {**target.params, **initial.params}
    assert set(params["layers"]) == set(range(len(keep)))
    draft = LoadedModel(initial.drafter.model, params, family=initial.drafter.family)
    save_model(draft, tmp_path / "draft")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft", attn_implementation="eager").eval()
    tokens = random_tokens(0, 2, 40)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = np.asarray(draft.logits(tokens))
    assert np.abs(found - expected).max() <= 2e-4 * expected.std()
