"""Layers whose slots blend into those behind them (DFlash2): a short causal convolution inside the block before and
behind each sublayer, whose taps each slot shifts, by groups of channels.

Dims: B rows, T slots of whole blocks, K taps, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax.models.attention.memory import Attended
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import Linear
from specjax.models.transformer import Block, normed


class Convolution(nnx.Module):
    """Around one sublayer: at first it changes nothing. ``slots``: of a block, over whose edges nothing goes."""

    def __init__(self, hidden: int, slots: int, taps: int, group: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.slots, self.taps, self.groups = slots, taps, hidden // group
        self.base = nnx.Param(jnp.zeros((2, taps, hidden), dtype).at[:, 0].set(1))
        self.projection = Linear(hidden, 2 * taps * self.groups, rngs=rngs, dtype=dtype)
        self.projection.kernel[...] = jnp.zeros_like(self.projection.kernel[...])

    def around(self, sublayer: Callable[[Array], Array], x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """``sublayer`` of ``x``, which says what its slots take of those before, on the way in and on the way out."""
        shifts = self.projection(x).reshape(*x.shape[:2], 2, self.taps, self.groups)
        return self._blended(sublayer(self._blended(x, shifts, 0)), shifts, 1)

    def _blended(self, x: Float[Array, "B T H"], shifts: Float[Array, "B T 2 K G"], end: int) -> Float[Array, "B T H"]:
        group = x.shape[-1] // self.groups
        blocks = x.reshape(len(x), -1, self.slots, x.shape[-1])
        total = jnp.zeros_like(blocks)
        for tap in range(self.taps):
            before = jnp.pad(blocks[:, :, : self.slots - tap], ((0, 0), (0, 0), (tap, 0), (0, 0)))
            own = jnp.repeat(shifts[:, :, end, tap], group, axis=-1).reshape(blocks.shape)
            total += before * (self.base[end, tap][None, None, None].astype(x.dtype) + own)
        return total.reshape(x.shape)


class ConvolvedBlock(Block):
    """A layer with both. Its injected keys and values pass none."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, sizes: tuple[int, int, int], *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        super().__init__(config, kind, rngs=rngs, dtype=dtype)
        self.attention_conv = Convolution(config.hidden_size, *sizes, rngs=rngs, dtype=dtype)
        self.mlp_conv = Convolution(config.hidden_size, *sizes, rngs=rngs, dtype=dtype)

    def __call__(self, x, rotary, memory: Attended):
        """As of `Block`; the keys and values are those of blended slots."""
        kept = []

        def attention(read: Array) -> Array:
            attended, *others = self.attention(read, rotary, memory)
            kept.extend(others)
            return attended

        x = x + self.attention_conv.around(attention, normed(self.attention_norm, x))
        x = x + self.mlp_conv.around(self.feed_forward, normed(self.mlp_norm, x))
        return x, *kept
