"""The KV cache as an object: what a pass writes, attends to and keeps. One pair of arrays a layer, turned as attention
multiplies with them, so that no pass copies a cache. Rollback is not advancing: stale slots are masked, then
overwritten, so nothing here ever clears or moves a slot, but for the accepted path of a tree.

Dims: B rows, S slots, T tokens fed, H query heads, G key-value heads, C head features, BG = B * G heads, a row's side
by side, R rows of another cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax import backend
from specjax.models.attention import flash
from specjax.models.attention.blocks import attend
from specjax.models.attention.sight import Sight, Tree
from specjax.types import Documents


class Layer(NamedTuple):
    """Keys and values of one layer, ``[B, G, ...]`` or folded, ``[BG, ...]``."""

    keys: Float[Array, "*heads S C"]
    values: Float[Array, "*heads C S"]

    @classmethod
    def of(cls, keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"], folded: bool = True) -> Layer:
        """A block of new keys and values: a layer of T slots."""
        batch, fed, kv_heads, features = keys.shape
        heads = (batch * kv_heads,) if folded else (batch, kv_heads)
        return cls(
            keys.transpose(0, 2, 1, 3).reshape(*heads, fed, features),
            values.transpose(0, 2, 3, 1).reshape(*heads, values.shape[3], fed),
        )

    def write(self, start: Int[Array, " B"], new: Layer, together: bool = False) -> Layer:
        """With each row's T new entries, which have the same form, at the slots from ``start[b]`` on. A block is
        contiguous in slots, in a tree as well.

        The engine keeps ``S >= start[b] + T``: `dynamic_update_slice` clamps its start and would overwrite valid slots.
        """
        last = self.keys.ndim - 1
        keys = _write(self.keys, start, new.keys, last - 1, together)
        return Layer(keys, _write(self.values, start, new.values, last, together))


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, keys ``[B, G, S, C]``, values ``[B, G, C, S]``; `fold` merges B and G. So both
    products of attention are with the rows of a matrix (`specjax.models.products.few_queries_product`).

    Kept as ``[B, S, G, C]``, XLA on CPU copied both in every pass: 1.5-2.3x the time of attention. And a loop over one
    row that carries a leading axis of 1 copies them again when it feeds a single token: hence the folded form.
    """

    layers: tuple[Layer, ...]
    total: Int[Array, " B"] | None = None
    """The length that a row will reach, prompt included, for models whose rotary frequencies depend on it."""
    spread: bool = flax.struct.field(pytree_node=False, default=False)
    """Over several devices: heads and rows, split over other axes, are then never folded, and rows are written
    together."""

    @classmethod
    def zeros(
        cls, num_layers: int, batch: int, num_slots: int, kv_heads: int, features: int, dtype: DTypeLike
    ) -> KVCache:
        keys, values = (batch, kv_heads, num_slots, features), (batch, kv_heads, features, num_slots)
        return cls(tuple(Layer(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(num_layers)))

    @property
    def num_slots(self) -> int:
        return self.layers[0].keys.shape[-2]

    def has_room(self, lengths: Int[Array, " B"], fed: int) -> Bool[Array, ""]:
        """Whether ``fed`` more tokens fit behind the longest of ``lengths``: `Layer.write` would overwrite."""
        return jnp.max(lengths) + fed <= self.num_slots

    def view(self, layers: Sequence[int]) -> tuple[Layer, ...]:
        """Keys and values of single layers, to be read: no copy."""
        return tuple(self.layers[i] for i in layers)

    def keep(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
        """After a tree, whose root is at slot ``start``: what node ``path[b, j]`` wrote moves to where token j + 1 of a
        chain would have written it. Node n has slot ``start + n``; what ``path`` names behind the accepted nodes may be
        any node, and is overwritten by the next block."""
        heads = self.layers[0].keys.shape[:-2]
        per_row = math.prod(heads) // len(path)
        sources = jnp.repeat(start[:, None] + path, per_row, axis=0).reshape(*heads, -1)

        def moved(layer: Layer) -> Layer:
            chosen_keys = jnp.take_along_axis(layer.keys, sources[..., None], axis=-2)
            chosen_values = jnp.take_along_axis(layer.values, sources[..., None, :], axis=-1)
            if self.spread:
                return layer.write(start + 1, Layer(chosen_keys, chosen_values), together=True)
            keys, values, chosen_keys, chosen_values = (
                x.reshape(-1, *x.shape[-2:]) for x in (*layer, chosen_keys, chosen_values)
            )
            written = Layer(keys, values).write(start + 1, Layer(chosen_keys, chosen_values))
            return Layer(*(x.reshape(old.shape) for x, old in zip(written, layer, strict=True)))

        return dataclasses.replace(self, layers=tuple(map(moved, self.layers)))

    def grow(self, slots: int) -> KVCache:
        """With more slots, ``slots`` in all: a layer at a time, each of which is let go of once it is copied."""

        def grown(layer: Layer) -> Layer:
            larger = _grown(layer, slots)
            for x in layer:
                if not isinstance(x, Tracer):
                    x.delete()
            return larger

        return dataclasses.replace(self, layers=tuple(map(grown, self.layers)))

    def insert(self, rows: Int[Array, " R"], other: KVCache) -> KVCache:
        """``other``'s rows in place of the ``rows``, neither folded; what is out of range goes nowhere."""
        return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), self, other)

    @property
    def is_folded(self) -> bool:
        return self.layers[0].keys.ndim == 3

    def fold(self) -> KVCache:
        """With rows and heads on one axis, ``[BG, ...]``: what a pass writes, and what a loop of passes carries."""
        stays = self.is_folded or self.spread
        return self if stays else self._changed(lambda x: x.reshape(-1, *x.shape[2:]))

    def unfold(self, batch: int) -> KVCache:
        return self if self.spread else self._changed(lambda x: x.reshape(batch, -1, *x.shape[1:]))

    def written(self, layers: Sequence[Layer]) -> KVCache:
        """With the folded ``layers`` of a pass in place of its own, and folded only if it was."""
        return self._changed(lambda old, new: new.reshape(old.shape), tuple(layers))

    def _changed(self, change: Callable[..., Array], *others: tuple[Layer, ...]) -> KVCache:
        return dataclasses.replace(self, layers=jax.tree.map(change, self.layers, *others))


