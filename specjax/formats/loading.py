"""Loading of drafters from a directory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from specjax import formats, registry
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import Drafter, TargetInfo
from specjax.models.files import read_json
from specjax.models.hf import DRAFTER, draft_of, resolve

DEFAULT_K = 5
"""Proposed tokens of a block, unless something says how many."""


def load_drafter(
    path_or_hub_id: str | os.PathLike,
    target: TargetInfo,
    k: int | None = None,
    kind: str | Mapping[str, Any] | None = None,
    check_finite: bool = True,
    quantize: Literal["int8", "int4"] | None = None,
) -> Drafter:
    """The drafter in a directory, ready for ``Decoder(target, drafter=...)``.

    Args:
        path_or_hub_id: a directory that `Trainable.save` wrote, a run directory (its draft), or, for a separate
            model, any Hugging Face directory or hub id.
        target: the `LoadedModel` that it drafts for; weights are cast to its dtype.
        k: proposed tokens of a block; None: 5, or as many as the draft can propose.
        kind: the kind as in `draft.kind` of a config, or ``package.module:Class`` of a drafter from outside; a mapping
            adds fields. `state` and `recycled` of `mtp` say how the head is read. `sample_from_anchor` of `dspark` and
            `reads` of `eagle3` and `p_eagle` are for a draft that does not say them plainly. Fields about training
            change nothing, and fields that the draft says itself are refused. None: the kind that the directory names,
            or else a separate model.
        check_finite: refuse NaN and infinite weights.
        quantize: number format of a separate model's kernels, see `specjax.load_model`; with it, the target's own
            directory can be the draft.

    Returns:
        A frozen drafter; `dataclasses.replace` gives it another ``k``.

    Raises:
        ModelError: for a directory that cannot be read, or, once it is bound, a vocabulary that is not the target's.
        ConfigError: for an unknown kind, a field of ``kind`` that the draft says itself, or ``quantize`` for a draft
            that is no separate model.
    """
    if kind is not None:
        registry.build(registry.DRAFTS, kind, "load_drafter: kind")  # an unknown kind fails before files are read
    found = draft_of(path_or_hub_id)
    said = kind_of(found) if kind in (None, DraftModel.kind) else None
    if kind is not None and said not in (None, kind):
        raise ModelError(f"{found}: is a {said} draft, no separate model; leave kind out, or name {said!r}")
    kind = said if kind is None else kind
    alone = kind == DraftModel.kind  # loaded without importing the code that trains one
    if alone:
        return DraftModel.load(found, target, DEFAULT_K if k is None else k, check_finite, quantize)
    if quantize is not None:
        raise ConfigError(f"quantize={quantize!r}: is for separate models, and this draft is a {kind!r}; leave it out")
    reader: Any = registry.build(registry.DRAFTS, kind, "load_drafter: kind")
    if isinstance(kind, Mapping) and kind["kind"] in registry.DRAFTS and reader.of_training is not None:
        for name in sorted(kind.keys() - {"kind"} - reader.of_training - reader.unsaid.keys()):
            raise ConfigError(f"load_drafter: kind.{name}: the draft in {found} has its own; leave it out")
    if k is not None:
        return reader.load(found, target, k, check_finite)
    drafter = reader.load(found, target, DEFAULT_K, check_finite)
    return dataclasses.replace(drafter, k=most) if (most := drafter.longest or DEFAULT_K) < DEFAULT_K else drafter


def asked_kind(draft: Any) -> str | dict[str, Any]:
    """Argument ``kind`` of `load_drafter` for the draft that the section `draft` of a config has left: of ours the name
    alone, since the directory says the rest; of one from outside its fields, too."""
    return draft.kind if draft.kind in registry.DRAFTS else {"kind": draft.kind, **draft.settings}


def kind_of(path_or_hub_id: str | os.PathLike) -> str:
    """The kind of drafter in a directory: the one that its config.json names, or else a separate model. A directory
    never names code."""
    file = resolve(path_or_hub_id) / "config.json"
    settings = read_json(file) if file.exists() else {}
    told = settings.get(DRAFTER)
    if told is not None and told not in tuple(registry.DRAFTS):
        raise ModelError(f"{file}: {DRAFTER}={told!r} is no kind of ours; name a drafter from outside by kind=")
    kind = told or formats.kind_of(settings)
    if kind is None:
        formats.refuse_by_weights(file.parent)
    return kind or DraftModel.kind
