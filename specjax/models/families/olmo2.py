"""OLMo 2 (2501.00656): norms only after attention and MLP; one norm over the queries of all heads, one over the
keys."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family, norm
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder


def _read(settings: Settings) -> ModelConfig:
    return read_decoder(
        settings,
        layers=[LayerKind(read_rope(settings))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-5), placement="post"),
        max_positions=2048,
        attention_bias=False,
        qk_norm="projection",
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_decoder(config), "attention_bias": config.qkv_bias, **write_rope(config)}


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _read,
    _write,
    {
        **TENSORS,
        **norm("layers.{}.attention_post_norm", "model.layers.{}.post_attention_layernorm"),
        **norm("layers.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
    },
    eos_id=50279,
)
