"""Files that appear whole or not at all, and values as JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def plain_json(value: Any) -> Any:
    """``default`` of `json.dumps`: arrays and array scalars as lists and numbers, paths as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_atomically(path: Path, content: str | bytes, *, alone: bool = False) -> None:
    """Write so that a reader sees the old content or the whole new one, whenever the writer is killed. Text is UTF-8.

    ``alone``: no other process writes this file, so that the partial one has a name of the file's own, and what a kill
    left of it is overwritten. Raises `OSError` if the disk takes no more; nothing partial stays then.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial" if alone else f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())  # or the name may outlive a power cut that the content does not
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
