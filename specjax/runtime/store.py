"""Store of files that are costly to make. Each has a record, written after it, with its SHA-256 and facts about it; a
file without a record is half-written. Damaged files and directories are set aside."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from specjax.errors import unwritable
from specjax.models.files import sha256
from specjax.runtime import fingerprint
from specjax.runtime.files import write_atomically

DAMAGED, REPLACED = ".damaged", ".replaced"
"""Suffixes of the names of files and directories that were set aside."""
_log = logging.getLogger(__name__)


def write(file: Path, content: bytes, record: dict[str, Any]) -> dict[str, Any]:
    """Write a file and its record, and return the record. Raises `TrainingError` if they cannot be written;
    nothing half-written stays."""
    record = {"sha256": hashlib.sha256(content).hexdigest(), **record}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content, alone=True)
        fingerprint.write_json(_record_file(file), record)
    except OSError as error:
        raise unwritable(file, error) from None
    return record


def record_of(file: Path) -> dict[str, Any] | None:
    """Record of an undamaged file; None for a missing or a damaged one. A warning names a damaged file."""
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


def set_aside(path: Path, why: str = DAMAGED) -> Path:
    """Rename a file or directory, as it is, to a name of its own; nothing is deleted. Returns the new path."""
    aside, number = path.with_name(f"{path.name}{why}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}{why}-{number}")
    try:
        os.rename(path, aside)
    except OSError as error:
        raise unwritable(path, error) from None
    return aside


def remove(file: Path) -> None:
    """Delete a file, its record first: after a kill in between, the file counts as half-written."""
    _record_file(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _record_file(file: Path) -> Path:
    return file.with_suffix(".json")
