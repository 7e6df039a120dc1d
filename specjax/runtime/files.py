"""Results as JSON files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def plain_json(value: Any) -> Any:
    """``default`` of `json.dumps`: arrays and array scalars as lists and numbers, paths as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_atomically(path: Path, text: str) -> None:
    """The whole text or what was there before, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
