"""Log of a training stage: its measurements, as JSON lines beside its checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specjax.errors import TrainingError, unwritable
from specjax.models.files import write_atomically
from specjax.runtime.distributed import is_first

LOG = "log.jsonl"


class Log:
    """A file of JSON lines, one for each record. Records that an interrupted run wrote past ``step``, its last
    checkpoint, are dropped, so that none is in it twice. Only the first of several processes writes.

    Raises `TrainingError` if the file cannot be written, or naming a line that is no record.
    """

    def __init__(self, file: Path, step: int):
        self._file = file
        if not is_first():
            return
        kept = [r for r in _parse(file) if r["step"] <= step]
        try:
            write_atomically(file, "".join(json.dumps(r) + "\n" for r in kept), alone=True)
        except OSError as error:
            raise unwritable(self._file, error) from None

    def append(self, record: dict[str, float]) -> None:
        if not is_first():
            return
        try:
            with self._file.open("a") as log:
                log.write(json.dumps(record) + "\n")
        except OSError as error:
            raise unwritable(self._file, error) from None


def note(text: str) -> None:
    """Print on stderr, in the first process only, a note about the config or the data."""
    if is_first():
        print(f"note: {text}", file=sys.stderr)


def read_log(directory: Path) -> list[dict[str, float]]:
    """The records of a stage: step, tokens (so far), tokens_per_s, loss and grad_norm (means since the record before);
    held_out_nll and alpha if they were measured; skipped (steps so far) if steps may be skipped. Empty if the stage has
    not begun."""
    return _parse(directory / LOG)


def _parse(file: Path) -> list[dict[str, float]]:
    records = []
    # A kill or a full disk can cut the last line short.
    *lines, _ = file.read_bytes().split(b"\n") if file.exists() else [b""]
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise TrainingError(
                f"{file}, line {number}: damaged, not a record; put the file back from a copy, or keep one of it and "
                "mend or delete the line"
            )
        records.append(record)
    return records
