"""The KV cache: one pair of arrays a layer, turned as attention multiplies with them, so that no pass copies a cache.
Rollback is not advancing: stale slots are masked, then overwritten, so nothing here ever clears or moves a slot.

Dims: B rows, S slots, T tokens fed, G key-value heads, C head features, BG = B * G heads, a row's side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax import backend


@flax.struct.dataclass
class KVCache:
    """``layers[l] = (keys, values)``, keys ``[B, G, C, S]``, values ``[B, G, S, C]``; `fold` merges B and G.

    Kept as ``[B, S, G, C]``, XLA on CPU copied both in every pass: 1.5-2.3x the time of attention. And a loop over one
    row that carries a leading axis of 1 copies them again when it feeds a single token: hence the folded form.
    """

    layers: tuple[tuple[Float[Array, "B G C S"], Float[Array, "B G S C"]], ...]
    total: Int[Array, " B"] | None = None
    """The length that a row will reach, prompt included, for models whose rotary frequencies depend on it."""

    @classmethod
    def zeros(
        cls, num_layers: int, batch: int, num_slots: int, kv_heads: int, features: int, dtype: DTypeLike
    ) -> KVCache:
        keys, values = (batch, kv_heads, features, num_slots), (batch, kv_heads, num_slots, features)
        return cls(tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(num_layers)))

    @property
    def num_slots(self) -> int:
        return self.layers[0][1].shape[-2]

    def has_room(self, lengths: Int[Array, " B"], fed: int) -> Bool[Array, ""]:
        """Whether ``fed`` more tokens fit behind the longest of ``lengths``: `write_block` would overwrite."""
        return jnp.max(lengths) + fed <= self.num_slots

    def view(self, layers: Sequence[int]) -> tuple[tuple[Array, Array], ...]:
        """Keys and values of single layers, to be read: no copy."""
        return tuple(self.layers[i] for i in layers)

    def keep(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
        """After a tree, whose root is at slot ``start``: what node ``path[b, j]`` wrote moves to where token j + 1 of a
        chain would have written it. Node n has slot ``start + n``; what ``path`` names behind the accepted nodes may be
        any node, and is overwritten by the next block."""
        heads = self.layers[0][0].shape[:-2]
        per_row = math.prod(heads) // len(path)
        sources = jnp.repeat(start[:, None] + path, per_row, axis=0).reshape(*heads, -1)

        def moved(layer):
            keys, values = layer
            chosen_keys = jnp.take_along_axis(keys, sources[..., None, :], axis=-1)
            chosen_values = jnp.take_along_axis(values, sources[..., None], axis=-2)
            flat = [x.reshape(-1, *x.shape[-2:]) for x in (keys, values, chosen_keys, chosen_values)]
            keys, values = _write(flat[0], start + 1, flat[2], axis=2), _write(flat[1], start + 1, flat[3], axis=1)
            return keys.reshape(layer[0].shape), values.reshape(layer[1].shape)

        return KVCache(tuple(moved(layer) for layer in self.layers), self.total)


def is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def num_slots(tree: Any) -> int:
    """Slots of the first cache in the tree."""
    return next(x.num_slots for x in jax.tree.leaves(tree, is_leaf=is_cache) if is_cache(x))


def grow(tree: Any, slots: int) -> Any:
    """Every cache in the tree, a drafter's too, with more slots: a bucket change between chunks, never inside one."""

    def grown(cache: KVCache) -> KVCache:
        more = (0, slots - cache.num_slots)
        return KVCache(
            tuple(
                (jnp.pad(keys, ((0, 0), (0, 0), (0, 0), more)), jnp.pad(values, ((0, 0), (0, 0), more, (0, 0))))
                for keys, values in cache.layers
            ),
            cache.total,
        )

    return jax.tree.map(lambda x: grown(x) if is_cache(x) else x, tree, is_leaf=is_cache)


def fold(tree: Any) -> Any:
    """Every cache in the tree with rows and heads on one axis, ``[BG, ...]``: what a loop of passes carries."""
    return _reshaped(tree, lambda x: x.reshape(-1, *x.shape[2:]))


def unfold(tree: Any, batch: int) -> Any:
    return _reshaped(tree, lambda x: x.reshape(batch, -1, *x.shape[1:]))


def _reshaped(tree: Any, reshape) -> Any:
    def reshaped(cache: KVCache) -> KVCache:
        return KVCache(jax.tree.map(reshape, cache.layers), cache.total)

    return jax.tree.map(lambda x: reshaped(x) if is_cache(x) else x, tree, is_leaf=is_cache)


def with_total(tree: Any, total: Int[Array, " B"]) -> Any:
    """Every cache in the tree that asks for it is told the length that each row will reach: before the first token is
    written, because that settles the frequencies its keys are rotated with."""

    def told(x: Any) -> Any:
        return KVCache(x.layers, total.astype(jnp.int32)) if is_cache(x) and x.total is not None else x

    return jax.tree.map(told, tree, is_leaf=is_cache)


def as_layer(keys: Float[Array, "B T G C"], values: Float[Array, "B T G C"]) -> tuple[Array, Array]:
    """A block of new keys and values as a folded layer: ``[BG, C, T]``, ``[BG, T, C]``."""
    batch, fed, kv_heads, features = keys.shape
    return (
        keys.transpose(0, 2, 3, 1).reshape(batch * kv_heads, features, fed),
        values.transpose(0, 2, 1, 3).reshape(batch * kv_heads, fed, values.shape[3]),
    )


def write_block(
    layer: tuple[Float[Array, "BG C S"], Float[Array, "BG S C"]],
    slots: Int[Array, "B T"],
    keys: Float[Array, "B T G C"],
    values: Float[Array, "B T G C"],
) -> tuple[Float[Array, "BG C S"], Float[Array, "BG S C"]]:
    """Write each row's T new entries at ``slots[b, 0] ...``: a block is contiguous in slots, in a tree as well.

    The engine keeps ``S >= slots[b, 0] + T``: `dynamic_update_slice` clamps its start and would overwrite valid slots.
    """
    new_keys, new_values = as_layer(keys, values)
    return _write(layer[0], slots[:, 0], new_keys, axis=2), _write(layer[1], slots[:, 0], new_values, axis=1)


def write_rows(buffer: Shaped[Array, "B L"], start: Int[Array, " B"], new: Shaped[Array, "B T"]) -> Array:
    """``buffer[b, start[b] : start[b] + T] = new[b]``."""
    return _write(buffer, start, new, axis=1)


def _write(buffer: Array, start: Int[Array, " B"], new: Array, axis: int) -> Array:
    """Write at ``start[b]`` of ``axis``."""
    rows, heads = len(start), len(buffer) // len(start)
    new = new.astype(buffer.dtype)

    def at(row, slot):
        index = (row, *(slot if i == axis else 0 for i in range(1, buffer.ndim)))
        return tuple(jnp.asarray(i, jnp.int32) for i in index)  # of one type, under JAX_ENABLE_X64 as well

    if rows > backend.UNROLLED_ROWS:
        old, new = (x.reshape(rows, heads, *x.shape[1:]) for x in (buffer, new))
        written = jax.vmap(lambda b, n, s: jax.lax.dynamic_update_slice(b, n, at(0, s)))(old, new, start)
        return written.reshape(buffer.shape)
    for row in range(rows):
        theirs = new[row * heads : (row + 1) * heads]
        buffer = jax.lax.dynamic_update_slice(buffer, theirs, at(row * heads, start[row]))
    return buffer
