"""Training state on disk, written in the background by orbax's `CheckpointManager`. Each step has a SHA-256 manifest,
because a flipped bit is restored silently otherwise. The manifest is written once the step is committed; a marker file
beside the directory then names the step. A step without a manifest is half-written if it is later than the one in the
marker, else damaged. All processes save and restore their shards; process 0 writes and checks the manifests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax.errors import TrainingError, unwritable
from specjax.models.files import sha256, write_json
from specjax.runtime import artifact
from specjax.runtime.distributed import on_main_process
from specjax.runtime.quiet import Quiet

MANIFEST = "sha256.json"
_PENDING, _WHOLE = "pending", "whole"
_HALF_WRITTEN = "half-written, it has no manifest"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored training state, the number of steps that led to it, and the measurements of the last steps that are
    not in the log yet."""

    step: int
    state: Any
    pending: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Checkpoints(contextlib.AbstractContextManager):
    """The last ``max_to_keep`` states under ``directory``, one subdirectory for each step. A step is deleted only when
    a later one has been committed, and a save begins only when the one before has its manifest. ``directory``.json
    names the newest step that was whole.

    Raises `TrainingError` if a state cannot be written; the steps that were saved before stay whole.
    """

    def __init__(self, directory: Path, max_to_keep: int = 2):
        self._directory = directory.absolute()
        self._marker = _marker(self._directory)
        self._quiet = Quiet()
        options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, cleanup_tmp_directories=True)
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except ValueError:  # the metadata of a step, which it reads, are damaged
            on_main_process(self._set_aside_damaged)
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._sealer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="manifest")
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self._latest: int | None = None

    def __exit__(self, kind, *exception) -> None:
        failed = kind is not None
        try:
            self.wait()
        except TrainingError as error:
            failed = True
            if kind is None:
                raise
            _log.warning("%s", error)
        finally:
            # The manager raises the error of its last save again.
            with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
                self._manager.close()
            self._sealer.shutdown()
            self._quiet.end(failed)

    @property
    def latest(self) -> int | None:
        """The newest step that is known to be whole."""
        return self._latest

    @property
    def saved(self) -> int | None:
        """The newest step that was ever whole, even if it is damaged by now. 0: none was. None: there is no record."""
        return on_main_process(lambda: _whole(self._marker))

    @property
    def set_aside(self) -> list[str]:
        """Directory names of the damaged steps that `restore_latest` set aside."""
        return on_main_process(lambda: sorted(folder.name for folder in self._directory.glob(f"*{artifact.DAMAGED}*")))

    @property
    def oldest(self) -> int | None:
        """The oldest step on disk; None if there is none."""
        return min(self._manager.all_steps(), default=None)

    def begin(self) -> None:
        """Record that no step is whole yet. From here on, a missing record means that something was lost."""
        if self.saved is None:
            on_main_process(functools.partial(self._mark, 0))

    def save(self, step: int, state: Any, pending: Sequence[dict[str, float]] = ()) -> None:
        """Begin to write ``state``, a pytree of arrays, once the save before is whole. Return when the state may be
        donated: it is copied to the host, or on CPU still referenced, so that a donation copies it. ``pending``: see
        `Restored`."""
        self.wait()
        with self._failing(step):
            if jax.process_index() == 0 and _whole(self._marker) is None and not self._manager.all_steps():
                self._mark(0)
            saved = ocp.args.StandardSave(state)
            self._manager.save(step, args=saved, custom_metadata={_PENDING: json.dumps(list(pending))}, force=True)
        self._saving = step, self._sealer.submit(self._seal, step)

    def wait(self) -> None:
        """Wait until the last save is whole."""
        if self._saving is not None:
            (step, sealed), self._saving = self._saving, None
            with self._failing(step):
                sealed.result()
            self._latest = step

    def restore_latest(self, like: Any) -> Restored | None:
        """The newest undamaged state, with the structure, shapes, dtypes and shardings of ``like``; None if there is
        none. A damaged step is named in a warning and set aside, as ``STEP.damaged`` beside the others. A half-written
        step is removed: training on from the step before makes it again."""
        self.wait()
        for step in on_main_process(lambda: sorted(self._manager.all_steps(), reverse=True)):
            damage = on_main_process(functools.partial(self._damage, step))
            if damage is None:
                on_main_process(functools.partial(self._mark, step))
                self._latest = step
                return self._restore(step, like)
            if damage == _HALF_WRITTEN:
                _log.warning("%s: checkpoint skipped and removed: %s", self._directory / str(step), damage)
                self._manager.delete(step)
            else:
                on_main_process(functools.partial(self._set_aside, step, damage))
                self._manager.reload()
        return None

    def _set_aside(self, step: int, damage: str) -> None:
        folder = self._directory / str(step)
        aside = artifact.set_aside(folder)
        _log.warning("%s: checkpoint skipped and set aside as %s: %s", folder, aside.name, damage)

    def _set_aside_damaged(self) -> None:
        for step in sorted(int(folder.name) for folder in self._directory.glob("*") if folder.name.isdigit()):
            damage = self._damage(step)
            if damage is not None:
                self._set_aside(step, damage)

    def _mark(self, step: int) -> None:
        if _whole(self._marker) == step:
            return
        try:
            write_json(self._marker, {_WHOLE: step})
        except OSError as error:
            raise unwritable(self._marker, error) from None

    def _restore(self, step: int, like: Any) -> Restored:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{self._directory / str(step)}: its bytes are as they were saved, but they are no state of this stage "
                f"({_one_line(error)}); was it saved by another version? go on with that one, or move "
                f"{self._directory.parent} elsewhere to start the stage over"
            ) from error
        pending = json.loads(self._manager.metadata(step).custom_metadata[_PENDING])
        return Restored(step, found, pending)

    def _seal(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            folder = self._directory / str(step)
            write_json(folder / MANIFEST, _hashes(folder))
            self._mark(step)

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # TensorStore has no exceptions of its own
            kept = "none was saved before" if self._latest is None else f"that of step {self._latest} is whole"
            raise TrainingError(
                f"{self._directory}: the checkpoint of step {step} cannot be written ({_one_line(error)}); {kept}; "
                "make room or mend the directory, then run the same command again"
            ) from error

    def _damage(self, step: int) -> str | None:
        folder = self._directory / str(step)
        try:
            expected = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            # A save begins only when the one before is whole.
            saved = _whole(self._marker)
            later = saved is not None and step > saved
            return _HALF_WRITTEN if later else f"its manifest, {MANIFEST}, is gone, or was never written"
        except ValueError:
            return f"{MANIFEST} is not JSON"
        if not isinstance(expected, dict):
            return f"{MANIFEST} holds no hashes"
        found = _hashes(folder)
        differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        return f"{', '.join(differing)} changed since it was saved" if differing else None


def steps_taken(directory: Path) -> int:
    """The newest step of a `Checkpoints` directory that exists or was ever whole; 0 if none was."""
    there = [int(folder.name) for folder in directory.glob("*") if folder.name.isdigit()]
    return max([*there, _whole(_marker(directory)) or 0])


def _marker(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")


def _whole(marker: Path) -> int | None:
    try:
        return int(json.loads(marker.read_text())[_WHOLE])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    # TensorStore's messages begin with the operation and end with the cause.
    return text if len(text) <= 200 else f"{text[:60]} ... {text[-130:]}"


def _hashes(folder: Path) -> dict[str, str]:
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    # Hidden files are partly written manifests.
    return {name: sha256(file) for name, file in files.items() if name != MANIFEST and not name.startswith(".")}
