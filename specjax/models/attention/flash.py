"""Attention of whole rows to themselves by kernels of libraries, on the devices that have them: cuDNN's on NVIDIA
(through `jax.nn.dot_product_attention`), splash attention on TPU. They make no array of scores. Training and the first
piece of a prompt use them. `specjax.models.attention.blocks` does what they cannot do, and a warning says so.

Dims: B rows, T tokens, H query heads, G key-value heads, C head features.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from specjax import backend
from specjax.models.attention.sight import AttentionMask
from specjax.models.sharding import ROWS, spec_of

LEAST_TOKENS = 128
"""Fewest tokens of a row for which a kernel is used: below, plain products are as fast."""
BLOCK = 512
"""Most tokens of a block of splash attention; its default of 128 keeps the matrix unit waiting."""
LARGEST_MASK = 2**28
"""Most entries of a mask, one for each pair of tokens of all rows, that cuDNN is given: a bias of two bytes each."""
_log = logging.getLogger(__name__)


class Call(NamedTuple):
    """Settings of a kernel call, beside its arrays."""

    scale: float
    soft_cap: float | None = None

    @classmethod
    def of(cls, q: Float[Array, "B T H C"], scale: float | None, soft_cap: float | None) -> Call:
        return cls(float(q.shape[-1] ** -0.5) if scale is None else scale, soft_cap)


class Unsupported(Exception):
    """Raised if a kernel cannot do what is asked of it; the message says what."""


def whole_rows(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T G C"],
    v: Float[Array, "B T G C"],
    sight: AttentionMask,
    call: Call,
    mesh: Mesh | None = None,
) -> Float[Array, "B T H C"] | None:
    """Attention of every token to itself and to those before it in its document; None if no kernel can do it. Over a
    ``mesh`` each device computes its own rows and heads."""
    kernel = {"cudnn": cudnn, "splash": splash}.get(backend.flash_kernel() or "")
    if kernel is None or q.shape[1] < LEAST_TOKENS:
        return None
    try:
        if sight.tree is not None:
            raise Unsupported("a mask of its own")
        segments = None if sight.segments is None else sight.segments[0]

        def attend(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
            return kernel(q, k, v, segments, sight.window, call)

        if mesh is None:
            return attend(q, k, v, segments)
        # Split by the heads of the keys; the queries' heads follow theirs.
        by_head = spec_of(k.shape, mesh, ROWS, None, "tensor", None)
        by_row = None if segments is None else spec_of(segments.shape, mesh, ROWS, None)
        specs = (by_head, by_head, by_head, by_row)
        return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False)(q, k, v, segments)
    except Unsupported as reason:
        _told(f"attention: {kernel.__name__} cannot do {reason}; XLA walks the keys in blocks instead")
        return None


@functools.lru_cache(maxsize=64)
def _told(message: str) -> None:
    """Warn once for each message, however often a function is traced."""
    _log.warning("%s", message)


def cudnn(q, k, v, segments, window: int | None, call: Call, implementation: Any = "cudnn") -> Array:
    mask = None
    if segments is not None:
        if segments.size * q.shape[1] > LARGEST_MASK:
            raise Unsupported(f"rows of {q.shape[1]:,} tokens and several documents")
        mask = (segments[:, :, None] == segments[:, None])[:, None]  # cuDNN takes documents in no other form
    if call.soft_cap is not None:
        raise Unsupported("capped scores")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"{q.dtype}")
    back = None if window is None else (window - 1, 0)
    how = {"is_causal": True, "scale": call.scale, "local_window_size": back, "implementation": implementation}
    try:
        with jax.numpy_dtype_promotion("standard"):  # the function relies on it
            return jax.nn.dot_product_attention(q, k, v, mask=mask, **how)
    except (RuntimeError, NotImplementedError) as error:  # no cuDNN here, or not for these sizes
        raise Unsupported(f"this ({error})") from None


def splash(q, k, v, segments, window: int | None, call: Call, interpret: bool = False) -> Array:
    """Splash attention, one group of heads that share keys and values after the other; in float32 within."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, length, heads, features = q.shape
    block = next((size for size in (BLOCK, 256, 128) if length % size == 0), None)
    if block is None:
        raise Unsupported(f"rows of {length} tokens, no multiple of 128")
    if q.dtype == jnp.float32:
        raise Unsupported("float32, which it multiplies in bfloat16")
    size = (length, length)
    mask = masks.CausalMask(size) if window is None else masks.LocalMask(size, (window - 1, 0), 0)
    group = heads // k.shape[2]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    attend: Any = kernels.make_splash_mqa(
        masks.MultiHeadMask([mask] * group),
        block_sizes=kernels.BlockSizes(**sizes),
        attn_logits_soft_cap=call.soft_cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q = (q * jnp.asarray(call.scale, q.dtype)).reshape(batch, length, -1, group, features).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    ids = None if segments is None else kernels.SegmentIds(segments, segments)
    of_row = jax.vmap(attend, in_axes=(0, 0, 0, None))  # over key-value heads
    out = jax.vmap(of_row, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, ids)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, features).astype(q.dtype)
