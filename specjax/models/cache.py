"""The KV cache: one pair of arrays a layer, row first. Rollback is not advancing: stale slots are masked, then
overwritten, so nothing here ever clears or moves a slot.

Dims: B rows, S slots, T tokens fed, G key-value heads, C head features.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

_UNROLLED_ROWS = 16


@flax.struct.dataclass
class KVCache:
    """``layers[l] = (keys, values)``, each ``[B, S, G, C]``."""

    layers: tuple[tuple[Float[Array, "B S G C"], Float[Array, "B S G C"]], ...]

    @classmethod
    def zeros(cls, num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> KVCache:
        return cls(tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers)))

    @property
    def num_slots(self) -> int:
        return self.layers[0][0].shape[1]

    def grown(self, num_slots: int) -> KVCache:
        """The same cache with more slots; a bucket change between chunks, never inside one."""
        extra = num_slots - self.num_slots
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))), self)


def write_block(
    buffer: Float[Array, "B S G C"], slots: Int[Array, "B T"], new: Float[Array, "B T G C"]
) -> Float[Array, "B S G C"]:
    """Write each row's T new entries at ``slots[b, 0] ...``: a block is contiguous in slots, in a tree as well.

    The engine keeps ``S >= slots[b, 0] + T``: `dynamic_update_slice` clamps its start and would overwrite valid slots.
    """
    return write_rows(buffer, slots[:, 0], new.astype(buffer.dtype))


def write_rows(buffer: Shaped[Array, "B S *F"], start: Int[Array, " B"], new: Shaped[Array, "B T *F"]):
    """``buffer[b, start[b] : start[b] + T] = new[b]``. A few rows are written one by one: each is an update in place,
    where the scatter over rows that `vmap` makes becomes a loop over single elements on CPU."""
    if buffer.shape[0] > _UNROLLED_ROWS:
        return jax.vmap(lambda b, s, n: jax.lax.dynamic_update_slice(b, n, (s, *[0] * (n.ndim - 1))))(
            buffer, start, new
        )
    for row in range(buffer.shape[0]):
        at = (row, start[row], *[0] * (new.ndim - 2))
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], at)
    return buffer
