"""Attention of a draft to two sets of keys and values: those of verified tokens, and those of the block being
drafted."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.interfaces import Documents
from specjax.models.attention.blocks import attend_to_both
from specjax.models.attention.sight import AttentionMask
from specjax.models.attention.stored import Layer


class BlockKV(NamedTuple):
    """Keys and values of a block's tokens in one layer, by depth D. Each of the T positions is the newest of a
    block."""

    keys: Float[Array, "B T D G C"]
    values: Float[Array, "B T D G C"]


@flax.struct.dataclass
class TargetAndBlockKV:
    """Memory that the tokens of one depth attend to in a layer: verified keys and values that ``sight`` allows, and the
    tokens of their own block up to themselves."""

    target: Layer
    sight: AttentionMask
    own: BlockKV
    depth: int | Int[Array, ""]

    def attend(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B T G C"],
        v: Float[Array, "B T G C"],
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T H C"], BlockKV]:
        """Attention output, and the block with these tokens' own keys and values added, see
        `specjax.models.attention.memory.Attended`."""
        own = BlockKV(*(_put(old, new, self.depth) for old, new in zip(self.own, (k, v), strict=True)))
        reached = jnp.arange(own.keys.shape[2], dtype=jnp.int32) <= self.depth
        return attend_to_both(q, self.target, self.sight, own, reached, scale, soft_cap), own


def _put(own: Float[Array, "B T D G C"], new: Float[Array, "B T G C"], depth: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(own, new[:, :, None].astype(own.dtype), depth, axis=2)


def inside_document(documents: Documents | None, root: Int[Array, " T"]) -> Bool[Array, "#B T"]:
    """True where the block that ends at a position has its ``root`` in the same document."""
    inside = (root >= 0)[None]
    if documents is None:
        return inside
    return inside & (documents.segments == documents.segments[:, jnp.maximum(root, 0)])
