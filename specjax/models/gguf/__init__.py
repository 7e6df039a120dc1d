"""Models in GGUF files, as llama.cpp has them, read as if they were Hugging Face directories. ``header`` says what is
in a file, ``architectures`` what its names mean, ``tensors`` reads the weights, ``tokenizer`` builds the tokenizer."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from specjax.models.families.settings import Settings
from specjax.models.gguf.architectures import ROPE_TENSORS, places_of, settings_of
from specjax.models.gguf.header import Header, read_header
from specjax.models.gguf.tensors import opened
from specjax.models.gguf.tokenizer import Vocabulary, tokenizer_of
from specjax.models.weights import StoredTensors

__all__ = ["GGUFFile"]


class GGUFFile:
    """A model in a GGUF file, or in several parts of which this is the first. Raises `ModelError` for what cannot be
    read."""

    def __init__(self, file: Path):
        self.where = self.generation_file = file
        self.name = file.stem

    @functools.cached_property
    def header(self) -> Header:
        return read_header(self.where)

    @property
    def settings(self) -> Settings:
        """Settings as config.json would have them."""
        return Settings(settings_of(self.header), self.where)

    @property
    def generation(self) -> dict[str, Any]:
        """Settings as generation_config.json would have them."""
        return {"eos_token_id": [*Vocabulary(self.header).eos_ids]}

    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer, None if there is none."""
        return tokenizer_of(self.header)

    def check(self) -> None:
        """Nothing: the header is checked when it is read, and there is no manifest."""

    def opened(self) -> AbstractContextManager[StoredTensors]:
        """The tensors by their Hugging Face names."""
        return opened(self.header, places_of(self.header), ROPE_TENSORS)
