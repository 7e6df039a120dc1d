"""Attention masks described by a few numbers a token: with an entry for each pair, a mask has 1 GB for a row of 32,000
tokens.

Dims: B rows, T tokens fed, S keys, K of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tree(NamedTuple):
    """A block whose tokens see all keys before ``start``, and inside the block what ``mask`` says."""

    start: Int[Array, " B"]
    mask: Bool[Array, "B T T"]


@flax.struct.dataclass
class AttentionMask:
    """The keys that each query sees: those up to ``last``, unless another field says otherwise. Keys are numbered 0 ..
    S-1; an array with one row holds for all rows."""

    last: Int[Array, "#B T"]
    tree: Tree | None = None
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None
    """Documents of queries and of keys: a query sees the keys of its own document."""
    positions: tuple[Int[Array, "B T"], Int[Array, "B S"] | None] | None = None
    """Positions of queries and of keys (None: the keys' numbers), if there is a window."""
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    """Distance in positions from which on a key is hidden; None: no window."""

    def within(
        self, window: int | None, queries: Int[Array, "B T"], keys: Int[Array, "B S"] | None = None
    ) -> AttentionMask:
        """This sight through a window, with the positions of queries and of keys (None: the keys' numbers)."""
        return self if window is None else dataclasses.replace(self, window=window, positions=(queries, keys))

    def lowered(self, by: Int[Array, " B"]) -> AttentionMask:
        """This sight for keys that are numbered from ``by[b]`` on; the caller must set positions of keys anew."""
        tree = None if self.tree is None else Tree(self.tree.start - by, self.tree.mask)
        positions = None if self.positions is None else (self.positions[0] - by[:, None], None)
        return dataclasses.replace(self, last=self.last - by[:, None], tree=tree, positions=positions)

    def of(self, keys: Int[Array, " K"]) -> Bool[Array, "#B T K"]:
        """Attention mask of the queries over these keys."""
        return self._seen(keys, lambda x: jnp.take(x, keys, axis=1, mode="clip"))

    def all(self, count: int) -> Bool[Array, "#B T S"]:
        """Attention mask of the queries over all ``count`` keys."""
        return self._seen(jnp.arange(count, dtype=jnp.int32), lambda x: x)

    def _seen(self, keys: Int[Array, " K"], chosen: Callable[[Array], Array]) -> Bool[Array, "#B T K"]:
        """Attention mask over ``keys``. ``chosen``: picks their entries from an array over all keys."""
        keys = keys[None, None]
        seen = keys <= self.last[..., None]
        if self.tree is not None:
            start, mask = self.tree
            inside = keys - start[:, None, None]
            clipped = jnp.clip(inside, 0, mask.shape[2] - 1)
            seen = (inside < 0) | ((inside < mask.shape[2]) & jnp.take_along_axis(mask, clipped, axis=2))
        if self.segments is not None:
            of_queries, of_keys = self.segments
            seen &= of_queries[..., None] == chosen(of_keys)[:, None]
        if self.window is not None and self.positions is not None:
            of_queries, of_keys = self.positions
            at = keys if of_keys is None else chosen(of_keys)[:, None]
            seen &= of_queries[..., None] - at < self.window
        return seen

    def ends(self, count: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """The first of ``count`` keys that some query may see, and the number behind the last one."""
        last = self.last if self.tree is None else self.tree.start[:, None] + self.tree.mask.shape[2] - 1
        first = jnp.zeros((), jnp.int32)
        if self.window is not None and self.positions is not None and self.positions[1] is None:
            first = jnp.min(self.positions[0]) - self.window + 1
        return jnp.clip(first, 0, count), jnp.clip(jnp.max(last) + 1, 0, count)

    def queries(self, start: Int[Array, ""], count: int) -> AttentionMask:
        """This sight for ``count`` of the queries, from ``start`` on."""

        def some(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, count, axis=1)

        return dataclasses.replace(
            self,
            last=some(self.last),
            tree=None if self.tree is None else Tree(self.tree.start, some(self.tree.mask)),
            segments=None if self.segments is None else (some(self.segments[0]), self.segments[1]),
            positions=None if self.positions is None else (some(self.positions[0]), self.positions[1]),
        )
