"""Configuration of a draft of its target's family, in other sizes. Rotary settings, norms, activations, biases, tying
and whatever else its layers are made of are the target's, so that the draft is served as its target is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax import config as config_lib
from specjax.errors import ConfigError
from specjax.interfaces import Target
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.families import Settings, family_of
from specjax.models.families.settings import same_or_each
from specjax.models.hf import check_saveable

_WHERE = "draft.architecture"


def resized(
    target: Target,
    shape: config_lib.Architecture,
    cut: bool = False,
    layers: Sequence[int] | None = None,
) -> tuple[ModelConfig, str]:
    """(the configuration, the Hugging Face model type it is saved as). The draft of a mixture of experts is of the
    family whose layers are the same without experts. ``cut``: True if heads that ``shape`` leaves open are the
    target's. ``layers``: numbers of the target's layers whose kinds the draft's layers take; None: those of `spread`,
    at least one with full attention.

    Raises `ConfigError` for sizes that the family cannot have.
    """
    full, family = target.config, family_of(target.family, _WHERE)
    if full.experts is not None and family.dense is not None:
        family = family_of(family.dense, _WHERE)
    sizes = sizes_of(shape.filled(full.num_heads, full.num_kv_heads, full.head_dim) if cut else shape.filled())
    own = _kinds(full, shape.num_layers) if layers is None else [full.layer(i) for i in layers]
    kinds = [dataclasses.replace(kind, dense=False) for kind in own]
    scale = full.attention_scale and full.attention_scale * (full.head_dim / sizes["head_dim"]) ** 0.5
    changes = {**sizes, "layers": same_or_each(kinds), "attention_scale": scale, "experts": None}
    try:
        wanted = dataclasses.replace(full, **changes)
        # Derive again what a family derives from its sizes, such as a multiplier of the embedding.
        model = family.read_config(Settings(family.write_config(wanted), "config.json"))
        check_saveable(family.model_type, model)
    except ValueError as error:
        raise ConfigError(f"{_WHERE}: no {family.model_type} like the target: {error}; give other sizes") from None
    for name, size in sizes.items():
        if getattr(model, name) != size:
            raise ConfigError(
                f"{_WHERE}: {name}={size}, and with its other sizes a {family.model_type}, as the target is one, has "
                f"{name}={getattr(model, name)}; set that"
            )
    return model, family.model_type


def sizes_of(shape: config_lib.Architecture) -> dict[str, Any]:
    """Sizes of a `filled` shape, by their names in `ModelConfig`."""
    sizes: dict[str, Any] = dataclasses.asdict(shape)
    return {**sizes, "head_dim": shape.head_dim or shape.hidden_size // sizes["num_heads"]}


def spread(layers: int, kept: int) -> list[int]:
    """Numbers of ``kept`` out of ``layers`` layers: the first, the last, and others evenly between them."""
    return [0] if kept == 1 else [round(i * (layers - 1) / (kept - 1)) for i in range(kept)]


def _kinds(full: ModelConfig, count: int) -> list[LayerKind]:
    """Kinds of the target's layers that `spread` names. If none of them has full attention, the last kind is replaced
    by one that has."""
    kinds = [full.layer(i) for i in spread(full.num_layers, count)]
    seeing = [kind for kind in full.layers if kind.window is None and kind.rope is not None]
    if seeing and not set(seeing) & set(kinds):
        kinds[-1] = seeing[-1]
    return kinds
