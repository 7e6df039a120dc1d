"""Stored models: a Hugging Face directory or hub id, or a GGUF file. Both give the same: settings as in config.json,
tensors by their Hugging Face names, a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from specjax.errors import ModelError
from specjax.models.families import Settings
from specjax.models.files import (
    CARD,
    DRAFT,
    GENERATION,
    HUB_FILES,
    TOKENIZER_JSON,
    import_transformers,
    read_json,
    refuse_outside,
    resolve,
    verify_manifest,
)
from specjax.models.gguf import GGUFFile
from specjax.models.weights import StoredTensors, opened

_TOKENIZER_DATA = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Checkpoint(Protocol):
    """A stored model. Its members raise `ModelError` for what cannot be read."""

    where: Path
    """The directory or file, for messages."""

    @property
    def name(self) -> str:
        """Name of the model, for messages and model cards."""
        ...

    @property
    def settings(self) -> Settings:
        """Settings as config.json has them."""
        ...

    @property
    def generation_file(self) -> Path:
        """The file that `generation` is read from."""
        ...

    @property
    def generation(self) -> dict[str, Any]:
        """Settings as generation_config.json has them; empty if nothing is said."""
        ...

    def check(self) -> None:
        """Refuse what is damaged, as far as can be told without reading the model."""

    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer; None if there is none."""

    def opened(self) -> AbstractContextManager[StoredTensors]:
        """All tensors, whose files are open meanwhile."""
        ...


class Directory:
    """A Hugging Face directory."""

    def __init__(self, where: Path, name: str):
        self.where, self.name, self.generation_file = where, name or where.name, where / GENERATION

    @property
    def settings(self) -> Settings:
        """config.json. Raises `ModelError` for a directory without one."""
        file = self.where / "config.json"
        if (self.where / DRAFT / "config.json").exists() and not file.exists():
            raise ModelError(f"{self.where}: is a run, no model (no config.json); its draft is {self.where / DRAFT}")
        return Settings(read_json(file), file)

    @property
    def generation(self) -> dict[str, Any]:
        return read_json(self.generation_file) if self.generation_file.exists() else {}

    def check(self) -> None:
        """Refuse links that lead out of the directory, and files that are not those of its manifest."""
        for pattern in HUB_FILES:
            for file in self.where.glob(pattern):
                refuse_outside(file)
        verify_manifest(self.where, ignored=(CARD,))  # the card may be edited freely

    def opened(self) -> AbstractContextManager[StoredTensors]:
        return opened(self.where)

    def tokenizer(self) -> Any:
        directory = self.where
        if not any((directory / file).exists() for file in _TOKENIZER_DATA):
            return None
        auto_tokenizer = import_transformers().AutoTokenizer
        try:
            tokenizer = auto_tokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises plain Exception
            for file in filter(Path.exists, (directory / name for name in TOKENIZER_JSON)):
                read_json(file)  # raises an error that names the damaged one
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{directory}: the tokenizer files cannot be read ({reason})") from error
        for key in ("is_local", "local_files_only"):  # they say how it was loaded, and would bind the next reader
            tokenizer.init_kwargs.pop(key, None)
        return tokenizer


def checkpoint_of(
    path_or_hub_id: str | os.PathLike, revision: str | None = None, files: Sequence[str] = HUB_FILES
) -> Checkpoint:
    """Stored model at a path or hub id, of which ``files`` are fetched. Raises `ModelError` if there is nothing."""
    where = resolve(path_or_hub_id, revision, files)
    return GGUFFile(where) if where.is_file() else Directory(where, Path(path_or_hub_id).name)
