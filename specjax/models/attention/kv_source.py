"""Keys and values that the tokens of a pass attend to.

Dims: B rows, S slots, T tokens fed, H query heads, G key-value heads, C head features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from specjax.interfaces import Documents
from specjax.models.attention import flash
from specjax.models.attention.blocks import attend
from specjax.models.attention.sight import AttentionMask, Tree
from specjax.models.attention.stored import LayerKV, OneOf, Sliding, Stored
from specjax.models.cache import KVCache


@runtime_checkable
class KVSource(Protocol):
    """Interface of the keys and values that the tokens of a pass attend to in a layer: a `CacheKV`, or the source of a
    drafter that reads another model's."""

    def attend(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B T G C"],
        v: Float[Array, "B T G C"],
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T H C"], Any]:
        """Output of attention, and the layer with the tokens' own keys and values."""
        ...


@flax.struct.dataclass
class CacheKV:
    """Keys and values that the tokens of a pass attend to in a layer: the slots of a cache, among which the tokens' own
    are written, or, without a cache, the tokens' own alone. ``sight`` says which of them each token sees; ``start`` is
    the slot where a row's block begins."""

    sight: AttentionMask
    start: Int[Array, " B"]
    cached: Stored | OneOf | None = None
    spread: bool = flax.struct.field(pytree_node=False, default=False)
    mesh: Mesh | None = flax.struct.field(pytree_node=False, default=None)
    """Mesh of the devices that a pass computes on, if there are several."""
    whole: bool = flax.struct.field(pytree_node=False, default=False)
    """True if the tokens of a pass are all that a row has so far, so that they attend to each other alone."""

    def over(self, cached: Stored | OneOf) -> CacheKV:
        """This source for another layer, whose folded cache is ``cached``."""
        if not isinstance(cached, Sliding) or self.whole:  # then its base is the row's first token
            return dataclasses.replace(self, cached=cached)
        sight, start = self.sight.lowered(cached.base), self.start - cached.base
        if sight.tree is not None and sight.positions is not None:
            queries, _ = sight.positions
            sight = sight.within(sight.window, queries, _key_positions(cached.keys.shape[-2], queries, start))
        return dataclasses.replace(self, cached=cached, sight=sight, start=start)

    def attend(
        self, q, k, v, scale: float | None = None, soft_cap: float | None = None
    ) -> tuple[Array, Stored | OneOf]:
        """Output of attention, and the layer with the tokens' own keys and values, see `KVSource`."""
        own = LayerKV.of(k, v, folded=not self.spread)
        layer = own if self.cached is None else self.cached.write(self.start, own, self.spread)
        if not self.whole:
            return attend(q, layer.keys, layer.values, self.sight, scale, soft_cap, scales=layer.scales), layer
        k, v = layer.as_read(k, v)
        out = flash.whole_rows(q, k, v, self.sight, flash.Call.of(q, scale, soft_cap), self.mesh)
        if out is None:
            own = LayerKV.of(k, v, folded=not self.spread)
            out = attend(q, *own.read(), self.sight, scale, soft_cap)
        return out, layer


def kv_sources(
    cache: KVCache | None,
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"] | None,
    mask: Bool[Array, "B T T"] | Documents | None,
    windows: Iterable[int | None],
    mesh: Mesh | None = None,
) -> dict[int | None, CacheKV]:
    """`CacheKV` of a pass for each window of its layers. Without ``slots``, the tokens of the pass are the first of
    their rows."""
    start = None if cache is None or slots is None else slots[:, 0]
    everything = _sight(positions, None if start is None else slots, start, mask)
    of_keys = positions
    if cache is not None and start is not None:  # in a chain, the position of a key is its slot
        of_keys = None if mask is None else _key_positions(cache.num_slots, positions, start)
    where = jnp.zeros(len(positions), jnp.int32) if start is None else start
    spread = cache is not None and cache.spread
    return {
        window: CacheKV(
            everything.within(window, positions, of_keys), where, spread=spread, mesh=mesh, whole=start is None
        )
        for window in dict.fromkeys(windows)
    }


def _sight(positions: Array, slots: Any, start: Any, mask: Any) -> AttentionMask:
    """Sight in which every query sees the slots before its block, and inside the block what ``mask`` allows (default:
    causal)."""
    if slots is None:
        slots = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    if mask is None:
        return AttentionMask(slots)
    if isinstance(mask, Documents):
        if start is not None:
            raise TypeError("a pass over a cache feeds each row one document")
        return AttentionMask(slots, segments=(mask.segments, mask.segments))
    return AttentionMask(slots, Tree(jnp.zeros(len(positions), jnp.int32) if start is None else start, mask))


def _key_positions(count: int, positions: Array, start: Array) -> Int[Array, "B S"]:
    """Positions of ``count`` keys if a tree is fed at ``start``; before it, a key's position is its slot."""
    slots = jnp.arange(count, dtype=positions.dtype)[None]
    inside = slots - start[:, None]
    fed = jnp.take_along_axis(positions, jnp.clip(inside, 0, positions.shape[1] - 1).astype(jnp.int32), axis=1)
    return jnp.where(inside < 0, slots, fed)
