"""Stored forms of drafts that read their target's hidden states. A `Form` says what is in config.json and where each
weight is; `load` and `save` do the rest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.features import FeatureModel, LoadedDraft
from specjax.drafters.formats import speculators
from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.files import read_json, verify_manifest, write_json
from specjax.models.weights import narrowest, read_params, write_params
from specjax.types import Params

SHARED = "specjax_shared"
"""In config.json: the weights that are stored though they are the target's, which need not be in memory twice."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """The parameters of a draft that its directory holds."""

    spec: FeatureModel
    kind: str

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    def init(self, key: Array) -> Params:
        return {n: value for n, value in self.spec.init(key).items() if n not in speculators.LEFT_OUT[self.kind]}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """The kind of draft that a config.json describes; None: none of these."""
    return speculators.kind_of(settings)


def load(directory: str | os.PathLike, kind: str, dtype: str, check_finite: bool = True) -> LoadedDraft:
    """The draft of this kind in a directory. Raises `ModelError` for what cannot be read."""
    found = hf.resolve(directory)
    verify_manifest(found, ignored=(hf.CARD,))
    file = found / "config.json"
    settings = read_json(file)
    if kind_of(settings) != kind:
        raise ModelError(
            f"{file}: speculators_model_type={settings.get('speculators_model_type')!r} is no {kind} draft"
        )
    spec = speculators.spec_of(kind, settings, file, dtype)
    family = speculators.family_of_draft(kind, spec)
    params = read_params(found, family, Stored(spec, kind), dtype, check_finite=check_finite)
    shared = settings.get(SHARED, ())
    own = {name: value for name, value in params.items() if name not in shared}
    return LoadedDraft(spec, own, Path(directory).name)


def save(
    draft: LoadedDraft,
    kind: str,
    directory: str | os.PathLike,
    *,
    target: str,
    card: str | None = None,
    shared: tuple[str, ...] = (),
) -> None:
    """Write a directory that `load` reads, and the library speculators, in place of what is there: all weights that
    the form stores, of which ``shared`` are the target's. Raises `ModelError`."""
    family = speculators.family_of_draft(kind, draft.spec)
    dtype = narrowest(draft.params) or str(jnp.dtype(draft.spec.dtype))
    settings = speculators.settings_of(kind, draft.spec, dtype, target)
    settings |= {hf.DRAFTER: kind, SHARED: [name for name in shared if name not in speculators.LEFT_OUT[kind]]}

    def write(partial: Path) -> None:
        write_params(partial, draft.params, family, Stored(draft.spec, kind), dtype, hf.MAX_SHARD_BYTES)
        write_json(partial / "config.json", settings)
        (partial / hf.CARD).write_text(card or f"# {draft.name}\n\nA draft of kind {kind}.\n", encoding="utf-8")

    hf.write_directory(directory, True, write)
