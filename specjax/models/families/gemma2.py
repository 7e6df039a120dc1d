"""Gemma 2 (2408.00118): norms around attention and MLP, windows in every other layer, soft caps."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family, norm
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import (
    Settings,
    layer_count,
    read_decoder,
    read_window,
    sliding_layers,
    write_decoder,
    write_layers,
)

_POSITIONS, _WINDOW = 8192, 4096


def _read(settings: Settings) -> ModelConfig:
    sliding = [i % 2 == 0 for i in range(layer_count(settings))]
    rope = read_rope(settings, max_positions=_POSITIONS)
    layers = sliding_layers(settings, rope, read_window(settings, absent=_WINDOW), sliding)
    return read_gemma(settings, layers, _POSITIONS, attention_cap=50.0, logit_cap=30.0)


def read_gemma(
    settings: Settings, layers: list[LayerKind], positions: int, attention_cap: float | None, logit_cap: float | None
) -> ModelConfig:
    """Config from the settings that Gemma 2 and 3 share. An absent soft cap means the family's, a null one means
    none."""
    caps = {"attn_logit_softcapping": attention_cap, "final_logit_softcapping": logit_cap}
    attention_cap, logit_cap = (
        settings.number(key, float, None) if key in settings.values else default for key, default in caps.items()
    )
    return read_decoder(
        settings,
        layers=layers,
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6), offset=1.0, placement="sandwich"),
        max_positions=positions,
        tie=True,
        kv_heads=4,
        head_dim=256,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        attention_bias=False,
        attention_scale=settings.number("query_pre_attn_scalar", int, 256) ** -0.5,
        attention_soft_cap=attention_cap,
        logit_soft_cap=logit_cap,
        embedding_multiplier=settings.number("hidden_size", int) ** 0.5,
    )


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    scale, layers = config.attention_scale, write_layers(config)
    # transformers makes a window's mask even if no layer has a window, and fails without its size.
    layers["sliding_window"] = layers["sliding_window"] or _WINDOW
    return {
        **write_decoder(config, activation="hidden_activation"),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": scale and round(scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **layers,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_gemma(config), **write_rope(config)}


GEMMA_TENSORS = {
    **TENSORS,
    **norm("layers.{}.attention_post_norm", "model.layers.{}.post_attention_layernorm"),
    **norm("layers.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm"),
    **norm("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
}
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read, _write, GEMMA_TENSORS, eos_id=1)
