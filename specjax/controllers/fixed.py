"""The same length in every block (2211.17192)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.types import Context, Outcome


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Proposals down to depth ``k``; None: as deep as the drafter goes."""

    k: Annotated[int, Field(ge=0, le=64)] | None = None
    kind: Literal["fixed"] = "fixed"

    def init(self, batch: int) -> Any:
        return {}

    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        return None if self.k is None else jnp.full(context.lengths.shape, self.k, jnp.int32)

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> None:
        return None

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        return state
