"""Model families of Hugging Face: how config.json reads, and where each of our parameters lives. Here: Llama.

A family is one `Family` entry. A setting that is not implemented is an error that names it, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor name, ``{}`` for the layer; ``transpose``: stored ``[out, in]``, ours is ``[in, out]``."""

    name: str
    transpose: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One Hugging Face model type: its config.json <-> `ModelConfig`, and our parameter path -> its tensor."""

    model_type: str
    architecture: str
    read_config: Callable[[Settings], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    tensors: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Settings:
    """config.json, read with errors that name the file and the setting."""

    values: Mapping[str, Any]
    where: Path

    def number(self, key: str, kind: type, default: int | float | None = None) -> Any:
        """A positive ``kind`` (int or float); null and absent mean ``default``, and None there means required."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where}: {key} is missing; it is needed to build the model")
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < math.inf:
            raise ModelError(f"{self.where}: {key}={value!r} should be a positive {kind.__name__}")
        return kind(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key}={value!r} should be true or false")
        return value

    def only(self, allowed: Mapping[str, Any], values: Mapping[str, Any] | None = None, within: str = "") -> None:
        """Refuse any other value of a setting than the implemented one; null and absent mean just that one."""
        for key, implemented in allowed.items():
            found = (self.values if values is None else values).get(key)
            if found is not None and found != implemented:
                remedy = "use a model without it" if implemented is None else f"only {implemented!r} is"
                raise ModelError(f"{self.where}: {within}{key}={found!r} is not implemented; {remedy}")


_LLAMA_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_LLAMA_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "is_encoder_decoder": False,
}


def _read_llama(settings: Settings) -> ModelConfig:
    settings.only(_LLAMA_FIXED)
    values = settings.values
    if values.get("use_sliding_window") is not False:
        settings.only({"sliding_window": None})
    layer_types = values.get("layer_types") or []
    settings.only({"layer_types": ["full_attention"] * len(layer_types)})
    sizes = {ours: settings.number(theirs, int) for ours, theirs in _LLAMA_SIZES.items()}
    if sizes["hidden_size"] % sizes["num_heads"] and values.get("head_dim") is None:
        raise ModelError(
            f"{settings.where}: hidden_size={sizes['hidden_size']} is not a multiple of "
            f"num_attention_heads={sizes['num_heads']}; set head_dim"
        )
    try:
        return ModelConfig(
            **sizes,
            num_kv_heads=settings.number("num_key_value_heads", int, sizes["num_heads"]),
            head_dim=settings.number("head_dim", int, sizes["hidden_size"] // sizes["num_heads"]),
            max_positions=settings.number("max_position_embeddings", int, 2048),
            rope_theta=_read_rope_theta(settings),
            rms_norm_eps=settings.number("rms_norm_eps", float, 1e-6),
            tie_embeddings=settings.flag("tie_word_embeddings", False),
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{settings.where}: {error}") from None


def _read_rope_theta(settings: Settings) -> float:
    """transformers 5 writes ``rope_parameters``; before it there were ``rope_theta`` and ``rope_scaling``, and where
    both are present the old dict replaces the new one whole, as in transformers.
    """
    key = "rope_scaling" if settings.values.get("rope_scaling") else "rope_parameters"
    rope = settings.values.get(key) or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{settings.where}: {key}={rope!r} should be an object")
    fixed = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    settings.only(fixed, rope, f"{key}.")
    settings.only(dict.fromkeys(rope.keys() - fixed.keys() - {"rope_theta"}), rope, f"{key}.")
    return Settings({**settings.values, **rope}, settings.where).number("rope_theta", float, 10_000.0)


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _LLAMA_SIZES.items()},
        **{key: _LLAMA_FIXED[key] for key in ("hidden_act", "attention_bias", "mlp_bias")},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Both spellings: transformers 4 and what is built on it read the first, transformers 5 the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read_config=_read_llama,
    write_config=_write_llama,
    tensors={
        "embedding": Tensor("model.embed_tokens.weight"),
        "norm.scale": Tensor("model.norm.weight"),
        "head.kernel": Tensor("lm_head.weight", transpose=True),
        "layers.{}.attention_norm.scale": Tensor("model.layers.{}.input_layernorm.weight"),
        "layers.{}.mlp_norm.scale": Tensor("model.layers.{}.post_attention_layernorm.weight"),
        **{
            f"layers.{{}}.{ours}.{name}.kernel": Tensor(f"model.layers.{{}}.{theirs}.{name}.weight", transpose=True)
            for ours, theirs, names in (
                ("attention", "self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
                ("mlp", "mlp", ("gate_proj", "up_proj", "down_proj")),
            )
            for name in names
        },
    },
)
FAMILIES = {family.model_type: family for family in (LLAMA,)}


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one parameter lives: our path, their name, our shape."""

    path: tuple[Any, ...]
    name: str
    transpose: bool
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape


def slots_of(family: Family, config: ModelConfig) -> list[Slot]:
    """Every parameter of `Model.init`, in its order."""
    shapes = jax.eval_shape(lambda: Model(config).init(jax.random.key(0)))
    slots = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(key.key for key in key_path)
        tensor = family.tensors[".".join("{}" if isinstance(part, int) else part for part in path)]
        layer = [part for part in path if isinstance(part, int)]
        slots.append(Slot(path, tensor.name.format(*layer), tensor.transpose, leaf.shape))
    return slots
