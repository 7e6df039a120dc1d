"""Drafts that read their target's hidden states, on disk: `load` and `save` a draft in one of the public forms, and
`convert` one into another."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp

from specjax.drafters.features import EMBEDDING_AND_HEAD, FeatureModel, LoadedDraft, check_readable, dense
from specjax.errors import ModelError
from specjax.formats import medusa, speculators
from specjax.formats.form import Format, TargetName
from specjax.formats.keys import MAY_BE_UNSAID
from specjax.formats.loading import FORMATS, SHARED, asked_of, kind_of, load, resolved
from specjax.interfaces import Target, TargetInfo
from specjax.models import hf
from specjax.models.families import Settings
from specjax.models.files import INDEX, WEIGHTS, draft_of, read_json, write_json
from specjax.models.weights import narrowest, opened

__all__ = [
    "FORMATS",
    "MAY_BE_UNSAID",
    "TargetInfo",
    "asked_of",
    "convert",
    "kind_of",
    "load",
    "own_form",
    "refuse_without_form",
    "save",
]


def refuse_without_form(source: str | os.PathLike) -> None:
    """Raises `ModelError` for the directory of one of our drafts, which cannot be written as a model."""
    file = Path(draft_of(source)) / "config.json"
    kind = kind_of(read_json(file)) if file.exists() else None
    if kind is not None:
        raise ModelError(f"{source}: is a {kind} draft; specjax export --format NAME --target MODEL writes it")


def form_of(kind: str, name: str) -> Format:
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
    lost = speculators.FORMAT.unsupported(spec, kind)
    return ("speculators", None) if lost is None else ("specjax", lost)


def readers_of(form_name: str) -> str:
    """Sentence for a draft's card: the software that decodes with a directory of this form."""
    if form_name == "specjax":
        return "Only specjax reads it (`specjax.load_drafter`)."
    return f"A directory in the form of {form_name}: servers of that form read it too."


def library_of(form_name: str) -> str:
    """The library that loads a directory of this form, for hubs that read cards."""
    return form_name if form_name == "speculators" else "specjax"


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
    found = resolved(draft_of(source), revision)
    settings = read_json(found / "config.json")
    kind = kind_of(settings)
    if kind is None:
        raise ModelError(f"{found}: is no draft that reads hidden states; --format is for those")
    form_of(kind, form_name)  # before anything is read
    draft = load(found, kind, TargetInfo(target.config, dtype or _dtype_of(found)), check_finite, whole=True)
    check_readable(kind, draft.spec, target.config)
    stored = Settings(settings, found / "config.json").names(SHARED)
    shared = (*stored, *(name for name in EMBEDDING_AND_HEAD if name not in draft.params))
    missing = [n for n in draft.spec.shapes if n in EMBEDDING_AND_HEAD and n not in draft.params]
    # The dtype must hold the target's numbers as well.
    held = jnp.promote_types(draft.spec.dtype, target.dtype) if missing and dtype is None else draft.spec.dtype
    params = {**draft.params, **{name: dense(target.params, name, held) for name in missing}}
    card = found / hf.CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else None
    if text is not None:
        for other in FORMATS:
            text = text.replace(readers_of(other), readers_of(form_name))
            text = text.replace(f"library_name: {library_of(other)}\n", f"library_name: {library_of(form_name)}\n")
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
    weights = WEIGHTS if any((found / name).exists() for name in (WEIGHTS, INDEX)) else medusa.WEIGHTS
    if weights == medusa.WEIGHTS and not (found / weights).exists():
        return "float32"
    with opened(found, weights) as stored:
        return stored.dtype


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
    hf.refuse_quantised(draft.params, "save")
    form = form_of(kind, form_name or own_form(draft.spec, kind)[0])
    stored = form.KINDS[kind]
    if stored.shared:
        draft = dataclasses.replace(draft, params={n: x for n, x in draft.params.items() if n not in shared})
    stored_as = dtype or narrowest(draft.params) or str(jnp.dtype(draft.spec.dtype))
    of = TargetName(target, max(draft.spec.reads) if target_layers is None else target_layers)

    def write(partial: Path) -> None:
        settings = form.write(partial, draft, kind, stored_as, of)
        settings |= {hf.DRAFTER: kind, SHARED: [name for name in shared if name not in stored.left_out]}
        write_json(partial / "config.json", settings, published=True)
        (partial / hf.CARD).write_text(card or f"# {draft.name}\n\nA draft of kind {kind}.\n", encoding="utf-8")

    hf.write_directory(directory, overwrite, write)
