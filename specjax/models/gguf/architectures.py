"""Meaning of llama.cpp's names: its settings as those of config.json, its tensors as those of a Hugging Face directory.
A family's own reader takes it from there (`specjax.models.families`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.errors import ModelError
from specjax.models.gguf.header import Header
from specjax.models.gguf.tensors import GGUFTensor, Place

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {name: theirs for name, theirs in _LAYER.items() if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")}
_FUSED |= {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``. ``family``: the model type that reads it. ``layer``: name of a tensor of a
    layer in the file -> in a Hugging Face directory. ``turned``: rotated features lie pair by pair. ``norm_offset``:
    number that the file's norms have more than a directory's. ``extra``: settings of config.json beside the common
    ones. ``keys``: settings of the file that ``extra`` reads."""

    family: str
    layer: dict[str, str]
    turned: bool = False
    norm_offset: float = 0.0
    extra: Callable[[Values], dict[str, Any]] = lambda values: {}
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Values:
    """Settings of the file under the name of its architecture."""

    header: Header
    architecture: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.values.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: Any = None) -> Any:
        """One positive number. A list that says the same of every layer is one, too."""
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, (list, str)) or value <= 0:
            what = "is missing" if value is None else f"is {value!r}, expected one positive number for all layers"
            raise ModelError(f"{self.header.file}: {self.architecture}.{name} {what}")
        return value


def _llama(values: Values) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in values.header.tensors, "mlp_bias": False}


def _window(values: Values) -> dict[str, Any]:
    return {"sliding_window": values.get("attention.sliding_window") or None}


