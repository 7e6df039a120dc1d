"""The jitted, donated update of a training stage: teacher and student in one program.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key

from specjax import backend
from specjax.distill.evaluate import matched
from specjax.distill.laws import acceptance
from specjax.distill.teacher import target_output
from specjax.types import Batch, FullLogits, Loss, LossContext, Params, Trainable

MICRO_TOKENS_CPU = 512
"""Tokens of a microbatch on CPU: its activations stay in cache, 1.35x over the whole batch at once on 2 cores."""


ALPHA_MEMORY = 0.9
"""What a step leaves of the running alpha: a mean over some ten steps."""


@flax.struct.dataclass
class TrainState:
    """All that a stage needs to go on, beside its data: a checkpoint holds every leaf of it."""

    params: Params
    opt: optax.OptState
    alpha: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    """Running mean of the batches' alpha (of cached logits: the estimate); at first 0, as if nothing were accepted."""
    key: Key[Array, ""] = flax.struct.field(default_factory=lambda: jax.random.key(0))
    """For what is drawn in a step; another one after every step, also after one that is left out."""
    skipped: Int[Array, ""] = flax.struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    """Steps in which loss or gradient was not finite."""


@flax.struct.dataclass
class _Given:
    """What no gradient of a step reaches."""

    target: Params
    reference: Params
    alpha: jax.Array


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
    drafter: Trainable,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    spec: Any,
    rows: int,
    reference: Trainable | None = None,
    skip: bool = False,
):
    """The jitted step ``(state, target_params, batch, reference_params) -> (state, metrics)``; ``state`` is donated.

    ``spec``: the target's static half, None where the loss needs no target or the batch brings its logits. The target's
    parameters are an argument: closed over, they would be compiled in as constants. ``rows``: of a microbatch.
    ``reference``: the frozen draft of a loss that compares with one, its parameters None without one. Loss, metrics and
    gradient are sums over all predictions of the batch divided once by the sum of their weights, however it is cut up.
    ``metrics["sound"]``: loss and gradient are finite. ``skip``: a step without that leaves parameters, optimizer and
    running alpha as they were.
    """

    def stage_loss(params, given: _Given, batch: Batch):
        target_out = None if spec is None else target_output(spec, given.target, batch)
        teacher = batch.teacher if target_out is None else FullLogits(target_out.logits)
        out = drafter.train_output(params, batch, target_out)
        frozen = None if reference is None else reference.train_output(given.reference, batch, target_out)
        total, weights, overlaps = jnp.float32(0), jnp.float32(0), {}
        for j in range(out.logits.shape[2]):
            m = matched(out, teacher, batch.following, j)
            weight = out.share[j] * m.weight
            context = LossContext(given.alpha, weight, None if frozen is None else frozen.logits[:, :, j])
            values = loss(m.draft_logits, m.teacher, m.tokens, context)
            # A prediction that does not count may have no finite loss.
            total += jnp.sum(jnp.where(weight > 0, weight * values, 0.0))
            weights += jnp.sum(weight)
            measured = {} if m.teacher is None else acceptance(*jax.lax.stop_gradient((m.draft_logits, m.teacher)))
            for name, overlap in measured.items():
                overlaps[name] = overlaps.get(name, 0.0) + jnp.sum(jnp.where(weight > 0, weight * overlap, 0.0))
        return total, (weights, {"loss": total, **overlaps})

    def sums(params, given: _Given, batch: Batch) -> _Sums:
        (_, (weight, metrics)), grads = jax.value_and_grad(stage_loss, has_aux=True)(params, given, batch)
        return _Sums(weight, grads, metrics)

    def update(state: TrainState, target_params: Params, batch: Batch, reference_params: Params = None):
        given = _Given(target_params, reference_params, state.alpha)
        micro = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], micro)
        if len(micro.tokens) == 1:
            total = sums(state.params, given, first)
        else:
            shapes = jax.eval_shape(sums, state.params, given, first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total: _Sums, batch: Batch):
                return jax.tree.map(jnp.add, total, sums(state.params, given, batch)), None

            total, _ = jax.lax.scan(add, zeros, micro)
        weight = jnp.where(total.weight > 0, total.weight, 1.0)
        grads, metrics = jax.tree.map(lambda x: x / weight.astype(x.dtype), (total.grads, total.metrics))
        updates, opt = optimizer.update(grads, state.opt, state.params)
        grad_norm, update_norm = optax.tree.norm(grads), optax.tree.norm(updates)
        # Of logits with a NaN or +inf the loss is not finite either.
        sound = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        skipped = state.skipped + 1 - sound.astype(jnp.int32)
        moved = optax.apply_updates(state.params, updates), opt, _running(state.alpha, metrics, total.weight)
        if skip:
            stayed = state.params, state.opt, state.alpha
            moved = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, stayed)
        metrics |= {"grad_norm": grad_norm, "sound": sound, "skipped": skipped}
        return TrainState(*moved, key=jax.random.split(state.key)[0], skipped=skipped), metrics

    return jax.jit(update, donate_argnums=0, compiler_options=backend.compiler_options())


def _running(alpha: jax.Array, metrics: dict[str, jax.Array], weight: jax.Array) -> jax.Array:
    """Moved towards this step's, if it measured one."""
    newest = metrics.get("alpha", metrics.get("alpha_estimate", alpha))
    return jnp.where(weight > 0, ALPHA_MEMORY * alpha + (1 - ALPHA_MEMORY) * newest, alpha)
