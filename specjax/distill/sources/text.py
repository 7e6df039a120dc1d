"""Training data as it stands in the text of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from specjax.data.rows import Batches, Rows
from specjax.distill.sources.context import SourceContext


@dataclasses.dataclass(frozen=True)
class Text:
    """Train on the text of the run."""

    kind: Literal["text"] = "text"

    def rows(self, context: SourceContext) -> Rows:
        return context.text

    def batches(self, batches: Batches, directory: Path, sample: Any, steps: int) -> Batches:
        return batches
