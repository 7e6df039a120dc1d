"""Reader and writer of the weights of a Hugging Face directory: safetensors to parameters and back, one tensor or one
shard at a time. Every stored tensor is used exactly once, or the directory is refused with the difference. Pickle
formats are never read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh
from safetensors.numpy import save_file

from specjax import backend
from specjax.errors import ModelError
from specjax.interfaces import Params
from specjax.models.config import ModelConfig
from specjax.models.families import Family
from specjax.models.families.base import Tensor
from specjax.models.files import INDEX, NO_PICKLE, WEIGHTS, read_json, write_json
from specjax.models.kernels.quantised import Quantised, Scheme
from specjax.models.sharding import Index, place, sharding_of
from specjax.models.transformer import Model, param_shapes

AS_STORED = "auto"
_STORED_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Name of a dtype in the file -> the dtype that it is loaded as if none is asked for."""

# --- numbers --------------------------------------------------------------------------------------------------------


def rounded(params: Params, dtype: str) -> Params:
    """``params`` with numbers that ``dtype`` holds, still in their own dtype; only bfloat16 rounds them."""
    return _to_bfloat16(params) if dtype == "bfloat16" else params


@jax.jit
def _to_bfloat16(params: Params) -> Params:
    # XLA may leave out a cast there and back.
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), params)


def committed(params: Any) -> Any:
    """Arrays of one device committed to it; nothing is copied. JAX compiles a program once more for arguments that
    differ in this alone, so weights that were loaded and weights that were trained would each have their own. With
    several processes they stay as they are: JAX moves no committed array to the devices of another process."""
    if jax.process_count() > 1:
        return params
    return jax.tree.map(lambda x: x if getattr(x, "committed", True) else jax.device_put(x, x.sharding), params)


def narrowest(params: Params) -> str | None:
    """bfloat16 if it holds all the numbers, else None."""
    return "bfloat16" if all(is_bfloat16(x) for x in jax.tree.leaves(params)) else None


def is_bfloat16(x: jax.Array) -> jax.Array | bool:
    """True if all numbers of ``x`` are bfloat16 numbers."""
    if x.dtype == jnp.bfloat16:
        return True
    if x.dtype != jnp.float32:
        return False
    if _on_one_host(x):  # compiles no program for its shape
        return not np.any(np.asarray(x).view(np.uint32) & 0xFFFF)
    return _low_bits_unset(x)


@jax.jit
def _low_bits_unset(x: jax.Array) -> jax.Array:
    # Compares bits: a cast to bfloat16 and back may retain more in XLA than bfloat16 holds.
    return jnp.all(jax.lax.bitcast_convert_type(x, jnp.uint32) & 0xFFFF == 0)


def _on_one_host(x: Any) -> bool:
    """True if the host can read ``x`` where it lies."""
    if not isinstance(x, jax.Array):
        return True
    [device, *others] = x.devices()
    return backend.is_host(device) and not others


# --- parameters and where they are stored ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stored place of one parameter, or of one expert's piece of it: our shape, their name and shape."""

    name: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    tensor: Tensor
    groups: int = 1
    start: int = 0

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Our value, cut from the stored tensor; a view if possible."""
        if self.tensor.part is None:
            return stored.T if self.tensor.transpose else stored
        section = self._section(stored)
        return section.reshape(-1, *section.shape[2:]).T

    def stored_index(self, index: tuple[slice, ...]) -> tuple[slice, ...] | None:
        """Index into the stored tensor of a piece of our parameter; None if the pieces of several parameters
        alternate."""
        if self.tensor.part is not None:
            return None
        return index[::-1] if self.tensor.transpose else index

    def write(self, value: np.ndarray, stored: np.ndarray) -> None:
        if self.tensor.part is None:
            stored[...] = value.T if self.tensor.transpose else value
        else:
            section = self._section(stored)
            section[...] = value.T.reshape(section.shape)

    def _section(self, stored: np.ndarray) -> np.ndarray:
        """View ``[groups, width, ...]`` of the stored features that are ours."""
        features = stored if self.tensor.transpose else stored.T
        features = features.reshape(self.groups, -1, *features.shape[1:])
        width = self.shape[-1] // self.groups
        return features[:, self.start : self.start + width]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of `Model.init`. ``stacked``: its slots are its pieces along the first axis; otherwise there is one
    slot."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Parameters of a spec that is no `Model`, for `read_params` and `write_params`: the configuration of its layers,
    and a nested dict of shapes."""

    config: ModelConfig
    params: Params


