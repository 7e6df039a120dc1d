"""The head for multi-token prediction that comes with a checkpoint of the target, in the target's own directory: that
of MiMo (2505.07608). It was trained to predict one token beyond the target's own. After that token it reads its own
output, for which it was not trained, so ``k`` should be 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.drafters.features import ENDS, FeatureModel, LoadedDraft
from specjax.drafters.mtp import MTPModel
from specjax.errors import ModelError
from specjax.formats.envelope import TargetName
from specjax.formats.stored import Stored
from specjax.interfaces import Params, TargetInfo
from specjax.models.families import Settings
from specjax.models.families.base import linear, norm
from specjax.models.families.mimo import MIMO, MTP_LAYERS

HEADS = "num_nextn_predict_layers"
_FIRST = MTP_LAYERS.format(0)
_TENSORS = {
    **norm("token_norm", f"{_FIRST}.token_layernorm"),
    **norm("hidden_norm", f"{_FIRST}.hidden_layernorm"),
    **linear("fc", f"{_FIRST}.input_proj"),
    **norm("norm", f"{_FIRST}.final_layernorm"),
}
_OF_THE_TARGET = (r"^model\.(layers|embed_tokens|norm)\b", r"^lm_head\.", r"\.rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True)
class Form:
    left_out: tuple[str, ...] = ENDS


KINDS: dict[str, Form] = {}
"""Kinds that are written: none. The head is read here and written in another form, since the rest of the directory is
the target's."""


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Kind of draft that a config.json describes, see `specjax.formats.kind_of`."""
    return "mtp" if settings.get("model_type") == MIMO.model_type and settings.get(HEADS) else None


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    file = found / "config.json"
    if settings[HEADS] != 1:
        raise ModelError(f"{file}: {HEADS}={settings[HEADS]!r}; only a single head is read")
    layers = MIMO.read_config(Settings(dict(settings), file))
    one = dataclasses.replace(layers, num_layers=1, layers=layers.layers[-1:], tie_embeddings=False)
    spec = MTPModel(one, (layers.num_layers,), layers.hidden_size, str(target.dtype))
    own = {n: t for n, t in MIMO.tensors.items() if n.startswith("layers.{}")}
    own = {n: dataclasses.replace(t, name=t.name.replace("model.layers.{}", MTP_LAYERS)) for n, t in own.items()}
    params = Stored(spec, {**own, **_TENSORS}, ENDS, others=_OF_THE_TARGET).read(found, spec.dtype, check_finite)
    # MiMo's layer reads (state, token), ours (token, state).
    state, token = jnp.split(params["fc"]["kernel"], 2)
    return spec, {**params, "fc": {"kernel": jnp.concatenate([token, state])}}


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
    """Raises `ModelError`: this form is not written."""
    raise ModelError("native: is a part of a target's directory; write it as speculators")
