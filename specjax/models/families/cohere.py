"""Cohere's Command R (huggingface.co/CohereLabs): attention and MLP in parallel under one LayerNorm without a bias;
rotary pairs are neighbours."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder

_POSITIONS = 8192


def _read(settings: Settings) -> ModelConfig:
    rope = read_rope(settings, theta=500_000.0, interleaved=True, max_positions=_POSITIONS)
    return read_decoder(
        settings,
        layers=[LayerKind(rope)],
        norm=Norm("layer", settings.number("layer_norm_eps", float, 1e-5)),
        max_positions=_POSITIONS,
        tie=True,
        residual="parallel_one_norm",
        attention_bias=False,
        qk_norm="each_head" if settings.flag("use_qk_norm", False) else "none",
        logit_multiplier=settings.number("logit_scale", float, 0.0625),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config, eps="layer_norm_eps"),
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm != "none",
        "logit_scale": config.logit_multiplier,
        **write_rope(config),
    }


COHERE = Family("cohere", "CohereForCausalLM", _read, _write, TENSORS, eos_id=255001)
