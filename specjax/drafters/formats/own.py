"""Drafts of which no other library has the like: config.json says our kind and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.drafters.early_exit import ExitModel
from specjax.drafters.features import FeatureModel, LoadedDraft, layers_like
from specjax.drafters.formats.stored import Stored
from specjax.errors import ModelError
from specjax.models.families.base import linear, norm
from specjax.types import Params

PREFIX = "specjax_"


@dataclasses.dataclass(frozen=True)
class Form:
    left_out: tuple[str, ...] = ("head",)


KINDS = {"early_exit": Form()}
_TENSORS = {
    **norm("adapter_norm", "adapter_norm"),
    **norm("norm", "norm"),
    **linear("adapter.gate_proj", "adapter.gate_proj"),
    **linear("adapter.up_proj", "adapter.up_proj"),
    **linear("adapter.down_proj", "adapter.down_proj"),
}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """See `specjax.drafters.formats.kind_of`."""
    kind = str(settings.get("model_type")).removeprefix(PREFIX)
    return kind if kind in KINDS else None


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: Any, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    count, width = settings.get("layers"), settings.get("adapter")
    if type(count) is not int or type(width) is not int:
        raise ModelError(f"{found / 'config.json'}: needs `layers` and `adapter`, two numbers; distill it again")
    sizes = dataclasses.replace(layers_like(target.config), intermediate_size=width)
    spec = ExitModel(sizes, (count,), int(settings.get("hidden_size", sizes.hidden_size)), str(target.dtype))
    return spec, Stored(spec, _TENSORS, KINDS[kind].left_out).read(found, spec.dtype, check_finite)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: str) -> dict[str, Any]:
    """The weights; returns config.json."""
    spec = draft.spec
    Stored(spec, _TENSORS, KINDS[kind].left_out).write(partial, draft.params, dtype)
    sizes = {"adapter": spec.config.intermediate_size, "hidden_size": spec.feature_size}
    return {"model_type": PREFIX + kind, "layers": spec.reads[0], **sizes, "target": target}
