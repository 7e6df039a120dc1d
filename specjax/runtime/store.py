"""Files that cost something to make: each has a record, written after it, with its SHA-256 and what is known of it.
No record means half-written. And what becomes of directories that are damaged."""

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
"""Of the name of what was set aside."""
_log = logging.getLogger(__name__)


def write(file: Path, content: bytes, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record as written. Raises `TrainingError` if the disk takes no more; nothing half-written stays."""
    record = {"sha256": hashlib.sha256(content).hexdigest(), **record}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content, alone=True)
        fingerprint.write_json(_record_file(file), record)
    except OSError as error:
        raise unwritable(file, error) from None
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


def set_aside(path: Path, why: str = DAMAGED) -> Path:
    """Out of the way under a name of its own, as it is: nothing is deleted. Returns where."""
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
    """The record first: a kill in between leaves what counts as half-written."""
    _record_file(file).unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _record_file(file: Path) -> Path:
    return file.with_suffix(".json")
