"""Keys and values of one layer as a cache stores them: plain, in 8 bits, or no more than a window sees. Their axes have
the order in which attention multiplies with them, so that no pass copies a cache.

Dims: B rows, S slots, T tokens fed, G key-value heads, C head features, BG = B * G heads with those of a row side by
side, N chosen slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from specjax import backend
from specjax.models.products import Scales


class LayerKV(NamedTuple):
    """Keys and values of one layer, ``[B, G, ...]`` or folded, ``[BG, ...]``."""

    keys: Float[Array, "*heads S C"]
    values: Float[Array, "*heads C S"]
    slot_axes = (-2, -1)

    @classmethod
    def of(cls, keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"], folded: bool = True) -> LayerKV:
        """Layer of T slots: a block of new keys and values."""
        batch, fed, kv_heads, features = keys.shape
        heads = (batch * kv_heads,) if folded else (batch, kv_heads)
        return cls(
            keys.transpose(0, 2, 1, 3).reshape(*heads, fed, features),
            values.transpose(0, 2, 3, 1).reshape(*heads, values.shape[3], fed),
        )

    def write(
        self, start: Int[Array, " B"], new: LayerKV, together: bool = False, number: Int[Array, ""] | int | None = None
    ) -> LayerKV:
        """This layer with each row's T new entries, which have the same form, at the slots from ``start[b]`` on. The
        slots of a block are contiguous, those of a tree as well. ``together``: all rows at once. ``number``: number of
        the layer to be changed, if these are all of a model, see `OneOf`.

        The engine keeps ``S >= start[b] + T``; otherwise `dynamic_update_slice` would clamp its start and overwrite
        valid slots.
        """
        return _written(self, start, new, together, number)

    @property
    def scales(self) -> None:
        """None: the numbers are the keys and values themselves."""
        return None

    def read(self) -> tuple[Array, Array]:
        """Keys and values, as stored."""
        return self.keys, self.values

    @staticmethod
    def as_read(keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"]) -> tuple[Array, Array]:
        """New keys and values as later passes will read them."""
        return keys, values


class Int8Layer(NamedTuple):
    """Keys and values of one layer in 8 bits, with a scale for each vector (of one token and head)."""

    keys: Int[Array, "*heads S C"]
    values: Int[Array, "*heads C S"]
    key_scales: Float[Array, "*heads S"]
    value_scales: Float[Array, "*heads S"]
    slot_axes = (-2, -1, -1, -1)

    def write(
        self, start: Int[Array, " B"], new: LayerKV, together: bool = False, number: Int[Array, ""] | int | None = None
    ) -> Int8Layer:
        """Like `LayerKV.write`; ``new`` has the dtype that the model computes in."""
        (keys, key_scales), (values, value_scales) = _in_int8(new.keys, -1), _in_int8(new.values, -2)
        return _written(self, start, Int8Layer(keys, values, key_scales, value_scales), together, number)

    @property
    def scales(self) -> Scales:
        """Factors of the numbers, one for each vector."""
        return Scales(self.key_scales, self.value_scales)

    def read(self) -> tuple[Array, Array]:
        """Keys and values in float32."""
        return self.scales.applied(self.keys, self.values)

    @staticmethod
    def as_read(keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"]) -> tuple[Array, Array]:
        """Like `LayerKV.as_read`, rounded to 8 bits: the values that a token reads do not depend on how a prompt is
        cut."""

        def rounded(x: Array) -> Array:
            numbers, scales = _in_int8(x, -1)
            return (numbers.astype(jnp.float32) * scales[..., None]).astype(x.dtype)

        return rounded(keys), rounded(values)


def _in_int8(x: Float[Array, "..."], axis: int) -> tuple[Array, Array]:
    """(whole numbers, float32 scales without ``axis``). A vector with a NaN or an infinity reads as NaN."""
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=axis) / _MOST_OF_INT8
    numbers = wide / jnp.expand_dims(jnp.where(scales == 0, 1.0, scales), axis)
    finite = jnp.all(jnp.isfinite(wide), axis=axis)  # a maximum may lose NaN, see `specjax.sampling.has_distribution`
    return jnp.round(numbers).astype(jnp.int8), jnp.where(finite, scales, jnp.nan)


_MOST_OF_INT8 = 127


class Sliding(NamedTuple):
    """A layer with a window that holds no more than the window sees: slot s of row b is token ``base[b] + s``."""

    slots: LayerKV | Int8Layer
    base: Int[Array, " B"]

    @property
    def keys(self) -> Array:
        return self.slots.keys

    @property
    def values(self) -> Array:
        return self.slots.values

    @property
    def scales(self) -> Scales | None:
        return self.slots.scales

    def read(self) -> tuple[Array, Array]:
        """Like `LayerKV.read`."""
        return self.slots.read()

    def as_read(self, keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"]) -> tuple[Array, Array]:
        """Like `LayerKV.as_read`."""
        return self.slots.as_read(keys, values)

    def write(self, start: Int[Array, " B"], new: LayerKV, together: bool = False) -> Sliding:
        """Like `LayerKV.write`; ``start`` counts slots, not tokens."""
        return self._replace(slots=self.slots.write(start, new, together))

    def slid(self, lengths: Int[Array, " B"], window: int) -> Sliding:
        """This layer without the entries that no token from ``lengths[b]`` on sees."""
        base = jnp.maximum(self.base, lengths - window)
        last = self.keys.shape[-2] - 1
        sources = jnp.minimum((base - self.base)[:, None] + jnp.arange(last + 1, dtype=jnp.int32)[None], last)
        return Sliding(_taken(self.slots, sources), base)


class OneOf(NamedTuple):
    """A layer among those of one array each: ``layers`` has an axis of layers before all others."""

    layers: LayerKV | Int8Layer
    number: Int[Array, ""] | int

    @property
    def slots(self) -> LayerKV | Int8Layer:
        """This layer by itself. No array is copied that a reduction reads."""
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, self.number, keepdims=False), self.layers)

    @property
    def keys(self) -> Array:
        return self.slots.keys

    @property
    def values(self) -> Array:
        return self.slots.values

    @property
    def scales(self) -> Scales | None:
        return self.slots.scales

    def read(self) -> tuple[Array, Array]:
        """Like `LayerKV.read`."""
        return self.slots.read()

    def as_read(self, keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"]) -> tuple[Array, Array]:
        """Like `LayerKV.as_read`."""
        return self.layers.as_read(keys, values)

    def write(self, start: Int[Array, " B"], new: LayerKV, together: bool = False) -> OneOf:
        """Like `LayerKV.write`; the result has all layers, of which this one is changed."""
        return self._replace(layers=self.layers.write(start, new, together, self.number))


Stored = LayerKV | Int8Layer | Sliding
BlockKV = tuple[Float[Array, "B T G C"], Float[Array, "B T G C"]]
"""Keys and values of the tokens of a pass in one layer."""
_Slots = TypeVar("_Slots", bound=LayerKV | Int8Layer)
_Stored = TypeVar("_Stored", bound=Stored)


def _by_array(change: Callable[..., Array], layer: _Slots, *others: _Slots) -> _Slots:
    """Layer of the arrays ``change(slot axis, array, arrays of the others)``."""
    return type(layer)(*map(change, layer.slot_axes, layer, *others))


def _written(
    layer: _Slots, start: Int[Array, " B"], new: _Slots, together: bool, number: Int[Array, ""] | int | None = None
) -> _Slots:
    return _by_array(lambda axis, old, x: _write(old, start, x, axis % x.ndim, together, number), layer, new)


def _taken(layer: _Slots, sources: Int[Array, "B N"]) -> _Slots:
    """Layer of the slots ``sources`` of each row."""
    heads = layer.keys.shape[:-2]

    def of(axis: int, x: Array) -> Array:
        by_row = x.reshape(len(sources), -1, *x.shape[len(heads) :])
        taken = jax.vmap(lambda row, at: jnp.take(row, at, axis=axis, mode="clip"))(by_row, sources)
        return taken.reshape(*heads, *taken.shape[2:])

    return _by_array(of, layer)


def moved(
    layer: Stored, start: Int[Array, " B"], path: Int[Array, "B N"], block: BlockKV | None, together: bool
) -> Stored:
    """This layer with the entries of the slots ``start + path`` copied to the slots from ``start + 1`` on. They come
    from ``block``, the keys and values of the slots from ``start`` on; None: from the slots themselves, which XLA on a
    TPU would all rearrange first."""
    if isinstance(layer, Sliding):
        return layer._replace(slots=moved(layer.slots, start - layer.base, path, block, together))
    if block is None:
        return _written(layer, start + 1, _taken(layer, start[:, None] + path), together)
    keys, values = (jnp.take_along_axis(x, path[:, :, None, None], axis=1, mode="clip") for x in block)
    return layer.write(start + 1, LayerKV.of(keys, values, folded=layer.keys.ndim == 3), together)


def resized(layer: _Stored, slots: int) -> _Stored:
    """This layer with ``slots`` slots: padded, or cut to its first ones."""
    if isinstance(layer, Sliding):
        return layer._replace(slots=resized(layer.slots, slots))

    def of(axis: int, x: Array) -> Array:
        more = slots - x.shape[axis]
        if more < 0:
            return jax.lax.slice_in_dim(x, 0, slots, axis=axis % x.ndim)
        return jnp.pad(x, [(0, more if i == axis % x.ndim else 0) for i in range(x.ndim)])

    return _by_array(of, layer)


def sliding(layer: Stored, rows: int) -> Sliding:
    return layer if isinstance(layer, Sliding) else Sliding(layer, jnp.zeros((rows,), jnp.int32))


# --- writing -------------------------------------------------------------------------------------------------------


def write_rows(
    buffer: Shaped[Array, "B L"], start: Int[Array, " B"], new: Shaped[Array, "B T"], together: bool = False
) -> Array:
    """``buffer[b, start[b] : start[b] + T] = new[b]``; ``together``: all rows at once, for rows on several devices."""
    return _write(buffer, start, new, 1, together)


def _write(
    buffer: Array,
    start: Int[Array, " B"],
    new: Array,
    axis: int,
    together: bool = False,
    layer: Int[Array, ""] | int | None = None,
) -> Array:
    """Write at ``start[b]`` of ``axis``: one row after the other, or all together if asked to or if they are many.
    ``layer``: the layer that is written, if ``buffer`` has an axis of layers before those of ``new``."""
    rows, heads, axes = len(start), len(new) // len(start), new.ndim
    new = new.astype(buffer.dtype)

    def at(row, slot):
        index = (row, *(slot if i == axis else 0 for i in range(1, axes)))
        index = index if layer is None else (layer, *index)
        return tuple(jnp.asarray(i, jnp.int32) for i in index)  # one type for all, under JAX_ENABLE_X64 as well

    if together or not backend.writes_row_by_row(rows):
        if layer is not None:
            own = jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False)
            own = _write(own, start, new, axis, together)
            return jax.lax.dynamic_update_index_in_dim(buffer, own, layer, 0)
        old, new = (x.reshape(rows, heads, *x.shape[1:]) for x in (buffer, new))
        written = jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, at(0, s)))(old, new, start)
        return written.reshape(buffer.shape)

    def write(row: Array | int, buffer: Array) -> Array:
        theirs = jax.lax.dynamic_slice_in_dim(new, row * heads, heads)
        theirs = theirs if layer is None else theirs[None]
        return jax.lax.dynamic_update_slice(buffer, theirs, at(row * heads, start[row]))

    if rows > backend.UNROLLED_ROWS_CPU:
        return jax.lax.fori_loop(0, rows, write, buffer)
    for row in range(rows):
        buffer = write(row, buffer)
    return buffer
