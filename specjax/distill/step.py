"""The jitted, donated update of a training stage: teacher and student in one program.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from specjax import backend
from specjax.distill.evaluate import matched
from specjax.distill.teacher import target_output
from specjax.metrics import alpha_per_position
from specjax.types import Batch, FullLogits, Loss, Params, Trainable

MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch on CPU: its activations stay in cache, 1.35x over the whole batch at once on 2 cores."""


@flax.struct.dataclass
class TrainState:
    """All that a stage needs to go on, beside its data: a checkpoint holds every leaf of it."""

    params: Params
    opt: optax.OptState
    key: Key[Array, ""] = flax.struct.field(default_factory=lambda: jax.random.key(0))
    """For what is drawn in a step; another one after every step, also after one that is left out."""
    skipped: Int[Array, ""] = flax.struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    """Steps in which loss or gradient was not finite."""


@flax.struct.dataclass
class _Sums:
    """Of a microbatch: gradient and metrics, each prediction weighted, and ``weight``, what they are divided by."""

    weight: jax.Array
    grads: Params
    metrics: dict[str, jax.Array]


def microbatch_rows(batch_size: int, length: int) -> int:
    """Rows of one microbatch: a divisor of ``batch_size``; the whole batch on an accelerator."""
    if jax.default_backend() != "cpu":
        return batch_size
    most = max(1, MICRO_TOKENS_CPU // length)
    return max(rows for rows in range(1, min(most, batch_size) + 1) if batch_size % rows == 0)


def make_update(
    drafter: Trainable, loss: Loss, optimizer: optax.GradientTransformation, spec: Any, rows: int, skip: bool = False
):
    """The jitted step ``(state, target_params, batch) -> (state, metrics)``; ``state`` is donated.

    ``metrics["sound"]``: loss and gradient are finite. ``skip``: a step without that leaves parameters and optimizer as
    they were.

    ``spec``: the target's static half, None where the loss needs no target. The target's parameters are an argument:
    closed over, they would be compiled in as constants. ``rows``: of a microbatch. Loss, metrics and gradient are sums
    over all predictions of the batch divided once by the sum of their weights, however it is cut up.
    """

    def stage_loss(params, target_params, batch: Batch):
        target_out = None if spec is None else target_output(spec, target_params, batch)
        out = drafter.train_output(params, batch, target_out)
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
        return _Sums(weight, grads, metrics)

    def update(state: TrainState, target_params: Params, batch: Batch):
        micro = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)
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
        grad_norm, update_norm = optax.tree.norm(grads), optax.tree.norm(updates)
        # Of logits with a NaN or +inf the loss is not finite either.
        sound = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        params, skipped = optax.apply_updates(state.params, updates), state.skipped + 1 - sound.astype(jnp.int32)
        if skip:
            moved, stayed = (params, opt), (state.params, state.opt)
            params, opt = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, stayed)
        metrics |= {"grad_norm": grad_norm, "sound": sound, "skipped": skipped}
        return state.replace(params=params, opt=opt, key=jax.random.split(state.key)[0], skipped=skipped), metrics

    return jax.jit(update, donate_argnums=0, compiler_options=backend.compiler_options())
