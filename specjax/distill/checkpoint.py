"""Training state on disk: orbax's `CheckpointManager`, plus a SHA-256 manifest a step, because a flipped bit restores
silently otherwise. The manifest is written after the step is committed: no manifest means half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax.distill.distributed import by_first
from specjax.distill.fingerprint import write_json

MANIFEST = "sha256.json"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A training state and the number of steps that led to it."""

    step: int
    state: Any


class Checkpoints(contextlib.AbstractContextManager):
    """The last ``max_to_keep`` states under ``directory``, one subdirectory a step."""

    def __init__(self, directory: Path, max_to_keep: int = 2):
        self._directory = directory.absolute()
        # Synchronous, so that the manifest follows the commit; a state of this size takes milliseconds.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __exit__(self, *exception) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The newest step that was saved."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """``state``: a pytree of arrays."""
        self._manager.save(step, args=ocp.args.StandardSave(state))
        folder = self._directory / str(step)
        by_first(lambda: write_json(folder / MANIFEST, _hashes(folder)))

    def restore_latest(self, like: Any) -> Restored | None:
        """The newest undamaged state, with the structure, shapes, dtypes and devices of ``like``; None if there is
        none. A damaged or half-written step is named in a warning and removed, so that it can be saved again."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        for step in by_first(lambda: sorted(self._manager.all_steps(), reverse=True)):
            damage = by_first(functools.partial(self._damage, step))
            if damage is None:
                return Restored(step, self._manager.restore(step, args=ocp.args.StandardRestore(abstract)))
            _log.warning("%s: checkpoint skipped and removed: %s", self._directory / str(step), damage)
            self._manager.delete(step)
        return None

    def _damage(self, step: int) -> str | None:
        folder = self._directory / str(step)
        try:
            expected = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            return "half-written, it has no manifest"
        except ValueError:
            return f"{MANIFEST} is not JSON"
        found = _hashes(folder)
        differing = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        return f"{', '.join(differing)} changed since it was saved" if differing else None


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        # Hidden files are manifests in the writing.
        if file.is_file() and name != MANIFEST and not name.startswith("."):
            with file.open("rb") as content:
                hashes[name] = hashlib.file_digest(content, "sha256").hexdigest()
    return hashes
