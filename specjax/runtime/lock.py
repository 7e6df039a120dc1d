"""Advisory locks, so that one process uses a run directory. The system frees a lock when its holder ends in any way."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from specjax.errors import TrainingError, unwritable
from specjax.runtime.log import note

LOCK = ".lock"


@contextlib.contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """Hold the lock ``file`` (it and its directory are created if missing), after waiting for another run that has it.

    Raises `TrainingError` if the file cannot be made.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+")
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
        directory.mkdir(parents=True, exist_ok=True)
        # Appending does not erase the holder's id before the lock is ours.
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise TrainingError(f"{directory}: cannot be used as a run directory ({error}); give another `out`") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise TrainingError(
                f"{directory}: in use by another run (process {holder}); wait for it, stop it, or give another `out`"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        # The file stays: removing it would let two runs hold locks on two files of the same name.
        yield
