"""The weights of a Hugging Face directory: safetensors in, parameters out, and back. Every stored tensor is used
exactly once, or the directory is refused with the difference. Pickle formats are never read."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.families import Family, parameters_of
from specjax.models.families.base import Slot
from specjax.models.files import read_json
from specjax.types import Params

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NO_PICKLE = "pickle formats (.bin, .pt, .pth, .ckpt) are never read, because unpickling runs code from the file"
_STORED_FLOATS = ("F64", "F32", "F16", "BF16")


def read_params(directory: Path, family: Family, config: ModelConfig, dtype: str) -> Params:
    """The parameters of `Model.init`, cast to ``dtype``."""
    parameters = parameters_of(family, config)
    with contextlib.ExitStack() as stack:
        stored = _named(family, _open_tensors(directory, stack))
        _check_names(directory, family, config, stored, {slot.name for p in parameters for slot in p.slots})
        params: Params = {}
        for parameter in parameters:
            node = params
            for part in parameter.path[:-1]:
                node = node.setdefault(part, {})
            values = [_read_tensor(stored[slot.name], slot, dtype, directory) for slot in parameter.slots]
            # A copy that JAX owns: a borrowed numpy buffer cannot be donated to a training step.
            node[parameter.path[-1]] = jnp.array(np.stack(values) if parameter.stacked else values[0])
    return params


def stored_tensors(params: Params, family: Family, config: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
    """What `read_params` reads: the tensors to store, by name."""
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters_of(family, config):
        value = np.asarray(_leaf(params, parameter.path, parameter.shape))
        for slot, piece in zip(parameter.slots, value if parameter.stacked else [value], strict=True):
            if slot.name not in tensors:  # it may hold several parameters
                tensors[slot.name] = np.zeros(slot.stored_shape, dtype)
            slot.write(_cast(piece, dtype, slot.name), tensors[slot.name])
    return tensors


def _leaf(params: Params, path: tuple, shape: tuple[int, ...]) -> Any:
    node = params
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    found = getattr(node, "shape", None)
    if found != shape:
        name = ".".join(map(str, path))
        raise ModelError(f"parameter {name} should have shape {list(shape)}, found {found and list(found)}")
    return node


def _check_names(
    directory: Path, family: Family, config: ModelConfig, stored: Mapping[str, _Stored], wanted: set[str]
) -> None:
    embedding, head = family.tensors["embedding"].name, family.tensors["head.kernel"].name
    unexpected = {name for name in stored.keys() - wanted if not any(re.search(b, name) for b in family.others)}
    missing = wanted - stored.keys()
    if config.tie_embeddings and head in unexpected and not missing:
        if not np.array_equal(stored[head].value(), stored[embedding].value()):
            raise ModelError(
                f"{directory}: {head} differs from {embedding} though config.json ties them; "
                "set tie_word_embeddings to false to use it, or drop it"
            )
        unexpected.remove(head)
    if missing or unexpected:
        raise ModelError(
            f"{directory}: the tensors do not fit config.json; missing: {_listed(missing)}; "
            f"unexpected: {_listed(unexpected)}"
        )


def _read_tensor(stored: _Stored, slot: Slot, dtype: str, directory: Path) -> np.ndarray:
    shape, stored_as = stored.header()
    if shape != slot.stored_shape:
        raise ModelError(
            f"{directory}: tensor {slot.name} has shape {list(shape)}, config.json asks for {list(slot.stored_shape)}"
        )
    if stored_as not in _STORED_FLOATS:
        raise ModelError(
            f"{directory}: tensor {slot.name} is stored as {stored_as}, readable are {', '.join(_STORED_FLOATS)}; "
            "export the model without quantisation"
        )
    return _cast(slot.read(stored.value()), dtype, slot.name)


def _cast(value: np.ndarray, dtype: str, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(value.astype(dtype, copy=False))
    if dtype == "float16" and np.isinf(cast).any() and not np.isinf(value).any():
        raise ModelError(f"tensor {name} has values beyond the range of float16; use bfloat16 or float32")
    return cast


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in an open file."""

    handle: Any
    name: str

    def header(self) -> tuple[tuple[int, ...], str]:
        header = self.handle.get_slice(self.name)
        return tuple(header.get_shape()), header.get_dtype()

    def value(self) -> np.ndarray:
        return self.handle.get_tensor(self.name)


def _named(family: Family, stored: Mapping[str, Any]) -> dict[str, _Stored]:
    """By the names that the family's table has: a file may leave out the prefix, from all names that have it."""
    bare = family.prefix and not any(name.startswith(family.prefix) for name in stored)
    tables = {tensor.name.split(".")[0] for tensor in family.tensors.values()} if bare else set()
    return {
        (family.prefix + name if bare and name.split(".")[0] not in tables else name): _Stored(handle, name)
        for name, handle in stored.items()
    }


def _open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it. Every shard must hold exactly what the index says."""
    index_file = directory / INDEX
    if (directory / WEIGHTS).exists():
        shards, weight_map = [WEIGHTS], None
    elif index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ModelError(f"{index_file}: has no weight_map from tensor names to shards")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise ModelError(f"{index_file}: shard {shard!r} is not a .safetensors file of this directory")
    else:
        raise ModelError(f"{directory}: holds no {WEIGHTS}; {NO_PICKLE}: convert the weights to safetensors")
    stored = {}
    for shard in shards:
        handle = stack.enter_context(_open_safetensors(directory / shard))
        for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
            if weight_map is not None and weight_map.get(name) != shard:
                raise ModelError(f"{directory / shard}: holds {name}, which {INDEX} places in {weight_map.get(name)}")
            stored[name] = handle
    absent = set(weight_map or ()) - stored.keys()
    if absent:
        raise ModelError(f"{index_file}: names tensors that its shards do not hold: {_listed(absent)}")
    return stored


def _open_safetensors(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="np")
    except FileNotFoundError:
        raise ModelError(f"{file}: missing, though {INDEX} names it; fetch it again") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{file}: truncated or not a safetensors file ({error}); fetch or save it again") from None


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
