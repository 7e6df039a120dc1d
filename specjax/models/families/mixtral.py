"""Mixtral (2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from specjax.models.config import Experts, LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family, expert_tensors
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, read_window, write_decoder

_POSITIONS = 131_072


def _read(settings: Settings) -> ModelConfig:
    experts = Experts(
        count=settings.number("num_local_experts", int, 8),
        top_k=settings.number("num_experts_per_tok", int, 2),
        intermediate_size=settings.number("intermediate_size", int),
        normalised=True,
    )
    rope = read_rope(settings, theta=1e6, max_positions=_POSITIONS)
    return read_decoder(
        settings,
        layers=[LayerKind(rope, read_window(settings))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-5)),
        max_positions=_POSITIONS,
        kv_heads=8,
        experts=experts,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return {
        **write_decoder(config),
        "num_local_experts": experts and experts.count,
        "num_experts_per_tok": experts and experts.top_k,
        "sliding_window": config.layer(0).window,
        **write_rope(config),
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _read,
    _write,
    TENSORS
    | expert_tensors("model.layers.{}.block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    dense="mistral",
    eos_id=2,
)
