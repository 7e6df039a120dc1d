"""Granite 3 (github.com/ibm-granite): a Llama with four multipliers."""

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
        attention_scale=settings.number("attention_multiplier", float, 1.0),
        embedding_multiplier=settings.number("embedding_multiplier", float, 1.0),
        residual_multiplier=settings.number("residual_multiplier", float, 1.0),
        logit_multiplier=1 / settings.number("logits_scaling", float, 1.0),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "attention_multiplier": config.attention_scale,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        # Rounded, because 1 / (1 / x) need not be x.
        "logits_scaling": round(1 / config.logit_multiplier, 12),
        **write_rope(config),
    }


GRANITE = Family("granite", "GraniteForCausalLM", _read, _write, TENSORS, eos_id=2)
