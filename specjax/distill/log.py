"""What a training stage measured, as JSON lines beside its checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from specjax.distill.distributed import is_first

LOG = "log.jsonl"


class Log:
    """JSON lines, one a record; what an interrupted run wrote past its last checkpoint is dropped. The first process
    writes."""

    def __init__(self, file: Path, step: int):
        self._file = file
        if not is_first():
            return
        kept = [r for r in _parse(file.read_text()) if r["step"] <= step] if file.exists() else []
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(partial, file)

    def append(self, record: dict[str, float]) -> None:
        if not is_first():
            return
        with self._file.open("a") as log:
            log.write(json.dumps(record) + "\n")


def read_log(directory: Path) -> list[dict[str, float]]:
    """The records of a stage: step, tokens (so far), tokens_per_s, loss and grad_norm (means since the record before);
    held_out_nll and alpha where they were measured. Empty if the stage has not begun."""
    file = directory / LOG
    return _parse(file.read_text()) if file.exists() else []


def _parse(text: str) -> list[dict[str, float]]:
    # A kill can cut the last line short.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
