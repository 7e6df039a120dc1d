"""Products of a decoder block as functions of arrays: rows times a matrix, and attention (1706.03762). float32 stays
float32 on every device, and a lower precision is added up in float32 where its digits count.

Dims: B rows, T tokens fed, S cache slots, H query heads, G key-value heads, C head features, BG = B * G heads, D keys
of each query's own, I/O features in and out, M tokens of all rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from specjax import backend

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Score of a key that is not seen."""


@jax.custom_vjp
def matrix_product(x: Float[Array, "M I"], kernel: Float[Array, "I O"]) -> Float[Array, "M O"]:
    """``x @ kernel``, whose gradient by the kernel is ``x.T @ dy`` (1.2x a training step over JAX's own). JAX's form,
    ``(dy.T @ x).T``, lets XLA on CPU fuse the computation of dy into a transposition, which is not vectorised."""
    return jnp.einsum("mi,io->mo", x, kernel, precision=precision_of(x))


def _matrix_product_forward(x, kernel):
    return matrix_product(x, kernel), (x, kernel)


def _matrix_product_backward(saved, dy):
    x, kernel = saved
    precision = precision_of(x)
    return (
        jnp.einsum("mo,io->mi", dy, kernel, precision=precision),
        jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision=precision),
    )


matrix_product.defvjp(_matrix_product_forward, _matrix_product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rounded_matrix_product(
    x: Float[Array, "M I"], kernel: Float[Array, "I O"] | Float[Array, "O I"], by_row: bool = False
) -> Float[Array, "M O"]:
    """``x @ kernel`` of numbers rounded to bfloat16, added up in float32; its gradients are made likewise. ``by_row``:
    the rows of the kernel are its outputs."""
    return _rounded_dot(x, kernel, by_row)


def _rounded_dot(x: Array, y: Array, by_row: bool) -> Array:
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return jax.lax.dot_general(x, y, (((1,), (int(by_row),)), ((), ())), preferred_element_type=jnp.float32)


def _rounded_matrix_product_forward(x, kernel, by_row):
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return _rounded_dot(x, kernel, by_row), (x, kernel)


def _rounded_matrix_product_backward(by_row, saved, dy):
    (x, kernel), dy = saved, dy.astype(jnp.bfloat16)
    of_kernel = _product_over_rows(dy, x) if by_row else _product_over_rows(x, dy)
    return _rounded_dot(dy, kernel, not by_row), of_kernel


rounded_matrix_product.defvjp(_rounded_matrix_product_forward, _rounded_matrix_product_backward)


def _product_over_rows(x: Float[Array, "M I"], y: Float[Array, "M O"]) -> Float[Array, "I O"]:
    """``x.T @ y`` of bfloat16, in float32."""
    features = x.shape[1]
    if features % 2 or not backend.multiplies_bfloat16():
        return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    # XLA on CPU hands no product of a transposed x to its library, and computes it in float32. Operands of a loop it
    # takes as they lie, so x is transposed before one of two rounds, as bits: a transposed bfloat16 would be converted.
    halves = jax.lax.bitcast_convert_type(x, jnp.uint16).T.reshape(2, features // 2, -1)

    def of_half(carry, half):
        return carry, _rounded_dot(jax.lax.bitcast_convert_type(carry[0][half], jnp.bfloat16), carry[1], by_row=False)

    return jax.lax.scan(of_half, (halves, y), jnp.arange(2))[1].reshape(features, -1)


def wide_matrix_product(x: Float[Array, "M I"], kernel: Float[Array, "I O"]) -> Float[Array, "M O"]:
    """`matrix_product` in float32: bfloat16 cannot tell two logits near 16 apart that differ by less than 1/16."""
    return matrix_product(x, kernel) if is_float32(x) else wide_product("mi,io->mo", x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def wide_product(subscripts: str, x: Array, y: Array) -> Array:
    """Einsum of arrays of a lower precision, added up and returned in float32. Its gradient is computed in the lower
    precision (with JAX's own, an accelerator would multiply float32)."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _wide_product_forward(subscripts, x, y):
    return wide_product(subscripts, x, y), (x, y)


def _wide_product_backward(subscripts, saved, dz):
    return jax.vjp(functools.partial(jnp.einsum, subscripts), *saved)[1](dz.astype(saved[0].dtype))


wide_product.defvjp(_wide_product_forward, _wide_product_backward)


def rows_of(table: Float[Array, "V I"], tokens: Int[Array, "*at"], dtype: DTypeLike) -> Float[Array, "*at I"]:
    """Rows of an embedding in ``dtype``, which the table itself need not have."""
    if table.dtype != dtype:
        # XLA on CPU converts all of a table to read a few rows. The barrier keeps that from being done before a loop
        # over tokens; the fusion that reads the rows then converts no more than these.
        tokens, table = jax.lax.optimization_barrier((tokens, table))
    return table[tokens].astype(dtype)


def few_rows_product(
    x: Float[Array, "M I"], kernel: Num[Array, "*layers O I"], layer: Int[Array, ""] | int | None = None
) -> Float[Array, "M O"]:
    """``x @ kernel.T`` for few rows, as one reduction that reads each row of the kernel once. Each step takes one row
    from each of several distant parts of the kernel: one read of x serves them all, and several streams from memory are
    under way at once. ``layer``: see `widened`."""
    # The division keeps XLA from computing x again for every row of the kernel: it takes a division to be too expensive
    # to repeat. It must be element by element: one by a scalar would become a product, which XLA would fuse.
    x = x / jnp.where(jnp.isinf(x), 2.0, 1.0).astype(x.dtype)
    if kernel.dtype != x.dtype:
        # The barrier keeps XLA from converting the kernel before the loop over tokens, and reading a wide copy in it.
        x, kernel = jax.lax.optimization_barrier((x, kernel))
    outputs, inputs = kernel.shape[-2:]
    count = math.gcd(backend.product_parts(len(x), inputs), outputs)
    parts = [widened(kernel, x.dtype, layer, i, count) for i in range(count)]
    terms = tuple(part * row for row in [row[None] for row in x] for part in parts)
    columns = jax.lax.reduce(terms, (jnp.zeros((), x.dtype),) * len(terms), add_all, (1,))
    return jnp.stack(columns).reshape(len(x), -1)


def widened(
    kernel: Num[Array, "*layers O I"], dtype: DTypeLike, layer: Int[Array, ""] | int | None, part: int = 0, of: int = 1
) -> Float[Array, "P I"]:
    """Rows of a kernel in ``dtype``: part ``part`` of ``of`` equal ones. ``layer``: the one that is meant among the
    kernels of several layers, in which whole numbers of 16 bits stand for the bfloat16 of the same bits, since XLA on
    CPU would convert a slice of bfloat16 three times; None: the kernel is of a single layer."""
    rows = kernel.shape[-2] // of
    if layer is None:
        return jax.lax.slice_in_dim(kernel, part * rows, (part + 1) * rows).astype(dtype)
    start = (jnp.asarray(layer, jnp.int32), jnp.int32(part * rows), jnp.int32(0))
    found = jax.lax.dynamic_slice(kernel, start, (1, rows, kernel.shape[-1]))[0]
    if kernel.dtype == jnp.uint16:
        found = jax.lax.bitcast_convert_type(found.astype(jnp.uint32) << 16, jnp.float32)
    return found.astype(dtype)


def bfloat16_of(kernel: Num[Array, "*layers O I"], layer: Int[Array, ""] | int | None) -> Float[Array, "O I"]:
    """A kernel that is stored in bfloat16. ``layer``: see `widened`."""
    if layer is not None:
        kernel = jax.lax.dynamic_index_in_dim(kernel, layer, keepdims=False)
    return jax.lax.bitcast_convert_type(kernel, jnp.bfloat16) if kernel.dtype == jnp.uint16 else kernel


def several_rows_product(
    x: Float[Array, "M I"], kernel: Num[Array, "*layers O I"], layer: Int[Array, ""] | int | None = None
) -> Float[Array, "M O"]:
    """`few_rows_product` of a few rows of x at a time, equally many each time. Compared with widening the kernel for
    the library's matrix product: 2x and more for up to 64 tokens, as fast for 128."""
    blocks = -(-len(x) // backend.product_rows())
    rows = -(-len(x) // blocks)
    padded = jnp.pad(x, ((0, blocks * rows - len(x)), (0, 0))).reshape(blocks, rows, -1)
    found = jax.lax.map(lambda block: few_rows_product(block, kernel, layer), padded)
    return found.reshape(blocks * rows, -1)[: len(x)]


def split_product(x: Float[Array, "M I"], kernel: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """``x @ kernel.T`` of float32 rows and a bfloat16 kernel. Each row is the sum of three of bfloat16, 8 digits each,
    so that no digit is lost, and the three products are added up in float32 (1904.06376)."""
    found = jax.lax.dot_general(_in_parts(x), kernel, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    first, second, third = jnp.split(found, 3)
    return first + (second + third)


def _in_parts(x: Float[Array, "M I"]) -> Float[Array, "M3 I"]:
    """Three rows of bfloat16 for each of float32, whose sum it is: all first parts, all second ones, all third ones."""

    def cut(x: Array) -> Array:  # not by conversion: XLA may remove one to bfloat16 and back
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    first = cut(x)
    second = cut(x - first)
    third = x - first - second
    # A selection is vectorised, a concatenation is not.
    part = jnp.arange(3, dtype=jnp.int32)[:, None, None]
    chosen = jnp.where(part == 0, first, jnp.where(part == 1, second, third))
    bits = (jax.lax.bitcast_convert_type(chosen, jnp.uint32) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).reshape(-1, x.shape[-1])


def add_all(totals, values):
    """Sums of the pairs of two tuples, for `jax.lax.reduce`."""
    return tuple(total + value for total, value in zip(totals, values, strict=True))


def isolate_nonfinite_kv(k: Float[Array, "B T G C"], v: Float[Array, "B T G C"]) -> tuple[Array, Array]:
    """Keys and values with which a token that overflowed gives NaN to the tokens that see it and to nobody else. A
    masked slot has weight 0, and 0 times NaN is NaN. So a value that is not finite becomes 0, and the key's feature of
    the same number NaN, because masked scores are replaced."""
    finite = jnp.isfinite(v)
    if backend.marks_whole_tokens():
        finite = jnp.all(finite, axis=-1, keepdims=True)
    return jnp.where(finite, k, jnp.asarray(jnp.nan, k.dtype)), jnp.where(finite, v, jnp.zeros((), v.dtype))


def few_queries_product(x: Float[Array, "BG Q I"], kernel: Float[Array, "BG O I"]) -> Float[Array, "BG Q O"]:
    """``x @ kernel.T``, head by head, for few queries: reductions on all cores that read each row once, as in
    `few_rows_product`. The library's batched product runs on one core for so long that the others fall asleep, and
    waking them costs more than the product (1.1-1.2x for blocks of a draft that reads its target, 1.3x for those of a
    separate one)."""
    x = x / jnp.where(jnp.isinf(x), 2.0, 1.0).astype(x.dtype)  # as in few_rows_product
    queries = x.shape[1]
    together = -(-queries // -(-queries // 8))
    found: list[Array] = []
    for first in range(0, queries, together):
        terms = [kernel * x[:, i, None] for i in range(first, min(first + together, queries))]
        zeros = (jnp.zeros((), x.dtype),) * len(terms)
        found += jax.lax.reduce(tuple(terms), zeros, add_all, (2,))
    return jnp.stack(found, axis=1)


def _by_head(x: Float[Array, "*heads Q I"], kernel: Float[Array, "*heads O I"]) -> Float[Array, "*heads Q O"]:
    """``x @ kernel.T``, head by head, added up in float32."""

    def library(x: Array, kernel: Array) -> Array:
        return einsum_of(x)("...qi,...oi->...qo", x, kernel)

    if x.ndim > 3 or x.shape[1] > backend.FEW_QUERIES or not is_float32(x):
        return library(x, kernel)
    return jax.lax.platform_dependent(x, kernel, cpu=few_queries_product, default=library)


class OwnKV(NamedTuple):
    """Keys and values of each query's own. ``reached``: mask of those that a query sees, one for all queries or one for
    each."""

    keys: Float[Array, "B T D G C"]
    values: Float[Array, "B T D G C"]
    reached: Bool[Array, "#T D"] | Bool[Array, " D"]


class Scales(NamedTuple):
    """Scales of keys and values that are stored as whole numbers, one for each vector of a slot and a head. Attention
    multiplies scores and weights with them: keys and values that are multiplied first, XLA on a GPU writes to memory
    before it reads them."""

    keys: Float[Array, "*heads S"]
    values: Float[Array, "*heads S"]

    def applied(self, keys: Num[Array, "*heads S C"], values: Num[Array, "*heads C S"]) -> tuple[Array, Array]:
        """Keys and values in float32."""
        return (
            keys.astype(jnp.float32) * self.keys[..., None],
            values.astype(jnp.float32) * self.values[..., None, :],
        )


def attend(
    q: Float[Array, "B T H C"],
    k: Num[Array, "*heads S C"],
    v: Num[Array, "*heads C S"],
    visible: Bool[Array, "#B T S"],
    scale: float | None = None,
    soft_cap: float | None = None,
    own: OwnKV | None = None,
    scales: Scales | None = None,
) -> Float[Array, "B T H C"]:
    """Grouped-query attention to S keys and values that all queries share and, with ``own``, to D of each query's own,
    under one softmax. The queries that share a key-value head are laid side by side, so that each product is one plain
    matrix multiplication per key-value head (2-3x on CPU over a five-axis einsum). ``heads``: BG, or B and G.
    ``scales``: those of the shared keys and values; None: they are no whole numbers."""
    batch, fed, heads, features = q.shape
    by_head, count = k.shape[:-2], k.shape[-2]
    group = batch * heads // math.prod(by_head)
    apart = q.reshape(batch, fed, -1, group, features)
    folded = apart.transpose(0, 2, 3, 1, 4).reshape(*by_head, group * fed, features)

    def masked(products: Array, visible: Array) -> Array:
        scores = _scores(products, features, scale, soft_cap)
        return jnp.where(visible, scores.reshape(batch, -1, group, fed, products.shape[-1]), LOWEST)

    def read(weights: Array, values: Array) -> Array:
        found = _by_head(weights.reshape(*by_head, group * fed, -1), values)
        return found.reshape(batch, -1, group, fed, features).transpose(0, 3, 1, 2, 4)

    def read_shared(weights: Float[Array, "B G N T S"]) -> Array:
        if scales is not None:
            weights = weights * scales.values.reshape(batch, -1, 1, 1, count)
        return read(weights.astype(q.dtype), v.astype(q.dtype))

    products = _by_head(folded, k.astype(q.dtype))
    scores = masked(products if scales is None else products * scales.keys[..., None, :], visible[:, None, None])
    if own is None:
        return read_shared(jax.nn.softmax(scores, axis=-1)).astype(q.dtype).reshape(q.shape)
    own_k, own_v = own.keys.astype(q.dtype), own.values.astype(q.dtype)
    if fed == 1:  # all queries of a head share these keys, too
        own_k, own_v = own_k[:, 0].transpose(0, 2, 1, 3), own_v[:, 0].transpose(0, 2, 3, 1)
        own_k, own_v = (x.reshape(*by_head, *x.shape[2:]) for x in (own_k, own_v))
        of_own = _by_head(folded, own_k)
    else:
        of_own = jnp.asarray(einsum_of(q)("btgnc,btdgc->bgntd", apart, own_k))
    of_own = masked(of_own, jnp.atleast_2d(own.reached)[None, None, None])
    weights = jax.nn.softmax(jnp.concatenate([scores, of_own], axis=-1), axis=-1)
    shared, each = weights[..., :count], weights[..., count:].astype(q.dtype)
    out_of_own = read(each, own_v) if fed == 1 else jnp.asarray(einsum_of(q)("bgntd,btdgc->btgnc", each, own_v))
    return (read_shared(shared) + out_of_own).astype(q.dtype).reshape(q.shape)


def attend_to_own(
    q: Float[Array, "B T H C"], own: OwnKV, scale: float | None = None, soft_cap: float | None = None
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Attention of each query to the keys and values of its own: the output in float32, and the logarithm of the
    softmax's denominator."""
    apart = q.reshape(*q.shape[:2], own.keys.shape[3], -1, q.shape[3])
    scores = einsum_of(q)("btgnc,btdgc->btgnd", apart, own.keys.astype(q.dtype))
    scores = _scores(scores, q.shape[3], scale, soft_cap)
    scores = jnp.where(jnp.atleast_2d(own.reached)[None, :, None, None], scores, LOWEST)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.asarray(einsum_of(q)("btgnd,btdgc->btgnc", weights, own.values.astype(q.dtype)))
    return out.reshape(q.shape), jax.nn.logsumexp(scores, axis=-1).reshape(q.shape[:3])


def einsum_of(x: Array) -> Any:
    """Einsum for arrays of the dtype of ``x``, added up in float32."""
    return functools.partial(jnp.einsum, precision=precision_of(x)) if is_float32(x) else wide_product


def _scores(products: Array, features: int, scale: float | None, soft_cap: float | None) -> Array:
    return soft_capped(jnp.asarray(products) * (features**-0.5 if scale is None else scale), soft_cap)


def soft_capped(x: Array, cap: float | None) -> Array:
    """``cap * tanh(x / cap)``; ``cap`` None: x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def is_float32(x: Array) -> bool:
    return x.dtype == jnp.float32


def precision_of(x: Array) -> jax.lax.Precision | None:
    # By default an accelerator multiplies float32 as TF32 or bfloat16, and greedy output differs from plain decoding.
    return jax.lax.Precision.HIGHEST if is_float32(x) else None