def parameters_of(family: Family, of: ModelConfig | Shapes) -> list[Parameter]:
    """Every parameter of `Model.init`, in its order; or every one of ``of``."""
    of = Shapes(of, param_shapes(Model(of))) if isinstance(of, ModelConfig) else of
    config, parameters = of.config, []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(of.params):
        path = tuple(key.key for key in key_path)
        tensor = family.tensors[".".join("{}" if isinstance(part, int) else part for part in path)]
        layer = [part for part in path if isinstance(part, int)]
        if tensor.stacked:
            names = [tensor.name.format(*layer, expert) for expert in range(leaf.shape[0])]
            slots = [_slot(name, leaf.shape[1:], tensor, config) for name in names]
        else:
            slots = [_slot(tensor.name.format(*layer), leaf.shape, tensor, config)]
        parameters.append(Parameter(path, leaf.shape, tuple(slots), tensor.stacked))
    return parameters


def _slot(name: str, shape: tuple[int, ...], tensor: Tensor, config: ModelConfig) -> Slot:
    stored, groups, start = shape, 1, 0
    if tensor.part is not None:
        widths, groups = tensor.part.widths(config), tensor.part.groups(config)
        stored, start = (*shape[:-1], groups * sum(widths)), sum(widths[: tensor.part.index])
    return Slot(name, shape, stored[::-1] if tensor.transpose else stored, tensor, groups, start)


# --- reading --------------------------------------------------------------------------------------------------------


def read_params(
    stored: StoredTensors,
    family: Family,
    of: ModelConfig | Shapes,
    dtype: str,
    mesh: Mesh | None = None,
    check_finite: bool = True,
    scheme: Scheme | None = None,
    keep_bfloat16: bool = False,
) -> Params:
    """The parameters of ``of``, cast to ``dtype`` and placed as `specjax.models.sharding` says. ``stored``: all tensors
    of a directory, see `opened`. ``dtype`` `AS_STORED`: the one they are stored in; float32 if there are several.
    ``check_finite``: NaN and infinities are refused. ``scheme``: kernels are quantised one by one, so that only one is
    in memory unquantised. ``keep_bfloat16``: what is stored in bfloat16 stays so, whatever ``dtype`` is."""
    parameters, config = parameters_of(family, of), of if isinstance(of, ModelConfig) else of.config
    stored = StoredTensors(stored.directory, _named(family, stored))
    _check_names(family, config, stored, {slot.name for p in parameters for slot in p.slots})
    # Every tensor is checked before the first is read: a mistake shows at once.
    dtypes = {slot.name: _checked_dtype(stored[slot.name], slot) for p in parameters for slot in p.slots}
    if dtype == AS_STORED:
        one = set(dtypes.values())
        dtype = one.pop() if len(one) == 1 else "float32"
    params: Params = {}
    found: list[Any] = []
    finite = None
    for parameter in parameters:
        node = params
        for part in parameter.path[:-1]:
            node = node.setdefault(part, {})
        narrow = keep_bfloat16 and {dtypes[slot.name] for slot in parameter.slots} == {"bfloat16"}
        read = functools.partial(_read_piece, stored, parameter, "bfloat16" if narrow else dtype)
        if mesh is None:
            value = whole(read, parameter.shape)
        else:
            value = place(read, parameter.shape, sharding_of(parameter.path, parameter.shape, config, mesh))
        if check_finite:
            finite = finite or _finite_where(value)  # all of them lie in the same place
            found.append(finite(value))
        node[parameter.path[-1]] = quantised(parameter.path, value, scheme)
    if check_finite:
        _refuse_non_finite(found, parameters, stored)
    return committed(params)


def whole(read: Callable[[Index], np.ndarray], shape: tuple[int, ...]) -> jax.Array:
    """Array of ``shape`` on the default device, made of what ``read`` returns for all of it. The copy is JAX's own, see
    `specjax.models.sharding.place`."""
    return jnp.array(read(tuple(slice(0, size) for size in shape))).block_until_ready()


def quantised(path: tuple[Any, ...], value: jax.Array, scheme: Scheme | None) -> Any:
    """A parameter as it is held in memory: with a ``scheme``, a kernel that a `Linear` multiplies with is stored in few
    bits. Embeddings, norms, biases, routers and experts stay as they are."""
    is_kernel = path[-1] == "kernel" and "experts" not in path
    return Quantised.of(value, scheme) if scheme is not None and is_kernel else value


@jax.jit
def _all_finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value).all()


