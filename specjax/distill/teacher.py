"""The frozen target's law of every position of a batch. Dims: B rows, T predicted positions, V vocabulary."""

from __future__ import annotations

from typing import Any

import jax

from specjax.types import Batch, Output, Params


def target_output(spec: Any, params: Params, batch: Batch) -> Output:
    """The target's forward over whole rows; no gradient reaches it."""
    return jax.lax.stop_gradient(spec(params, batch.tokens, batch.token_positions, mask=batch.attention_mask))
