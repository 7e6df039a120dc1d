"""What chain verifiers share. Dims: B rows, K draft length."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def leading_run(accepted: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of accepted tokens before the first that is not."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)
