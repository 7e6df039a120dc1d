"""GPT-NeoX and Pythia (2204.06745, 2304.01373): attention and MLP in parallel, each under a norm of its own; a part of
each head is rotated; query, key and value are stored head by head."""

from __future__ import annotations

from typing import Any

from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.families.base import QKV, Family, Tensor, fused, linear, norm
from specjax.models.families.rope import read_rope, write_rope
from specjax.models.families.settings import Settings, read_decoder, write_decoder

_ROPE = ("rotary_emb_base", "rotary_pct")


def _read(settings: Settings) -> ModelConfig:
    return read_decoder(
        settings,
        layers=[LayerKind(read_rope(settings, partial=0.25, old_names=_ROPE))],
        norm=Norm("layer", settings.number("layer_norm_eps", float, 1e-5), bias=True),
        max_positions=2048,
        activation=("hidden_act", "gelu"),
        residual="parallel" if settings.flag("use_parallel_residual", True) else "sequential",
        attention_bias=True,
        gated=False,
        mlp_bias=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    written = {
        **write_decoder(config, eps="layer_norm_eps"),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.residual == "parallel",
        **write_rope(config, _ROPE, whole=None),  # an absent share means a quarter
    }
    for name in ("head_dim", "num_key_value_heads"):  # GPT-NeoX has no such settings
        del written[name]
    return written


_LAYER = "gpt_neox.layers.{}"
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    _read,
    _write,
    {
        "embedding": Tensor("gpt_neox.embed_in.weight"),
        "head.kernel": Tensor("embed_out.weight", transpose=True),
        **norm("norm", "gpt_neox.final_layer_norm"),
        **norm("layers.{}.attention_norm", f"{_LAYER}.input_layernorm"),
        **norm("layers.{}.mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        **fused(
            QKV,
            f"{_LAYER}.attention.query_key_value",
            True,
            lambda config: (config.head_dim,) * 3,
            groups=lambda config: config.num_heads,
        ),
        **linear("layers.{}.attention.o_proj", f"{_LAYER}.attention.dense"),
        **linear("layers.{}.mlp.up_proj", f"{_LAYER}.mlp.dense_h_to_4h"),
        **linear("layers.{}.mlp.down_proj", f"{_LAYER}.mlp.dense_4h_to_h"),
    },
    others=(r"\.attention\.(masked_)?bias$", r"\.rotary_emb\.inv_freq$"),
    eos_id=2,
)
