"""The parts of a decoder block: projections, norms, attention, MLP, experts. `ModelConfig` says what each one does.

RMSNorm (1910.07467), LayerNorm (1607.06450), grouped-query attention (2305.13245), gated MLPs (2002.05202), mixtures of
experts (2401.04088).

Dims: B rows, T tokens fed, S cache slots, D hidden, H query heads, G key-value heads, C head features, BG = B * G
heads, I/O features in and out, E experts, M tokens of all rows, N = M * top_k tokens sent to experts.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.models.cache import as_layer, write_block
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.rotary import rotate

FEW_ROWS = 16
"""Most rows for which `few_rows_product` beats a matrix product on CPU (2 cores, float32: 12-16)."""
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Linear(nnx.Module):
    """``x @ kernel + bias``, kernel ``[in, out]``; or ``[out, in, 1]``, as `specjax.backend` lays it out on CPU, in x's
    dtype or one whose numbers x's holds too."""

    def __init__(
        self, features_in: int, features_out: int, bias: bool = False, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32
    ):
        scale = features_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (features_in, features_out), dtype) * scale)
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "B T I"], wide: bool = False) -> Float[Array, "B T O"]:
        """``wide``: in float32, whatever x is in."""
        kernel = self.kernel[...]
        rows = x.reshape(-1, x.shape[-1])
        if wide and kernel.ndim == 3:
            rows = rows.astype(jnp.float32)
        if kernel.ndim == 2:
            y = (wide_matrix_product if wide else matrix_product)(rows, kernel)
        elif len(rows) <= FEW_ROWS:
            y = few_rows_product(rows, kernel[..., 0])
        else:
            y = jnp.einsum("mi,oi->mo", rows, kernel[..., 0].astype(rows.dtype), precision=_precision(rows))
        y = y.reshape(*x.shape[:2], -1)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)[None, None]


@jax.custom_vjp
def matrix_product(x: Float[Array, "M I"], kernel: Float[Array, "I O"]) -> Float[Array, "M O"]:
    """``x @ kernel``, whose derivative by the kernel is ``x.T @ dy``. JAX's own, ``(dy.T @ x).T``, lets XLA on CPU fuse
    what makes dy into its transposition, where nothing is vectorised (1.2x a training step)."""
    return jnp.einsum("mi,io->mo", x, kernel, precision=_precision(x))


def _matrix_product_forward(x, kernel):
    return matrix_product(x, kernel), (x, kernel)


def _matrix_product_backward(saved, dy):
    x, kernel = saved
    precision = _precision(x)
    return (
        jnp.einsum("mo,io->mi", dy, kernel, precision=precision),
        jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision=precision),
    )


matrix_product.defvjp(_matrix_product_forward, _matrix_product_backward)


