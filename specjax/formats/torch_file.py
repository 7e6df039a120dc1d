"""Reading and writing of files of torch.save without torch, and without running code that is in them. A pickle may name
any function; this reader knows only the few that make a dict of tensors."""

from __future__ import annotations

import collections
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.errors import ModelError
from specjax.models.weights import StoredTensor, StoredTensors

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "BoolStorage": np.dtype(np.bool_),
}
_NAMES = dict(zip(_STORAGES.values(), ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"), strict=True))
"""Names of the dtypes in safetensors."""


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Tensors of a file, by name. Raises `ModelError` if torch.save did not write it, or if it holds anything else."""
    return _read(file, _Tensors)


class _InMemory(StoredTensor):
    """A tensor that has been read."""

    def header(self) -> tuple[tuple[int, ...], str]:
        return self.handle.shape, _NAMES[self.handle.dtype]

    def value(self, index: Any = None) -> np.ndarray:
        return self.handle if index is None else self.handle[index]


def stored_tensors(file: Path) -> StoredTensors:
    """The tensors of a file as `specjax.models.weights.opened` gives them. Raises `ModelError`."""
    return StoredTensors(file.parent, {name: _InMemory(x, name, file) for name, x in read_tensors(file).items()})


def tensor_names(file: Path) -> set[str]:
    """Names of all tensors of a file, without reading their numbers. Raises `ModelError`."""
    return set(_read(file, _Names))


def _read(file: Path, unpickler: type[_Tensors]) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            [told] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            found = unpickler(archive, told.removesuffix("data.pkl")).load()
    except _BROKEN as error:
        raise ModelError(
            f"{file}: is no plain dict of tensors as torch.save writes it ({error}), and nothing else is unpickled; "
            "convert it to safetensors"
        ) from None
    # A pickle may set attributes of its dict, so these are methods of `dict` itself.
    if not isinstance(found, dict) or not all(type(x) is np.ndarray for x in dict.values(found)):
        raise ModelError(f"{file}: holds a {type(found).__name__}, not a dict of tensors; convert it to safetensors")
    return dict(dict.items(found))


_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, OSError, EOFError),
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError),
)
"""Exceptions that reading raises for a file that is damaged, or no file of torch.save."""


class _Tensors(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str):
        super().__init__(archive.open(f"{root}data.pkl"))
        self._archive, self._root = archive, root
        byteorder = f"{root}byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise ValueError("its numbers are big-endian")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name  # a string, since a pickle may change any object that it is given
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _made,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in _STORAGES:
            raise pickle.UnpicklingError(f"it asks for {pid!r}")
        return np.frombuffer(self._archive.read(f"{self._root}data/{key}"), _STORAGES[storage], count)


class _Names(_Tensors):
    """A reader of names alone, whose tensors have no numbers."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return (lambda *_: np.zeros(0)) if found is _made else found

    def persistent_load(self, pid: Any) -> None:
        return None


def _parameter(tensor: Any, *_: Any) -> np.ndarray:
    if type(tensor) is not np.ndarray:
        raise TypeError(f"a parameter is a {type(tensor).__name__}")
    return tensor


def _made(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> np.ndarray:
    """A view of a storage, copied. Raises `ValueError` for a view that leaves its storage or repeats parts of it."""
    if type(storage) is not np.ndarray:
        raise TypeError(f"a storage is a {type(storage).__name__}")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n > 1)
    within = min((offset, *size, *stride), default=0) >= 0 and (0 in size or last < len(storage))
    if not within or math.prod(size) > len(storage):
        raise ValueError("a tensor lies outside of its storage")
    steps = [step * storage.itemsize if n > 1 else 0 for n, step in zip(size, stride, strict=True)]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()


# --- writing --------------------------------------------------------------------------------------------------------


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file that `read_tensors` and torch.load read, in any of the dtypes above. An array that has several names
    is stored once."""
    storages = {id(array): (str(i), array) for i, array in enumerate({id(x): x for x in tensors.values()}.values())}
    parts = {
        "data.pkl": _pickled({name: storages[id(x)] for name, x in tensors.items()}),
        "byteorder": b"little",
        **{f"data/{key}": array for key, array in storages.values()},
        "version": b"3\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            # A `ZipInfo` has a fixed date: the same tensors are the same bytes.
            with archive.open(zipfile.ZipInfo(f"{_ROOT}/{name}"), "w", force_zip64=True) as stream:
                stream.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())


_ROOT = "archive"


def _pickled(tensors: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """A pickle of the second protocol, written by hand: Python's own pickler would import the names in it."""
    empty = b"ccollections\nOrderedDict\n)R"
    items = b"".join(_text(name) + _tensor(key, array, empty) for name, (key, array) in tensors.items())
    return b"\x80\x02" + empty + b"(" + items + b"u."


def _tensor(key: str, array: np.ndarray, empty: bytes) -> bytes:
    storage = next(name for name, dtype in _STORAGES.items() if dtype == array.dtype)
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    place = _tuple(_text("storage"), f"ctorch\n{storage}\n".encode(), _text(key), _text("cpu"), _number(array.size))
    of = (place + b"Q", _number(0), _tuple(*map(_number, array.shape)), _tuple(*map(_number, strides)), b"\x89", empty)
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _tuple(*of) + b"R"


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(number: int) -> bytes:
    encoded = number.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded
