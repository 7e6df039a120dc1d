"""The optimizer of a training stage, from optax: AdamW (1711.05101) or Muon (2502.16982), a schedule, clipping; and an
average of the weights over the steps."""

from __future__ import annotations

import functools
import math

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from specjax import config
from specjax.interfaces import Params

MUON_RMS = 0.2
"""Root mean square of Muon's steps. AdamW's steps have it too, so one learning rate fits both (2502.16982)."""
_EMBEDDINGS = ("embedding", "position_embedding")


def make_optimizer(stage: config.Stage) -> optax.GradientTransformation:
    """The optimizer of a stage: it clips by the global norm, then steps as ``stage.optimizer`` says. Matrices decay,
    norm scales do not. Stages with equal settings get the same object, so that their steps are one program."""
    return _optimizer(stage.optimizer, stage.num_steps)


@functools.lru_cache(maxsize=64)
def _optimizer(o: config.Optimizer, steps: int) -> optax.GradientTransformation:
    optimizer = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        _direction(o),
        optax.add_decayed_weights(o.weight_decay, functools.partial(_decaying, embeddings=o.decay_embeddings)),
        optax.scale_by_learning_rate(make_schedule(o, steps)),
    )

    # Optax names no dtypes: under JAX_ENABLE_X64 its rates would be float64, and round differently.
    def init(params):
        with jax.enable_x64(False):
            return optimizer.init(params)

    def update(updates, state, params=None):
        # Optax raises floats to integer powers, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def make_schedule(o: config.Optimizer, steps: int) -> optax.Schedule:
    """Function step -> learning rate. A stage shorter than its warm-up ends inside it."""
    peak, end = o.peak, o.final_scale * o.peak
    if o.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, o.warmup_steps, max(steps, o.warmup_steps + 1), end)
    falling = {"linear": steps - o.warmup_steps, "wsd": math.ceil(o.decay_share * steps), "constant": 0}[o.schedule]
    falling = min(falling, steps - o.warmup_steps)
    parts = [optax.linear_schedule(0.0, peak, o.warmup_steps), optax.constant_schedule(peak)]
    if falling <= 0:
        return optax.join_schedules(parts, [o.warmup_steps])
    return optax.join_schedules([*parts, optax.linear_schedule(peak, end, falling)], [o.warmup_steps, steps - falling])


def _direction(o: config.Optimizer) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(o.b1, o.b2)
    if o.kind == "adamw":
        return adam
    # A kernel is [in, out], with an axis of experts before them in some.
    axes = functools.partial(jax.tree.map, lambda x: optax.contrib.MuonDimensionNumbers(-2, -1))
    # Take Muon's steps alone: decay and learning rate come after. Its own Adam, a Nesterov one, gets no parameters.
    muon = optax.contrib.muon(1.0, muon_weight_dimension_numbers=axes, consistent_rms=MUON_RMS)
    return optax.partition({"muon": optax.chain(muon, optax.scale(-1.0)), "adam": adam}, _muon_or_adam)


def _muon_or_adam(params: Params) -> Params:
    def label(path, x) -> str:
        return "muon" if x.ndim > 1 and _names(path)[0] not in (*_EMBEDDINGS, "head") else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _decaying(params: Params, embeddings: bool) -> Params:
    def decays(path, x) -> bool:
        return x.ndim > 1 and (embeddings or _names(path)[0] not in _EMBEDDINGS)

    return jax.tree_util.tree_map_with_path(decays, params)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "key", key)) for key in path]


@flax.struct.dataclass
class Average:
    """Average of the weights after each of ``steps`` steps. Each counts ``decay`` times as much as the next one."""

    params: Params
    steps: Int[Array, ""]

    @staticmethod
    def start(params: Params) -> Average:
        return Average(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def with_step(self, params: Params, decay: float) -> Average:
        steps = self.steps + 1
        share = _share(steps, decay)
        return Average(jax.tree.map(lambda mean, x: mean + share * (x - mean), self.params, params), steps)


def _share(steps: Int[Array, ""], decay: float) -> Float[Array, ""]:
    """Share of the newest weights in an average over ``steps``: 1 / (1 + decay + ... + decay^(steps - 1))."""
    return (1 - decay) / -jnp.expm1(math.log(decay) * steps.astype(jnp.float32))
