"""The form of drafts that no other library can express: config.json names our kind and its settings. It holds early
exit, and drafts that `specjax.formats.speculators` cannot express, stored as there with keys of ours added."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.drafters.early_exit import ExitModel
from specjax.drafters.features import FeatureModel, LoadedDraft, layers_like
from specjax.formats import speculators
from specjax.formats.envelope import Envelope, TargetName
from specjax.formats.stored import Stored
from specjax.interfaces import Params, TargetInfo
from specjax.models.families.base import linear, norm

PREFIX = "specjax_"


@dataclasses.dataclass(frozen=True)
class Form:
    left_out: tuple[str, ...] = ("head",)


KINDS = {"early_exit": Form(), **speculators.FORMS}
_TENSORS = {
    **norm("adapter_norm", "adapter_norm"),
    **norm("norm", "norm"),
    **linear("adapter.gate_proj", "adapter.gate_proj"),
    **linear("adapter.up_proj", "adapter.up_proj"),
    **linear("adapter.down_proj", "adapter.down_proj"),
}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Kind of draft that a config.json describes, see `specjax.formats.kind_of`."""
    kind = str(settings.get("model_type")).removeprefix(PREFIX)
    return kind if kind in KINDS and settings["model_type"] != kind else None


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    envelope = Envelope(settings, found / "config.json")
    spec: Any
    if kind in speculators.FORMS:
        spec = _with_more(envelope, speculators.spec_of(envelope, kind, target))
        weights = speculators.stored(spec, KINDS[kind])
    else:
        sizes = dataclasses.replace(layers_like(target.config), intermediate_size=envelope.count("adapter"))
        size = envelope.count("hidden_size", sizes.hidden_size)
        spec = ExitModel(sizes, (envelope.count("layers"),), size, str(target.dtype))
        weights = Stored(spec, _TENSORS, KINDS[kind].left_out)
    envelope.only_read("target")
    return spec, weights.read(found, spec.dtype, check_finite)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
    """Write the weights; returns config.json."""
    spec: Any = draft.spec
    named = {"model_type": PREFIX + kind, "target": target.name}
    if kind in speculators.FORMS:
        plain = LoadedDraft(
            dataclasses.replace(spec, config=dataclasses.replace(spec.config, **_NEUTRAL)), draft.params
        )
        said = speculators.written(partial, plain, kind, dtype, target)
        drop = (speculators.TYPE, "architectures", "speculators_config")
        return {**{name: value for name, value in said.items() if name not in drop}, **named, **_more(spec)}
    Stored(spec, _TENSORS, KINDS[kind].left_out).write(partial, draft.params, dtype)
    sizes = {"adapter": spec.config.intermediate_size, "hidden_size": spec.feature_size}
    return {**named, "layers": spec.reads[0], **sizes}


_NEUTRAL = {"embedding_multiplier": 1.0, "logit_multiplier": 1.0, "logit_soft_cap": None}
_AT_ROOT = "window_at_root"


def _more(spec: Any) -> dict[str, Any]:
    """Settings that the form of speculators cannot express."""
    said = {name: getattr(spec.config, name) for name, plain in _NEUTRAL.items() if getattr(spec.config, name) != plain}
    return said if spec.window_at_root else {**said, _AT_ROOT: False}


def _with_more(envelope: Envelope, spec: Any) -> Any:
    # 0 stands for no soft cap; the other two are never 0.
    scales = {name: envelope.positive(name, plain or 0.0) or None for name, plain in _NEUTRAL.items()}
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, **scales))
    at_root = envelope.get(_AT_ROOT, bool, True)
    return spec if at_root else dataclasses.replace(spec, **{_AT_ROOT: at_root})
