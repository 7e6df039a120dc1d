"""Stored forms of drafts that read their target's hidden states, a module each: what is in config.json, and where each
weight is. `load` and `save` do the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.drafters.features import LoadedDraft
from specjax.drafters.formats import medusa, own, speculators
from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.files import read_json, verify_manifest, write_json
from specjax.models.weights import narrowest

SHARED = "specjax_shared"
"""In config.json: the weights that are stored though they are the target's, which need not be in memory twice."""
FORMATS = {"speculators": speculators, "medusa": medusa, "specjax": own}
"""By name; each has `KINDS` that it stores, ``kind_of``, ``read`` and ``write``."""


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The kind of draft that a config.json describes; None: none of these. Raises `ModelError` for one in a known form
    that is not read."""
    return next((kind for form in FORMATS.values() if (kind := form.kind_of(settings))), None)


def load(directory: str | os.PathLike, kind: str, target: Any, check_finite: bool = True) -> LoadedDraft:
    """The draft of this kind in a directory, in the dtype of ``target``. Raises `ModelError` for what cannot be
    read."""
    found = hf.resolve(directory)
    verify_manifest(found, ignored=(hf.CARD,))
    settings = read_json(found / "config.json")
    form = next((form for form in FORMATS.values() if form.kind_of(settings) == kind), None)
    if form is None:
        told = settings.get(speculators.TYPE) or settings.get("model_type")
        raise ModelError(f"{found / 'config.json'}: {told!r} is no {kind} draft")
    spec, params = form.read(found, settings, kind, target, check_finite)
    shared = settings.get(SHARED, ())
    return LoadedDraft(spec, {n: value for n, value in params.items() if n not in shared}, Path(directory).name)


def save(
    draft: LoadedDraft,
    kind: str,
    directory: str | os.PathLike,
    *,
    target: str,
    card: str | None = None,
    shared: tuple[str, ...] = (),
) -> None:
    """Write a directory that `load` reads, in place of what is there: all weights that the form stores, of which
    ``shared`` are the target's. Raises `ModelError`."""
    form = next(form for form in FORMATS.values() if kind in form.KINDS)
    dtype = narrowest(draft.params) or str(jnp.dtype(draft.spec.dtype))

    def write(partial: Path) -> None:
        settings = form.write(partial, draft, kind, dtype, target)
        settings |= {hf.DRAFTER: kind, SHARED: [name for name in shared if name not in form.KINDS[kind].left_out]}
        write_json(partial / "config.json", settings)
        (partial / hf.CARD).write_text(card or f"# {draft.name}\n\nA draft of kind {kind}.\n", encoding="utf-8")

    hf.write_directory(directory, True, write)
