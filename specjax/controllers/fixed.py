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
    """The same block length every time (2211.17192)."""

    k: Annotated[int, Field(ge=0, le=64)] | None = None
    """The deepest proposal; None: as deep as the drafter goes."""
    kind: Literal["fixed"] = "fixed"

    @property
    def rungs(self) -> tuple[int, ...]:
        """``k`` alone; none: whatever the drafter proposes."""
        return () if self.k is None else (self.k,)

    def bind(self, depth: int) -> Fixed:
        """With no more than ``depth``."""
        return self if self.k is None else dataclasses.replace(self, k=min(self.k, depth))

    def init(self, batch: int) -> Any:
        """An empty state: nothing is adapted."""
        return {}

    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        """``k`` for every row; None: as deep as the drafter goes."""
        return None if self.k is None else jnp.full(context.lengths.shape, self.k, jnp.int32)

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> None:
        """No row stops early."""

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The state as it is."""
        return state
