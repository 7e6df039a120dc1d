"""Attention over many keys in little memory: scores are made for one block of keys at a time and then dropped
(2205.14135), forward and backward. A prompt of 32,000 tokens has 4 GB of scores a head.

Dims: B rows, T tokens fed, S keys, H query heads, G key-value heads, C head features, ``heads`` BG (B * G) or B and G,
Q queries of a key-value head over all tokens fed, K keys at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from specjax import backend
from specjax.models import products
from specjax.models.attention.sight import AttentionMask


def attend(
    q: Float[Array, "B T H C"],
    k: Num[Array, "*heads S C"],
    v: Num[Array, "*heads C S"],
    sight: AttentionMask,
    scale: float | None = None,
    soft_cap: float | None = None,
    own: products.OwnKV | None = None,
    scales: products.Scales | None = None,
) -> Float[Array, "B T H C"]:
    """Grouped-query attention, see `specjax.models.products.attend`: all scores at once if they are few, else block by
    block."""
    batch, fed, heads, _ = q.shape
    of_row = heads * fed * k.shape[-2]
    if backend.all_scores_at_once(batch, of_row):
        # Of a tree XLA copies the parts of the cache that groups of rows read.
        rows = None if own is not None or sight.tree is not None else backend.attended_rows(of_row)
        if k.ndim == 3 and rows is not None and rows < batch:
            return _in_groups(rows, q, k, v, sight.all(k.shape[-2]), scale, soft_cap, scales)
        return products.attend(q, k, v, sight.all(k.shape[-2]), scale, soft_cap, own, scales)
    k, v = (k, v) if scales is None else scales.applied(k, v)
    shared = in_blocks(q, k.astype(q.dtype), v.astype(q.dtype), sight, scale, soft_cap)
    out = shared[0] if own is None else merged(shared, products.attend_to_own(q, own, scale, soft_cap))
    return out.astype(q.dtype)


def _in_groups(rows: int, q, k, v, visible, scale, soft_cap, scales) -> Float[Array, "B T H C"]:
    """`products.attend` of so many ``rows`` at a time, over a folded cache."""
    batch, found = len(q), []
    heads = len(k) // batch
    for i in range(0, batch, rows):
        end = min(batch, i + rows)
        seen = visible if len(visible) == 1 else visible[i:end]
        k_part, v_part, scale_part = jax.tree.map(lambda x, i=i, end=end: x[i * heads : end * heads], (k, v, scales))
        found.append(products.attend(q[i:end], k_part, v_part, seen, scale, soft_cap, scales=scale_part))
    return jnp.concatenate(found)


def in_blocks(
    q: Float[Array, "B T H C"],
    k: Float[Array, "*heads S C"],
    v: Float[Array, "*heads C S"],
    sight: AttentionMask,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Attention made block by block. Returns the output in float32, and the logarithm of each softmax's denominator,
    with which `merged` joins two parts of the keys: 0 and -inf for a query that sees no key."""
    batch, fed, heads, features = q.shape
    scale = float(features**-0.5) if scale is None else scale
    count = -(-fed // backend.block_queries())
    some = -(-fed // count)  # blocks of nearly equal size
    walk = Walk(min(k.shape[-2], backend.block_keys(batch * heads * some)), batch, scale, soft_cap)

    def block(start: Int[Array, ""]) -> tuple[Array, Array]:
        own = jax.lax.dynamic_slice_in_dim(q, start, some, axis=1)
        return _of_queries(walk, own, k, v, sight.queries(start, some))

    if count == 1:
        return _of_queries(walk, q, k, v, sight)
    # The last block starts early enough to end with the queries; the queries that it repeats are dropped.
    starts = jnp.minimum(jnp.arange(count, dtype=jnp.int32) * some, fed - some)
    out, logsumexp = jax.lax.map(block, starts)
    left = count * some - fed

    def together(x: Array) -> Array:
        return jnp.concatenate([*x[:-1], x[-1, :, left:]], axis=1)

    return together(out), together(logsumexp)


def _of_queries(walk: Walk, q: Float[Array, "B T H C"], k, v, sight: AttentionMask) -> tuple[Array, Array]:
    """Attention of one block of queries. Those that share a key-value head are laid side by side, as in
    `products.attend`."""
    batch, fed, heads, features = q.shape
    by_head = k.shape[:-2]
    group = batch * heads // math.prod(by_head)
    folded = q.reshape(batch, fed, -1, group, features).transpose(0, 2, 3, 1, 4)
    folded = folded.reshape(*by_head, group * fed, features)
    found: Any = _walked(walk, folded, k, v, sight)
    out, logsumexp = found
    out = out.reshape(batch, -1, group, fed, features).transpose(0, 3, 1, 2, 4).reshape(batch, fed, heads, features)
    return out, logsumexp.reshape(batch, -1, group, fed).transpose(0, 3, 1, 2).reshape(batch, fed, heads)


class Walk(NamedTuple):
    """Settings of a loop over the keys: ``keys`` at a time, of ``batch`` rows."""

    keys: int
    batch: int
    scale: float
    soft_cap: float | None

    def over(self, sight: AttentionMask, count: int, body: Callable[[Block, Any], Any], start: Any) -> Any:
        """Result of ``body`` run on one block after the other of ``count`` keys; a block that no query sees costs
        nothing."""
        first, end = sight.ends(count)

        def step(i: Int[Array, ""], carried: Any) -> Any:
            return body(Block(self, sight, jnp.minimum(i * self.keys, count - self.keys), i * self.keys), carried)

        return jax.lax.fori_loop(first // self.keys, -(-end // self.keys), step, start)


class Block(NamedTuple):
    """The keys from ``start`` on; those before ``new`` were in another block."""

    walk: Walk
    sight: AttentionMask
    start: Int[Array, ""]
    new: Int[Array, ""]

    def of(self, x: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.walk.keys, axis % x.ndim)

    def scores(self, q: Float[Array, "*heads Q C"], k: Float[Array, "*heads K C"]) -> tuple[Array, Array]:
        """(scores, derivative of the soft cap at them)."""
        raw = products.einsum_of(q)("...qc,...kc->...qk", q, k) * self.walk.scale
        cap = self.walk.soft_cap
        if cap is None:
            return raw, jnp.float32(1.0)
        capped = jnp.tanh(raw / cap)
        return cap * capped, 1.0 - jnp.square(capped)

    def where_seen(self, x: Float[Array, "*heads Q K"], otherwise: float) -> Float[Array, "*heads Q K"]:
        numbers = self.start + jnp.arange(self.walk.keys, dtype=jnp.int32)
        seen = self.sight.of(numbers) & (numbers >= self.new)[None, None]
        apart = x.reshape(self.walk.batch, -1, *seen.shape[1:])
        return jnp.where(seen[:, None], apart, otherwise).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walked(
    walk: Walk,
    q: Float[Array, "*heads Q C"],
    k: Float[Array, "*heads S C"],
    v: Float[Array, "*heads C S"],
    sight: AttentionMask,
) -> tuple[Float[Array, "*heads Q C"], Float[Array, "*heads Q"]]:
    def body(block: Block, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = carried
        scores = block.where_seen(block.scores(q, block.of(k, -2))[0], products.LOWEST)
        top = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = block.where_seen(jnp.exp(scores - top[..., None]), 0.0)
        read = products.einsum_of(q)("...qk,...ck->...qc", weights.astype(q.dtype), block.of(v, -1))
        fade = jnp.exp(highest - top)
        return top, total * fade + jnp.sum(weights, axis=-1), out * fade[..., None] + read

    nothing = jnp.zeros(q.shape[:-1], jnp.float32)
    start = nothing + products.LOWEST, nothing, jnp.zeros(q.shape, jnp.float32)
    highest, total, out = walk.over(sight, k.shape[-2], body, start)
    sees = total != 0  # true for NaN, too
    divisor = jnp.where(sees, total, 1.0)
    return out / divisor[..., None], jnp.where(sees, highest + jnp.log(divisor), -jnp.inf)


def _walked_forward(walk, q, k, v, sight):
    found: Any = _walked(walk, q, k, v, sight)
    out, logsumexp = found
    return (out, logsumexp), (q, k, v, sight, out, logsumexp)


def _walked_backward(walk, saved, cotangents):
    """Gradients of `_walked`, from scores that are computed again."""
    q, k, v, sight, out, logsumexp = saved
    of_out, of_logsumexp = cotangents
    einsum: Any = products.einsum_of(q)
    constant = jnp.sum(of_out * out, axis=-1) - of_logsumexp
    of_read = of_out.astype(q.dtype)

    def body(block: Block, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        of_q, of_k, of_v = carried
        keys, values = block.of(k, -2), block.of(v, -1)
        scores, slope = block.scores(q, keys)
        weights = block.where_seen(jnp.exp(scores - logsumexp[..., None]), 0.0)
        of_weights = einsum("...qc,...ck->...qk", of_read, values)
        of_scores = block.where_seen(weights * (of_weights - constant[..., None]) * slope * walk.scale, 0.0)
        weights, of_scores = weights.astype(q.dtype), of_scores.astype(q.dtype)
        return (
            of_q + einsum("...qk,...kc->...qc", of_scores, keys),
            _added(of_k, einsum("...qk,...qc->...kc", of_scores, q), block.start, axis=-2),
            _added(of_v, einsum("...qk,...qc->...ck", weights, of_read), block.start, axis=-1),
        )

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    found = walk.over(sight, k.shape[-2], body, start)
    return *(grad.astype(x.dtype) for grad, x in zip(found, (q, k, v), strict=True)), None


_walked.defvjp(_walked_forward, _walked_backward)


def _added(total: Array, more: Array, start: Array, axis: int) -> Array:
    axis %= total.ndim
    old = jax.lax.dynamic_slice_in_dim(total, start, more.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, old + more, start, axis)


def merged(
    one: tuple[Float[Array, "B T H C"], Float[Array, "B T H"]],
    other: tuple[Float[Array, "B T H C"], Float[Array, "B T H"]],
) -> Float[Array, "B T H C"]:
    """Attention over two parts of the keys, each given as `in_blocks` returns it; at least one part is not empty."""
    share = jax.nn.sigmoid(one[1] - other[1])[..., None]
    return share * one[0] + (1.0 - share) * other[0]
