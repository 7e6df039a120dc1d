"""The KV cache: one pair of arrays a layer, row first. Rollback is not advancing: stale slots are masked, then
overwritten, so nothing here ever clears or moves a slot.

Dims: B rows, S slots, T tokens fed, G key-value heads, C head features.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@flax.struct.dataclass
class KVCache:
    """``layers[l] = (keys, values)``, each ``[B, S, G, C]``."""

    layers: tuple[tuple[Float[Array, "B S G C"], Float[Array, "B S G C"]], ...]

    @classmethod
    def zeros(cls, num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
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

    One in-place update a row: on CPU a scatter over rows becomes a loop over single elements. The engine keeps
    ``S >= slots[b, 0] + T``, because ``dynamic_update_slice`` clamps its start and would overwrite valid slots.
    """
    new = new.astype(buffer.dtype)
    for row in range(buffer.shape[0]):
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], (row, slots[row, 0], 0, 0))
    return buffer
