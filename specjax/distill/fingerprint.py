"""What determines a result, by content: digests of arrays, and a record beside the result that refuses to be mixed
with another one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from specjax.distill.distributed import whole
from specjax.errors import TrainingError, unwritable

FILE = "fingerprint.json"
_CONTENTS = {
    "train_rows": "the training text",
    "held_out_rows": "the held-out text",
    "train_text": "the training text",
    "target_params": "the target's weights",
    "reference_params": "the reference's weights",
    "initial_params": "the weights that training began with",
}
"""Fields that are digests of a content: they tell that it changed, not how."""


class Changed(TrainingError):
    """A directory was made with other ``settings``, in words, or from other ``contents``, fields of `_CONTENTS`."""

    def __init__(
        self, directory: Path, settings: str, contents: Sequence[str], places: Mapping[str, str] = MappingProxyType({})
    ):
        self.directory, self.settings, self.contents = directory, settings, contents
        names = [_CONTENTS[name] + places.get(name, "") for name in contents]
        told = [f"was made with other settings: {settings}"] if settings else []
        told += [f"changed since it was made: {' and '.join(names)}"] if names else []
        super().__init__(
            f"{directory}: {', and '.join(told)}; restore what it was made from, give another `out`, or remove "
            f"{directory} and what was made from it in {directory.parent}"
        )

    def at(self, places: Mapping[str, str]) -> Changed:
        """The same, with where each content is read from (field -> words)."""
        return Changed(self.directory, self.settings, self.contents, places)


def digest(tree: Any) -> str:
    """SHA-256 over every leaf's path, dtype, shape and bytes. Of arrays that lie on several processes, all call it."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(jax.device_get(whole(leaf)))
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def claim(directory: Path, fingerprint: Mapping[str, Any]) -> None:
    """Create ``directory`` for the result that ``fingerprint`` determines, or check that it was made for just that.

    ``fingerprint``: a JSON object. Raises `TrainingError` naming the fields that differ, the damaged record, or what
    keeps the directory from being made.
    """
    file = directory / FILE
    wanted = _flat(json.loads(json.dumps(fingerprint)))
    if file.exists():
        try:
            found = _flat(json.loads(file.read_text()))
        except (ValueError, AttributeError):
            raise TrainingError(f"{file}: damaged; remove {directory} to start it over") from None
        differing = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        if differing:
            settings = [n for n in differing if n not in _CONTENTS]
            shown = ", ".join(f"{n} ({_short(found, n)} then, {_short(wanted, n)} now)" for n in settings)
            raise Changed(directory, shown, [n for n in differing if n in _CONTENTS])
        return
    if directory.exists() and any(directory.iterdir()):
        raise TrainingError(f"{directory}: holds files but no {FILE}; give another `out`, or remove {directory}")
    # The directory appears with its record inside, so a kill leaves no directory of unknown origin.
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        write_json(partial / FILE, fingerprint)
        if directory.exists():
            directory.rmdir()
        os.rename(partial, directory)
    except OSError as error:
        raise unwritable(directory, error) from None


def write_json(file: Path, value: Any) -> None:
    """Write so that a reader sees the old content or the new, whenever the writer is killed."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w") as out:
            json.dump(value, out, indent=1, sort_keys=True)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


def _short(fields: Mapping[str, Any], name: str) -> str:
    text = repr(fields[name]) if name in fields else "not set"
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"