def _finite_where(value: jax.Array) -> Callable[[jax.Array], Any]:
    """A test that all numbers are finite, made where ``value`` lies."""
    return (lambda x: np.isfinite(np.asarray(x)).all()) if _on_one_host(value) else _all_finite


def _refuse_non_finite(found: list[Any], parameters: Sequence[Parameter], stored: StoredTensors) -> None:
    """Raises `ModelError` for NaN and infinities. ``found``: a flag for each parameter, True if it is finite; all are
    waited for at once, and stored tensors are searched only if one is False."""
    for parameter in itertools.compress(parameters, np.logical_not(jax.device_get(found))):
        for slot in parameter.slots:
            tensor = stored[slot.name]
            value = tensor.value()
            if count := value.size - np.count_nonzero(np.isfinite(value)):
                raise ModelError(
                    f"{tensor.file}: tensor {tensor.name} has {count} of {value.size} values that are NaN or infinite; "
                    "fetch the file again, use a checkpoint from before training diverged, or load it as it is with "
                    "check_finite=False (--no-check-finite)"
                )


def _read_piece(stored: StoredTensors, parameter: Parameter, dtype: str, index: Index) -> np.ndarray:
    """Piece ``index`` of a parameter, in an array of its own."""
    piece = np.empty([part.stop - part.start for part in index], dtype)
    slots, within = (parameter.slots[index[0]], index[1:]) if parameter.stacked else (parameter.slots, index)
    for slot, into in zip(slots, piece if parameter.stacked else [piece], strict=True):
        tensor = stored[slot.name]
        there = slot.stored_index(within)
        value = slot.read(tensor.value())[within] if there is None else slot.read(tensor.value(there))
        with np.errstate(over="ignore"):
            into[...] = value
        _refuse_overflow(into, value, f"{tensor.file}: tensor {tensor.name}")
    return piece


def _checked_dtype(stored: StoredTensor, slot: Slot) -> str:
    shape, stored_as = stored.header()
    where = f"{stored.file}: tensor {stored.name}"
    if shape != slot.stored_shape:
        raise ModelError(f"{where} has shape {list(shape)}, config.json asks for {list(slot.stored_shape)}")
    if stored_as not in _STORED_FLOATS:
        readable = ", ".join(_STORED_FLOATS)
        raise ModelError(
            f"{where} is stored as {stored_as}, readable are {readable}; export the model without quantisation"
        )
    return _STORED_FLOATS[stored_as]


def _refuse_overflow(cast: np.ndarray, value: np.ndarray, where: str) -> None:
    if cast.dtype == np.float16 and np.isinf(cast).any() and not np.isinf(value).any():
        raise ModelError(f"{where} has values beyond the range of float16; use bfloat16 or float32")


def _check_names(family: Family, config: ModelConfig, stored: StoredTensors, wanted: set[str]) -> None:
    directory = stored.directory
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


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file."""

    handle: Any
    name: str
    file: Path

    def header(self) -> tuple[tuple[int, ...], str]:
        """(its shape, the name of its dtype in the file)."""
        header = self.handle.get_slice(self.name)
        return tuple(header.get_shape()), header.get_dtype()

    def value(self, index: Index | None = None) -> np.ndarray:
        """The whole tensor or a piece of it, in memory of its own."""
        # The pages that were read count as the process's memory until their file is closed.
        with _open_safetensors(self.file) as handle:
            return handle.get_tensor(self.name) if index is None else handle.get_slice(self.name)[index]


class StoredTensors(dict[str, StoredTensor]):
    """All tensors of a directory by name, while its files are open."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]):
        super().__init__(tensors)
        self.directory = directory

    @property
    def dtype(self) -> str:
        """Dtype of all floating numbers; float32 if there are several."""
        headers = {tensor.header()[1] for tensor in self.values()}
        dtypes = {_STORED_FLOATS[name] for name in headers if name in _STORED_FLOATS}
        return dtypes.pop() if len(dtypes) == 1 else "float32"


