"""The section `draft` of early-exit drafts, which run the target's first layers."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.early_exit import ExitModel, TrainedExit
from specjax.drafters.features import layers_like
from specjax.errors import ConfigError
from specjax.interfaces import Params, Target
from specjax.models.training import in_float32, same_norm
from specjax.training.drafts.features import FeatureDraft, refuse_architecture


@dataclasses.dataclass(frozen=True)
class EarlyExitDraft(FeatureDraft):
    """The section `draft` of an early-exit draft."""

    layers: Annotated[int, Field(ge=1)] | None = None
    """Number of the target's layers that are run; None: a third of them."""
    adapter: Annotated[int, Field(ge=1)] | None = None
    """Number of neurons of the adapter; None: the target's hidden size."""
    kind: Literal["early_exit"] = "early_exit"  # pyright: ignore[reportIncompatibleVariableOverride]

    def described(self, config: RunConfig, target: Target) -> TrainedExit:
        full = target.config
        refuse_architecture(config)
        count = max(1, full.num_layers // 3) if self.layers is None else self.layers
        if count >= full.num_layers:
            raise ConfigError(f"draft.layers: {count}, and the target has {full.num_layers}; leave it earlier")
        sizes = layers_like(full)
        sizes = dataclasses.replace(sizes, intermediate_size=self.adapter or full.hidden_size)
        return TrainedExit(ExitModel(sizes, (count,), full.hidden_size), ("head",))

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        """``params`` with the target's final norm, if it is of the same kind."""
        norm = in_float32(target.params["norm"])
        return {**params, "norm": norm} if same_norm(target.config) else params
