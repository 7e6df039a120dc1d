"""Stored forms of the matrix of a `specjax.models.layers.Linear`, each with its product. Parameters that are trained
and saved are plain arrays ``[in, out]``. For decoding, an object that multiplies may stand in place of any of them: a
pytree that is called as a `Kernel` is, even if this package does not know it.

Dims: I/O features in and out, M tokens of all rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from specjax import backend
from specjax.models.kernels.quantised import Quantised
from specjax.models.products import (
    bfloat16_of,
    few_rows_product,
    matrix_product,
    precision_of,
    rounded_matrix_product,
    several_rows_product,
    split_product,
    wide_matrix_product,
    widened,
)


@runtime_checkable
class Kernel(Protocol):
    """Interface of a matrix that multiplies; it must be a pytree."""

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        """``rows @ matrix`` in the dtype of ``rows``; ``wide``: in float32, whatever that dtype."""
        ...


_rounds: contextvars.ContextVar[bool] = contextvars.ContextVar("rounds", default=False)


@contextlib.contextmanager
def operands_in(dtype: str | None) -> Iterator[None]:
    """While a program is traced, products of float32 rows and a `Dense` matrix, and the products of their gradients,
    take operands rounded to ``dtype``; None: of float32."""
    before = _rounds.set(dtype == "bfloat16")
    try:
        yield
    finally:
        _rounds.reset(before)


@flax.struct.dataclass
class Dense:
    """A matrix as it is trained and saved. ``by_row``: its rows are its outputs, as those of an embedding that is the
    head too."""

    value: Float[Array, "I O"] | Float[Array, "O I"]
    by_row: bool = flax.struct.field(pytree_node=False, default=False)

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        if _rounds.get() and rows.dtype == jnp.float32:
            return rounded_matrix_product(rows, self.value, self.by_row)
        return (wide_matrix_product if wide else matrix_product)(rows, self.dense().astype(rows.dtype))

    def dense(self) -> Float[Array, "I O"]:
        return self.value.T if self.by_row else self.value


@flax.struct.dataclass
class Transposed:
    """A matrix whose rows are its outputs: a product with few tokens reads each row once, without packing the matrix
    first."""

    value: Num[Array, "*layers O I"]
    layer: Int[Array, ""] | int | None = None
    """Number of the layer among the matrices of several; None: there is only one, or none is chosen yet."""

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        rows = rows.astype(jnp.float32) if wide else rows
        if len(rows) <= backend.FEW_ROWS:
            return few_rows_product(rows, self.value, self.layer)
        kernel = widened(self.value, rows.dtype, self.layer)
        return jnp.einsum("mi,oi->mo", rows, kernel, precision=precision_of(rows))

    def dense(self) -> Float[Array, "I O"]:
        return (self.value if self.layer is None else widened(self.value, jnp.float32, self.layer)).T


@flax.struct.dataclass
class Narrow(Transposed):
    """A float32 matrix stored in bfloat16, which holds all its numbers: half the bytes to read, multiplied in the dtype
    of the rows. Those of several layers are stored as the bits, see `specjax.models.products.widened`."""

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        rows = rows.astype(jnp.float32) if wide else rows
        if len(rows) >= backend.MATRIX_UNIT_ROWS and backend.multiplies_bfloat16() and rows.dtype == jnp.float32:
            return split_product(rows, bfloat16_of(self.value, self.layer))
        if backend.FEW_NARROW_ROWS < len(rows) <= backend.SEVERAL_NARROW_ROWS:
            return several_rows_product(rows, self.value, self.layer)
        return super().__call__(rows, wide)

    def dense(self) -> Float[Array, "I O"]:
        return widened(self.value, jnp.float32, self.layer).T


@flax.struct.dataclass
class Joined:
    """Matrices of any stored form that read one input, with their outputs side by side: what concatenation does for
    arrays."""

    parts: tuple[Kernel, ...]

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        return jnp.concatenate([part(rows, wide) for part in self.parts], axis=-1)


def of(value: Any) -> Kernel:
    """Kernel of a parameter: the parameter itself if it multiplies, or `Dense` around a plain array ``[I, O]``."""
    return value if isinstance(value, Kernel) else Dense(value)


def multiply(x: Float[Array, "B T I"], kernel: Any, wide: bool = False) -> Float[Array, "B T O"]:
    """The features of each token times ``kernel``, a parameter of any stored form; ``wide``: in float32. Where
    `backend.doubles_single_rows`, one token is multiplied as two equal ones."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1 and backend.doubles_single_rows():
        product = of(kernel)(jnp.broadcast_to(rows, (2, x.shape[-1])), wide)[:1]
    else:
        product = of(kernel)(rows, wide)
    return product.reshape(*x.shape[:-1], -1)


