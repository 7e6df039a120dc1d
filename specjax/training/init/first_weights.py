"""The draft before any training: with random weights, from a model directory, or made from the target (`draft.init`).

Each kind is a frozen dataclass that is its own configuration, registered in `specjax.registry.INITS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key
from pydantic import AfterValidator, Field

from specjax import config as config_lib
from specjax import registry
from specjax.config import RunConfig
from specjax.data.rows import Rows, spread
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel, with_its_vocabulary
from specjax.drafters.features import EMBEDDING_AND_HEAD
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import DraftKind, Init, Initial, Params, Target, Trainable
from specjax.models.config import ModelConfig
from specjax.models.families.settings import same_or_each
from specjax.models.files import draft_of
from specjax.models.hf import LoadedModel, abstract_model, check_saveable, load_model, refuse_quantised
from specjax.models.kernels import Kernel
from specjax.models.transformer import Model
from specjax.models.vocabulary import check_same_vocabulary
from specjax.training.init.draft_vocabulary import choosing_ids, first_ids
from specjax.training.init.prune import check_cuttable, prune
from specjax.training.init.shape import resized, sizes_of

_CALIBRATION_TOKENS = 8192
_MIN_POSITIONS = 1024


def draft_kind(config: RunConfig) -> DraftKind:
    """The section `draft` of the config, by its kind."""
    return registry.build(registry.DRAFTS, {"kind": config.draft.kind, **config.draft.settings}, "draft")


def initial_draft(config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
    """The draft that ``config.draft`` asks for, with its first weights. ``rows``: the training text."""
    return draft_kind(config).draft(config, target, rows)


@dataclasses.dataclass(frozen=True)
class SeparateModel(DraftKind):
    """A separate draft model with the target's vocabulary. `draft.init` names its first weights."""

    kind: Literal["draft_model"] = "draft_model"
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Number of ids that it proposes, the most frequent of the training text: a smaller head costs less. None: all, or
    those of the draft that `draft.init` names."""

    def draft(self, config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
        init: Init = self._init(config)
        drafter, params = init.draft(config, target, rows)
        return Initial(choosing_ids(self._narrow(drafter, target), rows), params)

    def drafter(self, config: RunConfig, target: LoadedModel) -> Trainable | None:
        """The draft in training; None if the source of its first weights does not say."""
        return self._narrow(self._init(config).drafter(config, target), target)

    def _narrow(self, drafter: Any, target: LoadedModel) -> Any:
        """``drafter`` with a draft vocabulary of the size that is asked for; its ids are chosen later."""
        ids = first_ids(self.draft_vocab_size, target.config)
        return drafter if ids is None else drafter.with_vocabulary(ids)

    def _init(self, config: RunConfig) -> Any:
        spec = config.draft.init
        if spec is None:
            spec = "scratch"
        if isinstance(spec, str):
            kind = config_lib.INIT_WORDS.get(spec)
            spec = {"kind": "checkpoint", "path": spec} if kind is None else {"kind": kind}
        return registry.build(registry.INITS, spec, "draft.init")

    def load(self, directory: str | os.PathLike, target: LoadedModel, k: int, check_finite: bool = True) -> DraftModel:
        return DraftModel.load(directory, target, k, check_finite)


@dataclasses.dataclass(frozen=True)
class Scratch(Init):
    """Random weights of the shape `draft.architecture`, in a model of the target's family."""

    kind: Literal["scratch"] = "scratch"

    def draft(self, config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
        drafter = self.drafter(config, target)
        _, key = jax.random.split(jax.random.key(config.seed))
        return Initial(drafter, drafter.init_params(key, target))

    def drafter(self, config: RunConfig, target: LoadedModel) -> TrainedDraftModel:
        shape, family = resized(target, config.draft.architecture)
        return TrainedDraftModel(Model(shape), family)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Init):
    """The weights of a model that exists. ``path``: a Hugging Face directory, hub id or run directory (its draft). Its
    shape replaces `draft.architecture`."""

    path: Annotated[str, Field(min_length=1)]
    kind: Literal["checkpoint"] = "checkpoint"

    def draft(self, config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
        path = draft_of(self.path)
        # For training, whatever the target computes in.
        draft = with_its_vocabulary(load_model(path, "float32"), path)
        check_same_vocabulary(target, draft)
        check_length(config, draft.config, "draft")
        return Initial(TrainedDraftModel(draft.spec, draft.family), draft.params)

    def drafter(self, config: RunConfig, target: LoadedModel) -> TrainedDraftModel:
        path = draft_of(self.path)
        draft = with_its_vocabulary(abstract_model(path, "float32"), path)
        return TrainedDraftModel(draft.spec, draft.family)


@dataclasses.dataclass(frozen=True)
class Pruned(Init):
    """The principal part of the target, cut to `draft.architecture` (`specjax.training.init.prune`)."""

    kind: Literal["pruned"] = "pruned"

    def draft(self, config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
        drafter = self.drafter(config, target)
        return Initial(drafter, prune(target, drafter.model.config, calibration(rows)))

    def drafter(self, config: RunConfig, target: LoadedModel) -> TrainedDraftModel:
        check_cuttable(target.config)
        shape, family = resized(target, config.draft.architecture, cut=True)
        return TrainedDraftModel(Model(shape), family)


def calibration(rows: Rows) -> np.ndarray:
    """Tokens ``[B, T]`` of the training text that show which parts of a target matter."""
    return np.asarray(spread(rows, _CALIBRATION_TOKENS).tokens)


def _ascending(keep: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in itertools.pairwise(keep)):
        raise ValueError(f"{list(keep)} is not ascending; give each layer once, in the target's order")
    return keep


@dataclasses.dataclass(frozen=True)
class Layers(Init):
    """Some of the target's layers, whole, between its embedding, final norm and head. ``keep``: their numbers, from 0.
    ``share``: True if embedding and head stay the target's own: frozen, in memory once, and written out with the draft.
    """

    keep: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_ascending)]
    share: bool = False
    kind: Literal["layers"] = "layers"

    def draft(self, config: RunConfig, target: LoadedModel, rows: Rows) -> Initial:
        drafter = self.drafter(config, target)
        # Trained in float32, whatever the target computes in.
        refuse_quantised(target.params, "draft.init: layers")
        kept = {new: target.params["layers"][old] for new, old in enumerate(self.keep)}
        own = {name: value for name, value in target.params.items() if not (self.share and name in EMBEDDING_AND_HEAD)}
        return Initial(drafter, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {**own, "layers": kept}))

    def drafter(self, config: RunConfig, target: LoadedModel) -> TrainedDraftModel:
        full = target.config
        if self.keep[-1] >= full.num_layers:
            raise ConfigError(
                f"draft.init.keep: the target has no layer {self.keep[-1]}, its {full.num_layers} layers are "
                f"0 .. {full.num_layers - 1}; keep some of those"
            )
        check_length(config, full, "draft")
        kinds = same_or_each([full.layer(i) for i in self.keep])
        model = Model(dataclasses.replace(full, num_layers=len(self.keep), layers=kinds))
        try:
            check_saveable(target.family, model.config)
        except ModelError as error:
            raise ConfigError(
                f"draft.init.keep: keep other layers than {list(self.keep)}; with these, {error}"
            ) from None
        if not self.share:
            return TrainedDraftModel(model, target.family)
        return SharedEnds(model, target.family, tuple(name for name in EMBEDDING_AND_HEAD if name in target.params))


