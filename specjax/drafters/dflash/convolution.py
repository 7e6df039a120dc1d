"""Layers of DFlash2, whose slots blend into the slots after them: a short causal convolution inside the block before
and after each sublayer. Each slot shifts the taps, by groups of channels.

Dims: B rows, T slots of whole blocks, K taps, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax.models.attention.kv_source import KVSource
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import Linear
from specjax.models.transformer import Block, normed


class Convolution(nnx.Module):
    """Convolutions around one sublayer, which begin as the identity. ``slots``: number of slots of a block; nothing
    crosses its edges."""

    def __init__(self, hidden: int, slots: int, taps: int, group: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.slots, self.taps, self.groups = slots, taps, hidden // group
        self.base = nnx.Param(jnp.zeros((2, taps, hidden), dtype).at[:, 0].set(1))
        self.projection = Linear(hidden, 2 * taps * self.groups, rngs=rngs, dtype=dtype)
        self.projection.kernel[...] = jnp.zeros_like(self.projection.kernel[...])

    def around(self, sublayer: Callable[[Array], Array], x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """``sublayer`` of ``x`` between the two convolutions. ``x`` also sets what each slot takes of those before it,
        in both."""
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
    """A transformer layer with convolutions around attention and MLP. Injected keys and values do not pass through
    them."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, sizes: tuple[int, int, int], *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        super().__init__(config, kind, rngs=rngs, dtype=dtype)
        self.attention_conv = Convolution(config.hidden_size, *sizes, rngs=rngs, dtype=dtype)
        self.mlp_conv = Convolution(config.hidden_size, *sizes, rngs=rngs, dtype=dtype)

    def __call__(self, x, rotary, kv: KVSource):
        """Output of the layer, as that of `Block`; its keys and values are those of blended slots."""
        layers = []

        def attention(read: Array) -> Array:
            attended, *others = self.attention(read, rotary, kv)
            layers.extend(others)
            return attended

        x = x + self.attention_conv.around(attention, normed(self.attention_norm, x))
        x = x + self.mlp_conv.around(self.feed_forward, normed(self.mlp_norm, x))
        return x, *layers
