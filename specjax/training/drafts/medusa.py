"""The section `draft` of Medusa's heads."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.features import dense, layers_like
from specjax.drafters.medusa import MedusaModel, TrainedMedusa
from specjax.interfaces import Params, Target
from specjax.models.training import in_float32
from specjax.training.drafts.features import FeatureDraft, refuse_architecture


@dataclasses.dataclass(frozen=True)
class MedusaDraft(FeatureDraft):
    """The section `draft` of Medusa's heads."""

    heads: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of heads, which is the longest draft length."""
    blocks: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of residual layers of a head."""
    own_heads: bool = False
    """True if each head has its own projection to the vocabulary, which begins as the target's; otherwise all have the
    target's, frozen."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a head's loss over that of the head before."""
    kind: Literal["medusa"] = "medusa"  # pyright: ignore[reportIncompatibleVariableOverride]
    of_training: ClassVar[Any] = frozenset({"depth_decay"})

    def described(self, config: RunConfig, target: Target) -> TrainedMedusa:
        full = target.config
        refuse_architecture(config)
        sizes = layers_like(full)
        options = {"heads": self.heads, "blocks": self.blocks, "own_heads": self.own_heads}
        model = MedusaModel(sizes, (full.num_layers,), full.hidden_size, **options)
        return TrainedMedusa(model, () if self.own_heads else ("head",), decay=self.depth_decay)

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        """``params`` with every projection as the target's."""
        if not self.own_heads:
            return params
        own = in_float32(dense(target.params, "head", jnp.float32))
        own = jax.tree.map(lambda x: x * target.config.logit_multiplier, own)
        # Copy: each head is trained, so each needs its own array.
        heads = {i: {**head, "head": jax.tree.map(jnp.copy, own)} for i, head in params["heads"].items()}
        return {**params, "heads": heads}
