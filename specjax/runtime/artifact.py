"""Files that a later run believes. A directory is claimed for all that its result is made from; a record holds its own
SHA-256, and a costly file has one beside it, written after the file. What is damaged, half-written or made from
anything else is refused, or set aside and made again. Locks keep two runs from writing the same."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from flax.traverse_util import flatten_dict

from specjax.errors import DataError, TrainingError, unwritable
from specjax.models.files import sha256, write_atomically, write_json
from specjax.runtime.fingerprint import of_json
from specjax.runtime.log import note

FILE, PROVENANCE = "fingerprint.json", "provenance.json"
_COPIES = (FILE, f".{FILE}")
"""Copies of a claim's record: one that is damaged, empty or gone must not cost the result. Readers believe the first
one, so it changes first."""
LOCK = ".lock"
DAMAGED, REPLACED = ".damaged", ".replaced"
"""Suffixes of the names of files and directories that were set aside."""
_OWN = "sha256"
"""Field of a record with its own digest, or with that of the file which it stands beside."""
_UNREADABLE = {_OWN: ""}
MayChange = Callable[[Any, Any], str | None]
"""(value then, value now) -> reason why a field may not change so; None if it may."""
_log = logging.getLogger(__name__)
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
        problems = [f"was made with other settings: {settings}"] if settings else []
        problems += [f"changed since it was made: {' and '.join(names)}"] if names else []
        super().__init__(
            f"{directory}: {', and '.join(problems)}; restore what it was made from, give another `out`, or move "
            f"{directory} and what was made from it in {directory.parent} elsewhere"
        )

    def at(self, places: Mapping[str, str]) -> Changed:
        """This error, with words that say where each content is read from (field -> words)."""
        return Changed(self.directory, self.settings, self.contents, places)


# Directories that are claimed.


def claim(
    directory: Path,
    inputs: Mapping[str, Any],
    may_change: Mapping[str, MayChange] | None = None,
    *,
    keep: bool = False,
) -> None:
    """Create ``directory`` for the result that ``inputs`` determine, or check that it was made for just that. The
    record has two copies: one that is damaged or gone is named in a warning and written again from the other.

    ``inputs``: a JSON object. ``may_change``: name of a field that may differ -> its rule. The record gets the new
    value, or with ``keep`` retains the old one for a later call to change.

    Raises `TrainingError` naming the fields that differ, a record of which both copies are damaged, or the reason why
    the directory cannot be made.
    """
    wanted, copies = _sealed(inputs), _copies(directory)
    if not any(copy is not None for copy in copies.values()):
        _create(directory, wanted)
        return
    found = _intact(copies)
    if found is None:
        raise TrainingError(
            f"{directory / FILE}: damaged, and not known to be of these settings; put it back from a copy, give "
            f"another `out`, or move {directory} elsewhere to make anew what is in it"
        )
    differing = _differing(found, wanted)
    _refuse_changes(directory, differing, may_change or {})
    if copies[FILE] != found:
        _log.warning("%s: damaged or gone; written again from its copy, %s", directory / FILE, _COPIES[1])
    now = found if keep and differing else wanted
    for name, copy in copies.items():
        if copy != now:
            write_json(directory / name, now)


def made_from(directory: Path) -> dict[str, Any]:
    """Inputs of the result in a claimed ``directory``."""
    return _unsealed(_intact(_copies(directory)) or {})


def write_provenance(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write, beside the inputs of a result that is whole, ``facts`` about it."""
    write_json(directory / PROVENANCE, {**made_from(directory), **facts})


def read_provenance(directory: Path) -> dict[str, Any]:
    """Inputs of a whole result, and the facts about it."""
    return json.loads((directory / PROVENANCE).read_text())


def refuse_full_disk(directory: Path, size: float, what: str, remedy: str) -> None:
    """Raise `DataError` if the disk of ``directory`` has no room for ``size`` bytes of ``what``."""
    free = shutil.disk_usage(directory).free
    if size > free:
        raise DataError(
            f"{directory}: {size / 1e6:,.1f} MB are wanted for {what}, and {free / 1e6:,.1f} MB are free on its disk; "
            f"free some, or {remedy}"
        )


def _create(directory: Path, record: Mapping[str, Any]) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise TrainingError(
            f"{directory}: holds files but no {FILE}; give another `out`, or move {directory} elsewhere"
        )
    # The directory appears with its record inside, so a kill leaves no directory of unknown origin.
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name in _COPIES:
            write_json(partial / name, record)
        if directory.exists():
            directory.rmdir()
        os.rename(partial, directory)
    except OSError as error:
        raise unwritable(directory, error) from None


def _copies(directory: Path) -> dict[str, dict[str, Any] | None]:
    return {name: _read(directory / name) for name in _COPIES}


