"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, kernels stored ``[in, out]``."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import QKV, Family, Tensor, fused, norm, qkv_widths
from specjax.models.families.settings import Settings, read_decoder, write_decoder

_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
"""GPT-2's name of a setting -> the name in other families."""


def _read(settings: Settings) -> ModelConfig:
    settings.only({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    values = dict(settings.values)
    values.setdefault("n_inner", None)
    if values["n_inner"] is None:
        values["n_inner"] = 4 * settings.number("n_embd", int)
    renamed = {_NAMES.get(key, key): value for key, value in values.items()}
    renamed = Settings({**renamed, "head_dim": None, "num_key_value_heads": None}, settings.where)
    return read_decoder(
        renamed,
        layers=[LayerKind(rope=None)],
        norm=Norm("layer", settings.number("layer_norm_epsilon", float, 1e-5), bias=True),
        max_positions=1024,
        tie=True,
        activation=("hidden_act", "gelu_new"),
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        gated=False,
        mlp_bias=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    written = write_decoder(config, eps="layer_norm_epsilon")
    for name in ("head_dim", "num_key_value_heads"):  # GPT-2 has no such settings
        del written[name]
    names = {theirs: ours for ours, theirs in _NAMES.items()}
    written = {names.get(key, key): value for key, value in written.items()}
    return written | {"activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation}


def _conv(ours: str, theirs: str) -> dict[str, Tensor]:
    return {f"{ours}.kernel": Tensor(f"{theirs}.weight"), f"{ours}.bias": Tensor(f"{theirs}.bias")}


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _read,
    _write,
    {
        "embedding": Tensor("transformer.wte.weight"),
        "position_embedding": Tensor("transformer.wpe.weight"),
        "head.kernel": Tensor("lm_head.weight", transpose=True),
        **norm("norm", "transformer.ln_f"),
        **norm("layers.{}.attention_norm", "transformer.h.{}.ln_1"),
        **norm("layers.{}.mlp_norm", "transformer.h.{}.ln_2"),
        **fused(QKV, "transformer.h.{}.attn.c_attn", False, qkv_widths),
        **_conv("layers.{}.attention.o_proj", "transformer.h.{}.attn.c_proj"),
        **_conv("layers.{}.mlp.up_proj", "transformer.h.{}.mlp.c_fc"),
        **_conv("layers.{}.mlp.down_proj", "transformer.h.{}.mlp.c_proj"),
    },
    prefix="transformer.",
    others=(r"\.attn\.(masked_)?bias$",),
    eos_id=50256,
)
