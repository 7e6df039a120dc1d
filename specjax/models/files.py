"""Files that appear whole or not at all, JSON files, and the ``SHA256SUMS`` manifest of a model directory, because
safetensors does not notice a flipped bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from specjax.errors import ModelError

MANIFEST = "SHA256SUMS"


def named(value: Any) -> str:
    """Argument of a caller as an error shows it: text and numbers as they are, anything larger by its type."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        return reprlib.repr(value)
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


def check_model(model: Any, what: str) -> None:
    """Raises `ModelError` unless ``model`` has the ``spec``, ``config`` and ``tokenizer`` of a model."""
    if not all(hasattr(model, name) for name in ("spec", "config", "tokenizer")):
        raise ModelError(f"{what}: {named(model)} is no model; give what specjax.load_model(PATH) returns")


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file}: missing; a Hugging Face model directory has one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds {type(value).__name__}, expected a JSON object")
    return value


def plain_json(value: Any) -> Any:
    """``default`` of `json.dumps`: arrays and array scalars as lists and numbers, paths as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_json(file: Path, value: Any, *, published: bool = False) -> None:
    """Write a value as JSON in place of the file's content (`write_atomically`). ``published``: in the form of a
    Hugging Face directory, whose text is not escaped."""
    form: dict[str, Any] = {"indent": 2, "ensure_ascii": False} if published else {"indent": 1}
    write_atomically(file, json.dumps(value, sort_keys=True, **form) + "\n", alone=True)


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


def flush(*paths: Path) -> None:
    """Force the contents of these files and directories out of the disk's cache, onto the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refuse_outside(file: Path) -> None:
    """Raises `ModelError` for a link that leads out of its directory. Allowed are the links of the hub's cache: files
    of ``snapshots/<commit>`` lead to ``blobs`` of the same repository."""
    try:
        directory, found = file.parent.resolve(), file.resolve()
    except RuntimeError:  # raised by pathlib before Python 3.13
        raise ModelError(f"{file}: is a link to itself; copy the file there instead") from None
    blobs = directory.parents[1] / "blobs" if directory.parent.name == "snapshots" else directory
    if not found.is_relative_to(directory) and not found.is_relative_to(blobs):
        raise ModelError(f"{file}: is a link to {found}, outside the model directory; copy the file there instead")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(directory: Path) -> None:
    """List every file of the directory in the format of ``sha256sum -c``."""
    lines = [f"{sha256(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
    (directory / MANIFEST).write_text("".join(lines), encoding="utf-8")


def verify_manifest(directory: Path, ignored: Collection[str] = ()) -> None:
    """Raises `ModelError` naming the first file that differs from the manifest; without a manifest, nothing is
    checked."""
    manifest = directory / MANIFEST
    for name, digest in _entries(manifest) if manifest.exists() else ():
        file = directory / name
        if name in ignored:
            continue
        if not file.is_file():
            raise ModelError(f"{file}: missing, though {MANIFEST} lists it; fetch it again")
        if sha256(file) != digest:
            remedy = f"fetch it again, or delete {MANIFEST} if the change is meant"
            raise ModelError(f"{file}: differs from its entry in {MANIFEST}; {remedy}")


def _entries(manifest: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{manifest}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not name or Path(name).name != name:
            raise ModelError(f"{manifest}, line {number}: {line!r} is not '<sha256>  <file name>'")
        yield name, digest
