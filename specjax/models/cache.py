"""The KV cache as an object: the keys and values that a pass writes, attends to and leaves behind. Each layer has one
pair of arrays, whose axes have the order in which attention multiplies with them, so that no pass copies a cache.

A rollback only leaves the length as it was: stale slots are masked, then overwritten. No pass clears or moves a slot,
except for the accepted path of a tree. Between passes a cache grows, and layers with a window slide: they drop the
tokens that no later one sees.

Dims: B rows, S slots, T tokens fed, H query heads, G key-value heads, C head features, BG = B * G heads with those of a
row side by side, D nodes of a path, R rows of another cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from specjax.models.attention.stored import BlockKV, Int8Layer, LayerKV, OneOf, Sliding, Stored, moved, resized, sliding


class Windows(NamedTuple):
    """Sizes of a cache in which layers with a window hold no more than they see; ``slots``: those of all other
    layers."""

    of_layers: tuple[int | None, ...]
    """Window of each layer in tokens; None: the layer holds everything."""
    room: int
    """Most tokens that are fed before the layers slide again."""
    slots: int

    def held(self, layer: int) -> int:
        """Number of slots of a layer."""
        window = self.of_layers[layer]
        return self.slots if window is None else min(self.slots, window + self.room)


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, keys ``[B, G, S, C]``, values ``[B, G, C, S]``; `fold` merges B and G. Both
    products of attention then read the rows of a matrix (`specjax.models.products.few_queries_product`).

    In the form ``[B, S, G, C]``, XLA on CPU copied both arrays in every pass: 1.5-2.3x the time of attention. A loop
    over one row that carries a leading axis of 1 copies them again when it feeds a single token: hence the folded form.
    """

    layers: tuple[Stored, ...]
    total: Int[Array, " B"] | None = None
    """Length in tokens that each row will reach, prompt included, for models whose rotary frequencies depend on it."""
    spread: bool = flax.struct.field(pytree_node=False, default=False)
    """True over several devices: heads and rows, split over different axes, are then never folded, and all rows are
    written together."""
    windows: Windows | None = flax.struct.field(pytree_node=False, default=None)
    """Sizes of the layers that slide; None: every layer holds everything."""
    block: tuple[BlockKV, ...] | None = None
    """Keys and values of the tokens of a tree that a pass has just written, by layer, for `keep`."""
    looped: bool = flax.struct.field(pytree_node=False, default=False)
    """True if ``layers`` is a single entry whose arrays have the layers in a first axis, and ``block`` alike, for a
    model that runs its layers as a loop."""

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        batch: int,
        num_slots: int,
        kv_heads: int,
        features: int,
        dtype: DTypeLike,
        windows: Windows | None = None,
        looped: bool = False,
    ) -> KVCache:
        """Empty cache; ``dtype`` int8: with scales."""
        many = (num_layers,) if looped else ()

        def layer(i: int) -> Stored:
            held = num_slots if windows is None else windows.held(i)
            keys, values = (
                jnp.zeros((*many, batch, kv_heads, *shape), dtype) for shape in ((held, features), (features, held))
            )
            scales = (jnp.zeros((*many, batch, kv_heads, held), jnp.float32) for _ in range(2))
            slots = Int8Layer(keys, values, *scales) if keys.dtype == jnp.int8 else LayerKV(keys, values)
            return slots if held == num_slots else Sliding(slots, jnp.zeros((batch,), jnp.int32))

        return cls(tuple(map(layer, range(1 if looped else num_layers))), windows=windows, looped=looped)

    @property
    def num_slots(self) -> int:
        return self.layers[0].keys.shape[-2] if self.windows is None else self.windows.slots

    def has_room(self, lengths: Int[Array, " B"], fed: int) -> Bool[Array, ""]:
        """True if ``fed`` more tokens fit behind each of ``lengths``; otherwise `LayerKV.write` would overwrite valid
        slots."""
        return fed <= self.room(lengths)

    def room(self, lengths: Int[Array, " B"]) -> Int[Array, ""]:
        """Number of tokens that still fit behind each of ``lengths``, until the cache grows or its layers slide."""
        left = [self.num_slots - jnp.max(lengths)]
        for layer in self.layers:
            if isinstance(layer, Sliding):
                left.append(layer.keys.shape[-2] - jnp.max(lengths - layer.base))
        return functools.reduce(jnp.minimum, left)

    def view(self, layers: Sequence[int]) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of single layers, to be read; only layers in few bits are copied. Raises `ValueError` for a
        layer that holds no more than it sees: `specjax.models.transformer.Model.init_cache` must be told which layers
        are read whole."""
        found = [self._layer(i) for i in layers]
        for i, layer in zip(layers, found, strict=True):
            if isinstance(layer, Sliding):
                raise ValueError(f"layer {i} of the cache slides, so that it cannot be read whole")
        return tuple(layer.read() for layer in found)

    def _layer(self, number: int) -> Stored | OneOf:
        if not self.looped:
            return self.layers[number]
        assert not isinstance(self.layers[0], Sliding)
        return OneOf(self.layers[0], number)

    def keep(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
        """This cache with the accepted path of a tree in the slots of a chain. Node n of the tree has slot
        ``start + n``; the entries of node ``path[b, j]`` move to slot ``start + j + 1``. Past the accepted nodes,
        ``path`` may name any node: the next block overwrites those slots."""

        of_layers = (None,) * len(self.layers) if self.block is None else self.block
        move = functools.partial(moved, together=self.spread)
        if self.looped:
            move = jax.vmap(move, in_axes=(0, None, None, 0))
        each = zip(self.layers, of_layers, strict=True)
        layers = tuple(move(layer, start, path, block) for layer, block in each)
        return dataclasses.replace(self, layers=layers, block=None)

    def slid(self, lengths: Int[Array, " B"]) -> KVCache:
        """This cache without the entries that no token from ``lengths[b]`` on sees, so that its layers have room again.
        It deletes its old arrays."""

        def slid(layer: Stored, window: int | None) -> Stored:
            return _slid(layer, lengths, window) if isinstance(layer, Sliding) else layer

        return self if self.windows is None else self._one_by_one(slid, self.windows.of_layers)

    def narrowed(self, lengths: Int[Array, " B"], room: int) -> KVCache:
        """This cache `slid`, with room for ``room`` more tokens and no others."""
        if self.windows is None:
            return self
        windows = self.windows._replace(room=room)

        def narrowed(layer: Stored, i: int) -> Stored:
            held, window = windows.held(i), windows.of_layers[i]
            if window is None or held == windows.slots:
                return layer
            return resized(sliding(layer, len(lengths)).slid(lengths, window), held)

        return dataclasses.replace(self._one_by_one(narrowed, range(len(self.layers))), windows=windows)

    def grow(self, slots: int) -> KVCache:
        """This cache with ``slots`` slots in all, in every layer that does not yet hold all that it sees. It deletes
        its old arrays."""
        windows = None if self.windows is None else self.windows._replace(slots=slots)

        def grown(layer: Stored, i: int) -> Stored:
            held = slots if windows is None else windows.held(i)
            layer = layer if held == slots else sliding(layer, len(layer.keys))
            return layer if held == layer.keys.shape[-2] else _grown(layer, held)

        return dataclasses.replace(self._one_by_one(grown, range(len(self.layers))), windows=windows)

    def _one_by_one(self, change: Callable[[Stored, Any], Stored], others: Iterable[Any]) -> KVCache:
        """This cache with each layer changed by its entry of ``others``. The old arrays of a layer are deleted before
        the next one changes, so that only one layer is in memory twice."""

        def changed(layer: Stored, other: Any) -> Stored:
            found = change(layer, other)
            kept = {id(x) for x in jax.tree.leaves(found)}
            for x in jax.tree.leaves(layer):
                if not isinstance(x, Tracer) and id(x) not in kept:
                    x.delete()
            return found

        return dataclasses.replace(self, layers=tuple(map(changed, self.layers, others)))

    def insert(self, rows: Int[Array, " R"], other: KVCache) -> KVCache:
        """This cache with ``other``'s rows in place of its ``rows``, neither folded; rows out of range are dropped."""

        def put(old: Array, new: Array) -> Array:
            at = old.at[:, rows] if self.looped else old.at[rows]
            return at.set(new, mode="drop")

        layers = jax.tree.map(put, self.layers, other.layers)
        if self.total is None or other.total is None:
            return dataclasses.replace(self, layers=layers)
        return dataclasses.replace(self, layers=layers, total=self.total.at[rows].set(other.total, mode="drop"))

    @property
    def is_folded(self) -> bool:
        return self.layers[0].keys.ndim == 3 + self.looped

    def fold(self) -> KVCache:
        """This cache with rows and heads on one axis, ``[BG, ...]``: the form that a pass writes and a loop of passes
        carries."""
        stays, many = self.is_folded or self.spread, int(self.looped)

        def folded(x: Array) -> Array:
            return x if x.ndim == 1 else x.reshape(*x.shape[:many], -1, *x.shape[many + 2 :])

        return self if stays else self._changed(folded)

    def unfold(self, batch: int) -> KVCache:
        stays, many = self.spread, int(self.looped)

        def unfolded(x: Array) -> Array:
            return x if x.ndim == 1 else x.reshape(*x.shape[:many], batch, -1, *x.shape[many + 1 :])

        return self if stays else self._changed(unfolded)

    def written(self, layers: Sequence[Stored], block: Sequence[BlockKV] | None = None) -> KVCache:
        """This cache with the folded ``layers`` of a pass in place of its own; it is folded only if it was before.
        ``block``: keys and values of the tokens of the pass in each layer, if they are a tree."""
        cache = self._changed(lambda old, new: new.reshape(old.shape), tuple(layers))
        return cache if block is None else dataclasses.replace(cache, block=tuple(block))

    def _changed(self, change: Callable[..., Array], *others: tuple[Stored, ...]) -> KVCache:
        return dataclasses.replace(self, layers=jax.tree.map(change, self.layers, *others))


