"""Gemma 1 (2403.08295): norm scales stored around zero, embeddings multiplied by sqrt(hidden size), gated GELU."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder

_POSITIONS = 8192


def _read(settings: Settings) -> ModelConfig:
    # The first releases say "gelu" and mean its approximation with a hyperbolic tangent.
    if settings.values.get("hidden_act") == "gelu":
        settings = Settings({**settings.values, "hidden_act": "gelu_pytorch_tanh"}, settings.where)
    settings.only({"hidden_activation": "gelu_pytorch_tanh"})
    return read_decoder(
        settings,
        layers=[LayerKind(read_rope(settings, max_positions=_POSITIONS))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6), offset=1.0),
        max_positions=_POSITIONS,
        tie=True,
        kv_heads=16,
        head_dim=256,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        attention_bias=False,
        embedding_multiplier=settings.number("hidden_size", int) ** 0.5,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_decoder(config), "attention_bias": config.qkv_bias, **write_rope(config)}


GEMMA = Family("gemma", "GemmaForCausalLM", _read, _write, TENSORS, eos_id=1)
