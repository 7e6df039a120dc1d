"""Loading of drafters from a directory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from specjax import registry
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.features import EMBEDDING_AND_HEAD, FeatureDrafter, LoadedDraft
from specjax.drafters.glide import Glide, load_glide
from specjax.errors import ConfigError, ModelError
from specjax.formats import medusa, native, own, serving, speculators
from specjax.formats.form import OF_TORCH, Format
from specjax.formats.keys import MAY_BE_UNSAID, REPLACED
from specjax.formats.unread import refuse_by_weights, refuse_unread
from specjax.interfaces import Drafter, TargetInfo
from specjax.models.families import Settings
from specjax.models.files import HUB_FILES, draft_of, read_json, refuse_outside, resolve, verify_manifest
from specjax.models.hf import CARD, DRAFTER, scheme_of

DEFAULT_K = 5
"""Proposed tokens of a block, unless something says how many."""
FORMATS: dict[str, Format] = {
    "speculators": speculators.FORMAT,
    "sglang": serving.SGLANG,
    "z-lab": serving.Z_LAB,
    "deepspec": serving.DEEPSPEC,
    "medusa": medusa.FORMAT,
    "native": native.FORMAT,
    "specjax": own.FORMAT,
}
"""Stored forms by name."""
SHARED = "specjax_shared"
"""Key in config.json: names of the stored weights that are the target's, which memory need not hold twice."""
_READ_HIDDEN_STATES = ("dflash", "dflash2", "dspark", "eagle3", "early_exit", "medusa", "mtp", "p_eagle")
"""Kinds of drafts that read hidden states."""


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
        quantize: number format of the draft's own kernels, see `specjax.load_model`: of a separate model, where the
            target's own directory can be the draft, and of drafts that read hidden states.

    Returns:
        A frozen drafter; `dataclasses.replace` gives it another ``k``.

    Raises:
        ModelError: for a directory that cannot be read, or, once it is bound, a vocabulary that is not the target's.
        ConfigError: for an unknown kind, a field of ``kind`` that the draft says itself, or ``quantize`` for a draft
            that is neither a separate model nor reads hidden states.
    """
    section: Any = None if kind is None else registry.build(registry.DRAFTS, kind, "load_drafter: kind")
    found, settings = draft_of(path_or_hub_id), None
    if kind is None or kind == DraftModel.kind:
        said, settings = described(found)
        if kind is not None and said != kind:
            raise ModelError(f"{found}: is a {said} draft, no separate model; leave kind out, or name {said!r}")
        kind = said
    if kind == DraftModel.kind:
        return DraftModel.load(found, target, DEFAULT_K if k is None else k, check_finite, quantize)
    scheme, name = scheme_of(quantize), kind if isinstance(kind, str) else kind["kind"]
    if scheme is not None and name not in _READ_HIDDEN_STATES:
        raise ConfigError(
            f"quantize={quantize!r}: is for separate models and drafts that read hidden states, and this draft is a "
            f"{name!r}; leave it out"
        )
    if section is not None:
        _refuse_what_it_says(kind, section, found)
    length = DEFAULT_K if k is None else k
    if name in _READ_HIDDEN_STATES:
        draft = load(found, name, target, check_finite, asked=asked_of(section), settings=settings)
        draft = draft if scheme is None else draft.quantised(scheme)
        drafter: Any = FeatureDrafter(draft, length, name)
    elif name == Glide.kind:
        glide = load_glide(found, str(target.dtype), check_finite)
        glide.free_originals()
        drafter = Glide(glide, length)
    else:
        assert section is not None  # only a caller names code
        drafter = section.load(found, target, length, check_finite)
    if k is None and (most := drafter.longest or DEFAULT_K) < DEFAULT_K:
        return dataclasses.replace(drafter, k=most)
    return drafter


def _refuse_what_it_says(kind: Any, section: Any, found: str | os.PathLike) -> None:
    """Raises `ConfigError` for fields of ``kind`` that a stored draft has itself."""
    if isinstance(kind, Mapping) and kind["kind"] in registry.DRAFTS and section.of_training is not None:
        for name in sorted(kind.keys() - {"kind"} - section.of_training - MAY_BE_UNSAID.get(section.kind, {}).keys()):
            raise ConfigError(f"load_drafter: kind.{name}: the draft in {found} has its own; leave it out")


def asked_of(section: Any) -> dict[str, Any]:
    """Keys of config.json that a section `draft` gives in place of a draft's file, with their values."""
    fields = {} if section is None else MAY_BE_UNSAID.get(section.kind, {})
    named = {key: getattr(section, field) for field, key in fields.items()}
    return {key: list(x) if isinstance(x, tuple) else x for key, x in named.items() if x is not None}


