"""What a drafter is unless it says otherwise."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from specjax.types import Bound, Context, Draft, Outcome, Output, Params, TargetView


class StatelessDrafter:
    """A drafter that reads committed tokens alone, has no weights and keeps nothing: a frozen dataclass with ``k`` and
    ``draft`` is all that is left to write. Its own bound form."""

    k: int

    def bind(self, target: Any) -> Bound:
        return Bound(self, {})

    def init(self, batch: int, num_slots: int) -> Any:
        return {}

    def extend(
        self, params: Params, state: Any, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], target_out: Output
    ) -> Any:
        return state

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        raise NotImplementedError

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        return state
