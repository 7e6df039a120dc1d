"""Mistral (2310.06825): a Llama whose every layer may have a sliding window."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, read_window, write_decoder

_POSITIONS = 131_072


def _read(settings: Settings) -> ModelConfig:
    rope = read_rope(settings, max_positions=_POSITIONS)
    return read_decoder(
        settings,
        layers=[LayerKind(rope, read_window(settings, absent=4096))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=_POSITIONS,
        kv_heads=8,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_decoder(config), "sliding_window": config.layer(0).window, **write_rope(config)}


MISTRAL = Family("mistral", "MistralForCausalLM", _read, _write, TENSORS, eos_id=2)