@runtime_checkable
class Attended(Protocol):
    """What the tokens of a pass attend to in a layer: a `Memory`, or that of a drafter that reads another model's."""

    def attend(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B T G C"],
        v: Float[Array, "B T G C"],
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T H C"], Any]:
        """What the tokens read, and what is there once their own keys and values are."""
        ...


@flax.struct.dataclass
class Memory:
    """What the tokens of a pass attend to in a layer: the slots of a cache, among which their own are written; or,
    without a cache, each other. ``sight`` says which of them each token reads, ``start`` is where a row's block is
    written."""

    sight: Sight
    start: Int[Array, " B"]
    cached: Layer | None = None
    spread: bool = flax.struct.field(pytree_node=False, default=False)
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    """Of the devices that a pass computes on, if they are several."""
    whole: bool = flax.struct.field(pytree_node=False, default=False)
    """The tokens of a pass are all that a row has so far, so that they attend to each other."""

    def over(self, cached: Layer) -> Memory:
        """The same of another layer, whose folded cache is ``cached``."""
        return dataclasses.replace(self, cached=cached)

    def attend(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B T G C"],
        v: Float[Array, "B T G C"],
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T H C"], Layer]:
        """What the tokens read, and the layer with their own keys and values."""
        own = Layer.of(k, v, folded=not self.spread)
        layer = own if self.cached is None else self.cached.write(self.start, own, self.spread)
        out = None
        if self.whole:
            out = flash.whole_rows(q, k, v, self.sight, flash.Call.of(q, scale, soft_cap), self.mesh)
        if out is None:
            keys, values = (x.astype(q.dtype) for x in (own if self.whole else layer))
            out = attend(q, keys, values, self.sight, scale, soft_cap)
        return out, layer


def memories(
    cache: KVCache | None,
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T T"] | Documents | None,
    windows: Iterable[int | None],
    mesh: Mesh | None = None,
) -> dict[int | None, Memory]:
    """What a pass attends to, for each window of its layers. Without ``slots``, the tokens of a pass are the first of
    their rows."""
    start = None if cache is None or slots is None else slots[:, 0]
    everything = _sight(positions, None if start is None else slots, start, mask)
    of_keys = positions if cache is None or start is None else _key_positions(cache, positions, start, mask)
    where = jnp.zeros(len(positions), jnp.int32) if start is None else start
    spread = cache is not None and cache.spread
    return {
        window: Memory(
            everything.within(window, positions, of_keys), where, spread=spread, mesh=mesh, whole=start is None
        )
        for window in dict.fromkeys(windows)
    }


def _sight(positions: Array, slots: Any, start: Any, mask: Any) -> Sight:
    """Every query sees the slots before its block, and inside the block what ``mask`` says (default: causal)."""
    if slots is None:
        slots = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    if mask is None:
        return Sight(slots)
    if isinstance(mask, Documents):
        if start is not None:
            raise TypeError("a pass over a cache feeds each row one document")
        return Sight(slots, segments=(mask.segments, mask.segments))
    return Sight(slots, Tree(jnp.zeros(len(positions), jnp.int32) if start is None else start, mask))


def _key_positions(cache: KVCache, positions: Array, start: Any, mask: Any) -> Int[Array, "B S"] | None:
    """None: those of the keys are their slots. They are in a chain, and in a tree before the block."""
    if mask is None:
        return None
    slots = jnp.arange(cache.num_slots, dtype=positions.dtype)[None]
    inside = slots - start[:, None]
    fed = jnp.take_along_axis(positions, jnp.clip(inside, 0, positions.shape[1] - 1).astype(jnp.int32), axis=1)
    return jnp.where(inside < 0, slots, fed)


@functools.partial(jax.jit, static_argnames="slots")
def _grown(layer: Layer, slots: int) -> Layer:
    more, rest = (0, slots - layer.keys.shape[-2]), [(0, 0)] * (layer.keys.ndim - 2)
    return Layer(jnp.pad(layer.keys, [*rest, more, (0, 0)]), jnp.pad(layer.values, [*rest, (0, 0), more]))


# --- every cache in a tree, a drafter's too -------------------------------------------------------------------------


def is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def first(tree: Any) -> KVCache:
    """The first cache in the tree."""
    return next(x for x in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(x))


def num_slots(tree: Any) -> int:
    """Slots of the first cache in the tree."""
    return first(tree).num_slots


def grow(tree: Any, slots: int) -> Any:
    """Every cache with more slots, its own arrays gone: a bucket change between chunks, never inside one."""
    return _each(tree, lambda cache: cache.grow(slots))


def insert(tree: Any, rows: Int[Array, " R"], other: Any) -> Any:
    """``other``'s rows in place of the ``rows`` of a tree whose arrays have the row first, caches and all."""

    def put(old: Any, new: Any) -> Any:
        return old.insert(rows, new) if is_cache(old) else old.at[rows].set(new, mode="drop")

    return jax.tree.map(put, tree, other, is_leaf=is_cache)


def free_programs() -> None:
    """Let go of the programs that grow caches."""
    _grown.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def fold(tree: Any) -> Any:
    """Every cache folded, as a loop of passes carries it."""
    return _each(tree, KVCache.fold)


def unfold(tree: Any, batch: int) -> Any:
    return _each(tree, lambda cache: cache.unfold(batch))


def with_total(tree: Any, total: Int[Array, " B"]) -> Any:
    """Every cache that asks for it is told the length that each row will reach: before the first token is written,
    because that settles the frequencies its keys are rotated with."""
    lengths = total.astype(jnp.int32)
    return _each(tree, lambda cache: cache if cache.total is None else dataclasses.replace(cache, total=lengths))


def _each(tree: Any, change: Callable[[KVCache], KVCache]) -> Any:
    return jax.tree.map(lambda x: change(x) if is_cache(x) else x, tree, is_leaf=is_cache)


# --- writing --------------------------------------------------------------------------------------------------------


def write_rows(
    buffer: Shaped[Array, "B L"], start: Int[Array, " B"], new: Shaped[Array, "B T"], together: bool = False
) -> Array:
    """``buffer[b, start[b] : start[b] + T] = new[b]``; all rows ``together`` where they lie over several devices."""
    return _write(buffer, start, new, 1, together)


def _write(buffer: Array, start: Int[Array, " B"], new: Array, axis: int, together: bool = False) -> Array:
    """Write at ``start[b]`` of ``axis``, row by row or ``together``, by the number of rows."""
    rows, heads = len(start), len(buffer) // len(start)
    new = new.astype(buffer.dtype)

    def at(row, slot):
        index = (row, *(slot if i == axis else 0 for i in range(1, buffer.ndim)))
        return tuple(jnp.asarray(i, jnp.int32) for i in index)  # of one type, under JAX_ENABLE_X64 as well

    if together or rows > backend.unrolled_rows():
        old, new = (x.reshape(rows, heads, *x.shape[1:]) for x in (buffer, new))
        written = jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, at(0, s)))(old, new, start)
        return written.reshape(buffer.shape)
    for row in range(rows):
        theirs = new[row * heads : (row + 1) * heads]
        buffer = jax.lax.dynamic_update_slice(buffer, theirs, at(row * heads, start[row]))
    return buffer
