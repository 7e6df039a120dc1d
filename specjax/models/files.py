"""Files of a model directory: where it lies, its JSON, its manifest ``SHA256SUMS``, because safetensors does not notice
a flipped bit; and files that appear whole or not at all."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import reprlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import ModelError

MANIFEST, GENERATION, CARD = "SHA256SUMS", "generation_config.json", "README.md"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_PICKLE = "pickle formats (.bin, .pt, .pth, .ckpt) are never read, because unpickling runs code from the file"
GGUF = ".gguf"
DRAFT = "draft"
"""Name of the draft's directory in a run directory."""
TOKENIZER_JSON = (
    *("tokenizer.json", "vocab.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.json",
)
HUB_FILES = (
    *("*.safetensors", "medusa_lm_head.pt", INDEX, "config.json", GENERATION),
    *("tokenizer.model", "merges.txt", "chat_template.jinja", *TOKENIZER_JSON),
)
"""Patterns of the files that are fetched for a hub id."""


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


def import_transformers() -> Any:
    """The transformers package, imported late because that takes seconds, and without its notice that torch is
    missing."""

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        import transformers
    finally:
        logger.removeFilter(keep)
    return transformers


# --- finding a directory ----------------------------------------------------------------------------------------------


def draft_of(source: str | os.PathLike) -> str | os.PathLike:
    """Model directory or hub id of the draft ``source``, for `load_model`: ``source`` itself, or of a run directory its
    draft. Raises `ModelError` for a directory that is neither."""
    directory = Path(source).expanduser() if isinstance(source, (str, os.PathLike)) and str(source) else None
    if directory is None or not directory.is_dir() or (directory / "config.json").exists():
        return source
    if not (directory / DRAFT / "config.json").exists():
        raise ModelError(
            f"{directory}: neither a model directory (no config.json) nor a run with a draft (no {DRAFT}/config.json); "
            "if it is a run, finish it with `specjax train` first"
        )
    return directory / DRAFT


def resolve(path_or_hub_id: str | os.PathLike, revision: str | None = None, files: Sequence[str] = HUB_FILES) -> Path:
    """Directory of a model, or its GGUF file; for a hub id, its ``files`` are downloaded first."""
    if not isinstance(path_or_hub_id, (str, os.PathLike)) or not str(path_or_hub_id):
        raise ModelError(f"{named(path_or_hub_id)} is no path; give a Hugging Face directory or a hub id")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ModelError(f"{path}: revision={revision!r} needs a hub id, and this is a local directory; drop one")
        return path
    if path.is_file() and path.suffix == GGUF:
        return path
    if path.exists():
        raise ModelError(f"{path}: is a file; give the Hugging Face directory that holds it. {NO_PICKLE}")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(path_or_hub_id)):
        raise ModelError(f"{path}: no such directory; give a Hugging Face directory or a hub id such as owner/name")
    import huggingface_hub

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        str(path_or_hub_id),
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=["*/*", "consolidated*"],  # the same weights again, in Mistral's format
    )
    try:
        try:
            return Path(fetch())
        except (OSError, ValueError):
            raise
        except Exception:  # of its HTTP library, as from a proxy that is down: use the cache
            return Path(fetch(local_files_only=True))
    except (OSError, ValueError) as error:  # the hub's own errors derive from OSError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{path_or_hub_id}: no such local directory, and as a hub id it cannot be fetched ({reason})"
        ) from error
