"""GGUF files written with the package ``gguf`` and llama.cpp's own table of names, from models of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import load_file

from specjax.models.hf import LoadedModel, save_model
from specjax.models.transformer import Model

ARCHITECTURES = {"gemma3_text": "gemma3"}
"""Model type -> general.architecture, where they differ."""


def randomised(params: Any, seed: int = 0) -> Any:
    """Weights none of which can be left out or swapped: norms are not all ones."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [x + rng.normal(size=x.shape).astype(np.float32) * 0.2 for x in leaves])


def settings_written(writer: gguf.GGUFWriter, config: Any, type_: str) -> None:
    kind = config.layer(0)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(kind.rope.features(config.head_dim))
    ropes = {layer.window is None: layer.rope for layer in config.layers}
    writer.add_rope_freq_base(ropes.get(True, kind.rope).theta)
    if type_.startswith("gemma"):
        writer.add_sliding_window(next(layer.window for layer in config.layers if layer.window))
        if config.attention_soft_cap:
            writer.add_attn_logit_softcapping(config.attention_soft_cap)
        if config.logit_soft_cap:
            writer.add_final_logit_softcapping(config.logit_soft_cap)


def turned(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head with its two halves in turn, as llama.cpp's converter lays out a Llama's."""
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    directory: Path,
    config: Any,
    type_: str,
    kinds: dict[str, str] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> tuple[Path, LoadedModel]:
    """(a GGUF file, the model in it). ``kinds``: part of a tensor's name -> the type that it is stored as; ``more``:
    writes other settings and tensors; ``options``: of the writer."""
    model = LoadedModel(Model(config), randomised(Model(config).init(jax.random.key(0))), family=type_)
    save_model(model, directory / "written")
    architecture = ARCHITECTURES.get(type_, type_)
    file = directory / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture, **options)
    settings_written(writer, config, type_)
    more(writer)
    enum = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(enum, config.num_layers)
    for name, tensor in load_file(directory / "written" / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if type_ == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = turned(tensor, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if type_.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        kind = next((kind for part, kind in (kinds or {}).items() if part in name), "F32")
        of = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(theirs, gguf.quants.quantize(tensor, of), raw_dtype=of)
    finish(writer)
    return file, model


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, pre: str, control: set[str]) -> None:
    """The byte-level tokenizer of the package tokenizers, as llama.cpp's converter writes it."""
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
