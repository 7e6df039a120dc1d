"""Header of a GGUF file: its settings, and where each tensor lies. The package ``gguf`` reads headers as well, but
takes seconds where this takes a tenth of one: it makes arrays of each string of the vocabulary.

The format is specified in the repository ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import ModelError

_MAGIC = b"GGUF"
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Number of a type of values -> its code in `struct`."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PART = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Place of a tensor. ``shape``: the slowest axis first, as in numpy; the file says it the other way round."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """Number of its type, see `gguf.GGMLQuantizationType`."""
    start: int
    """First byte in ``file``."""
    file: Path


@dataclasses.dataclass(frozen=True)
class Header:
    """Settings in a file, or in the first of several parts; and the tensors of all parts."""

    file: Path
    values: dict[str, Any]
    tensors: dict[str, Entry]


def read_header(file: Path) -> Header:
    """Header of ``file``, with the tensors of all its parts. Raises `ModelError` for a file that is none, that is cut
    short, or whose parts are not all there."""
    values, tensors = _read_one(file)
    parts = values.get("split.count", 1)
    if parts > 1:
        for part in _parts(file, parts):
            if part != file:
                tensors |= _read_one(part)[1]
        expected = values.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise ModelError(f"{file}: its parts hold {len(tensors)} tensors, split.tensors.count says {expected}")
    return Header(file, values, tensors)


def _parts(file: Path, count: int) -> list[Path]:
    """All parts of a split file, of which ``file`` is the first."""
    name = _PART.match(file.name)
    if name is None:
        raise ModelError(f"{file}: is one of {count} parts, and its name should end in -00001-of-{count:05}.gguf")
    parts = [file.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if parts[0] != file:
        raise ModelError(f"{file}: is part {int(name['part'])} of {count}; give the first one, {parts[0].name}")
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise ModelError(f"{file}: is one of {count} parts, and there is no {missing[0]} beside it; fetch it too")
    return parts


def _read_one(file: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            if size < 24:
                raise ModelError(f"{file}: {size} bytes are no GGUF file; fetch it again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).all()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error})") from None


class _Reader:
    """A place in the file that moves on with what is read."""

    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.at = file, data, 0

    def all(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.data[:4] != _MAGIC:
            raise ModelError(f"{self.file}: is no GGUF file: it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.file}: its numbers are big-endian, which is not read; convert the model again")
        if version not in (2, 3):
            raise ModelError(f"{self.file}: is GGUF version {version}, versions 2 and 3 are read; convert it again")
        try:
            tensor_count, value_count = self.number("Q"), self.number("Q")
            values = {}
            for _ in range(value_count):
                name = self.text()
                values[name] = self.value(self.number("I"))
            found = [self.entry() for _ in range(tensor_count)]
        except (struct.error, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise ModelError(
                f"{self.file}: its header is damaged at byte {self.at} ({error}); fetch it again"
            ) from None
        alignment = values.get("general.alignment") or 32
        base = -(-self.at // alignment) * alignment
        return values, {name: Entry(name, shape, kind, base + at, self.file) for name, shape, kind, at in found}

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error(f"a text of {length} bytes, and the file ends")
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise struct.error(f"type {kind} of a value is not known")
        kind, count = self.number("I"), self.number("Q")
        if kind not in _NUMBERS:
            return [self.value(kind) for _ in range(count)]
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        start, self.at = self.at, self.at + count * dtype.itemsize
        if self.at > len(self.data):
            raise struct.error(f"{count} numbers, and the file ends")
        return np.frombuffer(self.data[start : self.at], dtype).tolist()

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.text(), self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise struct.error(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.number("I"), self.number("Q")
