"""Qwen 3 with experts (2505.09388): in every layer, or in some of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.models.config import Experts, LayerKind, ModelConfig, Norm
from specjax.models.families.base import TENSORS, Family, expert_tensors
from specjax.models.families.qwen2 import POSITIONS
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, layer_count, read_decoder, read_switched_window, write_decoder


def _read(settings: Settings) -> ModelConfig:
    old = settings.number("num_experts", int, 128)  # the Hub's name; the other is what transformers 5 writes
    experts = Experts(
        count=settings.number("num_local_experts", int, old),
        top_k=settings.number("num_experts_per_tok", int, 8),
        intermediate_size=settings.number("moe_intermediate_size", int, 768),
        normalised=settings.flag("norm_topk_prob", False),
    )
    window = read_switched_window(settings, absent=4096)
    kind = LayerKind(read_rope(settings, max_positions=POSITIONS), window)
    step = settings.number("decoder_sparse_step", int, 1)
    plain = settings.numbers("mlp_only_layers", int) if settings.get("mlp_only_layers") else ()
    layers = [dataclasses.replace(kind, dense=i in plain or (i + 1) % step != 0) for i in range(layer_count(settings))]
    return read_decoder(
        settings,
        layers=layers,
        norm=Norm(eps=settings.number("rms_norm_eps", float, 1e-6)),
        max_positions=POSITIONS,
        kv_heads=4,
        attention_bias=False,
        qk_norm="head",
        experts=experts,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    experts, window = config.experts, config.layer(0).window
    return {
        **write_decoder(config),
        "attention_bias": config.qkv_bias,
        "num_experts": experts and experts.count,
        "num_experts_per_tok": experts and experts.top_k,
        "moe_intermediate_size": experts and experts.intermediate_size,
        "norm_topk_prob": experts is not None and experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if config.layer(i).dense],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        **write_rope(config),
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _read,
    _write,
    TENSORS | expert_tensors("model.layers.{}.mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
    dense="qwen3",
)