def _named(family: Family, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """``stored`` by the names of the family's table. A file may leave out the prefix from all names that have it, and
    may use `Family.aliases`. If a tensor is stored under both names, the second one stays under its alias, and is
    refused as one too many."""
    for theirs, ours in family.aliases.items():
        renamed = {name: ours + name.removeprefix(theirs) for name in stored if name.startswith(theirs)}
        stored = {name if (new := renamed.get(name, name)) in stored else new: x for name, x in stored.items()}
    bare = family.prefix and not any(name.startswith(family.prefix) for name in stored)
    tables = {tensor.name.split(".")[0] for tensor in family.tensors.values()} if bare else set()
    return {
        (family.prefix + name if bare and name.split(".")[0] not in tables else name): tensor
        for name, tensor in stored.items()
    }


@contextlib.contextmanager
def opened(directory: Path, weights: str = WEIGHTS) -> Iterator[StoredTensors]:
    """The tensors of a directory, whose files are open meanwhile. ``weights``: name of the file, if there is one for
    all. Every shard must hold exactly what the index says. Raises `ModelError`."""
    index_file = directory / INDEX
    if (directory / weights).exists():
        shards, weight_map = [weights], None
    elif index_file.exists():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ModelError(f"{index_file}: has no weight_map from tensor names to shards")
        shards = sorted(set(weight_map.values()))
        for shard in shards:
            if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
                raise ModelError(f"{index_file}: shard {shard!r} is not a .safetensors file of this directory")
    elif any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory}: holds neither {weights} nor {INDEX}, which names its shards; fetch it again")
    else:
        raise ModelError(f"{directory}: holds no {WEIGHTS}; {NO_PICKLE}: convert the weights to safetensors")
    stored = {}
    with contextlib.ExitStack() as stack:
        for shard in shards:
            file = directory / shard
            handle = stack.enter_context(_open_safetensors(file))
            for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
                if weight_map is not None and weight_map.get(name) != shard:
                    raise ModelError(f"{file}: holds {name}, which {INDEX} places in {weight_map.get(name)}")
                stored[name] = StoredTensor(handle, name, file)
        absent = set(weight_map or ()) - stored.keys()
        if absent:
            raise ModelError(f"{index_file}: names tensors that its shards do not hold: {_listed(absent)}")
        yield StoredTensors(directory, stored)


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


# --- writing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Source:
    """A parameter that makes up a stored tensor, or a part of it. ``expert``: index of the piece if it is stacked."""

    slot: Slot
    value: Any
    expert: int | None

    def on_host(self) -> np.ndarray:
        value = self.value if self.expert is None else self.value[self.expert]
        if self.expert is None and not _on_one_host(value):
            # A temporary copy: JAX holds on to what it has brought to the host for as long as the array lives.
            value = jnp.copy(value)
        return np.asarray(value)


def write_params(
    directory: Path,
    params: Params,
    family: Family,
    of: ModelConfig | Shapes,
    dtype: str,
    max_shard_bytes: int,
    weights: str = WEIGHTS,
    more: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the tensors that `read_params` reads, in files of at most ``max_shard_bytes`` unless a single tensor is
    larger, with an index if there are several. At most one file is in memory. ``more``: tensors that are no weights,
    for the first file."""
    stored = _sources(params, family, of)
    sizes = {name: math.prod(of[0].slot.stored_shape) * jnp.dtype(dtype).itemsize for name, of in stored.items()}
    shards = _shards(sizes, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = weights if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _tensor(stored[name], dtype) for name in names}
        if number == 1 and more:
            tensors |= more
            names = [*names, *more]
        save_file(tensors, directory / file, metadata={"format": "pt"})
        del tensors  # before the next ones are made
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(directory / INDEX, index, published=True)


def _sources(params: Params, family: Family, of: ModelConfig | Shapes) -> dict[str, list[_Source]]:
    sources: dict[str, list[_Source]] = {}
    for parameter in parameters_of(family, of):
        value = _leaf(params, parameter.path, parameter.shape)
        for i, slot in enumerate(parameter.slots):
            sources.setdefault(slot.name, []).append(_Source(slot, value, i if parameter.stacked else None))
    return sources


def _tensor(sources: Sequence[_Source], dtype: str) -> np.ndarray:
    """One stored tensor; it may hold several parameters."""
    tensor = np.zeros(sources[0].slot.stored_shape, dtype)
    for source in sources:
        piece = source.on_host()
        with np.errstate(over="ignore"):
            source.slot.write(piece, tensor)
        _refuse_overflow(source.slot.read(tensor), piece, f"tensor {source.slot.name}")
    return tensor


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in their order, as many to a shard as fit."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _leaf(params: Params, path: tuple, shape: tuple[int, ...]) -> Any:
    node = params
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    found = getattr(node, "shape", None)
    if found != shape:
        name = ".".join(map(str, path))
        raise ModelError(f"parameter {name} should have shape {list(shape)}, found {found and list(found)}")
    return node
