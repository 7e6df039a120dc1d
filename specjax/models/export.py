"""Export of any model that specjax reads to a directory that transformers, vLLM and SGLang load."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from specjax.models.files import draft_of, refuse_outside, resolve
from specjax.models.hf import (
    CARD,
    MAX_SHARD_BYTES,
    LoadedModel,
    check_replaceable,
    load_model,
    save_model,
)
from specjax.models.weights import AS_STORED


def export_model(
    source: str | os.PathLike,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    check_finite: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> LoadedModel:
    """Write ``source``, a model directory, a hub id, a GGUF file or the draft of a run directory, to ``directory``;
    return the model.

    ``dtype``: dtype of the written weights (default: as they are stored). A model card in ``source`` is copied; without
    one, the default card is written. Raises `ModelError` as `load_model` and `save_model` do.
    """
    check_replaceable(directory, overwrite)
    found = resolve(draft_of(source), revision)
    model = load_model(found, dtype or AS_STORED, check_finite=check_finite)
    model = dataclasses.replace(model, name=Path(source).name or model.name)
    card = found / CARD
    if found.is_dir():
        refuse_outside(card)
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else None
    save_model(model, directory, overwrite=overwrite, card=text, max_shard_bytes=max_shard_bytes)
    return model
