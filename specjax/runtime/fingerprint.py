"""Fingerprints of results: digests of all that a result is made from, in a record beside it. A result made from
anything else is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from specjax.errors import TrainingError, unwritable
from specjax.runtime.distributed import whole
from specjax.runtime.files import write_atomically

FILE = "fingerprint.json"
_SECOND = f".{FILE}"
"""Second copy of the record: one that is damaged, empty or gone must not cost the result."""
_OWN = "sha256"
"""Field of a record with the record's own digest, which shows that it is as it was written."""
MayChange = Callable[[Any, Any], str | None]
"""(value then, value now) -> reason why a field may not change so; None if it may."""
_log = logging.getLogger(__name__)
_digests: dict[Any, tuple[tuple[weakref.ref, ...], str]] = {}
_CONTENTS = {
    "train_rows": "the training text",
    "held_out_rows": "the held-out text",
    "train_text": "the training text",
    "prompts": "the prompts",
    "target": "the target's weights",
    "target_params": "the target's weights",
    "target_config": "the target's config",
    "reference_params": "the reference's weights",
    "initial_params": "the weights that training began with",
}
"""Field that is a digest -> name of its content. A digest shows that the content changed, not how."""
_NOT_KNOWN_ONCE = ("target_config", "drafter.every", "initial_made_from", "mesh")
"""Fields that a record of an earlier version may lack, whatever their values are now."""


class Changed(TrainingError):
    """Error: a directory was made with other ``settings`` (in words) or other ``contents`` (fields of `_CONTENTS`)."""

    def __init__(
        self, directory: Path, settings: str, contents: Sequence[str], places: Mapping[str, str] = MappingProxyType({})
    ):
        self.directory, self.settings, self.contents = directory, settings, contents
        names = [_CONTENTS[name] + places.get(name, "") for name in contents]
        told = [f"was made with other settings: {settings}"] if settings else []
        told += [f"changed since it was made: {' and '.join(names)}"] if names else []
        super().__init__(
            f"{directory}: {', and '.join(told)}; restore what it was made from, give another `out`, or move "
            f"{directory} and what was made from it in {directory.parent} elsewhere"
        )

    def at(self, places: Mapping[str, str]) -> Changed:
        """This error, with words that say where each content is read from (field -> words)."""
        return Changed(self.directory, self.settings, self.contents, places)


