"""One fixed length for every block (2211.17192)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Int
from pydantic import Field

from specjax.interfaces import BoundDrafter, Context, Controller, Outcome


@dataclasses.dataclass(frozen=True)
class Fixed(Controller):
    """One fixed length for every block (2211.17192)."""

    k: Annotated[int, Field(ge=0, le=64)] | None = None
    """Draft length; None: as long as the drafter goes."""
    kind: Literal["fixed"] = "fixed"

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        """The length ``k`` alone; empty if the drafter decides."""
        return () if self.k is None else (self.k,)

    def bind(self, drafter: BoundDrafter) -> Fixed:
        """The controller with ``k`` cut to ``depth``."""
        return self if self.k is None else dataclasses.replace(self, k=min(self.k, drafter.max_depth))

    def init(self, batch: int) -> Any:
        """An empty state: nothing is adapted."""
        return {}

    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        """The length ``k`` for every row; None: as long as the drafter goes."""
        return None if self.k is None else jnp.full(context.lengths.shape, self.k, jnp.int32)

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The unchanged state."""
        return state
