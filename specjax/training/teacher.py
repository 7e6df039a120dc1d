"""Distribution of the frozen target at every position of a batch, and the weights that a draft shares with it.

Dims: B rows, T predicted positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.interfaces import NOTHING, Batch, Output, Params, Reads, Trainable


def target_output(spec: Any, params: Params, batch: Batch, reads: Reads = NOTHING) -> Output:
    """Forward pass of the target over whole rows, with the states that a draft ``reads``, or the cached streams of the
    batch in its place. No gradient reaches it."""
    if batch.streams is not None:
        *hidden, final = batch.streams
        return Output(jnp.zeros((*batch.tokens.shape[:1], 0, 1), jnp.float32), tuple(hidden), final=final)
    more: dict[str, Any] = {"reads": reads} if reads else {}
    return jax.lax.stop_gradient(spec(params, batch.tokens, batch.token_positions, mask=batch.mask_for(spec), **more))


def needs_target(drafter: Trainable) -> bool:
    """True if a draft cannot run without its target, whatever its loss compares with."""
    return drafter.shares_target or bool(drafter.reads)


def with_shared_params(drafter: Trainable, params: Params, target_params: Params | None) -> Params:
    """All parameters that ``drafter`` computes with: its own ``params``, and those that it shares with the target. No
    gradient reaches the shared ones, and as arguments of the step they are in memory once."""
    if not drafter.shares_target:
        return params
    return drafter.complete(params, jax.lax.stop_gradient(target_params))
