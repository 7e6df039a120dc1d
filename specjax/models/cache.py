"""The KV cache as an object: what a pass writes, attends to and keeps. One pair of arrays a layer, turned as attention
multiplies with them, so that no pass copies a cache. Rollback is not advancing: stale slots are masked, then
overwritten, so no pass ever clears or moves a slot, but for the accepted path of a tree. Between passes a cache grows,
and layers with a window slide.

Dims: B rows, S slots, T tokens fed, H query heads, G key-value heads, C head features, BG = B * G heads, a row's side
by side, R rows of another cache.
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

from specjax.models.attention.stored import Int8Layer, Layer, Sliding, Stored, moved, resized, sliding


class Windows(NamedTuple):
    """Which layers hold no more than they see, of a cache with ``slots`` for whole ones."""

    of_layers: tuple[int | None, ...]
    """None: a layer that holds everything."""
    room: int
    """Tokens that are fed, at most, before the layers slide again."""
    slots: int

    def held(self, layer: int) -> int:
        """Slots of a layer."""
        window = self.of_layers[layer]
        return self.slots if window is None else min(self.slots, window + self.room)


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, keys ``[B, G, S, C]``, values ``[B, G, C, S]``; `fold` merges B and G. So both
    products of attention are with the rows of a matrix (`specjax.models.products.few_queries_product`).

    Kept as ``[B, S, G, C]``, XLA on CPU copied both in every pass: 1.5-2.3x the time of attention. And a loop over one
    row that carries a leading axis of 1 copies them again when it feeds a single token: hence the folded form.
    """

    layers: tuple[Stored, ...]
    total: Int[Array, " B"] | None = None
    """The length that a row will reach, prompt included, for models whose rotary frequencies depend on it."""
    spread: bool = flax.struct.field(pytree_node=False, default=False)
    """Over several devices: heads and rows, split over other axes, are then never folded, and rows are written
    together."""
    windows: Windows | None = flax.struct.field(pytree_node=False, default=None)
    """None: every layer holds everything."""

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
    ) -> KVCache:
        """Empty; ``dtype`` int8: with scales."""

        def layer(i: int) -> Stored:
            held = num_slots if windows is None else windows.held(i)
            keys, values = (
                jnp.zeros((batch, kv_heads, *shape), dtype) for shape in ((held, features), (features, held))
            )
            scales = (jnp.zeros((batch, kv_heads, held), jnp.float32) for _ in range(2))
            slots = Int8Layer(keys, values, *scales) if keys.dtype == jnp.int8 else Layer(keys, values)
            return slots if held == num_slots else Sliding(slots, jnp.zeros((batch,), jnp.int32))

        return cls(tuple(map(layer, range(num_layers))), windows=windows)

    @property
    def num_slots(self) -> int:
        return self.layers[0].keys.shape[-2] if self.windows is None else self.windows.slots

    def has_room(self, lengths: Int[Array, " B"], fed: int) -> Bool[Array, ""]:
        """Whether ``fed`` more tokens fit behind each of ``lengths``: `Layer.write` would overwrite."""
        return fed <= self.room(lengths)

    def room(self, lengths: Int[Array, " B"]) -> Int[Array, ""]:
        """Tokens that still fit behind each of ``lengths``: until the cache grows, or its layers slide."""
        left = [self.num_slots - jnp.max(lengths)]
        for layer in self.layers:
            if isinstance(layer, Sliding):
                left.append(layer.keys.shape[-2] - jnp.max(lengths - layer.base))
        return functools.reduce(jnp.minimum, left)

    def view(self, layers: Sequence[int]) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of single layers, to be read; no copy, but of what is in few bits. Raises `ValueError` for
        one that holds no more than it sees: `specjax.models.transformer.Model.init_cache` is told what is read."""
        for i in layers:
            if isinstance(self.layers[i], Sliding):
                raise ValueError(f"layer {i} of the cache slides, so that it cannot be read whole")
        return tuple(self.layers[i].read() for i in layers)

    def keep(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
        """After a tree, whose root is at slot ``start``: what node ``path[b, j]`` wrote moves to where token j + 1 of a
        chain would have written it. Node n has slot ``start + n``; what ``path`` names behind the accepted nodes may be
        any node, and is overwritten by the next block."""

        return dataclasses.replace(
            self, layers=tuple(moved(layer, start, path, together=self.spread) for layer in self.layers)
        )

    def slid(self, lengths: Int[Array, " B"]) -> KVCache:
        """Layers without what no token from ``lengths[b]`` on sees, so that there is room again; its own are gone."""

        def slid(layer: Stored, window: int | None) -> Stored:
            return _slid(layer, lengths, window) if isinstance(layer, Sliding) else layer

        return self if self.windows is None else self._one_by_one(slid, self.windows.of_layers)

    def narrowed(self, lengths: Int[Array, " B"], room: int) -> KVCache:
        """`slid`, with so much ``room`` and no more."""
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
        """With more slots, ``slots`` in all, where a layer does not hold all that it sees; its own arrays are gone."""
        windows = None if self.windows is None else self.windows._replace(slots=slots)

        def grown(layer: Stored, i: int) -> Stored:
            held = slots if windows is None else windows.held(i)
            layer = layer if held == slots else sliding(layer, len(layer.keys))
            return layer if held == layer.keys.shape[-2] else _grown(layer, held)

        return dataclasses.replace(self._one_by_one(grown, range(len(self.layers))), windows=windows)

    def _one_by_one(self, change: Callable[[Stored, Any], Stored], others: Iterable[Any]) -> KVCache:
        """Each layer changed, beside what is said of it, and let go before the next: none but one is there twice."""

        def changed(layer: Stored, other: Any) -> Stored:
            found = change(layer, other)
            kept = {id(x) for x in jax.tree.leaves(found)}
            for x in jax.tree.leaves(layer):
                if not isinstance(x, Tracer) and id(x) not in kept:
                    x.delete()
            return found

        return dataclasses.replace(self, layers=tuple(map(changed, self.layers, others)))

    def insert(self, rows: Int[Array, " R"], other: KVCache) -> KVCache:
        """``other``'s rows in place of the ``rows``, neither folded; what is out of range goes nowhere."""
        return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), self, other)

    @property
    def is_folded(self) -> bool:
        return self.layers[0].keys.ndim == 3

    def fold(self) -> KVCache:
        """With rows and heads on one axis, ``[BG, ...]``: what a pass writes, and what a loop of passes carries."""
        stays = self.is_folded or self.spread
        return self if stays else self._changed(lambda x: x if x.ndim == 1 else x.reshape(-1, *x.shape[2:]))

    def unfold(self, batch: int) -> KVCache:
        stays = self.spread
        return self if stays else self._changed(lambda x: x if x.ndim == 1 else x.reshape(batch, -1, *x.shape[1:]))

    def written(self, layers: Sequence[Stored]) -> KVCache:
        """With the folded ``layers`` of a pass in place of its own, and folded only if it was."""
        return self._changed(lambda old, new: new.reshape(old.shape), tuple(layers))

    def _changed(self, change: Callable[..., Array], *others: tuple[Stored, ...]) -> KVCache:
        return dataclasses.replace(self, layers=jax.tree.map(change, self.layers, *others))


