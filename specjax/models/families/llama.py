"""Llama 1 to 3, and the many models that are a Llama under another name (2302.13971, 2407.21783)."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder


def _read(settings: Settings) -> ModelConfig:
    return read_decoder(
        settings,
        layers=[LayerKind(read_rope(settings))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=2048,
        attention_bias=False,
        mlp_bias=settings.flag("mlp_bias", False),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return {**write_decoder(config), **biases, **write_rope(config)}


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write, TENSORS, eos_id=2)
