"""The section `draft` of P-EAGLE drafts."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.eagle3 import Options
from specjax.drafters.features import ENDS, layers_like
from specjax.drafters.p_eagle import PEagle, PEagleModel, TrainedPEagle
from specjax.interfaces import Params, Target
from specjax.training.drafts.eagle3 import as_a_linear_guess
from specjax.training.drafts.features import FeatureDraft, first_ids, mask_token, streams


@dataclasses.dataclass(frozen=True)
class PEagleDraft(FeatureDraft):
    """The section `draft` of a P-EAGLE draft: layers of the target's sizes, with its embedding and head, frozen."""

    mask_token: Annotated[int, Field(ge=0)] | None = None
    """Id that no text has, whose embedding mask rows have; None: the last of the vocabulary."""
    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the target's streams that the draft captures, as in `eagle3`."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of the draft's layers; the paper has four."""
    depths: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of depths of a block that are trained."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a depth's loss over that of the depth before."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Size of the draft vocabulary, the most frequent ids of the training data; None: all ids."""
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["p_eagle"] = "p_eagle"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = PEagle
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay"})

    def described(self, config: RunConfig, target: Target) -> TrainedPEagle:
        full = target.config
        reads = streams(self.reads, config, full)
        mask = mask_token(self.mask_token, full)
        options = Options(self.norm_before_residual, False, self.norm_before_fc, self.fc_norm)
        layers = layers_like(full, self.layers)
        kept = first_ids(self.draft_vocab_size, full)
        model = PEagleModel(layers, reads, full.hidden_size, kept=kept, options=options, mask_token=mask)
        return TrainedPEagle(model, ENDS, depths=self.depths, decay=self.depth_decay)

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        return as_a_linear_guess(drafter, params, target, rows)
