"""Weights in few bits, multiplied in the dtype of the other factor (weight-only): whole numbers and a scale for each
output, or for each group of inputs of an output. Quantisation is symmetric and rounds to the nearest, as a checkpoint
is loaded.

A quantised model is another model. A target's distribution becomes that of its rounded weights, to which verification
is exact; a quantised draft only changes how many proposed tokens are accepted.

Dims: I/O features in and out, N groups of C inputs each (I = N * C), M tokens of all rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import backend
from specjax.models.products import add_all, few_rows_product, precision_of, several_rows_product


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to quantise: ``bits`` a weight, and one scale for each ``group`` of inputs; None: one for all inputs of an
    output."""

    bits: int
    group: int | None = None

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def groups(self, inputs: int) -> int:
        """Number of groups of so many ``inputs``; 1 if the group size does not divide them."""
        return inputs // self.group if self.group is not None and inputs % self.group == 0 else 1


SCHEMES = {"int8": Scheme(8), "int4": Scheme(4, 128)}
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of the largest weight that the largest whole number may stand for; all are tried if there are fewer than 8
bits."""


@flax.struct.dataclass
class Quantised:
    """A quantised matrix ``[I, O]``. ``value``: int8 or int4 ``[N, O, C]``, the order in which the products of GPUs and
    TPUs read it: any other one of int4 they copy to it. Where the device reads kernels transposed: int8 ``[O, I]``, or
    uint8 ``[O, N, C / 2]`` with two 4-bit numbers a byte."""

    value: Array
    scale: Float[Array, "N O"]
    bits: int = flax.struct.field(pytree_node=False)
    turned: bool = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, matrix: Float[Array, "I O"], scheme: Scheme) -> Quantised:
        """Quantise ``matrix`` to the nearest numbers, laid out for this device."""
        return _quantised(matrix, scheme, backend.transposes_kernels())

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.value.size * (2 if self.value.dtype == jnp.uint8 else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays; two 4-bit numbers share a byte."""
        return self.value.size * (self.bits if self.value.dtype == jnp.int4 else 8) // 8 + 4 * self.scale.size

    @property
    def _outputs(self) -> int:
        """Axis of the outputs in ``value``."""
        return 0 if self.turned else 1

    def like(self, other: Quantised) -> bool:
        """True if two matrices of the same inputs also have the same groups and the same stored form."""
        same = self.scale.shape[0] == other.scale.shape[0] and self.value.dtype == other.value.dtype
        return same and self.turned == other.turned

    @classmethod
    def joined(cls, parts: Sequence[Quantised]) -> Quantised:
        """One matrix with the outputs of all ``parts`` side by side."""
        value = jnp.concatenate([part.value for part in parts], axis=parts[0]._outputs)
        return dataclasses.replace(parts[0], value=value, scale=jnp.concatenate([part.scale for part in parts], axis=1))

    def apart(self, sizes: Sequence[int]) -> list[Quantised]:
        """Matrices that were `joined`, with ``sizes`` outputs each."""
        ends = list(itertools.accumulate(sizes))[:-1]
        values = jnp.split(self.value, ends, axis=self._outputs)
        scales = jnp.split(self.scale, ends, axis=1)
        return [dataclasses.replace(self, value=v, scale=s) for v, s in zip(values, scales, strict=True)]

    def __call__(self, rows: Float[Array, "M I"], wide: bool = False) -> Float[Array, "M O"]:
        x = rows.astype(jnp.float32) if self.turned else rows  # a CPU multiplies in nothing but float32
        if self.turned:
            product = self._turned_product(x)
        elif len(self.value) == 1:
            product = _product("mi,oi->mo", x, self.value[0]) * self.scale
        elif len(x) <= backend.FEW_ROWS:
            parts = _product("mng,nog->nmo", x.reshape(len(x), len(self.value), -1), self.value)
            product = jnp.sum(parts * self.scale[:, None], axis=0)
        else:
            product = _product("mi,io->mo", x, self.dense().astype(x.dtype))
        return product.astype(jnp.float32 if wide else rows.dtype)

    def _turned_product(self, x: Float[Array, "M I"]) -> Float[Array, "M O"]:
        if len(x) > backend.SEVERAL_NARROW_ROWS:
            return jnp.matmul(x, self.dense().astype(x.dtype), precision=precision_of(x))
        if self.bits == 4:
            return _several_packed(x, self.value, self.scale)
        few = few_rows_product if len(x) <= backend.FEW_NARROW_ROWS else several_rows_product
        if len(self.scale) == 1:
            return few(x, self.value) * self.scale
        parts = x.reshape(len(x), len(self.scale), -1), self.value.reshape(len(self.value), len(self.scale), -1)
        each = [few(parts[0][:, i], parts[1][:, i]) * self.scale[i] for i in range(len(self.scale))]
        return functools.reduce(jnp.add, each)

    def dense(self) -> Float[Array, "I O"]:
        """The matrix that the numbers stand for, in float32."""
        groups, outputs = self.scale.shape
        if not self.turned:
            values = self.value.astype(jnp.float32).transpose(0, 2, 1)
        elif self.bits == 4:
            values = jnp.concatenate(_halves(self.value), axis=-1).transpose(1, 2, 0)
        else:
            values = self.value.astype(jnp.float32).T.reshape(groups, -1, outputs)
        return (values * self.scale[:, None]).reshape(-1, outputs)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantised(matrix: Float[Array, "I O"], scheme: Scheme, turned: bool) -> Quantised:
    inputs, outputs = matrix.shape
    groups = scheme.groups(inputs)
    grouped = matrix.astype(jnp.float32).reshape(groups, -1, outputs)
    largest = jnp.max(jnp.abs(grouped), axis=1)

    def rounded(clip: float) -> tuple[Array, Array, Array]:
        scale = jnp.where(largest > 0, largest, 1.0) * (clip / scheme.largest)
        value = jnp.clip(jnp.round(grouped / scale[:, None]), -scheme.largest, scheme.largest)
        return jnp.sum(jnp.square(value * scale[:, None] - grouped), axis=1), value, scale

    best, value, scale = rounded(1.0)
    for clip in _CLIPS[1:] if scheme.bits < 8 else ():
        error, other, its_scale = rounded(clip)
        better = error < best
        best, scale = jnp.where(better, error, best), jnp.where(better, its_scale, scale)
        value = jnp.where(better[:, None], other, value)
    if not turned:
        return Quantised(value.transpose(0, 2, 1).astype(f"int{scheme.bits}"), scale, scheme.bits, False)
    if scheme.bits == 8 or value.shape[1] % 2:
        return Quantised(value.reshape(inputs, outputs).T.astype(jnp.int8), scale, 8, True)
    low, high = jnp.split((value.transpose(2, 0, 1) + 8).astype(jnp.uint8), 2, axis=-1)
    return Quantised(low | (high << 4), scale, 4, True)


