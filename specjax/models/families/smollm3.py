"""SmolLM 3 (huggingface.co/blog/smollm3): a Llama in which some layers have no rotary embedding (2501.18795)."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import ModelConfig, Norm
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

_POSITIONS = 32_768


def _read(settings: Settings) -> ModelConfig:
    count = layer_count(settings)
    window = read_switched_window(settings)
    rotated = _rotated_layers(settings, count)
    rope = read_rope(settings, theta=2e6, max_positions=_POSITIONS)
    kinds = sliding_layers(settings, rope, window, [window is not None and not turns for turns in rotated])
    layers = [
        kind if turns else dataclasses.replace(kind, rope=None) for kind, turns in zip(kinds, rotated, strict=True)
    ]
    return read_decoder(
        settings,
        layers=layers,
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=_POSITIONS,
        tie=True,
        kv_heads=4,
        attention_bias=False,
        mlp_bias=settings.flag("mlp_bias", False),
    )


def _rotated_layers(settings: Settings, count: int) -> list[bool]:
    """True for each layer with a rotary embedding. ``no_rope_layers`` says the opposite of its name: 1 is a layer
    *with* one."""
    every = settings.number("no_rope_layer_interval", int, 4)
    if settings.get("no_rope_layers") is None:
        return [(i + 1) % every != 0 for i in range(count)]
    given = settings.numbers("no_rope_layers", int)
    if len(given) < count or any(x not in (0, 1) for x in given):
        raise settings.bad("no_rope_layers", f"0 or 1 for each of the {count} layers")
    return [bool(x) for x in given[:count]]


def _write(config: ModelConfig) -> dict[str, Any]:
    kinds = [config.layer(i) for i in range(config.num_layers)]
    return {
        **write_decoder(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(kind.rope is not None) for kind in kinds],
        **write_layers(config),
        "use_sliding_window": any(kind.window is not None for kind in kinds),
        **write_rope(config),
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, TENSORS, eos_id=128001)
