"""Attention of a draft to two sets of keys and values: those of verified tokens, and those of the block being
drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.interfaces import Batch, Documents
from specjax.models.attention.blocks import attend
from specjax.models.attention.sight import AttentionMask
from specjax.models.attention.stored import LayerKV
from specjax.models.config import ModelConfig
from specjax.models.products import OwnKV


class BlockKV(NamedTuple):
    """Keys and values of a block's tokens in one layer, by depth D. Each of the T positions is the newest of a
    block."""

    keys: Float[Array, "B T D G C"]
    values: Float[Array, "B T D G C"]

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, fed: int, depths: int, dtype: str) -> BlockKV:
        zeros = jnp.zeros((batch, fed, depths, config.num_kv_heads, config.head_dim), dtype)
        return cls(zeros, zeros)


@flax.struct.dataclass
class TargetAndBlockKV:
    """Keys and values that the tokens of one depth attend to in a layer: verified keys and values that ``sight``
    allows, and the tokens of their own block up to themselves."""

    target: LayerKV
    sight: AttentionMask
    own: BlockKV
    depth: int | Int[Array, ""]

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, BlockKV]:
        """Attention output, and the block with these tokens' own keys and values added, see
        `specjax.models.attention.kv_source.KVSource`."""
        own = BlockKV(*(_put(old, new, self.depth) for old, new in zip(self.own, (k, v), strict=True)))
        reached = jnp.arange(own.keys.shape[2], dtype=jnp.int32) <= self.depth
        return attend(q, *self.target, self.sight, scale, soft_cap, OwnKV(*own, reached)), own


def _put(own: Float[Array, "B T D G C"], new: Float[Array, "B T G C"], depth: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(own, new[:, :, None].astype(own.dtype), depth, axis=2)


def by_depth(batch: Batch, depths: int, decay: float, before: int) -> Iterator[tuple[int, Float[Array, "B T"], float]]:
    """For each depth of the blocks that end at the positions of a batch: (depth, from 0; weight of each position; share
    of all predictions, which falls by the factor ``decay`` from depth to depth). A position counts only if its document
    holds the first token that its block reads, ``before`` tokens before the root."""
    positions = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    shares = [decay**depth for depth in range(depths)]
    for depth, share in enumerate(shares):
        inside = inside_document(batch.documents, positions - before - depth)
        yield depth, jnp.where(inside, jnp.asarray(batch.weight), 0.0), share / sum(shares)


def inside_document(documents: Documents | None, root: Int[Array, " T"]) -> Bool[Array, "#B T"]:
    """True where the block that ends at a position has the position ``root`` in the same document."""
    inside = (root >= 0)[None]
    if documents is None:
        return inside
    return inside & (documents.segments == documents.segments[:, jnp.maximum(root, 0)])
