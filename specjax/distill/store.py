"""Sequences on disk: a file and, written after it, its record with the SHA-256. No record means half-written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from specjax.distill import fingerprint
from specjax.distill.rows import Sequences
from specjax.errors import TrainingError
from specjax.models.files import sha256

SUFFIX = ".safetensors"
_ARRAYS = ("tokens", "ends", "prompts")
_log = logging.getLogger(__name__)


def write(file: Path, sequences: Sequences, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record as written. Raises `TrainingError` if the disk takes no more; nothing half-written stays."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            out.write(save({name: getattr(sequences, name) for name in _ARRAYS}))
            out.flush()
            os.fsync(out.fileno())
        record = {"sha256": sha256(partial), **record}
        os.replace(partial, file)
        fingerprint.write_json(_record_file(file), record)
    except OSError as error:
        raise TrainingError(f"{file}: cannot be written ({error.strerror}); what was finished before is kept") from None
    finally:
        partial.unlink(missing_ok=True)
    return record


def record_of(file: Path) -> dict[str, Any] | None:
    """The record of an undamaged file. A damaged one is named in a warning, and nothing like one that is not there."""
    if not _record_file(file).exists():
        return None
    try:
        record = json.loads(_record_file(file).read_text())
        if not file.exists():
            damage = "missing, though it has a record"
        elif sha256(file) == record["sha256"]:
            return record
        else:
            damage = "changed since it was written"
    except (ValueError, KeyError, TypeError):
        damage = "its record is damaged"
    _log.warning("%s: %s", file, damage)
    return None


def read(file: Path) -> Sequences:
    return Sequences(**load(file.read_bytes()))


def remove(file: Path) -> None:
    """The record first: a kill in between leaves what counts as half-written."""
    _record_file(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _record_file(file: Path) -> Path:
    return file.with_suffix(".json")
