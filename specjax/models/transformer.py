"""One decoder-only transformer: token ids in, logits, hidden states and an updated KV cache out.

Weights live in flax NNX modules; `Model` is the functional view that the engine uses: the only static part is the
config, parameters are always a traced argument. RMSNorm, rotary positions (2104.09864), grouped-query attention
(2305.13245), SwiGLU (2002.05202).

Dims: B rows, T tokens fed, S cache slots, V vocabulary, D hidden, H query heads, G key-value heads, C head features.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.models.cache import KVCache, as_layer, fold, unfold, write_block
from specjax.models.config import ModelConfig
from specjax.types import Output, Params

FEW_ROWS = 16
"""Most rows for which `few_rows_product` beats a matrix product on CPU (2 cores, float32: 12-16)."""


class Linear(nnx.Module):
    """``x @ kernel``, kernel ``[in, out]``; or stacked blocks of columns ``[blocks, in, out / blocks]``, as
    `specjax.backend` lays it out."""

    def __init__(self, features_in: int, features_out: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        scale = features_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (features_in, features_out), dtype) * scale)

    def __call__(self, x: Float[Array, "B T I"]) -> Float[Array, "B T O"]:
        kernel = self.kernel[...]
        rows = x.reshape(-1, x.shape[-1])
        if kernel.ndim == 2:
            y = matrix_product(rows, kernel)
        elif kernel.shape[2] == 1 and len(rows) <= FEW_ROWS:
            y = few_rows_product(rows, kernel[..., 0])
        elif kernel.shape[2] == 1:
            y = jnp.einsum("mi,oi->mo", rows, kernel[..., 0], precision=_precision(x))
        else:
            # A batched product with x repeated: a contraction that broadcasts by itself is several times slower on CPU.
            repeated = jnp.broadcast_to(rows, (len(kernel), *rows.shape))
            y = jnp.einsum("pmi,pio->pmo", repeated, kernel, precision=_precision(x)).swapaxes(0, 1)
        return y.reshape(*x.shape[:2], -1)


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


def few_rows_product(x: Float[Array, "M I"], kernel: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """``x @ kernel.T`` for few rows, as one reduction with M results that reads each row of the kernel once."""
    # XLA would compute what makes x anew for every row of the kernel; a division it takes to be too dear for that
    # (element by element: by a scalar, it would turn it into a product and fuse that).
    x = x / jnp.where(jnp.isinf(x), 2.0, 1.0).astype(x.dtype)
    zeros = (jnp.zeros((), x.dtype),) * len(x)
    columns = jax.lax.reduce(tuple(kernel * row[None] for row in x), zeros, _add_all, (1,))
    return jnp.stack(columns)


def _add_all(totals, values):
    return tuple(total + value for total, value in zip(totals, values, strict=True))


class RMSNorm(nnx.Module):
    def __init__(self, features: int, eps: float, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return x32.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        linear = functools.partial(Linear, rngs=rngs, dtype=dtype)
        if config.fused_projections:
            self.qkv_proj = linear(config.hidden_size, sum(sizes) * config.head_dim)
        else:
            self.q_proj, self.k_proj, self.v_proj = (linear(config.hidden_size, n * config.head_dim) for n in sizes)
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size)

    def __call__(self, x, rotary, slots, layer_cache, visible):
        """``layer_cache`` is folded; ``visible[B, T, S]`` says which keys each query may read. Returns (attended,
        (keys, values))."""
        batch, fed = x.shape[:2]
        q, k, v = (y.reshape(batch, fed, -1, self.config.head_dim) for y in self.projections(x))
        q, k = rotate(q, rotary), rotate(k, rotary)
        layer_cache = as_layer(k, v) if layer_cache is None else write_block(layer_cache, slots, k, v)
        k, v = (x.astype(q.dtype) for x in layer_cache)
        out = attend(q, k, v, visible)
        return self.o_proj(out.reshape(batch, fed, -1)), layer_cache

    def projections(self, x) -> tuple[Array, Array, Array]:
        if not self.config.fused_projections:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries, keys = (n * self.config.head_dim for n in (self.config.num_heads, self.config.num_kv_heads))
        q, k, v = jnp.split(self.qkv_proj(x), (queries, queries + keys), axis=-1)
        return q, k, v


class MLP(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        hidden, neurons = config.hidden_size, config.intermediate_size
        if config.fused_projections:
            self.gate_up_proj = Linear(hidden, 2 * neurons, rngs=rngs, dtype=dtype)
        else:
            self.gate_proj = Linear(hidden, neurons, rngs=rngs, dtype=dtype)
            self.up_proj = Linear(hidden, neurons, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(neurons, hidden, rngs=rngs, dtype=dtype)
        self.fused = config.fused_projections

    def __call__(self, x):
        return self.down_proj(self.neurons(x))

    def neurons(self, x):
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return jax.nn.silu(gate) * up


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(self, x, rotary, slots, layer_cache, visible):
        attended, layer_cache = self.attention(self.attention_norm(x), rotary, slots, layer_cache, visible)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), layer_cache


class Transformer(nnx.Module):
    """The weights. Initialised at variance 1/fan_in, residual outputs scaled down by depth (GPT-2)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype) * 0.02
        )
        self.layers = nnx.List([Block(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        depth_scale = (2 * config.num_layers) ** -0.5
        for block in self.layers:
            for linear in (block.attention.o_proj, block.mlp.down_proj):
                linear.kernel[...] = linear.kernel[...] * depth_scale

    def __call__(self, tokens, positions, slots, cache, mask, hidden_layers):
        x = self.embedding[...][tokens]
        rotary = rotary_table(positions, self.config, x.dtype)
        visible = _visible(positions, slots, cache, mask)
        folded = cache is None or cache.layers[0][0].ndim == 3
        layer_caches = [None] * self.config.num_layers if cache is None else (cache if folded else fold(cache)).layers
        hidden, written = [], []
        for index, (block, layer_cache) in enumerate(zip(self.layers, layer_caches, strict=True)):
            if index in hidden_layers:
                hidden.append(x)
            x, layer_cache = block(x, rotary, slots, layer_cache, visible)
            written.append(layer_cache)
        x = self.norm(x)
        if cache is not None:
            cache = KVCache(tuple(written)) if folded else unfold(KVCache(tuple(written)), len(tokens))
        return x, tuple(hidden), cache

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        if self.config.tie_embeddings:
            return matrix_product(x.reshape(-1, x.shape[-1]), self.embedding[...].T).reshape(*x.shape[:2], -1)
        return self.head(x)


def rotary_table(positions: Int[Array, "B T"], config: ModelConfig, dtype) -> tuple[Array, Array]:
    """(cos, sin), each ``[B, T, 1, C/2]``; computed in float32 whatever the model's dtype."""
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: Float[Array, "B T H C"], rotary: tuple[Array, Array]) -> Float[Array, "B T H C"]:
    """Rotary embedding in Hugging Face's layout: feature i is paired with feature i + C/2."""
    cos, sin = rotary
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(
    q: Float[Array, "B T H C"], k: Float[Array, "BG C S"], v: Float[Array, "BG S C"], visible: Bool[Array, "#B T S"]
) -> Float[Array, "B T H C"]:
    """Grouped-query attention. The queries that share a key-value head are laid side by side, so that each of the
    two products is one plain matrix multiplication a key-value head (2-3x on CPU over a five-axis einsum)."""
    batch, fed, heads, features = q.shape
    group = batch * heads // len(k)
    q = q.reshape(batch, fed, -1, group, features).transpose(0, 2, 3, 1, 4).reshape(len(k), group * fed, features)
    scores = jnp.einsum("hqc,hcs->hqs", q, k, precision=_precision(q)).astype(jnp.float32) * features**-0.5
    scores = scores.reshape(batch, -1, group, fed, k.shape[2])
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(len(k), group * fed, -1)
    out = jnp.einsum("hqs,hsc->hqc", weights, v, precision=_precision(q))
    out = out.reshape(batch, -1, group, fed, features).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, fed, heads, features)


def _visible(positions, slots, cache, mask) -> Bool[Array, "B T S"]:
    """Every query reads the slots before its block, and inside the block what ``mask`` says (default: causal)."""
    fed = positions.shape[1]
    if cache is None:
        causal = jnp.tril(jnp.ones((fed, fed), bool))[None]
        return causal if mask is None else mask
    key_slot = jnp.arange(cache.num_slots)[None, None]
    if mask is None:
        return key_slot <= slots[..., None]
    inside = key_slot - slots[:, :1, None]
    in_block = jnp.take_along_axis(mask, jnp.clip(inside, 0, fed - 1).astype(jnp.int32), axis=2)
    return (inside < 0) | ((inside < fed) & in_block)


def _precision(x: Array) -> jax.lax.Precision | None:
    # float32 means float32: without it an accelerator multiplies in TF32 or bfloat16 and greedy identity is lost.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


@functools.lru_cache(maxsize=64)
def _graphdef(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class Model:
    """A `Transformer` as a pure function of its parameters. Static and hashable; satisfies `specjax.types.Model`."""

    config: ModelConfig

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Params:
        """Fresh parameters, a nested dict of arrays."""
        _, state = nnx.split(Transformer(self.config, rngs=nnx.Rngs(params=key), dtype=dtype))
        return nnx.to_pure_dict(state)

    def module(self, params: Params) -> Transformer:
        """The NNX module that holds ``params``."""
        return nnx.merge(_graphdef(self.config), nnx.State(params))

    def init_cache(self, batch: int, num_slots: int, dtype: DTypeLike = jnp.float32) -> KVCache:
        config = self.config
        return KVCache.zeros(config.num_layers, batch, num_slots, config.num_kv_heads, config.head_dim, dtype)

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        mask: Bool[Array, "B T T"] | None = None,
        hidden_layers: tuple[int, ...] = (),
        rows: Int[Array, "B R"] | None = None,
    ) -> Output:
        """Feed T tokens a row; with a cache (folded or not), they are written to ``slots`` (contiguous in each row) and
        attend to every earlier slot. Returns logits for the ``rows`` of the block that are asked for (default: all T),
        the residual streams entering ``hidden_layers`` followed by the final normed one, and the new cache."""
        module = self.module(params)
        final, hidden, cache = module(tokens, positions, slots, cache, mask, hidden_layers)
        wanted = final if rows is None else jnp.take_along_axis(final, rows[..., None], axis=1)
        return Output(module.logits(wanted), (*hidden, final), cache)
