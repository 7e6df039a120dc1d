"""Phi 3 and 4 (2404.14219): fused projections on disk; the long versions stretch their rotary embedding by LongRoPE."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import QKV, TENSORS, Family, fused, qkv_widths
from specjax.models.families.rope import longrope_attention_factor, read_rope
from specjax.models.families.settings import Settings, read_decoder, read_window, write_decoder
from specjax.models.rotary import LongRope

_POSITIONS = 4096


def _read(settings: Settings) -> ModelConfig:
    rope = read_rope(
        settings,
        partial=1.0,
        max_positions=_POSITIONS,
        aliases={"su": "longrope", "yarn": "longrope"},  # names in older releases
        original=4096,
    )
    return read_decoder(
        settings,
        layers=[LayerKind(rope, read_window(settings))],
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-5)),
        max_positions=_POSITIONS,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    (rope,) = config.ropes
    written = {
        **write_decoder(config),
        "sliding_window": config.layer(0).window,
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial,
        "original_max_position_embeddings": config.max_positions,
    }
    if isinstance(rope.scaling, LongRope):
        scaling = rope.scaling
        # transformers 4 takes these three keys and no more.
        written["rope_scaling"] = {
            "type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
        }
        written["original_max_position_embeddings"] = original = scaling.original_positions
        if scaling.attention_factor != longrope_attention_factor(config.max_positions / original, original):
            written["rope_scaling"]["attention_factor"] = scaling.attention_factor
    return written


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    _write,
    {
        **TENSORS,
        **fused(QKV, "model.layers.{}.self_attn.qkv_proj", True, qkv_widths),
        **fused(
            ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
            "model.layers.{}.mlp.gate_up_proj",
            True,
            lambda config: (config.intermediate_size, config.intermediate_size),
        ),
    },
    eos_id=32000,
)
