"""The defaults of a drafter that keeps nothing."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from specjax.types import Bound, Context, Draft, Outcome, Output, Params, TargetView


class StatelessDrafter:
    """A drafter that reads committed tokens alone, has no weights and keeps nothing. A frozen dataclass with ``k`` and
    ``draft`` is all that is left to write; it is its own bound form."""

    k: int

    def bind(self, target: Any) -> Bound:
        """The drafter itself, without parameters, whatever the target."""
        return Bound(self, {})

    def init(self, batch: int, num_slots: int) -> Any:
        """An empty state."""
        return {}

    def extend(
        self, params: Params, state: Any, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], target_out: Output
    ) -> Any:
        """The state as it is: the prompts are in every context."""
        return state

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The proposed block, and the state; for a subclass to write. Raises `NotImplementedError` until it does."""
        raise NotImplementedError

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The state as it is: nothing is learnt from a block."""
        return state
