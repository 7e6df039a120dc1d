"""What a source of training data is given, and the simplest one: the text of the run as it stands."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from specjax.data.rows import Batches, ConcatenatedRows, Rows
from specjax.runtime.progress import Bars, no_bars
from specjax.types import Drafter, Params


@dataclasses.dataclass(frozen=True)
class Proposer:
    """A draft that helps to sample from the target: its weights, and the drafter of k tokens a block that decodes with
    weights of that shape."""

    params: Params
    drafter: Callable[[Params, int], Drafter]


@dataclasses.dataclass(frozen=True)
class SourceContext:
    """``name``: of the stage. ``directory``: where data that is made for it goes. ``text``: rows of the training text.
    ``draft``: as the stage begins with it, None without one. ``today``: of the run, for chat templates that ask.
    ``needs_labels``: the loss does (`specjax.types.Loss`)."""

    name: str
    directory: Path
    text: ConcatenatedRows
    target: Any
    draft: Proposer | None
    prompt_weight: float
    seed: int
    on_bad: Literal["error", "skip"] = "error"
    bars: Bars = no_bars
    today: datetime.date | None = None
    needs_labels: bool = True


@dataclasses.dataclass(frozen=True)
class Text:
    """Train on the text of the run."""

    kind: Literal["text"] = "text"

    def rows(self, context: SourceContext) -> Rows:
        return context.text

    def vocabulary_rows(self, context: SourceContext) -> list[tuple[Rows, float]]:
        """Rows that show which ids the stage asks for, before there is a draft, each with its share of them all."""
        return [(context.text, 1.0)]

    def batches(self, batches: Batches, directory: Path, sample: Any, steps: int) -> Batches:
        return batches
