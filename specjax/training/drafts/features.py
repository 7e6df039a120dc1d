"""Common base of the sections `draft` of drafts that read hidden states, and their first weights."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax import formats
from specjax.config import RunConfig
from specjax.data.rows import Rows as TextRows
from specjax.drafters.base import stored_start
from specjax.drafters.features import (
    EMBEDDING_AND_HEAD,
    FeatureDrafter,
    LoadedDraft,
    check_readable,
    end_of,
    layers_like,
    published_streams,
)
from specjax.errors import ConfigError
from specjax.interfaces import DraftKind, Initial, Params, Target, TargetInfo
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.files import draft_of
from specjax.models.training import in_float32
from specjax.training.init.draft_vocabulary import choosing_ids


class FeatureDraft(DraftKind):
    """Base of the sections `draft`. A subclass is a dataclass with ``kind``."""

    kind: str
    keeps_hidden: ClassVar[bool] = True
    of_training: ClassVar[Any] = frozenset()

    def described(self, config: RunConfig, target: Target) -> Any:
        """The `TrainedFeatureDraft` of these fields."""
        raise NotImplementedError

    def drafter(self, config: RunConfig, target: Target) -> Any:
        """The `TrainedFeatureDraft` of these fields, or of the directory that `draft.init` names."""
        described, first = self.described(config, target), self._stored(config, target)
        return described if first is None else self._as(described, first)

    def first(self, drafter: Any, params: Params, target: Target, rows: TextRows) -> Params:
        """``params`` with first weights made from the target; ``rows``: the training text."""
        return params

    def draft(self, config: RunConfig, target: Target, rows: TextRows) -> Initial:
        stored, drafter, init = self._stored(config, target), self.described(config, target), config.draft.init
        if stored is not None:
            hf.refuse_quantised(target.params, f"draft.init: {init}")
            own = _without_the_targets(stored, target)
            return Initial(self._as(drafter, own), own.params)
        drafter = choosing_ids(drafter, rows)
        _, key = jax.random.split(jax.random.key(config.seed))
        params = drafter.init_params(key, target)
        if init not in ("scratch", {"kind": "scratch"}):
            hf.refuse_quantised(target.params, "draft.init: target")
            params = self.first(drafter, params, target, rows)
        return Initial(drafter, params)

    def _stored(self, config: RunConfig, target: Target) -> LoadedDraft | None:
        """The stored draft whose training is to go on, in float32; None if a new one is trained."""
        path = stored_start(config, self.of_training.union(formats.MAY_BE_UNSAID.get(self.kind, ())))
        if path is None:
            return None
        drafter = self.load(draft_of(path), TargetInfo(target.config, "float32"), 1)
        check_readable(self.kind, drafter.model.spec, target.config)
        return drafter.model

    def _as(self, described: Any, draft: LoadedDraft) -> Any:
        """The stored ``draft`` in training, trained as ``described`` says."""
        wanted = draft.spec.shapes
        shared = tuple(name for name in EMBEDDING_AND_HEAD if name in wanted and name not in draft.params)
        return dataclasses.replace(described, model=draft.spec, shared=shared)

    def load(
        self, directory: str | os.PathLike, target: TargetInfo, k: int, check_finite: bool = True
    ) -> FeatureDrafter:
        found = formats.load(directory, self.kind, target, check_finite, asked=formats.asked_of(self))
        return FeatureDrafter(found, k, self.kind)


def _without_the_targets(draft: LoadedDraft, target: Target) -> LoadedDraft:
    """``draft`` without weights that equal the target's, number by number. Those are frozen, stored or not."""

    def same(name: str) -> bool:
        of_target = end_of(draft.spec, target.params, name, jnp.float32)
        found = jax.tree.leaves(draft.params[name]), jax.tree.leaves(of_target)
        return all(x.shape == y.shape and bool(jnp.array_equal(x, y)) for x, y in zip(*found, strict=True))

    of_target = [name for name in EMBEDDING_AND_HEAD if name in draft.params and same(name)]
    return dataclasses.replace(draft, params={n: x for n, x in draft.params.items() if n not in of_target})


def streams(reads: tuple[int, ...] | None, config: RunConfig, full: ModelConfig) -> tuple[int, ...]:
    """Numbers of the target's streams that a config names; None: the published default, 2, L / 2 and L - 3 of L layers,
    but a third, two thirds and all of the layers of a shallow target. Raises `ConfigError`."""
    refuse_architecture(config)
    count = full.num_layers
    if reads is None:
        published = published_streams(count)
        thirds = (-(-count // 3), -(-2 * count // 3), count)
        reads = tuple(sorted(set(published if count >= SHALLOW else thirds)))
    if list(reads) != sorted(set(reads)) or not reads or reads[-1] > count:
        raise ConfigError(f"draft.reads: {list(reads)}; name some of the target's streams 0 .. {count}, ascending")
    return reads


def refuse_architecture(config: RunConfig) -> None:
    """Raises `ConfigError` if the config sets sizes: they are the target's."""
    if config.draft.architecture != type(config.draft.architecture)():
        raise ConfigError(
            f"draft.architecture: a draft of kind {config.draft.kind} has its target's sizes; leave it out"
        )


def mask_token(asked: int | None, full: ModelConfig) -> int:
    """The id ``asked`` for, which must be one of the target's; None: the last. Raises `ConfigError`."""
    found = full.vocab_size - 1 if asked is None else asked
    if found >= full.vocab_size:
        raise ConfigError(f"draft.mask_token: {found}, and the target has ids 0 .. {full.vocab_size - 1}")
    return found


SHALLOW = 12
"""Number of a target's layers below which the published streams leave out what its last half computes."""


def last_layer(target: Target) -> Params | None:
    """The target's last layer in float32, or None if it does not have the form of `layers_like`."""
    full = target.config
    kinds = dict.fromkeys(("num_layers", "layers", "tie_embeddings", "embedding_multiplier"))
    like = layers_like(full)
    if dataclasses.replace(full, **{name: getattr(like, name) for name in kinds}) != like:
        return None
    if full.layer(full.num_layers - 1).rope != like.layer(0).rope:
        return None
    return in_float32(target.params["layers"][full.num_layers - 1])