def plain(value: Any) -> Any:
    """The array ``[I, O]`` that a kernel was laid out from; anything else unchanged."""
    return value.dense() if isinstance(value, Dense | Transposed) else value


def are_quantised(params: Any) -> bool:
    """True if some of these parameters are stored in few bits."""
    return any(isinstance(leaf, Quantised) for leaf in leaves_of(params))


def leaves_of(params: Any) -> list[Any]:
    """Leaves of ``params``: arrays, and whole objects that multiply."""
    return jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Kernel))


def together(layers: list[Any]) -> Any:
    """One tree for equal trees of arrays, `Transposed` and `Narrow`, with those of all layers side by side in a first
    axis, see `layer_of`. The list is emptied on the way, so that no more than one parameter of all layers is in memory
    twice."""
    flat, tree = [], None
    while layers:
        leaves, tree = jax.tree.flatten(layers.pop(0), is_leaf=lambda x: isinstance(x, Kernel))
        flat.append(leaves)
    assert tree is not None
    found: list[Any] = []
    for i in range(len(flat[0])):
        kind = type(flat[0][i])
        is_kernel = issubclass(kind, Transposed)
        arrays = [leaves[i].value if is_kernel else leaves[i] for leaves in flat]
        for leaves in flat:
            leaves[i] = None
        stacked = _side_by_side(arrays, is_kernel)
        found.append(kind(stacked) if is_kernel else stacked)
        backend.return_memory()
    return jax.tree.unflatten(tree, found)


def _side_by_side(arrays: list[Array], bits: bool) -> Array:
    """The arrays in a first axis; ``bits``: those of bfloat16 as whole numbers, see `widened`. The list is emptied on
    the way: each array is freed before the next one is copied."""
    first = jax.typeof(arrays[0])
    dtype = jnp.uint16 if bits and first.dtype == jnp.bfloat16 else first.dtype
    found = jnp.zeros((len(arrays), *first.shape), dtype)
    for place in range(len(arrays)):
        found = jax.block_until_ready(_put(found, arrays.pop(0), place))
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _put(found: Array, array: Array, place: Int[Array, ""] | int) -> Array:
    if found.dtype != array.dtype:
        array = jax.lax.bitcast_convert_type(array, found.dtype)
    return jax.lax.dynamic_update_index_in_dim(found, array, place, axis=0)


def layer_of(layers: Any, layer: Int[Array, ""] | int) -> Any:
    """The parameters of one layer among those that `together` made. No array is copied that a kernel reads."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Transposed):
            return dataclasses.replace(leaf, layer=layer)
        return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)

    return jax.tree.map(one, layers, is_leaf=lambda x: isinstance(x, Kernel))


def counted(params: Any) -> tuple[int, int]:
    """(number of weights, bytes that they take); a quantised kernel counts the weights that it stands for."""
    parts = [part for leaf in leaves_of(params) for part in _arrays(leaf)]
    return sum(part.size for part in parts), sum(map(_bytes, parts))


def _arrays(leaf: Any) -> list[Any]:
    return [leaf] if isinstance(leaf, Quantised) else jax.tree.leaves(leaf)


def _bytes(part: Any) -> int:
    """Bytes of an array, which may be a shape alone."""
    return part.nbytes if isinstance(part, Quantised) else part.size * part.dtype.itemsize


def join(values: Sequence[Any], shards: int = 1) -> Any:
    """One parameter for several that read the same input, with their outputs side by side. Each of ``shards`` equal
    parts holds a share of every parameter."""
    if any(isinstance(value, Kernel) for value in values):
        if all(isinstance(value, Quantised) and value.like(values[0]) for value in values) and shards == 1:
            return Quantised.joined(values)
        if shards > 1:
            raise ValueError("kernels that are no arrays are not fused over several devices")
        return Joined(tuple(map(of, values)))
    if shards == 1:
        return jnp.concatenate(values, axis=-1)
    parts = [value.reshape(*value.shape[:-1], shards, -1) for value in values]
    return jnp.concatenate(parts, axis=-1).reshape(*values[0].shape[:-1], -1)


def split(value: Any, sizes: Sequence[int], shards: int = 1) -> list[Any]:
    """Parameters that `join` joined, with ``sizes`` outputs each."""
    if isinstance(value, Joined):
        return [plain(part) for part in value.parts]
    if isinstance(value, Quantised):
        return value.apart(sizes)
    return apart(value, sizes, shards)


def apart(outputs: Float[Array, "*B O"], sizes: Sequence[int], shards: int = 1) -> list[Array]:
    """Outputs of joined parameters, separated into those of each."""
    ends = list(itertools.accumulate(size // shards for size in sizes))[:-1]
    if shards == 1:
        return jnp.split(outputs, ends, axis=-1)
    lead = outputs.shape[:-1]
    return [x.reshape(*lead, -1) for x in jnp.split(outputs.reshape(*lead, shards, -1), ends, axis=-1)]
