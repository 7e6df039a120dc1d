"""What the tests of Hugging Face directories share: small tokenizers, edits of files on disk, comparisons."""

from __future__ import annotations

import json

import jax
import numpy as np
from safetensors.numpy import save_file

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


def rewrite(llama, tensors: dict) -> None:
    save_file(tensors, llama.path / "model.safetensors")
