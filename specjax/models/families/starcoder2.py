"""StarCoder 2 (2402.19173): LayerNorm, biases, a plain MLP with GELU."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family, linear
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, read_window, write_decoder

_POSITIONS = 4096


def _read(settings: Settings) -> ModelConfig:
    biased = settings.flag("use_bias", True)
    rope = read_rope(settings, max_positions=_POSITIONS)
    return read_decoder(
        settings,
        layers=[LayerKind(rope, read_window(settings))],
        norm=Norm("layer", settings.number("norm_epsilon", float, 1e-5), bias=True),
        max_positions=_POSITIONS,
        tie=True,
        kv_heads=2,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        qkv_bias=biased,
        o_bias=biased,
        gated=False,
        mlp_bias=biased,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config, eps="norm_epsilon"),
        "use_bias": config.mlp_bias,
        "sliding_window": config.layer(0).window,
        **write_rope(config),
    }


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    _read,
    _write,
    {
        **TENSORS,
        **linear("layers.{}.mlp.up_proj", "model.layers.{}.mlp.c_fc"),
        **linear("layers.{}.mlp.down_proj", "model.layers.{}.mlp.c_proj"),
    },
    eos_id=50256,
)