@functools.partial(jax.jit, static_argnames="slots")
def _grown(layer: Stored, slots: int) -> Stored:
    return resized(layer, slots)


@functools.partial(jax.jit, static_argnames="window")
def _slid(layer: Sliding, lengths: Int[Array, " B"], window: int) -> Sliding:
    return layer.slid(lengths, window)


# --- all caches of a pytree, a drafter's too ------------------------------------------------------------------------


def is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def first(tree: Any) -> KVCache:
    """First cache in the pytree."""
    return next(x for x in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(x))


def num_slots(tree: Any) -> int:
    """Number of slots of the first cache in the pytree."""
    return first(tree).num_slots


def grow(tree: Any, slots: int) -> Any:
    """The pytree with every cache grown to ``slots`` slots and its old arrays deleted: a change of bucket between
    chunks, never inside one."""
    return _each(tree, lambda cache: cache.grow(slots))


def slide(tree: Any, lengths: Int[Array, " B"]) -> Any:
    """The pytree with every cache `slid` and its old arrays deleted: only between chunks, too."""
    return _each(tree, lambda cache: cache.slid(lengths))


def narrowed(tree: KVCache | Any, lengths: Int[Array, " B"], room: int) -> Any:
    """The pytree with every cache slid, and room for ``room`` more tokens and no others."""
    return _each(tree, lambda cache: cache.narrowed(lengths, room))