def _product(subscripts: str, x: Array, numbers: Array) -> Array:
    """Einsum added up in float32."""
    numbers = numbers.astype(x.dtype)
    return jnp.einsum(subscripts, x, numbers, precision=precision_of(x), preferred_element_type=jnp.float32)


def _halves(packed: Array) -> tuple[Array, Array]:
    """The numbers in the low and in the high half of each byte."""
    low, high = (half.astype(jnp.int8).astype(jnp.float32) - 8.0 for half in (packed & 15, packed >> 4))
    return low, high


def _several_packed(x: Float[Array, "M I"], packed: Array, scale: Float[Array, "N O"], rows: int = 4) -> Array:
    """`products.several_rows_product` of packed 4-bit numbers. A single row counts as two, for which XLA finds the
    better loop."""
    rows = min(rows, max(len(x), 2))
    blocks = -(-len(x) // rows)
    padded = jnp.pad(x, ((0, blocks * rows - len(x)), (0, 0))).reshape(blocks, rows, -1)
    found = jax.lax.map(lambda block: _few_packed(block, packed, scale), padded)
    return found.reshape(blocks * rows, -1)[: len(x)]


def _few_packed(x: Float[Array, "M I"], packed: Array, scale: Float[Array, "N O"]) -> Array:
    """`products.few_rows_product` of packed 4-bit numbers; the comments there give the reasons."""
    x = x / jnp.where(jnp.isinf(x), 2.0, 1.0).astype(x.dtype)
    x, packed = jax.lax.optimization_barrier((x.astype(jnp.float32), packed))
    half = packed.shape[-1]
    grouped = x.reshape(len(x), len(scale), -1)
    low, high = ((packed & 15).astype(jnp.int8), (packed >> 4).astype(jnp.int8))
    terms = [low.astype(x.dtype) * row[None, :, :half] + high.astype(x.dtype) * row[None, :, half:] for row in grouped]
    sums = jax.lax.reduce(tuple(terms), (jnp.zeros((), x.dtype),) * len(terms), add_all, (2,))
    # Numbers are stored with 8 added.
    added = 8.0 * jnp.sum(grouped, axis=-1)
    return jnp.stack([jnp.sum((total - more[None]) * scale.T, axis=1) for total, more in zip(sums, added, strict=True)])
