"""The best linear guess of a draft that reads hidden states, by least squares on some of the training text: its first
weights. A draft that begins as a layer of the target does worse than one that begins at random
(docs/drafters.md, "How they begin").

Dims: B rows, T positions, I inputs, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.data.rows import StartRows, spread, spread_numbers, take
from specjax.interfaces import Batch, Output, Params, Reads, Target
from specjax.models.training import in_float32, same_norm
from specjax.runtime.distributed import whole
from specjax.training.teacher import target_output

if TYPE_CHECKING:
    from specjax.data.rows import Rows

TOKENS_AN_INPUT = 32
RIDGE = 1e-2
"""Ridge of the least squares: share of each input's mean square that is added to it."""
TOKENS_AT_ONCE = 2**14

Inputs = Callable[[Params, Float[Array, "B T H"], Batch, tuple[Array, ...], Output], Float[Array, "B T I"]]
"""Function of (the draft's parameters, embedded tokens, rows, the streams that the draft reads at the token before, all
of the target's forward pass) that gives the inputs of a linear guess. Hashable: equal ones share a compiled program."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Result of a linear fit: ``kernel [I, H]``, with the last norm ``norm`` behind it, predicts the input of the
    target's head from the inputs as well as any linear map does. ``products``: the inputs' mean products."""

    kernel: Float[np.ndarray, "I H"]
    norm: Params
    products: Float[np.ndarray, "I I"]

    def size(self, part: slice) -> float:
        """Root mean square of the output that ``part`` of the inputs gives."""
        kernel = self.kernel[part]
        return float(np.sqrt(np.sum(kernel * (self.products[part, part] @ kernel)) / kernel.shape[1]))


def linear_guess(target: Target, rows: Rows, reads: tuple[int, ...], own: Params, inputs: Inputs) -> Fit:
    """Fit the linear guess, see `Fit`, to a sample of the ``rows``, or to all for which the target's streams are kept
    if those are no fewer. ``reads``: numbers of the streams; ``own``: the draft's parameters, handed to ``inputs``. All
    processes call this. Memory holds, for a while, three float64 matrices of the inputs."""
    like, asked = same_norm(target.config), Reads(hidden_layers=reads)
    squares = functools.partial(_squares, target.spec, asked, inputs)
    size = jax.eval_shape(squares, target.params, own, spread(rows, 1))[0].shape[0]
    numbers = spread_numbers(rows, TOKENS_AN_INPUT * size)
    if isinstance(rows, StartRows) and rows.kept is not None:
        kept, of_kept = rows.kept(asked)
        rows, numbers = (kept, of_kept) if len(of_kept) >= len(numbers) else (rows, numbers)
    total, at_once = None, max(1, TOKENS_AT_ONCE // rows.length)
    for start in range(0, len(numbers), at_once):
        some = take(rows, numbers[start : start + at_once])
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), whole(squares(target.params, own, some)))
        total = found if total is None else jax.tree.map(np.add, total, found)
    assert total is not None
    gram, cross, power, count = total
    norm = whole(target.params["norm"]) if like else None
    return _solved(gram, cross, float(power), float(count), norm=None if norm is None else in_float32(norm))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _squares(
    spec: Any, reads: Reads, inputs: Inputs, params: Params, own: Params, batch: Batch
) -> tuple[Array, Array, Array, Array]:
    """Sums over the rows' tokens: products of inputs, products of inputs and goal, squares of the goal, number of
    tokens."""
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    out = target_output(spec, params, batch, reads)
    streams = [jnp.asarray(x, jnp.float32) for x in out.hidden]
    assert out.final is not None
    goal = jnp.asarray(out.final, jnp.float32)
    if same_norm(spec.config):  # the draft's norm has the target's scale, and undoes any length
        scale = in_float32(params["norm"])["scale"]
        goal = unit(goal / jnp.where(scale == 0, 1.0, scale)[None, None])
    token = jnp.asarray(params["embedding"][batch.tokens], jnp.float32)
    read = inputs(own, token, batch, tuple(jnp.roll(x, 1, axis=1) for x in streams), out)
    counts = (batch.token_positions > 0) & (jnp.asarray(batch.weight) > 0)
    x, y = (jnp.where(counts[..., None], a, 0.0).reshape(-1, a.shape[-1]) for a in (read, goal))
    return exact(x.T, x), exact(x.T, y), jnp.sum(jnp.square(y)), jnp.sum(counts)


def _solved(gram: np.ndarray, cross: np.ndarray, power: float, count: float, norm: Params | None) -> Fit:
    products, cross = gram / max(count, 1), cross / max(count, 1)
    ridged = products.copy()
    ridged.flat[:: len(ridged) + 1] += RIDGE * np.diag(products) + 1e-12
    kernel = np.linalg.solve(ridged, cross)
    if norm is None:
        size = cross.shape[1]
        norm = {"scale": jnp.full(size, np.sqrt(power / max(count, 1) / size), jnp.float32)}
    return Fit(kernel.astype(np.float32), norm, products)


def low_rank(
    kernel: Float[np.ndarray, "I O"], products: Float[np.ndarray, "I I"]
) -> tuple[Float[np.ndarray, "I R"], Float[np.ndarray, " R"], Float[np.ndarray, "R O"]]:
    """(left, strength, right) with ``kernel = (left * strength) @ right``, of which the first r columns and rows give
    the kernel of rank r whose outputs differ least, over inputs whose mean products are ``products``. Singular vectors
    of the kernel alone would count a direction that no input has as much as any other."""
    ridged = products.astype(np.float64)
    ridged.flat[:: len(ridged) + 1] += RIDGE * np.diag(products) + 1e-12
    root = np.linalg.cholesky(ridged)
    left, strength, right = np.linalg.svd(root.T @ kernel, full_matrices=False)
    return np.linalg.solve(root.T, left), strength, right


def unit(x: Float[Array, "*B H"], eps: float = 1e-6) -> Float[Array, "*B H"]:
    """``x`` scaled to root mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def silent(layer: Params) -> Params:
    """The layer with zeroed output projections, so that it adds nothing yet."""
    zeroed = functools.partial(jax.tree.map, jnp.zeros_like)
    attention = {**layer["attention"], "o_proj": zeroed(layer["attention"]["o_proj"])}
    return {**layer, "attention": attention, "mlp": {**layer["mlp"], "down_proj": zeroed(layer["mlp"]["down_proj"])}}
