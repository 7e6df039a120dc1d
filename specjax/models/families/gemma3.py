"""Gemma 3 (2503.19786): local layers with windows and a rotary base of their own, normalised queries and keys. Of
models that also take images, the text part is read; it is saved as a model of text alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import LayerKind, ModelConfig
from specjax.models.families.base import Family
from specjax.models.families.gemma2 import GEMMA_TENSORS, read_gemma, write_gemma
from specjax.models.families.rope import read_one, written
from specjax.models.families.settings import Settings, layer_count, read_window, sliding_layers
from specjax.models.rotary import Rope

_POSITIONS = 131_072


def _read(settings: Settings) -> ModelConfig:
    settings.only({"attn_logit_softcapping": None})  # transformers does not apply it in Gemma 3
    # Used only if layer_types is absent: transformers is known to write a pattern that is not the model's.
    pattern = settings.number("sliding_window_pattern", int, 6)
    sliding = [(i + 1) % pattern != 0 for i in range(layer_count(settings))]
    whole, local = _read_ropes(settings)
    layers = [
        kind if kind.window is None else LayerKind(local, kind.window)
        for kind in sliding_layers(settings, whole, read_window(settings, absent=4096), sliding)
    ]
    config = read_gemma(settings, layers, _POSITIONS, attention_cap=None, logit_cap=None)
    return dataclasses.replace(config, qk_norm="head")


def _read_ropes(settings: Settings) -> tuple[Rope, Rope]:
    """(rotary embedding of full layers, that of sliding ones). The old spelling scales the full ones alone."""
    settings.only({"original_max_position_embeddings": None})
    positions = settings.number("max_position_embeddings", int, _POSITIONS)
    both = settings.inner("rope_parameters")
    whole, local = both.inner("full_attention"), both.inner("sliding_attention")
    both.only_read()
    scaling = settings.inner("rope_scaling").values
    whole = dataclasses.replace(whole, values={**whole.values, **scaling})
    theta, local_theta = settings.number("rope_theta", float, 1e6), settings.number("rope_local_base_freq", float, 1e4)
    return read_one(whole, theta, max_positions=positions), read_one(local, local_theta, max_positions=positions)


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [config.layer(i) for i in range(config.num_layers)]
    default = {"full_attention": Rope(1e6), "sliding_attention": Rope(1e4)}
    found = {"full_attention" if kind.window is None else "sliding_attention": kind.rope for kind in kinds}
    whole, local = (found.get(name) or rope for name, rope in default.items())
    old: dict[str, Any] = {"rope_theta": whole.theta, "rope_local_base_freq": local.theta}
    if whole.scaling is not None:
        old["rope_scaling"] = written(whole)
    new = {"full_attention": written(whole), "sliding_attention": written(local)}
    return {**write_gemma(config), **old, "rope_parameters": new}


def _read_text_part(settings: Settings) -> ModelConfig:
    """Config of ``text_config``, which leaves out even sizes that have a default."""
    settings.only({"quantization_config": None})
    sizes = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216}
    sizes |= {"num_hidden_layers": 26, "num_attention_heads": 8}
    text = settings.inner("text_config").values
    return _read(Settings({**sizes, **text}, settings.where, "text_config."))


GEMMA3_TEXT = Family("gemma3_text", "Gemma3ForCausalLM", _read, _write, GEMMA_TENSORS, eos_id=1)
GEMMA3 = Family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    _read_text_part,
    _write,
    {path: dataclasses.replace(tensor, name=f"language_model.{tensor.name}") for path, tensor in GEMMA_TENSORS.items()},
    others=(r"\.rotary_emb\.inv_freq$", r"^vision_tower\.", r"^multi_modal_projector\."),
    saved_as="gemma3_text",
    eos_id=1,
)
