"""Write files that appear whole or not at all, and turn values into JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def plain_json(value: Any) -> Any:
    """``default`` of `json.dumps`: arrays and array scalars as lists and numbers, paths as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_atomically(path: Path, content: str | bytes, *, alone: bool = False) -> None:
    """Write a file so that readers see the old content or the whole new one, even if the writer is killed. Text is
    UTF-8.

    ``alone``: no other process writes this file. The partial file then has a fixed name, so that one left by a kill is
    overwritten. Raises `OSError` if the disk is full; no partial file stays then.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial" if alone else f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())  # else a power cut may leave the name without the content
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
