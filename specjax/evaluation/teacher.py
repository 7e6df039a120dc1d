"""The frozen target's distribution of every position of a batch, and the weights that a draft shares with its target.

Dims: B rows, T predicted positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import NOTHING, Batch, Output, Params, Reads, Sharing, Trainable, reads_of


def target_output(spec: Any, params: Params, batch: Batch, reads: Reads = NOTHING) -> Output:
    """The target's forward over whole rows, with what a draft ``reads`` of it, or what was kept of that; no gradient
    reaches it."""
    if batch.streams is not None:
        *hidden, final = batch.streams
        return Output(jnp.zeros((*batch.tokens.shape[:1], 0, 1), jnp.float32), tuple(hidden), final=final)
    more: dict[str, Any] = {"reads": reads} if reads else {}
    return jax.lax.stop_gradient(spec(params, batch.tokens, batch.token_positions, mask=batch.mask_for(spec), **more))


def needs_target(drafter: Any) -> bool:
    """Whether a draft is nothing without its target, whatever its loss compares with."""
    return isinstance(drafter, Sharing) or bool(reads_of(drafter))


def with_shared_params(drafter: Trainable, params: Params, target_params: Params | None) -> Params:
    """What ``drafter`` computes with: ``params``, its own, and those of the target that it shares. No gradient reaches
    the latter, and as arguments of the step they are in memory once."""
    if not isinstance(drafter, Sharing):
        return params
    return drafter.complete(params, jax.lax.stop_gradient(target_params))
