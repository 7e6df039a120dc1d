"""Drafters as they are unless they say otherwise: one without state, and one that is trained.

Dims: B rows, T tokens fed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Int, Key

from specjax.errors import ConfigError
from specjax.types import (
    Batch,
    Bound,
    Context,
    Draft,
    Drafter,
    Outcome,
    Output,
    Params,
    Prediction,
    TargetView,
    Trainable,
    TrainingForm,
)


def stored_start(config: Any, of_training: frozenset[str]) -> str | None:
    """The directory or hub id of the draft that a kind's training goes on with, by `draft.init`; None: it begins new.
    ``of_training``: the kind's fields that say how it is trained; no other may be set, and no size, since the draft has
    its own. Raises `ConfigError`."""
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


def longest(drafter: Any) -> int | None:
    """The longest block of a drafter, loaded or in training; None: any."""
    return getattr(getattr(drafter, "model", None), "most", None)


def refuse_longer(drafter: Any, k: int, field: str) -> None:
    """Raises `ConfigError` where ``field`` of a config asks for longer blocks than a drafter proposes."""
    most = longest(drafter)
    if most is not None and k > most:
        raise ConfigError(f"{field}: {k}, and this draft proposes at most {most}; lower it")


class StatelessDrafter:
    """A drafter that reads committed tokens alone, has no weights and keeps nothing. A frozen dataclass with ``k`` and
    ``draft`` is all that is left to write; it is its own bound form."""

    k: int

    def bind(self, target: Any) -> Bound:
        """The drafter itself, without parameters, whatever the target."""
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
        """The state as it is: the prompts are in every context."""
        return state

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The proposed block, and the state; for a subclass to write. Raises `NotImplementedError` until it does."""
        raise NotImplementedError

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The state as it is: nothing is learnt from a block."""
        return state


class TrainedDrafter:
    """A drafter in training, all that a job asks of it: a frozen dataclass that is a `Trainable` (``init_params``,
    ``predictions``) and says how its weights are decoded with and saved. ``params`` are all that it computes with, also
    those that are the target's (`specjax.types.Sharing`).
    """

    serving: ClassVar[str] = "`specjax.load_drafter` reads it."
    """Who decodes with what `save` wrote, for its card."""
    library: ClassVar[str] = "specjax"
    """Which loads it, for hubs that read cards."""

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        """Random weights, for a draft of ``target``."""
        raise NotImplementedError(f"{type(self).__name__} has no first weights: define init_params")

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """See `Trainable`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it predicts: define predictions")

    def at_depths(self, depths: int) -> Trainable | None:
        """The same with a prediction for each of the first ``depths`` places of a block, or with one that holds at all
        of them; None: it has none for so many."""
        return None

    def in_training(self, form: TrainingForm) -> Trainable:
        """The same, as a stage runs it. Raises `ConfigError` where it cannot be run so."""
        return _only_plain(self, form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        """The place of the parameter at ``path`` on a mesh with the axes data, fsdp and tensor; None: whole on every
        device. Asked for optimizer state of the same path as well."""
        return None

    def passes(self, length: int) -> int:
        """Passes over whole rows of ``length`` tokens that its training makes, as memory is planned for."""
        return getattr(self, "depths", 1)

    def parts(self, length: int) -> int:
        """Parts in which the predictions of rows of ``length`` tokens are made where no step draws them, so that no
        more exists at a time than in training: `Batch.number` says which one."""
        return 1

    def to_drafter(self, params: Params, target: Any, k: int) -> Drafter:
        """The drafter that decodes with these weights, ``k`` tokens a block."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it decodes: define to_drafter")

    def save(self, params: Params, target: Any, directory: Path, *, name: str = "draft", card: str | None = None):
        """Write a directory with everything that decoding needs, in place of what is there; ``card``: its README.md."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is saved: define save")


def at_depths(drafter: Any, depths: int) -> Any:
    """See `TrainedDrafter.at_depths`; None for one without."""
    change = getattr(drafter, "at_depths", None)
    return None if change is None else change(depths)


def passes_of(drafter: Any, length: int) -> int:
    """See `TrainedDrafter.passes`; 1 for one without."""
    count = getattr(drafter, "passes", None)
    return 1 if count is None else count(length)


def by_part(drafter: Any, batch: Batch, measure: Callable[[Batch], Any]) -> Any:
    """The sum of what ``measure`` makes of each part of a batch, one after the other, see `TrainedDrafter.parts`.

    Args:
        drafter: whose predictions ``measure`` asks for.
        batch: rows that no step draws.
        measure: gives a pytree of arrays, of a batch that says which part is meant; of a single part it does not.

    Returns:
        Such a pytree.
    """
    parts, shape = getattr(drafter, "parts", lambda length: 1)(batch.tokens.shape[1]), batch.tokens.shape[:1]
    if parts == 1:
        return measure(batch)

    def of_part(number: Int[Array, ""]) -> Any:
        return measure(dataclasses.replace(batch, number=jnp.broadcast_to(number, shape)))

    found = jax.lax.map(of_part, jnp.arange(parts, dtype=jnp.int32))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), found)


def in_training(drafter: Any, form: TrainingForm) -> Any:
    """``drafter`` as a stage runs it, see `TrainedDrafter.in_training`; one without that is run as it is."""
    change = getattr(drafter, "in_training", None)
    return _only_plain(drafter, form) if change is None else change(form)


def _only_plain(drafter: Any, form: TrainingForm) -> Any:
    if form.remat or form.scan_layers:
        raise ConfigError(f"remat, scan_layers: {type(drafter).__name__} has no transformer of its own; set both false")
    return drafter