@functools.partial(jax.jit, static_argnames="slots")
def _grown(layer: Stored, slots: int) -> Stored:
    return resized(layer, slots)


@functools.partial(jax.jit, static_argnames="window")
def _slid(layer: Sliding, lengths: Int[Array, " B"], window: int) -> Sliding:
    return layer.slid(lengths, window)


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


def slide(tree: Any, lengths: Int[Array, " B"]) -> Any:
    """Every cache without what no token from ``lengths[b]`` on sees, its own arrays gone: between chunks, too."""
    return _each(tree, lambda cache: cache.slid(lengths))


def narrowed(tree: KVCache | Any, lengths: Int[Array, " B"], room: int) -> Any:
    """Every cache slid, with so much ``room`` and no more."""
    return _each(tree, lambda cache: cache.narrowed(lengths, room))


def insert(tree: Any, rows: Int[Array, " R"], other: Any) -> Any:
    """``other``'s rows in place of the ``rows`` of a tree whose arrays have the row first, caches and all."""

    def put(old: Any, new: Any) -> Any:
        return old.insert(rows, new) if is_cache(old) else old.at[rows].set(new, mode="drop")

    return jax.tree.map(put, tree, other, is_leaf=is_cache)


def free_programs() -> None:
    """Let go of the programs that change caches between chunks."""
    _grown.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    _slid.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


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