def _intact(copies: Mapping[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """The first intact copy, None if there is none. An earlier version wrote only one, without its digest."""
    first, second = copies.values()
    earlier = first if first is not None and second is None and _OWN not in first else None
    return next((copy for copy in (first, second) if copy is not None and _is_whole(copy)), earlier)


def _differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differing field -> (value then, value now). A missing field is None: an earlier version did not know it."""
    was, now = (flatten_dict(_unsealed(record), sep=".") for record in (found, wanted))
    names = sorted(n for n in was | now if n in was or n not in _NOT_KNOWN_ONCE)
    return {name: (was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)}


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


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 24 else f"{text[:20]}...{text[-1]}"


# Records with their own digest.


def write_record(file: Path, record: Mapping[Any, Any]) -> None:
    """Write a JSON object with its own digest, for `read_record`."""
    write_json(file, _sealed(record))


def read_record(file: Path, then: str) -> dict[str, Any] | None:
    """The object that `write_record` wrote, without its digest. None if the file does not exist, or is not as it was
    written; a warning tells of the latter, and of the consequence ``then``."""
    found = _read(file)
    if found is None or _is_whole(found):
        return None if found is None else _unsealed(found)
    _log.warning("%s: %s; %s", file, "damaged" if _OWN in found else "of an earlier version, or damaged", then)
    return None


def _sealed(record: Mapping[Any, Any]) -> dict[str, Any]:
    """The record as JSON gives it back, with its own digest."""
    plain = json.loads(json.dumps(_unsealed(record)))
    return {**plain, _OWN: of_json(plain)}


def _unsealed(record: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in record.items() if name != _OWN}


def _is_whole(record: Mapping[str, Any]) -> bool:
    return record.get(_OWN) == of_json(_unsealed(record))


def _read(file: Path) -> dict[str, Any] | None:
    """JSON object in a file; None if there is no file. Anything else gives a record that is not intact."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return _UNREADABLE
    return found if isinstance(found, dict) else _UNREADABLE


# Files that are costly to make, each with a record beside it.


def write(file: Path, content: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write a file, and after it a record with its SHA-256 and ``facts`` about it; return the record. Raises
    `TrainingError` if they cannot be written; nothing half-written stays."""
    record = {**facts, _OWN: hashlib.sha256(content).hexdigest()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content, alone=True)
        write_json(file.with_suffix(".json"), record)
    except OSError as error:
        raise unwritable(file, error) from None
    return record


def record_of(file: Path) -> dict[str, Any] | None:
    """Record of an undamaged file; None for a missing, half-written or damaged one. A warning names a damaged file."""
    record = _read(file.with_suffix(".json"))
    if record is None:
        return None
    if not record.get(_OWN):
        damage = "its record is damaged"
    elif not file.exists():
        damage = "missing, though it has a record"
    elif sha256(file) == record[_OWN]:
        return record
    else:
        damage = "changed since it was written"
    _log.warning("%s: %s", file, damage)
    return None


def remove(file: Path) -> None:
    """Delete a file, its record first: after a kill in between, the file counts as half-written."""
    file.with_suffix(".json").unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def set_aside(path: Path, why: str = DAMAGED) -> Path:
    """Rename a file or directory, as it is, to a name of its own; nothing is deleted. Returns the new path."""
    aside, number = path.with_name(f"{path.name}{why}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}{why}-{number}")
    try:
        os.rename(path, aside)
    except OSError as error:
        raise unwritable(path, error) from None
    return aside


# Advisory locks. The system frees one when its holder ends in any way. Their files stay: removing one would let two
# runs hold locks on two files of the same name.


@contextlib.contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """Hold the lock ``file`` (it and its directory are created if missing), after waiting for another run that has it.

    Raises `TrainingError` if the file cannot be made.
    """
    try:
        opened = _opened(file)
    except OSError as error:
        raise unwritable(file, error) from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"{file.parent}: another run makes there what this one needs; waiting for it")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def exclusive(directory: str | os.PathLike) -> Iterator[None]:
    """Hold ``directory/.lock`` (both are created if missing) until the block ends.

    Raises `TrainingError` naming the directory and the holder's process id if another run has it.
    """
    directory = Path(directory)
    try:
        opened = _opened(directory / LOCK)
    except OSError as error:
        raise TrainingError(f"{directory}: cannot be used as a run directory ({error}); give another `out`") from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.seek(0)
            holder = opened.read().strip() or "unknown"
            raise TrainingError(
                f"{directory}: in use by another run (process {holder}); wait for it, stop it, or give another `out`"
            ) from None
        opened.truncate(0)
        opened.write(str(os.getpid()))
        opened.flush()
        yield


def _opened(file: Path) -> IO[str]:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.open("a+")  # appending does not erase the holder's id before the lock is ours
