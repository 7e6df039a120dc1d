"""The section `draft` of GLIDE drafts, which read the target's keys and values."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Literal

import jax
from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.base import stored_start
from specjax.drafters.glide import GlideModel, LoadedGlide, TrainedGlide, check_readable, load_glide
from specjax.errors import ConfigError
from specjax.formats.loading import load_drafter
from specjax.interfaces import Drafter, DraftKind, Initial, Target
from specjax.models.files import draft_of
from specjax.models.transformer import Model
from specjax.training.init.draft_vocabulary import choosing_ids, first_ids
from specjax.training.init.first_weights import calibration
from specjax.training.init.prune import check_cuttable, prune
from specjax.training.init.shape import resized, spread


@dataclasses.dataclass(frozen=True)
class GlideDraft(DraftKind):
    """The section `draft` of a GLIDE draft, beside `architecture`, `init` and `pretrain`: heads, head size and rotary
    settings are the target's."""

    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the target's layers, ascending: each layer of the draft is cut from one and reads it. None: the first,
    the last, and others evenly between them."""
    depths: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of a block's tokens that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of a depth's loss over that of the depth before."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Number of ids that it proposes, the most frequent of the training text: a smaller head costs less. None: all."""
    kind: Literal["glide"] = "glide"

    def draft(self, config: RunConfig, target: Target, rows: Rows) -> Initial:
        stored = self._stored(config, target)
        if stored is not None:
            return Initial(self._of(stored), stored.params)
        drafter = choosing_ids(self._described(config, target), rows)
        if config.draft.init in ("scratch", {"kind": "scratch"}):
            return Initial(drafter, drafter.init_params(jax.random.split(jax.random.key(config.seed))[1], target))
        check_cuttable(target.config, "set it to scratch, or train a separate draft (kind: draft_model)")
        return Initial(drafter, prune(target, drafter.config, calibration(rows), drafter.glide.reads))

    def drafter(self, config: RunConfig, target: Target) -> TrainedGlide:
        stored = self._stored(config, target)
        return self._described(config, target) if stored is None else self._of(stored)

    def _of(self, stored: LoadedGlide) -> TrainedGlide:
        return TrainedGlide(GlideModel(stored.spec, stored.reads), stored.family, self.depths, self.depth_decay)

    def _stored(self, config: RunConfig, target: Target) -> LoadedGlide | None:
        """The stored draft whose training is to go on, in float32; None if a new one is trained."""
        path = stored_start(config, frozenset({"depths", "depth_decay"}))
        if path is None:
            return None
        found = load_glide(draft_of(path))
        check_readable(found.spec.config, found.reads, target.config)
        return found

    def _described(self, config: RunConfig, target: Target) -> TrainedGlide:
        full, shape = target.config, config.draft.architecture
        reads = tuple(spread(full.num_layers, shape.num_layers)) if self.reads is None else self.reads
        if len(reads) != shape.num_layers or list(reads) != sorted(set(reads)) or reads[-1] >= full.num_layers:
            raise ConfigError(
                f"draft.reads: {list(reads)} for {shape.num_layers} layers of a draft and {full.num_layers} of its "
                "target; name as many different ones of those, ascending"
            )
        model, family = resized(target, shape, cut=True, layers=reads)
        check_readable(model, reads, full)
        spec = Model(model, vocabulary=first_ids(self.draft_vocab_size, full))
        return TrainedGlide(GlideModel(spec, reads), family, self.depths, self.depth_decay)

    def load(self, directory: str | os.PathLike, target: Target, k: int, check_finite: bool = True) -> Drafter:
        return load_drafter(directory, target, k, self.kind, check_finite)
