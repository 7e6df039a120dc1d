"""Inputs of a source of training data, and the simplest source: the text of the run as it stands."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from specjax.data.rows import ConcatenatedRows, Rows
from specjax.interfaces import Drafter, Params, Source, Target
from specjax.runtime.progress import Bars, no_bars


@dataclasses.dataclass(frozen=True)
class DraftHandle:
    """A draft that helps to sample from the target: its weights, and a function (weights of that shape, k) -> drafter
    of k tokens a block."""

    params: Params
    drafter: Callable[[Params, int], Drafter]


@dataclasses.dataclass(frozen=True)
class SourceContext:
    """Inputs of a source of training data. ``name``: name of the stage. ``directory``: directory for data made for it.
    ``text``: rows of the training text. ``draft``: the draft that the stage begins with, or None. ``today``: date of
    the run, for chat templates that ask. ``needs_labels``: True if the loss does (`specjax.interfaces.Loss`)."""

    name: str
    directory: Path
    text: ConcatenatedRows
    target: Target
    draft: DraftHandle | None
    prompt_weight: float
    seed: int
    on_bad: Literal["error", "skip"] = "error"
    bars: Bars = no_bars
    today: datetime.date | None = None
    needs_labels: bool = True


@dataclasses.dataclass(frozen=True)
class Text(Source):
    """Train on the text of the run."""

    kind: Literal["text"] = "text"

    def rows(self, context: SourceContext) -> Rows:
        return context.text
