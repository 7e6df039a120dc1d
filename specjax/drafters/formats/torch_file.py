"""Tensors of a file that torch.save wrote, without torch and without running what is in it: a pickle may name any
function, and of all there are this one knows the two that make a dict of tensors."""

from __future__ import annotations

import collections
import math
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.errors import ModelError

_STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """By name. Raises `ModelError` for a file that is none, or holds anything else."""
    try:
        with zipfile.ZipFile(file) as archive:
            [told] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            found = _Tensors(archive, told.removesuffix("data.pkl")).load()
    except _BROKEN as error:
        raise ModelError(
            f"{file}: is no plain dict of tensors as torch.save writes it ({error}), and nothing else is unpickled; "
            "convert it to safetensors"
        ) from None
    # What else the file may have made of its dict is not asked.
    if not isinstance(found, dict) or not all(type(x) is np.ndarray for x in dict.values(found)):
        raise ModelError(f"{file}: holds a {type(found).__name__}, not a dict of tensors; convert it to safetensors")
    return dict(dict.items(found))


_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, OSError, EOFError),
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError),
)
"""What reading raises of a file that is damaged, or no such thing."""


class _Tensors(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str):
        super().__init__(archive.open(f"{root}data.pkl"))
        self._archive, self._root = archive, root
        byteorder = f"{root}byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise ValueError("its numbers are big-endian")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name  # a word: what a file is handed, it may change
        known = {("collections", "OrderedDict"): collections.OrderedDict, ("torch._utils", "_rebuild_tensor_v2"): _made}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, count = pid
        if kind != "storage" or storage not in _STORAGES:
            raise pickle.UnpicklingError(f"it asks for {pid!r}")
        return np.frombuffer(self._archive.read(f"{self._root}data/{key}"), _STORAGES[storage], count)


def _made(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> np.ndarray:
    """A view of a storage, copied; one that leaves it, or repeats it, is refused."""
    if type(storage) is not np.ndarray:
        raise TypeError(f"a storage is a {type(storage).__name__}")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True) if n > 1)
    within = min((offset, *size, *stride), default=0) >= 0 and (0 in size or last < len(storage))
    if not within or math.prod(size) > len(storage):
        raise ValueError("a tensor lies outside of its storage")
    steps = [step * storage.itemsize if n > 1 else 0 for n, step in zip(size, stride, strict=True)]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()
