"""Stored forms of drafts that read their target's hidden states, one module each. A form says what config.json holds
and under which name each weight is stored; `load` and `save` do the rest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.drafters.features import ENDS, FeatureModel, LoadedDraft, check_readable, dense
from specjax.errors import ModelError
from specjax.formats import medusa, native, own, speculators
from specjax.formats.envelope import Envelope, TargetName
from specjax.formats.serving import deepspec, sglang, z_lab
from specjax.formats.stored import OF_TORCH, as_safetensors
from specjax.formats.unread import refuse_by_weights as refuse_by_weights
from specjax.formats.unread import refuse_unread
from specjax.interfaces import Target, TargetInfo
from specjax.models import hf
from specjax.models.files import read_json, refuse_outside, verify_manifest, write_json
from specjax.models.transformer import param_shapes
from specjax.models.weights import INDEX, WEIGHTS, narrowest, stored_dtype

SHARED = "specjax_shared"
"""Key in config.json: names of the stored weights that are the target's, which memory need not hold twice."""
FORMATS: dict[str, Any] = {
    "speculators": speculators,
    "sglang": sglang,
    "z-lab": z_lab,
    "deepspec": deepspec,
    "medusa": medusa,
    "native": native,
    "specjax": own,
}
"""Stored forms by name. Each has the ``KINDS`` that it writes, ``kind_of``, ``read`` and ``write``."""


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The kind of draft that a config.json describes; None: no draft of these forms. Raises `ModelError` for a known
    form that is not read."""
    kind = next((kind for form in FORMATS.values() if (kind := form.kind_of(settings))), None)
    if kind is None:
        refuse_unread(settings)
    return kind


def refuse_without_form(source: str | os.PathLike) -> None:
    """Raises `ModelError` for the directory of one of our drafts, which cannot be written as a model."""
    file = Path(hf.draft_of(source)) / "config.json"
    kind = kind_of(read_json(file)) if file.exists() else None
    if kind is not None:
        raise ModelError(f"{source}: is a {kind} draft; specjax export --format NAME --target MODEL writes it")


def form_of(kind: str, name: str) -> Any:
    """The form called ``name``. Raises `ModelError` if it has no drafts of this kind."""
    able = {n: form for n, form in FORMATS.items() if kind in form.KINDS}
    if name not in able:
        raise ModelError(f"format {name!r}: has no {kind} drafts; of those that have: {', '.join(able)}")
    return able[name]


def own_form(spec: FeatureModel, kind: str) -> tuple[str, str | None]:
    """The form that a draft is saved in: (its name, the part of the draft that the form of speculators cannot express,
    if that is why it is another form)."""
    if kind not in speculators.KINDS:
        return next(name for name, form in FORMATS.items() if kind in form.KINDS), None
    lost = speculators.unsaid(spec, kind)
    return ("speculators", None) if lost is None else ("specjax", lost)


def load(
    directory: str | os.PathLike,
    kind: str,
    target: TargetInfo,
    check_finite: bool = True,
    whole: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> LoadedDraft:
    """The draft of this kind in a directory, in the dtype of ``target``. ``whole``: True to include stored weights that
    are the target's; ``asked``: keys of config.json that the file may leave out, with their values. Raises `ModelError`
    for what cannot be read."""
    found = _resolved(directory)
    for file in found.iterdir():
        refuse_outside(file)
    verify_manifest(found, ignored=(hf.CARD,))
    settings = _with(asked or {}, read_json(found / "config.json"), found / "config.json")
    form = next((form for form in FORMATS.values() if form.kind_of(settings) == kind), None)
    if form is None:
        refuse_unread(settings)
        told = settings.get(speculators.TYPE) or settings.get("model_type")
        raise ModelError(f"{found / 'config.json'}: {told!r} is no {kind} draft")
    stored = Envelope(settings, found / "config.json").names(SHARED)
    others = {name: value for name, value in settings.items() if name != SHARED}
    with as_safetensors(found) as read_from:
        spec, params = form.read(read_from, others, kind, TargetInfo(target.config, str(target.dtype)), check_finite)
    shared = () if whole else stored
    return LoadedDraft(spec, {n: value for n, value in params.items() if n not in shared}, Path(directory).name)


def _resolved(source: str | os.PathLike, revision: str | None = None) -> Path:
    """Directory of a draft. Of a hub id, torch's files are fetched if there are no others."""
    found = hf.resolve(source, revision)
    if found == Path(source).expanduser() or any(found.glob("*.safetensors")):
        return found
    return hf.resolve(source, revision, (*hf.HUB_FILES, *OF_TORCH))


def _with(asked: Mapping[str, Any], settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """``settings`` with the keys of ``asked`` added. Raises `ModelError` if the file has another value for one of
    them."""
    for name, value in asked.items():
        if settings.get(name) not in (None, value):
            raise ModelError(f"{file}: {name}={settings[name]!r}, and {value!r} is asked for; leave it out")
    return {**settings, **asked}


def convert(
    source: str | os.PathLike,
    directory: str | os.PathLike,
    target: Target,
    form_name: str,
    overwrite: bool = False,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    check_finite: bool = True,
) -> str:
    """Write the draft ``source``, a directory, a hub id or a run, in another form; returns its kind. Weights that are
    the target's come from ``target``, a `LoadedModel`, if the new form stores them and the old one did not. ``dtype``:
    dtype of the written weights; None: as they are stored. Raises `ModelError` for a draft that the form cannot
    express."""
    found = _resolved(hf.draft_of(source), revision)
    settings = read_json(found / "config.json")
    kind = kind_of(settings)
    if kind is None:
        raise ModelError(f"{found}: is no draft that reads hidden states; --format is for those")
    form_of(kind, form_name)  # before anything is read
    draft = load(found, kind, TargetInfo(target.config, dtype or _dtype_of(found)), check_finite, whole=True)
    check_readable(kind, draft.spec, target.config)
    stored = Envelope(settings, found / "config.json").names(SHARED)
    shared = (*stored, *(name for name in ENDS if name not in draft.params))
    missing = [n for n in param_shapes(draft.spec) if n in ENDS and n not in draft.params]
    # The dtype must hold the target's numbers as well.
    held = jnp.promote_types(draft.spec.dtype, target.dtype) if missing and dtype is None else draft.spec.dtype
    params = {**draft.params, **{name: dense(target.params, name, held) for name in missing}}
    card = found / hf.CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else None
    save(
        LoadedDraft(dataclasses.replace(draft.spec, dtype=str(held)), params, draft.name),
        kind,
        directory,
        target=target.source or target.name,
        target_layers=target.config.num_layers,
        card=text,
        shared=tuple(dict.fromkeys(shared)),
        form_name=form_name,
        overwrite=overwrite,
        dtype=dtype,
    )
    return kind


def _dtype_of(found: Path) -> str:
    """Dtype that a draft's weights are stored in; for a torch file float32, which holds the others."""
    if any((found / name).exists() for name in (WEIGHTS, INDEX)):
        return stored_dtype(found)
    return stored_dtype(found, medusa.WEIGHTS) if (found / medusa.WEIGHTS).exists() else "float32"


def save(
    draft: LoadedDraft,
    kind: str,
    directory: str | os.PathLike,
    *,
    target: str,
    target_layers: int | None = None,
    card: str | None = None,
    shared: tuple[str, ...] = (),
    form_name: str | None = None,
    overwrite: bool = True,
    dtype: str | None = None,
) -> None:
    """Write a directory that `load` reads, replacing what is there, with all weights that the form stores; ``shared``:
    names of those that are the target's. ``target_layers``: the target's number of layers; None: the highest stream
    that the draft reads. ``form_name``: one of `FORMATS`; None: `own_form`. ``dtype``: dtype of the weights; None: the
    narrowest that holds them. Raises `ModelError`."""
    form = form_of(kind, form_name or own_form(draft.spec, kind)[0])
    stored_as = dtype or narrowest(draft.params) or str(jnp.dtype(draft.spec.dtype))
    of = TargetName(target, max(draft.spec.reads) if target_layers is None else target_layers)

    def write(partial: Path) -> None:
        settings = form.write(partial, draft, kind, stored_as, of)
        settings |= {hf.DRAFTER: kind, SHARED: [name for name in shared if name not in form.KINDS[kind].left_out]}
        write_json(partial / "config.json", settings, published=True)
        (partial / hf.CARD).write_text(card or f"# {draft.name}\n\nA draft of kind {kind}.\n", encoding="utf-8")

    hf.write_directory(directory, overwrite, write)
