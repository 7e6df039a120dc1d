"""Drafters from disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from specjax import registry
from specjax.drafters import formats
from specjax.drafters.base import longest
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, ModelError
from specjax.models.files import read_json
from specjax.models.hf import DRAFTER, draft_of, resolve
from specjax.types import Drafter

DEFAULT_K = 5
"""Draft tokens a block, where nothing says how many."""


def load_drafter(
    path_or_hub_id: str | os.PathLike,
    target: Any,
    k: int | None = None,
    kind: str | Mapping[str, Any] | None = None,
    check_finite: bool = True,
    quantize: Literal["int8", "int4"] | None = None,
) -> Drafter:
    """The drafter in a directory, ready for ``Decoder(target, drafter=...)``.

    Args:
        path_or_hub_id: what `TrainedDrafter.save` wrote, a run directory (its draft), or, of a separate model, any
            Hugging Face directory or hub id.
        target: the `LoadedModel` that it drafts for; weights are cast to its dtype.
        k: draft tokens a block; None: 5, or as many as the draft can propose.
        kind: as `draft.kind` of a config, ``package.module:Class`` of a drafter from outside; with fields of its own, a
            mapping: `state` and `recycled` of `mtp` are those that it is read with, `sample_from_anchor` of `dspark`
            and `reads` of `eagle3` and `p_eagle` where the draft does not say it plainly; what says how a draft is
            trained changes nothing, and what a draft says of itself is refused. None: what the directory says it is, or
            else a separate model.
        check_finite: refuse NaN and infinite weights.
        quantize: how the kernels of a separate model are stored, see `specjax.load_model`: with it, a directory of the
            target itself is a draft of it.

    Returns:
        A frozen drafter; `dataclasses.replace` gives it another ``k``.

    Raises:
        ModelError: for a directory that cannot be read, or, once it is bound, a vocabulary that is not the target's.
        ConfigError: for an unknown kind, a field of ``kind`` that the draft says itself, or ``quantize`` for a draft
            that is no separate model.
    """
    if kind is not None:
        registry.build(registry.DRAFTS, kind, "load_drafter: kind")  # an unknown one before the directory is looked for
    found = draft_of(path_or_hub_id)
    said = kind_of(found) if kind in (None, DraftModel.kind) else None
    if kind is not None and said not in (None, kind):
        raise ModelError(f"{found}: is a {said} draft, no separate model; leave kind out, or name {said!r}")
    kind = said if kind is None else kind
    alone = kind == DraftModel.kind  # without what trains one
    if alone:
        return DraftModel.load(found, target, DEFAULT_K if k is None else k, check_finite, quantize)
    if quantize is not None:
        raise ConfigError(f"quantize={quantize!r}: is for separate models, and this draft is a {kind!r}; leave it out")
    reader: Any = registry.build(registry.DRAFTS, kind, "load_drafter: kind")
    if isinstance(kind, Mapping) and kind["kind"] in registry.DRAFTS and hasattr(reader, "of_training"):
        for name in sorted(kind.keys() - {"kind"} - reader.of_training - getattr(reader, "unsaid", {}).keys()):
            raise ConfigError(f"load_drafter: kind.{name}: the draft in {found} has its own; leave it out")
    if k is not None:
        return reader.load(found, target, k, check_finite)
    drafter = reader.load(found, target, DEFAULT_K, check_finite)
    return dataclasses.replace(drafter, k=most) if (most := longest(drafter) or DEFAULT_K) < DEFAULT_K else drafter


def asked_kind(draft: Any) -> str | dict[str, Any]:
    """``kind`` of `load_drafter` for what the section `draft` of a config has left: of ours the name alone, since the
    directory says the rest; of one from outside its fields, too."""
    return draft.kind if draft.kind in registry.DRAFTS else {"kind": draft.kind, **draft.settings}


def kind_of(path_or_hub_id: str | os.PathLike) -> str:
    """The kind of drafter in a directory: what its config.json says, or else a model. A directory never names code."""
    file = resolve(path_or_hub_id) / "config.json"
    settings = read_json(file) if file.exists() else {}
    told = settings.get(DRAFTER)
    if told is not None and told not in tuple(registry.DRAFTS):
        raise ModelError(f"{file}: {DRAFTER}={told!r} is no kind of ours; name a drafter from outside by kind=")
    kind = told or formats.kind_of(settings)
    if kind is None:
        formats.refuse_by_weights(file.parent)
    return kind or DraftModel.kind