def insert(tree: Any, rows: Int[Array, " R"], other: Any) -> Any:
    """The pytree with ``other``'s rows in place of its ``rows``; all arrays but those of caches have the row first."""

    def put(old: Any, new: Any) -> Any:
        return old.insert(rows, new) if is_cache(old) else old.at[rows].set(new, mode="drop")

    return jax.tree.map(put, tree, other, is_leaf=is_cache)


def of_first_row(tree: Any, rows: int) -> Any:
    """The pytree with ``rows`` copies of its first row; caches are included, not folded."""
    first = jnp.zeros((rows,), jnp.int32)

    def copied(x: Any) -> Any:
        if not is_cache(x):
            return x[first]
        layers = jax.tree.map(lambda array: jnp.take(array, first, axis=int(x.looped)), x.layers)
        return dataclasses.replace(x, layers=layers, total=None if x.total is None else x.total[first])

    return jax.tree.map(copied, tree, is_leaf=is_cache)


def free_programs() -> None:
    """Free the compiled programs that change caches between chunks."""
    _grown.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    _slid.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def fold(tree: Any) -> Any:
    """The pytree with every cache folded, as a loop of passes carries it."""
    return _each(tree, KVCache.fold)


def unfold(tree: Any, batch: int) -> Any:
    return _each(tree, lambda cache: cache.unfold(batch))


def with_total(tree: Any, total: Int[Array, " B"]) -> Any:
    """The pytree with the length that each row will reach in every cache that needs it. Call it before the first token
    is written: the length settles the frequencies that keys are rotated with."""
    lengths = total.astype(jnp.int32)
    return _each(tree, lambda cache: cache if cache.total is None else dataclasses.replace(cache, total=lengths))


def _each(tree: Any, change: Callable[[KVCache], KVCache]) -> Any:
    return jax.tree.map(lambda x: change(x) if is_cache(x) else x, tree, is_leaf=is_cache)
