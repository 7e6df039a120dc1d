"""The frozen target's distribution of every position of a batch, and the weights that a draft shares with its target.

Dims: B rows, T predicted positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax

from specjax.types import Batch, Output, Params, Sharing, Trainable


def target_output(spec: Any, params: Params, batch: Batch) -> Output:
    """The target's forward over whole rows; no gradient reaches it."""
    return jax.lax.stop_gradient(spec(params, batch.tokens, batch.token_positions, mask=batch.attention_mask))


def with_shared_params(drafter: Trainable, params: Params, target_params: Params | None) -> Params:
    """What ``drafter`` computes with: ``params``, its own, and those of the target that it shares. No gradient reaches
    the latter, and as arguments of the step they are in memory once."""
    if not isinstance(drafter, Sharing):
        return params
    return drafter.complete(params, jax.lax.stop_gradient(target_params))
