"""The jitted update of a training stage: target and draft in one program, which donates the state.

Dims: B rows, T predicted positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from specjax import backend
from specjax.interfaces import PLAIN, Batch, FullLogits, Loss, LossContext, Params, Prediction, Trainable, TrainingForm
from specjax.models import kernels
from specjax.models.vocabulary import TokenRows
from specjax.training.chunked_loss import Matched, Matching, Positions, Teacher
from specjax.training.distributions import acceptance, overlap
from specjax.training.layout import ONE_DEVICE, Layout
from specjax.training.optimizer import Average
from specjax.training.teacher import target_output, with_shared_params

ALPHA_MEMORY = 0.9
"""Share of the running alpha that is left after a step: a mean over some ten steps."""


@flax.struct.dataclass
class TrainState:
    """Everything but its data that a stage needs to go on: a checkpoint holds every leaf of it. It has no random key:
    all that training draws is a function of its seed and of the step or row that the draw is for."""

    params: Params
    """Trained parameters, in float32 whatever the step computes in."""
    opt: optax.OptState
    alpha: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.float32))
    """Running mean of the batches' alpha (its estimate with cached logits); 0 at first, as if nothing were accepted."""
    skipped: Int[Array, ""] = flax.struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))
    """Number of steps in which loss or gradient was not finite."""
    average: Average | None = None
    """Average of the parameters over the steps; None: not asked for."""

    @property
    def result(self) -> Params:
        """The parameters to evaluate, select and return."""
        return self.params if self.average is None else self.average.params


@flax.struct.dataclass
class _Given:
    """Inputs of a step that no gradient reaches."""

    target: Params
    references: dict[str, Params]
    alpha: jax.Array


@flax.struct.dataclass
class _Sums:
    """Sums over a microbatch: gradient and metrics, each prediction weighted, and ``weight``, which divides them."""

    weight: jax.Array
    grads: Params
    metrics: dict[str, jax.Array]


def microbatch_rows(batch_size: int, length: int, shards: int = 1) -> int:
    """Number of rows of one microbatch, over all ``shards`` of the batch. It takes equally many of each shard, a
    divisor of the shard's rows."""
    tokens = backend.microbatch_tokens()
    if tokens is None:
        return batch_size
    own = batch_size // shards
    most = max(1, tokens // length)
    return shards * max(rows for rows in range(1, min(most, own) + 1) if own % rows == 0)


def start_state(
    params: Params, optimizer: optax.GradientTransformation, averages: bool, layout: Layout, drafter: Any
) -> TrainState:
    """The state before the first step; ``params`` are copied, because a step donates its state."""
    start = functools.partial(_start, optimizer, averages)
    params = layout.put(params, layout.of_draft(params, drafter))
    shardings = layout.of_draft(jax.eval_shape(start, params), drafter)
    state = jax.jit(_start, static_argnums=(0, 1), out_shardings=shardings)(optimizer, averages, params)
    # Commit it to its devices, as a restored state is: an uncommitted one would compile another program.
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def abstract_state(
    shapes: Params, optimizer: optax.GradientTransformation, averages: bool, layout: Layout, drafter: Any
) -> TrainState:
    """Shapes and shardings of `start_state`, without making its arrays: the form that a checkpoint is restored into."""
    state = jax.eval_shape(functools.partial(_start, optimizer, averages), shapes)
    lies = layout.of_draft(state, drafter)
    if lies is None:
        here = jnp.zeros((), jnp.float32).sharding
        lies = jax.tree.map(lambda _: here, state)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state, lies)


def _start(optimizer: optax.GradientTransformation, averages: bool, params: Params) -> TrainState:
    params = jax.tree.map(jnp.copy, params)
    average = Average.start(params) if averages else None
    return TrainState(params, optimizer.init(params), average=average)


