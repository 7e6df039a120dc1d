"""Tensors of a GGUF file under their Hugging Face names, in float32 or as they are stored. Values are those of the
package ``gguf``; nothing but the rows asked for is read and widened."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import ModelError
from specjax.models.gguf.header import Entry, Header
from specjax.models.weights import StoredTensors

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a tensor of the model in the file. ``heads``: if it is set, the rows of each of so many heads
    alternate between the two halves of its features, and are put back. ``offset``: number added to the values."""

    name: str
    heads: int | None = None
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file, read by `specjax.models.weights` as those of safetensors are."""

    entry: Entry
    place: Place

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def file(self) -> Path:
        return self.entry.file

    def header(self) -> tuple[tuple[int, ...], str]:
        """(its shape, the dtype that holds its values)."""
        kind = kind_of(self.entry).name
        return self.entry.shape, kind if kind in ("F16", "BF16", "F64") else "F32"

    def value(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The whole tensor or a piece of it. Of quantised types and bfloat16: in float32."""
        rows = np.arange(self.entry.shape[0])
        if self.place.heads is not None:
            rows = rows.reshape(self.place.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        first, *rest = index or (slice(None),)
        value = self._rows(rows[first])[(slice(None), *rest)]
        return value + np.float32(self.place.offset) if self.place.offset else value

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        entry, kind = self.entry, kind_of(self.entry)
        refuse_cut(entry)
        bytes_of_row = num_bytes(entry) // entry.shape[0]
        stored = np.memmap(entry.file, np.uint8, "r", entry.start, (entry.shape[0], bytes_of_row))
        found = np.asarray(stored[rows])
        if kind.name in _PLAIN:
            return found.view(_PLAIN[kind.name]).reshape(len(rows), *entry.shape[1:])
        return import_gguf().dequantize(found, kind).reshape(len(rows), *entry.shape[1:])


def import_gguf() -> Any:
    """Module ``gguf.quants``. Raises `ModelError` if the package is not installed."""
    try:
        import gguf.quants as quants
    except ImportError:
        raise ModelError("GGUF files are read with the package gguf: pip install 'specjax[gguf]'") from None
    return quants


def kind_of(entry: Entry) -> Any:
    """Type of a tensor, a `gguf.GGMLQuantizationType`. Raises `ModelError` for one that cannot be read."""
    quants = import_gguf()
    try:
        kind = quants.GGMLQuantizationType(entry.kind)
    except ValueError:
        raise ModelError(f"{entry.file}: tensor {entry.name} has type {entry.kind}, which is not known") from None
    if kind.name not in (*_PLAIN, "BF16") and kind not in quants._type_traits:
        raise ModelError(f"{entry.file}: tensor {entry.name} is stored as {kind.name}, which is not read")
    return kind


def num_bytes(entry: Entry) -> int:
    """Bytes of a tensor in the file."""
    values, size = import_gguf().GGML_QUANT_SIZES[kind_of(entry)]
    if entry.shape and entry.shape[-1] % values:
        raise ModelError(
            f"{entry.file}: tensor {entry.name} has rows of {entry.shape[-1]} values, no multiple of {values}"
        )
    return math.prod(entry.shape) // values * size


def refuse_cut(entry: Entry) -> None:
    """Raise `ModelError` if the file ends before its tensor does."""
    end, size = entry.start + num_bytes(entry), entry.file.stat().st_size
    if end > size:
        raise ModelError(
            f"{entry.file}: is cut short: tensor {entry.name} ends at byte {end:,}, the file at {size:,}; "
            "fetch it again"
        )


@contextlib.contextmanager
def opened(header: Header, places: dict[str, Place], others: Collection[str] = ()) -> Iterator[StoredTensors]:
    """The tensors by their Hugging Face names. ``places``: where each lies. ``others``: names that are no weights. Any
    other tensor of the file keeps its own name, and is refused by it. Raises `ModelError` for a file that lacks one, or
    is cut short."""
    used = {place.name for place in places.values()}
    missing = sorted(used - header.tensors.keys())
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(f"{header.file}: tensors are missing: {listed}; fetch it again, or convert the model again")
    rest = {name: Place(name) for name in header.tensors.keys() - used - {*others}}
    found = {}
    for name, place in {**places, **rest}.items():
        refuse_cut(header.tensors[place.name])
        found[name] = GGUFTensor(header.tensors[place.name], place)
    yield StoredTensors(header.file, found)
