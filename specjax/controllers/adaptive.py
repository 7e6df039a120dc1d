"""The default: lengths chosen by measured costs once there are any, and the drafter's own length before."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from jaxtyping import Array, Int
from pydantic import Field

from specjax.controllers.fixed import Fixed
from specjax.controllers.pooled import Pooled
from specjax.controllers.total import Total
from specjax.controllers.weighing import Settings, Weighing, lengths
from specjax.errors import ConfigError
from specjax.interfaces import BoundDrafter, Context, Controller, Outcome


@dataclasses.dataclass(frozen=True)
class Adaptive(Settings, Controller):
    """The length of the most expected tokens for what a block costs, once a `Decoder` knows what blocks cost
    (`Decoder.calibrate`; jobs and commands measure by themselves). Before, every block is as long as the drafter's: a
    row then replays alone from its seed, and nothing depends on a clock.

    One length for the whole batch (``per`` batch, the goodput of 2406.14066) makes its slowest row end first. Which
    sample of its distribution a row gets then depends on the rows beside it: a batch replays with the same prompts,
    seeds and costs, a row alone only in greedy decoding or with the `coupled` rule, where lengths change nothing. A
    length for each row (``per`` row; 2211.17192, section 3.3) depends on that row and on the costs alone."""

    per: Literal["batch", "row"] = "batch"
    """Owner of a length: all rows of the batch share one, or each row has its own."""
    total: Annotated[int, Field(ge=1)] | None = None
    """Proposed tokens of a block, all rows together, spent where they are most likely accepted; None: as many as the
    lengths say."""
    kind: Literal["adaptive"] = "adaptive"
    needs_costs: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.total is not None and self.per == "row":
            raise ConfigError("adaptive: total and per=row exclude each other; a total is one of the whole batch")

    def bind(self, drafter: BoundDrafter) -> Weighing:
        chain = drafter.num_nodes == drafter.max_depth
        ks, reviews = lengths(self.ks, drafter.max_depth), chain and drafter.previews
        if self.total is not None:
            return Total(self, ks, drafter.match_classes, reviews, drafter.model_class, total=self.total)
        return (Pooled if self.per == "batch" else Weighing)(
            self, ks, drafter.match_classes, reviews, drafter.model_class
        )

    def without_costs(self) -> Controller:
        return Fixed()

    def init(self, batch: int) -> Any:
        raise self._unbound

    def choose(self, state: Any, context: Context) -> Int[Array, " B"]:
        raise self._unbound

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        raise self._unbound

    @property
    def _unbound(self) -> ConfigError:
        return ConfigError("controller 'adaptive': bind it to a drafter first, as `Decoder` does")
