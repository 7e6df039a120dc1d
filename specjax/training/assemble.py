"""A run, assembled once from its config. The memory plan, the stages of training, a resume and the report read its
parts, so that none of them derives target, draft or placement for itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax

from specjax import config as config_lib
from specjax import registry
from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.interfaces import DraftKind, Initial, Loss, Source
from specjax.models import families
from specjax.models.hf import LoadedModel, abstract_model
from specjax.models.transformer import param_shapes
from specjax.training.init.first_weights import draft_kind, target_model, target_stage
from specjax.training.layout import Layout, abstract_layout, make_layout


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run before anything of it is loaded: the parts that its config names, with shapes in place of weights."""

    config: RunConfig
    target: LoadedModel
    """The target to load or to train, with shapes in place of weights."""
    kind: DraftKind
    """The section `draft` of the config."""
    initial: Initial | None
    """The draft in training, with shapes in place of weights; None: its kind gives no shapes."""

    @property
    def stages(self) -> Mapping[str, config_lib.Stage]:
        """The stages that take steps, in their order, by the names of their directories."""
        config = self.config
        stages = {"draft-pretrain": config.draft.pretrain, "draft-distill": config.distill}
        if config.target.path is None:
            stages = {"target-train": target_stage(config), **stages}
        return {name: stage for name, stage in stages.items() if stage.steps != 0}

    @property
    def last_stage(self) -> str | None:
        """Name of the draft's last stage; None: the draft is not trained."""
        return next((name for name in reversed([*self.stages]) if name != "target-train"), None)

    @functools.cached_property
    def layout(self) -> Layout:
        """Placement over this machine's devices. Raises `ConfigError` if their number does not fit the mesh."""
        return make_layout(self.config.mesh)

    @functools.cached_property
    def abstract_layout(self) -> Layout:
        """Placement over a mesh of devices that need not be there."""
        return abstract_layout(self.config.mesh)

    def with_target(self, target: LoadedModel) -> Run:
        """The run of a target that is loaded now. A target trained from scratch may have fewer token ids than were
        planned."""
        if target.spec == self.target.spec:
            return self
        return dataclasses.replace(self, target=target, initial=abstract_draft(self.kind, self.config, target))

    def trained_by(self, name: str) -> Initial | None:
        """The model that the stage ``name`` trains, with shapes in place of weights."""
        if name != "target-train":
            return self.initial
        return Initial(TrainedDraftModel(self.target.spec), self.target.params)

    def first_draft(self, target: LoadedModel, rows: Rows) -> Initial:
        """The draft with its first weights. ``target``: the loaded target; ``rows``: the training text."""
        return self.kind.draft(self.config, target, rows)

    def loss(self, name: str, stage: config_lib.Stage) -> Loss:
        """Loss of the stage ``name``."""
        return registry.build(registry.LOSSES, stage.loss, f"{name}: loss")

    def source(self, name: str, stage: config_lib.Stage) -> Source:
        """Source of the data that the stage ``name`` trains on."""
        return registry.build(registry.DATA, "text" if stage.steps == 0 else stage.data, f"{name}: data")

    def seed(self, name: str) -> int:
        """Seed of the data of the draft's stage ``name``."""
        return self.config.seed if name == "draft-pretrain" else self.config.seed + 1

    def directory(self, name: str) -> Path:
        """Directory of a stage, or of an exported draft."""
        return Path(self.config.out) / name


def assemble(config: RunConfig) -> Run:
    """Assemble a run. Nothing is loaded but the sizes of its models. Raises `SpecjaxError` for a config that cannot
    run."""
    kind, target = draft_kind(config), abstract_target(config)
    return Run(config, target, kind, abstract_draft(kind, config, target))


def abstract_target(config: RunConfig) -> LoadedModel:
    """The target of a config, to load or to train, with shapes in place of weights."""
    settings = config.target
    if settings.path is None:
        model = target_model(config, settings.vocab_size)
        return LoadedModel(model, param_shapes(model))
    if settings.family is not None:
        families.register(settings.family)
    return abstract_model(settings.path, settings.dtype, settings.revision, settings.kv_cache)


def abstract_draft(kind: DraftKind, config: RunConfig, target: LoadedModel) -> Initial | None:
    """The draft in training, with shapes in place of weights: none are read or made. None if its kind gives no
    shapes."""
    drafter = kind.drafter(config, target)
    if drafter is None or drafter.config is None:
        return None
    return Initial(drafter, jax.eval_shape(lambda key: drafter.init_params(key, target), jax.random.key(0)))
