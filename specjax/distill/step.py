"""The jitted, donated update of a training stage: teacher and student in one program.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from specjax import backend
from specjax.distill.evaluate import matched
from specjax.distill.layout import ONE_DEVICE, Layout
from specjax.distill.optimizer import Average
from specjax.distill.teacher import target_output
from specjax.metrics import alpha_per_position
from specjax.types import Batch, FullLogits, Loss, Params, Trainable

MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch on CPU: its activations stay in cache, 1.35x over the whole batch at once on 2 cores."""


@flax.struct.dataclass
class TrainState:
    params: Params
    """float32, whatever the step computes in."""
    opt: optax.OptState
    average: Average | None = None
    """Of the parameters over the steps; None: not asked for."""

    @property
    def result(self) -> Params:
        """The parameters to evaluate, select and keep."""
        return self.params if self.average is None else self.average.params


@flax.struct.dataclass
class _Sums:
    """Of a microbatch: gradient and metrics, each prediction weighted, and ``weight``, what they are divided by."""

    weight: jax.Array
    grads: Params
    metrics: dict[str, jax.Array]


def microbatch_rows(batch_size: int, length: int, shards: int = 1) -> int:
    """Rows of one microbatch over all ``shards`` of the batch, which they divide: the whole batch on an accelerator."""
    if jax.default_backend() != "cpu":
        return batch_size
    own = batch_size // shards
    most = max(1, MICRO_TOKENS_CPU // length)
    return shards * max(rows for rows in range(1, min(most, own) + 1) if own % rows == 0)


def start_state(
    params: Params, optimizer: optax.GradientTransformation, averages: bool, layout: Layout, drafter: Any
) -> TrainState:
    """Before the first step; ``params`` are copied, because a step donates its state."""

    def start(params: Params) -> TrainState:
        return TrainState(params, optimizer.init(params), Average.start(params) if averages else None)

    if layout.mesh is None:
        return start(jax.tree.map(jnp.array, params))
    params = layout.put(params, layout.of_draft(params, drafter))
    shardings = layout.of_draft(jax.eval_shape(start, params), drafter)
    return jax.jit(start, out_shardings=shardings)(params)


def make_update(
    drafter: Trainable,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    spec: Any,
    rows: int,
    *,
    compute_dtype: DTypeLike = jnp.float32,
    ema: float | None = None,
    layout: Layout = ONE_DEVICE,
    state: TrainState | None = None,
):
    """The jitted step ``(state, target_params, batch) -> (state, metrics)``; ``state`` is donated.

    ``spec``: the target's static half, None where the loss needs no target. The target's parameters are an argument:
    closed over, they would be compiled in as constants. ``rows``: of a microbatch, over all devices. Loss, metrics and
    gradient are sums over all predictions of the batch divided once by the sum of their weights, however it is cut up
    and wherever it lies. ``compute_dtype``: of the draft's forward and backward pass. ``ema``: decay of
    ``state.average``. ``state``: over a mesh, one that lies where the step is to find and leave its states.
    """

    drafter, spec = layout.drafter(drafter), layout.model(spec)

    def cast(x):
        return x.astype(compute_dtype) if x.dtype == jnp.float32 else x

    def stage_loss(params, target_params, batch: Batch):
        target_out = None if spec is None else target_output(spec, target_params, batch)
        out = drafter.train_output(jax.tree.map(cast, params), batch, target_out)
        total, weights, alphas = jnp.float32(0), jnp.float32(0), jnp.float32(0)
        for j in range(out.logits.shape[2]):
            m = matched(out, target_out, batch.following, j)
            weight = out.share[j] * m.weight
            teacher = None if m.target_logits is None else FullLogits(m.target_logits)
            values = loss(m.draft_logits, teacher, m.tokens)
            # A prediction that does not count may have no finite loss.
            total += jnp.sum(jnp.where(weight > 0, weight * values, 0.0))
            weights += jnp.sum(weight)
            if m.target_logits is not None:
                overlap = alpha_per_position(*jax.lax.stop_gradient((m.target_logits, m.draft_logits)))
                alphas += jnp.sum(jnp.where(weight > 0, weight * overlap, 0.0))
        metrics = {"loss": total} | ({} if target_out is None else {"alpha": alphas})
        return total, (weights, metrics)

    def sums(params, target_params, batch: Batch) -> _Sums:
        (_, (weight, metrics)), grads = jax.value_and_grad(stage_loss, has_aux=True)(params, target_params, batch)
        if layout.mesh is not None:  # added up where they are needed: a reduce-scatter under fsdp
            grads = jax.lax.with_sharding_constraint(grads, layout.of_draft(grads, drafter))
        return _Sums(weight, grads, metrics)

    def microbatches(x):
        """Each has some rows of every shard, so that no row moves."""
        shards = layout.row_shards
        own = x.reshape(shards, -1, rows // shards, *x.shape[1:])
        return own.swapaxes(0, 1).reshape(-1, rows, *x.shape[1:])

    def update(state: TrainState, target_params: Params, batch: Batch):
        micro = jax.tree.map(microbatches, batch)
        first = jax.tree.map(lambda x: x[0], micro)
        if len(micro.tokens) == 1:
            total = sums(state.params, target_params, first)
        else:
            shapes = jax.eval_shape(sums, state.params, target_params, first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total: _Sums, batch: Batch):
                return jax.tree.map(jnp.add, total, sums(state.params, target_params, batch)), None

            total, _ = jax.lax.scan(add, zeros, micro)
        weight = jnp.where(total.weight > 0, total.weight, 1.0)
        grads, metrics = jax.tree.map(lambda x: x / weight.astype(x.dtype), (total.grads, total.metrics))
        updates, opt = optimizer.update(grads, state.opt, state.params)
        # A step is sound if what it adds to sound weights is finite.
        metrics |= {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        params = optax.apply_updates(state.params, updates)
        average = None if ema is None or state.average is None else state.average.with_step(params, ema)
        return TrainState(params, opt, average), metrics

    shardings: dict[str, Any] = {}
    if layout.mesh is not None:
        lies = jax.tree.map(lambda x: x.sharding, state)
        shardings = {"in_shardings": (lies, None, layout.rows()), "out_shardings": (lies, layout.everywhere())}
    return jax.jit(update, donate_argnums=0, compiler_options=backend.compiler_options(), **shardings)