def load(
    directory: str | os.PathLike,
    kind: str,
    target: TargetInfo,
    check_finite: bool = True,
    whole: bool = False,
    asked: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> LoadedDraft:
    """The draft of this kind in a directory, in the dtype of ``target``. ``whole``: True to include stored weights that
    are the target's; ``asked``: keys of config.json that the file may leave out, with their values; ``settings``: its
    config.json, if it has been read. Raises `ModelError` for what cannot be read."""
    found = resolved(directory)
    for file in found.iterdir():
        refuse_outside(file)
    verify_manifest(found, ignored=(CARD,))
    file = found / "config.json"
    settings = _with(asked or {}, read_json(file) if settings is None else settings, file)
    form = next((form for form in FORMATS.values() if form.kind_of(settings) == kind), None)
    if form is None:
        refuse_unread(settings)
        told = settings.get(speculators.TYPE) or settings.get("model_type")
        raise ModelError(f"{file}: {told!r} is no {kind} draft")
    shared = Settings(settings, file).names(SHARED)
    others = {name: value for name, value in settings.items() if name != SHARED}
    spec, params = form.read(found, others, kind, target, check_finite)
    if kind in form.KINDS and form.KINDS[kind].shared:
        lost = [name for name in spec.shapes if name in EMBEDDING_AND_HEAD and name not in (*params, *shared)]
        if lost:
            raise ModelError(
                f"{found}: lacks {lost[0]}, and {SHARED} does not name it as the target's; export it again"
            )
    left_out = () if whole else shared
    return LoadedDraft(spec, {n: value for n, value in params.items() if n not in left_out}, Path(directory).name)


def resolved(source: str | os.PathLike, revision: str | None = None) -> Path:
    """Directory of a draft. Of a hub id, torch's files are fetched if there are no others."""
    found = resolve(source, revision)
    if found == Path(source).expanduser() or any(found.glob("*.safetensors")):
        return found
    return resolve(source, revision, (*HUB_FILES, *OF_TORCH.values()))


def _with(asked: Mapping[str, Any], settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """``settings`` with the keys of ``asked`` added. Raises `ModelError` if the file has another value for one of
    them."""
    for name, value in asked.items():
        if settings.get(name) not in (None, value) and name not in REPLACED:
            raise ModelError(f"{file}: {name}={settings[name]!r}, and {value!r} is asked for; leave it out")
    return {**settings, **asked}


def asked_kind(draft: Any) -> str | dict[str, Any]:
    """Argument ``kind`` of `load_drafter` for the draft that the section `draft` of a config has left: of ours the name
    alone, since the directory says the rest; of one from outside its fields, too."""
    return draft.kind if draft.kind in registry.DRAFTS else {"kind": draft.kind, **draft.settings}


def described(source: str | os.PathLike) -> tuple[str, dict[str, Any]]:
    """(the kind of drafter in a directory: the one that its config.json names, or else a separate model; config.json,
    empty without one). A directory never names code. Raises `ModelError`."""
    file = resolve(source) / "config.json"
    settings = read_json(file) if file.exists() else {}
    told = settings.get(DRAFTER)
    if told is not None and told not in tuple(registry.DRAFTS):
        raise ModelError(f"{file}: {DRAFTER}={told!r} is no kind of ours; name a drafter from outside by kind=")
    kind = told or kind_of(settings)
    if kind is None:
        refuse_by_weights(file.parent)
    return kind or DraftModel.kind, settings


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The kind of draft that a config.json describes; None: no draft of these forms. Raises `ModelError` for a known
    form that is not read."""
    kind = next((kind for form in FORMATS.values() if (kind := form.kind_of(settings))), None)
    if kind is None:
        refuse_unread(settings)
    return kind
