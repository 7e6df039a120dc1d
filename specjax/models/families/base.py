"""Description of a model family: how its config.json reads and writes, and a table that says where each parameter is
stored and how it is cut from there. Tables work in both directions, bit for bit. "Ours" is a parameter as specjax has
it, "theirs" as the file does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.settings import Settings


@dataclasses.dataclass(frozen=True)
class Part:
    """One of several parameters that are stored as one tensor, side by side along its output features. The tensor has
    sections of ``widths(config)`` features that repeat ``groups(config)`` times; ``index`` is the section of this
    parameter."""

    index: int
    widths: Callable[[ModelConfig], tuple[int, ...]]
    groups: Callable[[ModelConfig], int] = lambda config: 1


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor. ``name``: its name, with ``{}`` for the layer and then for the expert. ``transpose``: stored
    ``[out, in]``, where ours is ``[in, out]``. ``part``: our section, if it holds several parameters. ``stacked``: our
    parameter stacks one such tensor for each expert."""

    name: str
    transpose: bool = False
    part: Part | None = None
    stacked: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One Hugging Face model type. ``tensors``: our parameter path -> where it is stored. ``prefix``: beginning of
    stored names that some files leave out. ``others``: patterns of names that are not its weights, such as the buffers
    of older versions. ``saved_as``: the model type to save as, if it is another one. ``dense``: the model type of the
    same layers with a plain MLP, if these have experts. ``aliases``: beginnings of names that some files have -> the
    table's. ``eos_id``: token that ends a text if config.json does not say (null there means that nothing does)."""

    model_type: str
    architecture: str
    read_config: Callable[[Settings], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    tensors: Mapping[str, Tensor]
    prefix: str = ""
    others: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    saved_as: str | None = None
    dense: str | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    eos_id: int | None = None


def linear(ours: str, theirs: str) -> dict[str, Tensor]:
    return {f"{ours}.kernel": Tensor(f"{theirs}.weight", transpose=True), f"{ours}.bias": Tensor(f"{theirs}.bias")}


def norm(ours: str, theirs: str) -> dict[str, Tensor]:
    return {f"{ours}.scale": Tensor(f"{theirs}.weight"), f"{ours}.bias": Tensor(f"{theirs}.bias")}


def expert_tensors(block: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors of the router and the experts of the stored module ``block``. ``names``: our name of an expert's
    projection -> theirs."""
    router = {"layers.{}.experts.router.kernel": Tensor(f"{block}.gate.weight", transpose=True)}
    return router | {
        f"layers.{{}}.experts.{ours}.kernel": Tensor(f"{block}.experts.{{}}.{theirs}.weight", True, stacked=True)
        for ours, theirs in names.items()
    }


def fused(ours: tuple[str, ...], theirs: str, transpose: bool, widths, groups=lambda config: 1) -> dict[str, Tensor]:
    """Tensors of projections that are stored as one; see `Part`."""
    parts = {name: Part(i, widths, groups) for i, name in enumerate(ours)}
    kernels = {f"{name}.kernel": Tensor(f"{theirs}.weight", transpose, part) for name, part in parts.items()}
    return kernels | {f"{name}.bias": Tensor(f"{theirs}.bias", part=part) for name, part in parts.items()}


QKV = tuple(f"layers.{{}}.attention.{name}_proj" for name in "qkv")


def qkv_widths(config: ModelConfig) -> tuple[int, ...]:
    return tuple(n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads))


# Names that most families share with Llama; an entry that a model has no parameter for is not used.
TENSORS: dict[str, Tensor] = {
    "embedding": Tensor("model.embed_tokens.weight"),
    "head.kernel": Tensor("lm_head.weight", transpose=True),
    **norm("norm", "model.norm"),
    **norm("layers.{}.attention_norm", "model.layers.{}.input_layernorm"),
    **norm("layers.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"),
    **{
        path: tensor
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for path, tensor in linear(f"layers.{{}}.attention.{name}", f"model.layers.{{}}.self_attn.{name}").items()
    },
    **norm("layers.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm"),
    **norm("layers.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm"),
    **{
        path: tensor
        for name in ("gate_proj", "up_proj", "down_proj")
        for path, tensor in linear(f"layers.{{}}.mlp.{name}", f"model.layers.{{}}.mlp.{name}").items()
    },
}
