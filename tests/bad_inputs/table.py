"""A table of bad inputs: what a user does wrong, and what the one line of the error must say: what, where, the value
and the remedy. A row is added in the module of its edge; `test_the_table_is_large` counts them all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specjax.models.hf import LoadedModel, load_model


@dataclasses.dataclass(frozen=True)
class World:
    """What rows are made of. ``tmp``: an empty directory of the row's own; ``saved``: a model directory, shared."""

    target: LoadedModel
    draft: LoadedModel
    tmp: Path
    saved: Path

    @property
    def textless(self) -> LoadedModel:
        return dataclasses.replace(self.target, tokenizer=None)

    def model(self, *, without: Sequence[str] = (), **settings: Any) -> Path:
        """A copy of ``saved`` with other settings in its config.json (None removes one), and no manifest."""
        path = self.tmp / "model"
        shutil.copytree(self.saved, path, ignore=shutil.ignore_patterns("SHA256SUMS", *without))
        if settings:
            file = path / "config.json"
            known = json.loads(file.read_text()) | settings
            file.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))
        return path

    def load(self, **settings: Any) -> LoadedModel:
        return load_model(self.model(**settings))

    def file(self, name: str, content: str | bytes = "") -> Path:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@dataclasses.dataclass(frozen=True)
class Row:
    """``call`` must fail with ``error``, one line that holds every one of ``says``; ``{tmp}`` in them is the row's own
    directory."""

    call: Callable[[World], Any]
    error: type[Exception]
    says: tuple[str, ...]


def row(error: type[Exception], call: Callable[[World], Any], *says: str) -> Row:
    return Row(call, error, says)


def check(row: Row, world: World) -> None:
    with pytest.raises(row.error) as caught:
        row.call(world)
    message = str(caught.value)
    assert "\n" not in message, message
    missing = [said for said in (text.replace("{tmp}", str(world.tmp)) for text in row.says) if said not in message]
    assert not missing, f"{missing} not in: {message}"