@dataclasses.dataclass(frozen=True)
class Update:
    """The step of a stage, a function of arrays: ``(state, target_params, batch, frozen) -> (state, metrics)``.

    ``spec``: the target's static half; None if the loss needs no target or the batch brings its logits. The target's
    parameters are an argument: closed over, they would be compiled in as constants. Without ``spec`` they are None,
    unless the draft shares some of them. ``rows``: rows of a microbatch, over all devices. ``references``: the frozen
    drafts that the loss compares with, by its names for them; ``frozen``: their parameters. Loss, metrics and gradient
    are sums over all predictions of the batch, divided once by the sum of their weights: neither microbatches nor
    devices change them. ``metrics["sound"]``: True if loss and gradient are finite. ``skip``: True if a step that is
    not sound leaves parameters, optimizer, averages and running alpha as they were. ``form``: form of the draft's
    forward and backward pass; ``layout``: where it lies. ``ema``: decay of ``state.average``. ``tokens``: the token
    rows of the target that distributions are compared over; None: all.
    """

    drafter: Trainable
    loss: Loss
    optimizer: optax.GradientTransformation
    spec: Any
    rows: int
    references: Mapping[str, Trainable] = dataclasses.field(default_factory=dict)
    skip: bool = False
    form: TrainingForm = PLAIN
    ema: float | None = None
    layout: Layout = ONE_DEVICE
    tokens: TokenRows | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "references", flax.core.freeze(dict(self.references)))  # a FrozenDict is hashable

    def jitted(self, state: TrainState | None = None):
        """The jitted step, compiled at its first call, once for all equal steps; a call donates its state. Over a mesh,
        the step finds and leaves its states where the given ``state`` lies."""
        if self.layout.mesh is None:
            return _jitted(self)
        shardings, structure = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, state))
        return _jitted(self, structure, tuple(shardings))

    def summed_loss(self, params: Params, given: _Given, batch: Batch):
        """(loss, (weight, metrics)) of the rows of ``batch``, summed over their predictions."""
        target_out = None if self.spec is None else target_output(self.spec, given.target, batch, self.drafter.reads)
        if target_out is None:
            teacher = None if batch.teacher is None else Teacher(batch.teacher)
        else:
            teacher = Teacher.of(self.spec, given.target, target_out)
        # Cast the draft's own weights first: the target's shared ones then go to that dtype in one step.
        whole = with_shared_params(self.drafter, jax.tree.map(self._cast, params), given.target)
        # One prediction will do: that of a separate draft model does not depend on where a block began.
        others = {
            n: next(iter(other.predictions(given.references[n], batch, target_out)))
            for n, other in self.references.items()
        }
        total, weights, overlaps, by_depth = jnp.float32(0), jnp.float32(0), {}, []
        narrowed: Teacher | None = None
        for number, prediction in enumerate(self.drafter.predictions(whole, batch, target_out)):
            if number == 0 and not others:
                narrowed = self._narrowed(prediction, teacher, given.target, batch)
            matching = Matching.of(prediction, narrowed or teacher, batch.labels, self.tokens, others)
            if narrowed is not None:
                matching = dataclasses.replace(matching, narrow=prediction.narrow)
            loss, sums = self._compared(matching, prediction, given.alpha)
            total, weights = total + loss, weights + sums["weight"]
            overlaps |= {n: overlaps.get(n, 0.0) + x for n, x in sums.items() if n != "weight"}
            by_depth.append({"loss": loss, **sums})
        depths = {"by_depth": by_depth} if len(by_depth) > 1 else {}
        return total, (weights, {"loss": total, **overlaps, **depths})

    def _narrowed(
        self, prediction: Prediction, teacher: Teacher | None, target: Params, batch: Batch
    ) -> Teacher | None:
        """The teacher over the draft vocabulary alone, if prediction and target can be compared there. The logsumexp of
        all its logits is cached, or made once for all depths."""
        narrow = prediction.narrow
        if narrow is None or prediction.loss_logits is not None or teacher is None or teacher.head is None:
            return None
        params = self.spec.narrowed(target, narrow.ids)
        if params is None:
            return None
        logsumexp = teacher.logsumexp(self.tokens) if batch.logsumexp is None else batch.logsumexp
        return teacher.narrowed(functools.partial(self.spec.head, params), logsumexp)

    def _compared(
        self, matching: Matching, prediction: Prediction, alpha: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, weight and overlaps) of a prediction, summed over its positions."""

        labels, share = self.loss.labels_alone, prediction.share

        def given(m: Matched, chosen: Any) -> tuple[Any, ...]:
            context = LossContext(alpha, share * m.weight, m.references, chosen, m.label_in_vocabulary)
            return m.draft_logits, m.teacher, m.tokens, context

        chosen = None
        if self.loss.selects:
            scores = matching.mapped(lambda m, _: self.loss.scores(*given(m.over_draft_vocabulary(labels), None)))
            chosen = self.loss.choose(jax.lax.stop_gradient(scores), share * matching.weight(labels))

        def measure(m: Matched, some: Positions) -> tuple[jax.Array, dict[str, jax.Array]]:
            own = m.over_draft_vocabulary(labels)
            weight, values = share * own.weight, self.loss(*given(own, some.more))
            measured = {} if m.teacher is None else jax.lax.stop_gradient(acceptance_of(m))
            if m.confidence is not None:
                unsure = optax.sigmoid_binary_cross_entropy(m.confidence, measured["alpha"])
                values = values + prediction.confidence_share * unsure
                error = jnp.abs(jax.nn.sigmoid(m.confidence) - measured["alpha"])
                measured["confidence_error"] = jax.lax.stop_gradient(error)
            # The loss of a prediction that does not count may not be finite.
            sums = {n: jnp.sum(jnp.where(weight > 0, weight * x, 0.0)) for n, x in {"loss": values, **measured}.items()}
            return sums.pop("loss"), {**sums, "weight": jnp.sum(weight)}

        return matching.summed(measure, chosen)

    def accumulate(self, params: Params, given: _Given, batch: Batch) -> _Sums:
        """Gradient and metrics of the batch, microbatch by microbatch."""
        micro = jax.tree.map(self._microbatches, batch)
        first = jax.tree.map(lambda x: x[0], micro)
        if len(micro.tokens) == 1:
            return self._sums(params, given, first)
        shapes = jax.eval_shape(self._sums, params, given, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total: _Sums, batch: Batch):
            return jax.tree.map(jnp.add, total, self._sums(params, given, batch)), None

        return jax.lax.scan(add, zeros, micro)[0]

    def apply_gradients(self, state: TrainState, total: _Sums) -> tuple[TrainState, dict[str, jax.Array]]:
        weight = jnp.where(total.weight > 0, total.weight, 1.0)
        grads, metrics = jax.tree.map(lambda x: x / weight.astype(x.dtype), (total.grads, total.metrics))
        for depth, of_depth in enumerate(metrics.pop("by_depth", ()), 1):
            counted = of_depth.pop("weight")  # a share: it has been divided by the whole weight too
            metrics |= {
                f"{name}_at_{depth}": value / jnp.where(counted > 0, counted, 1.0) for name, value in of_depth.items()
            }
        updates, opt = self.optimizer.update(grads, state.opt, state.params)
        grad_norm, update_norm = optax.tree.norm(grads), optax.tree.norm(updates)
        # Logits with a NaN or +inf make the loss NaN or infinite too.
        sound = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
        params = optax.apply_updates(state.params, updates)
        average = None if self.ema is None or state.average is None else state.average.with_step(params, self.ema)
        moved = params, opt, _running(state.alpha, metrics, total.weight), average
        if self.skip:
            stayed = state.params, state.opt, state.alpha, state.average
            moved = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, stayed)
        params, opt, alpha, average = moved
        skipped = state.skipped + 1 - sound.astype(jnp.int32)
        metrics |= {"grad_norm": grad_norm, "sound": sound, "skipped": skipped}
        return TrainState(params, opt, alpha, skipped, average), metrics

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.form.dtype or x.dtype) if x.dtype == jnp.float32 else x

    def _sums(self, params: Params, given: _Given, batch: Batch) -> _Sums:
        with kernels.operands_in(self.form.matmul_dtype):
            (_, (weight, metrics)), grads = jax.value_and_grad(self.summed_loss, has_aux=True)(params, given, batch)
        if self.layout.mesh is not None:  # summed where they are needed: a reduce-scatter under fsdp
            grads = jax.lax.with_sharding_constraint(grads, self.layout.of_draft(grads, self.drafter))
        return _Sums(weight, grads, metrics)

    def _microbatches(self, x: jax.Array) -> jax.Array:
        """``x`` cut into microbatches. Each has some rows of every shard, so that no row moves."""
        shards = self.layout.row_shards
        own = x.reshape(shards, -1, self.rows // shards, *x.shape[1:])
        return own.swapaxes(0, 1).reshape(-1, self.rows, *x.shape[1:])


def acceptance_of(m: Matched) -> dict[str, jax.Array]:
    """Acceptance at each position, among all ids even where only those of a draft vocabulary are compared."""
    if m.narrow is None:
        assert m.teacher is not None
        return acceptance(m.draft_logits, m.teacher)
    assert isinstance(m.teacher, FullLogits)
    log_p = m.teacher.logits.astype(jnp.float32) - m.narrow.logsumexp[..., None]
    return {"alpha": overlap(log_p, jax.nn.log_softmax(m.draft_logits.astype(jnp.float32), axis=-1))}


@functools.lru_cache(maxsize=16)
def _jitted(step: Update, structure: Any = None, state_shardings: tuple[Any, ...] = ()):
    """The jitted function of ``step``. ``structure``, ``state_shardings``: where the leaves of its state lie, over a
    mesh. A caller that lowers for another device clears JAX's caches first."""
    layout, shardings = step.layout, {}
    if layout.mesh is not None:
        lies = jax.tree.unflatten(structure, state_shardings)
        shardings = {
            "in_shardings": (lies, None, layout.rows(), None),
            "out_shardings": (lies, layout.everywhere()),
        }
    form = dataclasses.replace(step.form, sharding=layout.rows())
    placed = dataclasses.replace(step, drafter=step.drafter.in_training(form), spec=layout.model(step.spec))

    def update(state: TrainState, target_params: Params, batch: Batch, frozen: dict[str, Params] | None = None):
        given = _Given(target_params, frozen or {}, state.alpha)
        return placed.apply_gradients(state, placed.accumulate(state.params, given, batch))

    return jax.jit(update, donate_argnums=0, compiler_options=backend.compiler_options(), **shardings)


def _running(alpha: jax.Array, metrics: dict[str, jax.Array], weight: jax.Array) -> jax.Array:
    """The running alpha, moved towards this step's alpha if it measured one."""
    newest = metrics.get("alpha", metrics.get("alpha_estimate", alpha))
    return jnp.where(weight > 0, ALPHA_MEMORY * alpha + (1 - ALPHA_MEMORY) * newest, alpha)
