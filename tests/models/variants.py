"""Tiny checkpoints of every family and every setting that changes what a family computes: name -> config.json as
transformers takes it. Windows, patterns and stretched positions are short, so that 40 tokens show them."""

from __future__ import annotations

from typing import Any

LENGTH = 40
"""Tokens that show everything a variant does."""
_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def _of(model_type: str, **settings: Any) -> dict[str, Any]:
    return {**_COMMON, "model_type": model_type, **settings}


def _rope(rope_type: str = "default", theta: float = 100.0, **settings: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **settings}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHORT, _LONG = [1.0, 1.3, 1.1, 2.0], [1.5, 2.0, 4.0, 8.0]
_GEMMA = {"head_dim": 12, "tie_word_embeddings": True}
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": 9, "sliding_window": 7, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3 = {**_GEMMA2, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
_PLAIN_HEADS = {"num_key_value_heads": 4}  # as many as query heads
_GPT2 = {
    **{key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": _of("llama", rope_parameters=_rope()),
    "llama-tied-biased": _of("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=12),
    "llama-gelu": _of("llama", hidden_act="gelu"),
    "llama-linear": _of("llama", rope_parameters=_rope("linear", factor=3.0)),
    "llama-dynamic": _of("llama", rope_parameters=_rope("dynamic", factor=3.0)),
    "llama-dynamic-past": _of("llama", max_position_embeddings=24, rope_parameters=_rope("dynamic", factor=3.0)),
    "llama-llama3": _of("llama", rope_parameters=_rope("llama3", **_LLAMA3)),
    "llama-yarn": _of(
        "llama", head_dim=16, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-yarn-all": _of(
        "llama",
        head_dim=16,
        rope_parameters=_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=4.0,
            beta_slow=0.5,
            mscale=1.3,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    "llama-longrope": _of(
        "llama",
        num_key_value_heads=1,
        rope_parameters=_rope(
            "longrope",
            short_factor=_SHORT,
            long_factor=_LONG,
            factor=8.0,
            attention_factor=1.7,
            original_max_position_embeddings=8,
        ),
    ),
    "mistral": _of("mistral", sliding_window=None),
    "mistral-window": _of("mistral", sliding_window=7, rope_parameters=_rope()),
    "mixtral": _of("mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral-window": _of("mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=7),
    "mixtral-wide": _of(
        "mixtral", num_local_experts=7, num_experts_per_tok=3, hidden_act="gelu", head_dim=12, tie_word_embeddings=True
    ),
    "mimo": _of("mimo", rope_parameters=_rope(), num_nextn_predict_layers=1),
    "qwen2": _of("qwen2", sliding_window=7, use_sliding_window=False),
    "qwen2-window": _of("qwen2", sliding_window=7, use_sliding_window=True, max_window_layers=2),
    "qwen2-layer-types": _of(
        "qwen2",
        head_dim=12,
        sliding_window=7,
        use_sliding_window=True,
        max_window_layers=4,
        layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3": _of("qwen3", head_dim=12, tie_word_embeddings=True),
    "qwen3-window-biased": _of(
        "qwen3", head_dim=8, attention_bias=True, sliding_window=7, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3_moe": _of("qwen3_moe", head_dim=12, norm_topk_prob=True, **_EXPERTS),
    "qwen3_moe-some-layers": _of(
        "qwen3_moe", head_dim=8, decoder_sparse_step=2, mlp_only_layers=[1], **{**_EXPERTS, "num_experts_per_tok": 3}
    ),
    "gemma": _of("gemma", hidden_act="gelu_pytorch_tanh", **_GEMMA),
    "gemma-untied-biased": _of(
        "gemma", head_dim=12, num_key_value_heads=1, attention_bias=True, rope_parameters=_rope("linear", factor=2.0)
    ),
    "gemma2": _of("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **_GEMMA2),
    "gemma2-no-caps": _of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, **_GEMMA2),
    "gemma3": _of(
        "gemma3_text",
        rope_parameters={"full_attention": _rope(theta=500.0), "sliding_attention": _rope(theta=20.0)},
        **_GEMMA3,
    ),
    "gemma3-linear-cap": _of(
        "gemma3_text",
        rope_parameters={"full_attention": _rope("linear", factor=4.0), "sliding_attention": _rope(theta=20.0)},
        final_logit_softcapping=3.0,
        **_GEMMA3,
    ),
    "gemma3-yarn": _of(
        "gemma3_text",
        attention_bias=True,
        rope_parameters={
            "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=32),
            "sliding_attention": _rope("linear", theta=20.0, factor=2.0),
        },
        **{**_GEMMA3, "head_dim": 16, "tie_word_embeddings": False},
    ),
    "phi3": _of("phi3", rope_parameters=_rope(partial_rotary_factor=0.5), original_max_position_embeddings=128),
    "phi3-longrope-short": _of(
        "phi3",
        rope_parameters=_rope("longrope", short_factor=_SHORT, long_factor=_LONG, partial_rotary_factor=1.0),
        original_max_position_embeddings=64,
        sliding_window=7,
    ),
    "phi3-longrope-long": _of(
        "phi3",
        rope_parameters=_rope("longrope", short_factor=_SHORT, long_factor=_LONG, partial_rotary_factor=1.0),
        original_max_position_embeddings=8,
    ),
    "olmo2": _of("olmo2"),
    "olmo2-biased": _of("olmo2", attention_bias=True, rope_parameters=_rope()),
    "olmo2-yarn": _of(
        "olmo2",
        head_dim=16,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "smollm3": _of("smollm3", no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=True),
    "smollm3-window": _of(
        "smollm3", no_rope_layers=[0, 1, 1, 0], use_sliding_window=True, sliding_window=7, rope_parameters=_rope()
    ),
    "smollm3-no-rotary": _of("smollm3", no_rope_layers=[0, 0, 0, 0], attention_bias=True, mlp_bias=True),
    "starcoder2": _of("starcoder2", sliding_window=7, tie_word_embeddings=True),
    "starcoder2-no-bias": _of("starcoder2", use_bias=False, sliding_window=None),
    "granite": _of(
        "granite",
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=0.7,
        attention_bias=True,
        mlp_bias=True,
    ),
    "cohere": _of("cohere", logit_scale=0.8, tie_word_embeddings=True),
    "cohere-qk-norm": _of("cohere", logit_scale=1.5, use_qk_norm=True, attention_bias=True, rope_parameters=_rope()),
    "cohere-dynamic": _of("cohere", logit_scale=0.8, head_dim=12, rope_parameters=_rope("dynamic", factor=3.0)),
    "gpt2": {**_GPT2, "tie_word_embeddings": True},
    "gpt2-untied": {**_GPT2, "n_inner": 40, "activation_function": "relu", "tie_word_embeddings": False},
    "gpt_neox": _of("gpt_neox", **_PLAIN_HEADS, rope_parameters=_rope(partial_rotary_factor=0.25)),
    "gpt_neox-sequential": _of(
        "gpt_neox",
        **_PLAIN_HEADS,
        use_parallel_residual=False,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    ),
    "gpt_neox-whole": _of(
        "gpt_neox",
        **_PLAIN_HEADS,
        use_parallel_residual=False,
        rope_parameters=_rope("linear", factor=2.0, partial_rotary_factor=1.0),
    ),
    "gpt_neox-yarn": _of(
        "gpt_neox",
        **_PLAIN_HEADS,
        hidden_act="relu",
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32, partial_rotary_factor=0.5),
    ),
}

OLD: dict[str, dict[str, Any]] = {
    "llama-llama3": {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "llama-linear": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama-yarn": {
        "rope_theta": 100.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "gemma3": {
        "layer_types": None,
        "sliding_window_pattern": 3,
        "rope_theta": 500.0,
        "rope_local_base_freq": 20.0,
    },
    "gemma3-linear-cap": {
        "layer_types": None,
        "sliding_window_pattern": 3,
        "rope_theta": 100.0,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    },
    "phi3": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_emb_base": 100, "rotary_pct": 0.25},
    "gpt_neox-sequential": {"rotary_emb_base": 100, "rotary_pct": 0.5},
    "qwen3_moe": {"num_experts": None, "num_local_experts": 6},
    **{
        name: {
            "rope_theta": 100.0,
            "rope_scaling": {
                "type": kind,
                **{key: VARIANTS[name]["rope_parameters"][key] for key in ("short_factor", "long_factor")},
            },
        }
        for name, kind in (("phi3-longrope-short", "longrope"), ("phi3-longrope-long", "yarn"))
    },
}
"""Variant -> its settings as transformers 4 and the Hub spell them, instead of ``rope_parameters``."""


def in_old_spelling(name: str) -> dict[str, Any]:
    """None in `OLD` stands for a setting that did not exist."""
    settings = {
        key: value for key, value in VARIANTS[name].items() if key not in OLD[name] and key != "rope_parameters"
    }
    return settings | {key: value for key, value in OLD[name].items() if value is not None}
