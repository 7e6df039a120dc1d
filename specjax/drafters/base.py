"""Drafters without weights and state, and checks that all kinds share.

Dims: B rows, T tokens fed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Int

from specjax.errors import ConfigError
from specjax.interfaces import Bound, BoundDrafter, Drafter, Outcome, Output, Params, Target, Trainable


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


def refuse_longer(drafter: Drafter | Trainable, k: int, field: str) -> None:
    """Raises `ConfigError` if ``field`` of a config asks for a draft length ``k`` above the drafter's largest."""
    most = drafter.longest
    if most is not None and k > most:
        raise ConfigError(f"{field}: {k}, and this draft proposes at most {most}; lower it")


def own_arrays(model: Any) -> list[Any]:
    """Weights that a draft's model holds now: none of a path, or of a model that has freed them."""
    return (
        [] if isinstance(model, (str, os.PathLike)) else jax.tree.leaves(getattr(model, "__dict__", {}).get("params"))
    )


class StatelessDrafter(Drafter, BoundDrafter):
    """A drafter that reads committed tokens alone and has neither weights nor state. A subclass is a frozen dataclass
    that adds ``k`` and ``draft``; it is its own bound form."""

    def bind(self, target: Target) -> Bound:
        """The drafter itself, without parameters, for any target."""
        return Bound(self, {})

    def init(self, batch: int, num_slots: int) -> Any:
        """An empty state."""
        return {}

    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        """The unchanged state: every context already contains the prompts."""
        return state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The unchanged state: the drafter learns nothing from a block."""
        return state
