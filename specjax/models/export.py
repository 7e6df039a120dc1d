"""Any model that specjax reads, written as a directory that transformers, vLLM and SGLang load."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from specjax.errors import ModelError
from specjax.models.files import refuse_outside
from specjax.models.hf import CARD, MAX_SHARD_BYTES, LoadedModel, check_replaceable, load_model, resolve, save_model
from specjax.models.weights import AS_STORED

_DRAFT = "draft"


def export_model(
    source: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    check_finite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> LoadedModel:
    """Write ``source``, a model directory, a hub id or the draft of a run directory, to ``directory``; return it.

    ``dtype``: of the written weights (default: as they are stored). A model card in ``source`` is kept; without one,
    the default card is written. Raises `ModelError` as `load_model` and `save_model` do.
    """
    check_replaceable(directory, overwrite)
    found = _draft_of_run(Path(source).expanduser()) or resolve(source, revision)
    model = load_model(found, dtype or AS_STORED, check_finite=check_finite)
    model = dataclasses.replace(model, name=Path(source).name or model.name)
    card = found / CARD
    refuse_outside(card)
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else None
    save_model(model, directory, overwrite=overwrite, card=text, max_shard_bytes=max_shard_bytes)
    return model


def _draft_of_run(source: Path) -> Path | None:
    """None for what is not a directory, or is a model's."""
    if not source.is_dir() or (source / "config.json").exists():
        return None
    if not (source / _DRAFT / "config.json").exists():
        raise ModelError(
            f"{source}: neither a model directory (no config.json) nor a run with a draft (no {_DRAFT}/config.json); "
            "if it is a run, finish it with train_draft.py first"
        )
    return source / _DRAFT
