"""Qwen 2 and 2.5 (2407.10671, 2412.15115): biases on query, key and value; windows from some layer on."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import (
    Settings,
    layer_count,
    read_decoder,
    read_switched_window,
    sliding_layers,
    write_decoder,
    write_layers,
)

POSITIONS = 32_768


def _read(settings: Settings) -> ModelConfig:
    return read_decoder(
        settings,
        layers=windowed_layers(settings),
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=POSITIONS,
        kv_heads=32,
        qkv_bias=True,
    )


def windowed_layers(settings: Settings) -> list[LayerKind]:
    """Kind of each layer. Hub configs carry a ``sliding_window`` that ``use_sliding_window: false`` (the default) keeps
    inactive."""
    window = read_switched_window(settings, absent=4096)
    first = settings.number("max_window_layers", int, 28, least=0)
    sliding = [window is not None and i >= first for i in range(layer_count(settings))]
    return sliding_layers(settings, read_rope(settings, max_positions=POSITIONS), window, sliding)


def write_windowed_layers(config: ModelConfig) -> dict[str, Any]:
    layers = write_layers(config)
    types = layers["layer_types"]
    first = types.index("sliding_attention") if "sliding_attention" in types else len(types)
    return {**layers, "use_sliding_window": first < len(types), "max_window_layers": first}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_decoder(config), **write_windowed_layers(config), **write_rope(config)}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read, _write, TENSORS)
