"""The parts of a decoder block: projections, norms, attention, MLP, experts. `ModelConfig` says what each one does.

RMSNorm (1910.07467), LayerNorm (1607.06450), grouped-query attention (2305.13245), gated MLPs (2002.05202), mixtures of
experts (2401.04088).

Dims: B rows, T tokens fed, D hidden, I/O features in and out, E experts, M tokens of all rows, N = M * top_k tokens
sent to experts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax.models import kernels
from specjax.models.attention.kv_source import KVSource
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.products import isolate_nonfinite_kv, precision_of
from specjax.models.rotary import rotate

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class InitKeys(nnx.Rngs):
    """The keys of ``nnx.Rngs(params=key)``, whose counter is an array: counted in a trace, it takes seconds a hundred
    layers, every time that a model is loaded."""

    def __init__(self, key: Array | int):
        self._key = jax.random.key(key) if isinstance(key, int) else key
        self._count = 0

    def params(self) -> Array:
        """The next key."""
        self._count += 1
        return jax.random.fold_in(self._key, self._count - 1)


class Linear(nnx.Module):
    """``x @ kernel + bias``, where the kernel is an array ``[in, out]`` or one of `specjax.models.kernels`."""

    def __init__(
        self, features_in: int, features_out: int, bias: bool = False, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ):
        scale = features_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (features_in, features_out), dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "B T I"], wide: bool = False) -> Float[Array, "B T O"]:
        """``wide``: the product is in float32, whatever the dtype of x."""
        y = kernels.multiply(x, self.kernel.get_value(), wide)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)[None, None]


class RMSNorm(nnx.Module):
    """``x / rms(x) * (offset + scale)`` over the last axis; ``scale`` may have a row for each head."""

    def __init__(self, shape: tuple[int, ...], eps: float, offset: float = 0.0, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.full(shape, 1 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = _aligned(self.scale[...], x)
        if self.offset:  # the sum is near one, where a lower precision has few numbers
            return (x32 * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)
        return x32.astype(x.dtype) * scale.astype(x.dtype)


class LayerNorm(nnx.Module):
    """``(x - mean(x)) / std(x) * scale + bias`` over the last axis; ``scale`` may have a row for each head."""

    def __init__(self, shape: tuple[int, ...], eps: float, bias: bool, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        x32 = x32 * _aligned(self.scale[...], x).astype(jnp.float32)
        if self.bias is not None:
            x32 = x32 + _aligned(self.bias[...], x).astype(jnp.float32)
        return x32.astype(x.dtype)


def _aligned(weight: Array, x: Array) -> Array:
    return weight.reshape((1,) * (x.ndim - weight.ndim) + weight.shape)


def make_norm(config: ModelConfig, *shape: int, dtype: DTypeLike) -> RMSNorm | LayerNorm:
    norm = config.norm
    if norm.kind == "rms":
        return RMSNorm(shape, norm.eps, norm.offset, dtype=dtype)
    return LayerNorm(shape, norm.eps, norm.bias, dtype=dtype)


class Attention(nnx.Module):
    """Grouped-query attention of one layer. ``inputs``: number of features that it reads; None: the width of the
    stream."""

    def __init__(
        self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs, dtype: DTypeLike, inputs: int | None = None
    ):
        self.config, self.rope = config, kind.rope
        inputs = inputs or config.hidden_size
        heads, kv_heads, features = config.num_heads, config.num_kv_heads, config.head_dim
        linear = functools.partial(Linear, rngs=rngs, dtype=dtype)
        if config.fused_projections:
            self.qkv_proj = linear(inputs, (heads + 2 * kv_heads) * features, config.qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                linear(inputs, n * features, config.qkv_bias) for n in (heads, kv_heads, kv_heads)
            )
        self.o_proj = linear(heads * features, config.hidden_size, config.o_bias)
        if config.qk_norm != "none":
            shapes = {
                "head": ((features,), (features,)),
                "each_head": ((heads, features), (kv_heads, features)),
                "projection": ((heads * features,), (kv_heads * features,)),
            }[config.qk_norm]
            self.q_norm, self.k_norm = (make_norm(config, *shape, dtype=dtype) for shape in shapes)

    def __call__(self, x, rotary, kv: KVSource):
        """``rotary``: the table of this layer, None without one. Returns (output, the layer's keys and values including
        those of the tokens fed, those of the tokens fed alone)."""
        batch, fed = x.shape[:2]
        config = self.config
        q, k, v = self.projections(x)
        if config.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(batch, fed, -1, config.head_dim) for y in (q, k, v))
        if config.qk_norm in ("head", "each_head"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = (rotate(y, rotary, self.rope.interleaved) for y in (q, k))
        k, v = isolate_nonfinite_kv(k, v)
        out, layer = kv.attend(q, k, v, config.attention_scale, config.attention_soft_cap)
        return self.o_proj(out.reshape(batch, fed, -1)), layer, (k, v)

    def projections(self, x) -> tuple[Array, Array, Array]:
        if not self.config.fused_projections:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        config = self.config
        sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        q, k, v = kernels.apart(self.qkv_proj(x), sizes, config.fused_shards)
        return q, k, v


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.gated, self.fused, self.activation = config.gated, config.fused_projections, config.activation
        self.shards = config.fused_shards
        linear = functools.partial(Linear, bias=config.mlp_bias, rngs=rngs, dtype=dtype)
        hidden, neurons = config.hidden_size, config.intermediate_size
        if self.gated and self.fused:
            self.gate_up_proj = linear(hidden, 2 * neurons)
        else:
            if self.gated:
                self.gate_proj = linear(hidden, neurons)
            self.up_proj = linear(hidden, neurons)
        self.down_proj = linear(neurons, hidden)

    def __call__(self, x):
        return self.down_proj(self.neurons(x))

    def neurons(self, x):
        activation = ACTIVATIONS[self.activation]
        if not self.gated:
            return activation(self.up_proj(x))
        if not self.fused:
            return activation(self.gate_proj(x)) * self.up_proj(x)
        both = self.gate_up_proj(x)
        gate, up = kernels.apart(both, [both.shape[-1] // 2] * 2, self.shards)
        return activation(gate) * up


class ExpertLinear(nnx.Module):
    """One kernel for each expert, ``[E, in, out]``."""

    def __init__(self, experts: int, features_in: int, features_out: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        scale = features_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (experts, features_in, features_out), dtype) * scale)

    def __call__(self, x: Float[Array, "N I"], sizes: Int[Array, " E"]) -> Float[Array, "N O"]:
        """Multiply the first ``sizes[0]`` rows of x by the first kernel, the next ``sizes[1]`` by the second, and so
        on."""
        return jax.lax.ragged_dot(x, self.kernel[...].astype(x.dtype), sizes, precision=precision_of(x))


class ExpertMLP(nnx.Module):
    """A router and E gated MLPs. Tokens are sorted by their expert, so that each expert computes its own tokens
    only."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        assert config.experts is not None
        self.experts, self.activation = config.experts, config.activation
        hidden, count, neurons = config.hidden_size, config.experts.count, config.experts.intermediate_size
        self.router = Linear(hidden, count, rngs=rngs, dtype=dtype)
        self.gate_proj, self.up_proj = (ExpertLinear(count, hidden, neurons, rngs=rngs, dtype=dtype) for _ in range(2))
        self.down_proj = ExpertLinear(count, neurons, hidden, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        count, top_k = self.experts.count, self.experts.top_k
        weights = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1).reshape(-1, count)
        weights, chosen = jax.lax.top_k(weights, top_k)
        if self.experts.normalised:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=count).astype(jnp.int32)
        sent = x.reshape(-1, x.shape[-1])[order // top_k]
        gate, up = self.gate_proj(sent, sizes), self.up_proj(sent, sizes)
        out = self.down_proj(ACTIVATIONS[self.activation](gate) * up, sizes)[jnp.argsort(order)]
        out = out.reshape(-1, top_k, x.shape[-1]) * weights[..., None].astype(x.dtype)
        return jnp.sum(out, axis=1).reshape(x.shape)
