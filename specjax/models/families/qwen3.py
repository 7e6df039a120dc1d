"""Qwen 3 (2505.09388): each head's queries and keys are normalised."""

from __future__ import annotations

from typing import Any

from specjax.models.config import ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.qwen2 import POSITIONS, windowed_layers, write_windowed_layers
from specjax.models.families.rope import write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder


def _read(settings: Settings) -> ModelConfig:
    return read_decoder(
        settings,
        layers=windowed_layers(settings),
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=POSITIONS,
        kv_heads=32,
        head_dim=128,
        attention_bias=False,
        qk_norm="head",
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        "attention_bias": config.qkv_bias,
        **write_windowed_layers(config),
        **write_rope(config),
    }


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read, _write, TENSORS)