def wide_matrix_product(x: Float[Array, "M I"], kernel: Float[Array, "I O"]) -> Float[Array, "M O"]:
    """`matrix_product` in float32: of two logits near 16, bfloat16 cannot tell apart what differs by less than 1/16."""
    return matrix_product(x, kernel) if _is_float32(x) else _wide_product("mi,io->mo", x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_product(subscripts: str, x: Array, y: Array) -> Array:
    """The einsum of arrays of a lower precision, added up and returned in float32. Its derivative is computed in theirs
    (from JAX's own, an accelerator would multiply float32)."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _wide_product_forward(subscripts, x, y):
    return _wide_product(subscripts, x, y), (x, y)


def _wide_product_backward(subscripts, saved, dz):
    return jax.vjp(functools.partial(jnp.einsum, subscripts), *saved)[1](dz.astype(saved[0].dtype))


_wide_product.defvjp(_wide_product_forward, _wide_product_backward)


def few_rows_product(x: Float[Array, "M I"], kernel: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """``x @ kernel.T`` for few rows, as one reduction that reads each row of the kernel once. Each of its steps takes a
    row out of several distant parts of the kernel: what was read of x serves them all, and several streams from memory
    are under way at once (1.4-2x for 3 to 8 tokens over one part)."""
    # XLA would compute what makes x anew for every row of the kernel; a division it takes to be too dear for that
    # (element by element: by a scalar, it would turn it into a product and fuse that).
    x = x / jnp.where(jnp.isinf(x), 2.0, 1.0).astype(x.dtype)
    if kernel.dtype != x.dtype:
        # XLA would move the conversion out of the loop over tokens, and read a wide copy in it.
        x, kernel = jax.lax.optimization_barrier((x, kernel))
    # As many sums as there are vector registers, at most.
    wanted = 4 if len(x) <= 8 else 2
    parts = jnp.split(kernel, math.gcd(wanted, len(kernel)))
    zeros = (jnp.zeros((), x.dtype),) * (len(x) * len(parts))
    columns = jax.lax.reduce(
        tuple(part.astype(x.dtype) * row[None] for row in x for part in parts), zeros, _add_all, (1,)
    )
    return jnp.stack(columns).reshape(len(x), -1)


def _add_all(totals, values):
    return tuple(total + value for total, value in zip(totals, values, strict=True))


class RMSNorm(nnx.Module):
    """``x / rms(x) * (offset + scale)`` over the last axis; ``scale`` may have a row for each head."""

    def __init__(self, shape: tuple[int, ...], eps: float, offset: float = 0.0, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.full(shape, 1 - offset, dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = _aligned(self.scale[...], x)
        if self.offset:  # near one, where a lower precision has few numbers
            return (x32 * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)
        return x32.astype(x.dtype) * scale


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
    def __init__(self, config: ModelConfig, kind: LayerKind, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config, self.rope = config, kind.rope
        heads, kv_heads, features = config.num_heads, config.num_kv_heads, config.head_dim
        linear = functools.partial(Linear, rngs=rngs, dtype=dtype)
        if config.fused_projections:
            self.qkv_proj = linear(config.hidden_size, (heads + 2 * kv_heads) * features, config.qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                linear(config.hidden_size, n * features, config.qkv_bias) for n in (heads, kv_heads, kv_heads)
            )
        self.o_proj = linear(heads * features, config.hidden_size, config.o_bias)
        if config.qk_norm != "none":
            shapes = {
                "head": ((features,), (features,)),
                "each_head": ((heads, features), (kv_heads, features)),
                "projection": ((heads * features,), (kv_heads * features,)),
            }[config.qk_norm]
            self.q_norm, self.k_norm = (make_norm(config, *shape, dtype=dtype) for shape in shapes)

    def __call__(self, x, rotary, slots, layer_cache, visible):
        """``rotary``: the table of this layer, None without one. ``layer_cache`` is folded; ``visible[B, T, S]`` says
        which keys each query may read. Returns (attended, (keys, values) of all slots, those of the tokens fed)."""
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
        k, v = fed_ones = seen_only_where_visible(k, v)
        layer_cache = as_layer(k, v) if layer_cache is None else write_block(layer_cache, slots, k, v)
        k, v = (x.astype(q.dtype) for x in layer_cache)
        out = attend(q, k, v, visible, config.attention_scale, config.attention_soft_cap)
        return self.o_proj(out.reshape(batch, fed, -1)), layer_cache, fed_ones

    def projections(self, x) -> tuple[Array, Array, Array]:
        if not self.config.fused_projections:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries, keys = (n * self.config.head_dim for n in (self.config.num_heads, self.config.num_kv_heads))
        q, k, v = jnp.split(self.qkv_proj(x), (queries, queries + keys), axis=-1)
        return q, k, v


def seen_only_where_visible(k: Float[Array, "B T G C"], v: Float[Array, "B T G C"]) -> tuple[Array, Array]:
    """Keys and values of tokens that overflowed, so that NaN reaches those who see them and nobody else: a masked slot
    has weight 0, and 0 times NaN is NaN. Their values become 0 and their keys NaN, as masked scores are replaced."""
    overflowed = ~jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(overflowed, jnp.asarray(jnp.nan, k.dtype), k), jnp.where(overflowed, jnp.zeros((), v.dtype), v)


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "BG C S"],
    v: Float[Array, "BG S C"],
    visible: Bool[Array, "#B T S"],
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T H C"]:
    """Grouped-query attention. The queries that share a key-value head are laid side by side, so that each of the
    two products is one plain matrix multiplication a key-value head (2-3x on CPU over a five-axis einsum)."""
    batch, fed, heads, features = q.shape
    group = batch * heads // len(k)
    q = q.reshape(batch, fed, -1, group, features).transpose(0, 2, 3, 1, 4).reshape(len(k), group * fed, features)
    product = functools.partial(jnp.einsum, precision=_precision(q)) if _is_float32(q) else _wide_product
    scores = jnp.asarray(product("hqc,hcs->hqs", q, k))
    scores = scores * (features**-0.5 if scale is None else scale)
    scores = soft_capped(scores, soft_cap)
    scores = scores.reshape(batch, -1, group, fed, k.shape[2])
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(len(k), group * fed, -1)
    out = jnp.asarray(product("hqs,hsc->hqc", weights, v), q.dtype)
    out = out.reshape(batch, -1, group, fed, features).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, fed, heads, features)


def soft_capped(x: Array, cap: float | None) -> Array:
    """``cap * tanh(x / cap)``; None: x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.gated, self.fused, self.activation = config.gated, config.fused_projections, config.activation
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
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return activation(gate) * up


class ExpertLinear(nnx.Module):
    """One kernel an expert, ``[E, in, out]``."""

    def __init__(self, experts: int, features_in: int, features_out: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        scale = features_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (experts, features_in, features_out), dtype) * scale)

    def __call__(self, x: Float[Array, "N I"], sizes: Int[Array, " E"]) -> Float[Array, "N O"]:
        """The first ``sizes[0]`` rows of x times the first kernel, and so on."""
        return jax.lax.ragged_dot(x, self.kernel[...], sizes, precision=_precision(x))


class ExpertMLP(nnx.Module):
    """A router and E gated MLPs. Tokens are sorted by the expert they go to, so that only those are computed."""

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


def _is_float32(x: Array) -> bool:
    return x.dtype == jnp.float32


def _precision(x: Array) -> jax.lax.Precision | None:
    # float32 means float32: without it an accelerator multiplies in TF32 or bfloat16 and greedy identity is lost.
    return jax.lax.Precision.HIGHEST if _is_float32(x) else None