def digest(tree: Any) -> str:
    """SHA-256 over every leaf's path, dtype, shape and bytes. If several processes hold the arrays, all call it. JAX's
    arrays do not change, so those of a tree are read once as long as they live."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return _digest(tree)
    key = (structure, *map(id, leaves))
    refs, known = _digests.get(key, ((), ""))
    if not refs or any(ref() is not leaf for ref, leaf in zip(refs, leaves, strict=True)):
        known = _digest(tree)
        for old in [old for old, (refs, _) in _digests.items() if any(ref() is None for ref in refs)]:
            del _digests[old]
        _digests[key] = tuple(map(weakref.ref, leaves)), known
    return known


def of_model(model: Any) -> tuple[str, str]:
    """Digests of a model's weights and of its config: the same weights with another rotary embedding, for example, are
    another model."""
    settings = repr(model.spec.config)
    return digest(model.params), hashlib.sha256(settings.encode()).hexdigest()


def _digest(tree: Any) -> str:
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(jax.device_get(whole(leaf)))
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def claim(
    directory: Path,
    fingerprint: Mapping[str, Any],
    may_change: Mapping[str, MayChange] | None = None,
    *,
    keep: bool = False,
) -> None:
    """Create ``directory`` for the result that ``fingerprint`` determines, or check that it was made for just that. The
    record has two copies: one that is damaged or gone is named in a warning and written again from the other.

    ``fingerprint``: a JSON object. ``may_change``: name of a field that may differ -> its rule. The record gets the new
    value, or with ``keep`` retains the old one for a later call to change.

    Raises `TrainingError` naming the fields that differ, a record of which both copies are damaged, or the reason why
    the directory cannot be made.
    """
    wanted = json.loads(json.dumps(fingerprint))
    wanted[_OWN] = of_record(wanted)
    records = {name: _read(directory / name) for name in (FILE, _SECOND)}
    if not any(record is not None for record in records.values()):
        _create(directory, wanted)
        return
    found = _intact(records)
    if found is None:
        raise TrainingError(
            f"{directory / FILE}: damaged, and not known to be of these settings; put it back from a copy, give "
            f"another `out`, or move {directory} elsewhere to make anew what is in it"
        )
    differing = _differing(found, wanted)
    _refuse_changes(directory, differing, may_change or {})
    if records[FILE] != found:
        _log.warning("%s: damaged or gone; written again from its copy, %s", directory / FILE, _SECOND)
    now = found if keep and differing else wanted
    # Readers believe the first copy, so it changes first.
    for name in (FILE, _SECOND):
        if records[name] != now:
            write_json(directory / name, now)


def _create(directory: Path, fingerprint: Mapping[str, Any]) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise TrainingError(
            f"{directory}: holds files but no {FILE}; give another `out`, or move {directory} elsewhere"
        )
    # The directory appears with its record inside, so a kill leaves no directory of unknown origin.
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name in (FILE, _SECOND):
            write_json(partial / name, fingerprint)
        if directory.exists():
            directory.rmdir()
        os.rename(partial, directory)
    except OSError as error:
        raise unwritable(directory, error) from None


def made_from(directory: Path) -> dict[str, Any]:
    """Fingerprint of the result in a claimed ``directory``."""
    found = _intact({name: _read(directory / name) for name in (FILE, _SECOND)}) or {}
    return {name: value for name, value in found.items() if name != _OWN}


def write_record(file: Path, record: Mapping[Any, Any]) -> None:
    """Write a JSON object with its own digest, for `read_record`."""
    record = json.loads(json.dumps(record))
    write_json(file, {**record, _OWN: of_record(record)})


def read_record(file: Path, then: str) -> dict[str, Any] | None:
    """The object that `write_record` wrote, without its digest. None if the file does not exist, or is not as it was
    written; a warning tells of the latter, and of the consequence ``then``."""
    found = _read(file)
    if found is None:
        return None
    known = found.pop(_OWN, None)
    if known == of_record(found):
        return found
    _log.warning("%s: %s; %s", file, "of an earlier version, or damaged" if known is None else "damaged", then)
    return None


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON in place of the file's content (`write_atomically`)."""
    write_atomically(file, json.dumps(value, indent=1, sort_keys=True) + "\n", alone=True)


def of_record(record: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, without its own digest if it holds that."""
    fields = {name: value for name, value in record.items() if name != _OWN}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[str, Any] | None:
    """Record in a file; None if there is no file. A file that is no record gives one that is not intact."""
    damaged = {_OWN: ""}
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return damaged
    return found if isinstance(found, dict) else damaged


def _intact(records: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """The first intact record, None if there is none. An earlier version wrote only one, without its digest."""
    for record in records.values():
        if record is not None and record.get(_OWN) == of_record(record):
            return record
    first = records[FILE]
    return first if first is not None and records[_SECOND] is None and _OWN not in first else None


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differing field -> (value then, value now). A missing field is None: an earlier version did not know it."""
    was, now = _flat(found), _flat(wanted)
    ignored = {_OWN, *(n for n in _NOT_KNOWN_ONCE if n not in was)}
    names = sorted(n for n in was | now if n not in ignored and was.get(n) != now.get(n))
    return {name: (was.get(name), now.get(name)) for name in names}


def _refuse_changes(
    directory: Path, differing: Mapping[str, tuple[Any, Any]], may_change: Mapping[str, MayChange]
) -> None:
    reasons = {name: may_change[name](*values) for name, values in differing.items() if name in may_change}
    refused = [name for name in differing if name not in reasons or reasons[name]]
    if not refused:
        return
    settings = [name for name in refused if name not in _CONTENTS]
    shown = ", ".join(f"{n} ({_short(differing[n][0])} then, {_short(differing[n][1])} now)" for n in settings)
    why = "".join(f"; {reason}" for reason in reasons.values() if reason)
    raise Changed(directory, shown + why, [name for name in refused if name in _CONTENTS])


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return flat


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"
