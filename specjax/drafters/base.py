"""Bases of drafters with weights and of drafters without, and checks that all kinds share.

Dims: B rows, T tokens fed.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from pydantic import Field

from specjax.errors import ConfigError
from specjax.interfaces import Bound, BoundDrafter, Drafter, NarrowHead, Outcome, Params, Target, Trainable


def stored_start(config: Any, of_training: frozenset[str]) -> str | None:
    """Directory or hub id of the draft that training continues from (`draft.init`); None: training begins anew.
    ``of_training``: the kind's fields that say how it is trained. No other field and no size may be set, since the
    stored draft has its own. Raises `ConfigError`."""
    init, kind = config.draft.init, config.draft.kind
    if init in (None, "target", "scratch", {"kind": "pruned"}, {"kind": "scratch"}):
        return None
    path = init.get("path") if isinstance(init, Mapping) and init.get("kind") == "checkpoint" else init
    if not isinstance(path, str):
        raise ConfigError(
            f"draft.init: {init!r}; a draft of kind {kind} begins as its `target`, from `scratch`, or as another "
            "draft, whose directory is named"
        )
    described, sizes = sorted(config.draft.settings.keys() - of_training), config.draft.architecture
    if sizes != type(sizes)():
        described.append("architecture")
    if described:
        raise ConfigError(f"draft.{described[0]}: the draft in {path} has its own; leave it out")
    return path


def heads_of(model: Any, params: Params) -> dict[str, Any]:
    """Fields of a `Prediction` whose logits are those of a model's head: ``head`` and, of a draft vocabulary,
    ``in_vocabulary`` and ``narrow``."""
    head, vocabulary = functools.partial(model.head, params), model.vocabulary
    if vocabulary is None:
        return {"head": head}
    narrow = NarrowHead(vocabulary.ids, functools.partial(model.logits_of_few, params))
    return {"head": head, "in_vocabulary": jnp.asarray(vocabulary.mask), "narrow": narrow}


def refuse_longer(drafter: Drafter | Trainable, k: int, field: str) -> None:
    """Raises `ConfigError` if ``field`` of a config asks for a draft length ``k`` above the drafter's largest."""
    most = drafter.longest
    if most is not None and k > most:
        raise ConfigError(f"{field}: {k}, and this draft proposes at most {most}; lower it")


@dataclasses.dataclass(frozen=True)
class ModelDrafter(Drafter):
    """A drafter with weights, the field ``model``."""

    model: Any
    """A loaded draft, or the directory of one where a kind says so."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Proposed tokens of a block, 1 to 64."""

    @property
    def is_path(self) -> bool:
        """True if ``model`` is a path, not a loaded draft."""
        return isinstance(self.model, (str, os.PathLike))

    @property
    def replaceable(self) -> list[Any]:
        """Weights that the draft holds now: none of a path, or of a draft that has freed them."""
        return [] if self.is_path else jax.tree.leaves(getattr(self.model, "__dict__", {}).get("params"))

    def bind(self, target: Target) -> Bound:
        """The draft bound to its target.

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            The bound form, which the engine runs, and the draft's weights laid out for decoding. Weights that are the
            target's are shared, not copied.

        Raises:
            ModelError: the two cannot be paired, or ``model`` is no draft of this kind or cannot be read.
        """
        return self._bound(self._read(target) if self.is_path else self.model, target)

    def _read(self, target: Target) -> Any:
        """The draft in the directory ``model``, in the dtype of ``target``."""
        return self.model

    @abc.abstractmethod
    def _bound(self, draft: Any, target: Target) -> Bound:
        """The result of `bind` for a loaded ``draft``."""


class StatelessDrafter(Drafter, BoundDrafter):
    """A drafter that reads committed tokens alone and has neither weights nor state. A subclass is a frozen dataclass
    that adds ``k`` and ``draft``; it is its own bound form."""

    def bind(self, target: Target) -> Bound:
        """The drafter itself, without parameters, for any target."""
        return Bound(self, {})

    def init(self, batch: int, num_slots: int) -> Any:
        """An empty state."""
        return {}

    def extend(self, params, state: Any, tokens, lengths, target_out, start=None) -> Any:
        """The unchanged state: every context already contains the prompts."""
        return state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The unchanged state: the drafter learns nothing from a block."""
        return state
