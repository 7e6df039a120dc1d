"""The optimizer of a training stage, out of optax."""

from __future__ import annotations

import functools

import jax
import optax

from specjax import config


def make_optimizer(stage: config.Stage) -> optax.GradientTransformation:
    """AdamW with clipping by the global norm; matrices decay, norm scales do not."""
    o = stage.optimizer
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=o.learning_rate,
        warmup_steps=o.warmup_steps,
        # A stage shorter than its warm-up ends inside it.
        decay_steps=max(stage.steps, o.warmup_steps + 1),
        end_value=o.final_scale * o.learning_rate,
    )
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)

    def update(updates, state, params=None):
        # Optax raises floats to integer powers, which JAX's strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)