@dataclasses.dataclass(frozen=True)
class SharedEnds(TrainedDraftModel):
    """A draft model whose parameters ``shared`` are the target's: not its own, not trained, not in memory twice."""

    shared: tuple[str, ...] = EMBEDDING_AND_HEAD

    @property
    def shares_target(self) -> bool:
        return True

    def complete(self, params: Params, target_params: Params) -> Params:
        dtype = params["norm"]["scale"].dtype
        shared = {name: target_params[name] for name in self.shared}

        def cast(x: Any) -> Any:
            return x if isinstance(x, Kernel) else x.astype(dtype)  # a kernel multiplies in its input's dtype

        return {**params, **jax.tree.map(cast, shared, is_leaf=lambda x: isinstance(x, Kernel))}

    def init_params(self, key: Key[jax.Array, ""], target: Target | None) -> Params:
        params = super().init_params(key, target)
        return {name: value for name, value in params.items() if name not in self.shared}


def target_model(config: RunConfig, vocab_size: int) -> Model:
    """The target that a run trains from scratch."""
    assert config.target.architecture is not None  # the config holds a path or an architecture
    return Model(model_config(config.target.architecture, vocab_size, max(_MIN_POSITIONS, config.data.seq_len)))


def target_stage(config: RunConfig) -> config_lib.Stage:
    """The stage that trains the target from scratch."""
    settings = config.target
    optional: dict[str, Any] = {"eval_every": max(1, settings.steps // 4), "save_every": 100}
    optional["optimizer"] = settings.optimizer
    return config_lib.Stage("cross_entropy", settings.steps, batch_size=settings.batch_size, **optional)


def model_config(shape: config_lib.Architecture, vocab_size: int, max_positions: int) -> ModelConfig:
    """The configuration of a Llama of ``shape``."""
    return ModelConfig(vocab_size, **sizes_of(shape.filled()), max_positions=max_positions)


def check_length(config: RunConfig, model: ModelConfig, name: str) -> None:
    if config.data.seq_len > model.max_positions:
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} exceeds the {name}'s {model.max_positions} positions; lower it"
        )
