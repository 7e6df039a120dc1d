"""Sequences stored as files."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load, save

from specjax.data.rows import Sequences

SUFFIX = ".safetensors"
_ARRAYS = ("tokens", "ends", "prompts")


def to_bytes(sequences: Sequences) -> bytes:
    return save({name: getattr(sequences, name) for name in _ARRAYS})


def read(file: Path) -> Sequences:
    return Sequences(**load(file.read_bytes()))