def _gemma(values: Values) -> dict[str, Any]:
    # The models of 27B, which are known by their depth, scale scores by hidden size over heads.
    heads, layers = values.number("attention.head_count"), values.number("block_count")
    whole = {46: 4608 // 32, 62: 5376 // 32}.get(layers) if heads == 32 else None
    return {
        "query_pre_attn_scalar": whole or values.number("attention.key_length"),
        "attn_logit_softcapping": values.get("attn_logit_softcapping"),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "sliding_window": values.number("attention.sliding_window"),
    }


def _gemma3(values: Values) -> dict[str, Any]:
    pattern = values.get("attention.sliding_window_pattern", 6)
    layers = range(values.number("block_count"))
    if isinstance(pattern, list):
        sliding = [bool(slides) for slides in pattern]
    else:
        sliding = [(i + 1) % pattern != 0 for i in layers]
    types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    whole = {"rope_theta": values.get("rope.freq_base", 1e6), **(_scaling(values) or {"rope_type": "default"})}
    local = {"rope_theta": values.get("rope.freq_base_swa", 1e4), "rope_type": "default"}
    ropes = {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    return {**_gemma(values), "layer_types": types, **ropes}


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ARCHITECTURES = {
    "llama": Architecture("llama", _LAYER, turned=True, extra=_llama),
    "qwen2": Architecture("qwen2", _LAYER),
    "qwen3": Architecture("qwen3", _LAYER | _QK_NORMS),
    "gemma2": Architecture(
        "gemma2", _SANDWICH, norm_offset=1.0, extra=_gemma, keys=(*_CAPS, "attention.sliding_window")
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _SANDWICH | _QK_NORMS,
        norm_offset=1.0,
        extra=_gemma3,
        keys=(*_CAPS, "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    ),
    "phi3": Architecture("phi3", _FUSED, extra=_window, keys=("attention.sliding_window",)),
}
"""``general.architecture`` -> what it means."""
_COMMON = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "rope.freq_base"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned"),
)


def architecture_of(header: Header) -> tuple[Architecture, Values]:
    """(architecture of the file, its settings). Raises `ModelError` for one that is not known, and for a setting that
    nothing here reads."""
    name = header.values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.file}: general.architecture={name!r} is not read; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    found = ARCHITECTURES[name]
    known = {f"{name}.{key}" for key in (*_COMMON, *found.keys)}
    # A zero says that the model has none of it.
    unread = [
        key for key, value in header.values.items() if key.startswith(f"{name}.") and key not in known and value != 0
    ]
    if unread:
        key = sorted(unread)[0]
        raise ModelError(f"{header.file}: {key}={header.values[key]!r} is not implemented; use a model without it")
    return found, Values(header, name)


def settings_of(header: Header) -> dict[str, Any]:
    """Settings of config.json of the model in the file. Raises `ModelError` for what cannot be read."""
    architecture, values = architecture_of(header)
    heads, hidden = values.number("attention.head_count"), values.number("embedding_length")
    head_dim = values.number("attention.key_length", hidden // heads)
    if values.number("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{header.file}: values have another size than keys ({head_dim}), which is not implemented")
    embedding = header.tensors.get("token_embd.weight")
    rope = {"rope_theta": values.get("rope.freq_base", 10_000.0), **(_scaling(values) or {"rope_type": "default"})}
    rotated = values.number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return {
        "model_type": architecture.family,
        "vocab_size": values.get("vocab_size", 1) if embedding is None else embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": values.number("feed_forward_length"),
        "num_hidden_layers": values.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values.number("context_length"),
        # Written as a number of 32 bits, of which seven digits are meant.
        "rms_norm_eps": float(f"{values.number('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope,
        **architecture.extra(values),
    }


def places_of(header: Header) -> dict[str, Place]:
    """Name of each tensor in a Hugging Face directory -> its place in the file."""
    architecture, values = architecture_of(header)
    heads = values.number("attention.head_count")
    turned = {"attn_q": heads, "attn_k": values.number("attention.head_count_kv", heads)} if architecture.turned else {}

    def norm(name: str) -> Place:
        return Place(name, offset=-architecture.norm_offset)

    places = {"model.embed_tokens.weight": Place("token_embd.weight"), "model.norm.weight": norm("output_norm.weight")}
    if "output.weight" in header.tensors:
        places["lm_head.weight"] = Place("output.weight")
    for i in range(values.number("block_count")):
        for ours, theirs in architecture.layer.items():
            name, there = f"blk.{i}.{ours}", f"model.layers.{i}.{theirs}"
            if ours.endswith("norm"):
                places[f"{there}.weight"] = norm(f"{name}.weight")
                continue
            places[f"{there}.weight"] = Place(f"{name}.weight", turned.get(ours))
            if f"{name}.bias" in header.tensors:
                places[f"{there}.bias"] = Place(f"{name}.bias", turned.get(ours))
    return places


# --- rotary embeddings ------------------------------------------------------------------------------------------------

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings: divisors of the rotary frequencies."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _scaling(values: Values) -> dict[str, Any] | None:
    """Scaling of the rotary embedding as config.json says it; None: there is none."""
    header, kind = values.header, values.get("rope.scaling.type")
    held = [name for name in ROPE_TENSORS if name in header.tensors]
    divisors = {name: GGUFTensor(header.tensors[name], Place(name)).value() for name in held}
    if "rope_freqs.weight" in divisors:
        return _of_divisors(values, divisors["rope_freqs.weight"])
    factor, original = values.get("rope.scaling.factor"), values.get("rope.scaling.original_context_length")
    attention = values.get("rope.scaling.attn_factor")
    if len(divisors) == 2:
        long, short = (divisors[name].astype(float).tolist() for name in ROPE_TENSORS[1:])
        found = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if original:
            found["original_max_position_embeddings"] = original
        if attention:
            found["attention_factor"] = attention
        return found
    if attention not in (None, 0, 1):
        raise ModelError(
            f"{header.file}: {values.architecture}.rope.scaling.attn_factor={attention!r} is not implemented without "
            "rope_factors_long and rope_factors_short"
        )
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"  # as llama.cpp reads a factor of no type
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{header.file}: {values.architecture}.rope.scaling.type={kind!r} is not implemented")


def _of_divisors(values: Values, divisors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling, of which a file keeps ``divisors`` alone: the number by which each frequency is divided."""
    factor = float(divisors.max())
    theta, size = values.get("rope.freq_base", 10_000.0), 2 * len(divisors)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    low, high, original = _LLAMA3.values()
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(f"{values.header.file}: rope_freqs.weight holds no scaling of Llama 3's, and no other is read")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
