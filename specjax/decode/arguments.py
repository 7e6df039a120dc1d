"""Checks of a caller's arguments on entry: drafter, verifier, controller, block costs, token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import registry
from specjax.errors import ConfigError, DataError
from specjax.interfaces import Bound, BoundDrafter, Controller, Drafter, Target, Verifier
from specjax.models.files import named
from specjax.models.sharding import beside

_short = reprlib.Repr().repr
_HOW = (
    "give None, a name such as 'ngram', or an instance such as specjax.NGram(k=5) or "
    "specjax.DraftModel(specjax.load_model(PATH), k=5)"
)


def drafter_of(drafter: Any) -> Drafter | None:
    """The drafter that an instance, a name or a mapping ``{kind: ..., field: value}`` stands for. Raises `ConfigError`
    for anything else, with the known names and the nearest one, and for a field out of range."""
    if drafter is None:
        return None
    if isinstance(drafter, str):
        try:
            registry.resolve(registry.DRAFTERS, drafter, "drafter")
        except ConfigError as error:
            raise ConfigError(f"{error}; a model is given as specjax.DraftModel(specjax.load_model(PATH))") from None
    checked = _part(drafter, registry.DRAFTERS, Drafter, _HOW)
    if not isinstance(checked.k, int) or checked.k < 1:  # the registry checks only its own classes
        raise ConfigError(f"drafter {checked.kind!r}: k={checked.k!r}; a block needs at least one proposal")
    return checked


def verifier_of(verifier: Any) -> Verifier:
    """The verifier that an instance, a name or a mapping stands for; errors as in `drafter_of`."""
    known = ", ".join(sorted(registry.VERIFIERS))
    return _part(verifier, registry.VERIFIERS, Verifier, f"give a kind ({known}) or an instance")


def controller_of(controller: Any) -> Controller:
    """The controller that an instance, a name or a mapping stands for; errors as in `drafter_of`."""
    known = ", ".join(sorted(registry.CONTROLLERS))
    how = f"give a kind ({known}) or an instance, such as specjax.controllers.fixed.Fixed(k=3)"
    return _part(controller, registry.CONTROLLERS, Controller, how)


def _part(given: Any, table: Mapping[str, str], base: type, how: str) -> Any:
    """The part of the class ``base`` that an instance, a name or a mapping stands for. ``how``: remedy for anything
    else."""
    what = base.__name__.lower()
    if isinstance(given, (str, Mapping)):
        return registry.build(table, given, what)
    if not isinstance(given, base):
        is_class = isinstance(given, type) and issubclass(given, (Drafter, Verifier))
        instance = f"; {given.__name__} is a class, {given.__name__}() its instance" if is_class else ""
        raise ConfigError(f"{what}: {named(given)} is no {what}{instance}; {how}")
    return registry.checked(table, given, what)


def controller_for(controller: Any, drafter: BoundDrafter) -> Controller:
    """The controller for a bound drafter; if it proposes nothing, there is nothing to choose, and it is `fixed`."""
    found = controller_of(controller if drafter.max_depth else "fixed")
    return found.bind(drafter)


def bound(drafter: Drafter, target: Target) -> Bound:
    """The drafter bound to its target. Raises `ConfigError` if what it gives is no bound drafter."""
    spec, params = drafter.bind(target)
    if not isinstance(spec, BoundDrafter):
        raise ConfigError(
            f"drafter {drafter.kind!r}: its bind gives {named(spec)}, no specjax.interfaces.BoundDrafter; inherit it, "
            "or specjax.drafters.base.StatelessDrafter if it keeps nothing"
        )
    return Bound(spec, beside(params, target.mesh))


def weights_of(drafter: Drafter | None, target: Target) -> list[Any]:
    """Arrays that a bound drafter is made from: the target's layout and those of the drafter's own model. If a user
    replaces one of them, the drafter must be bound again."""
    own = [] if drafter is None else drafter.replaceable
    return [target.layout(), *own]


def token_ids(prompt: Any, where: str) -> list[int]:
    """Token ids as plain integers. Raises `DataError` for anything but a list or array of whole numbers; truncates
    nothing."""
    if hasattr(prompt, "__array__"):
        array = np.asarray(prompt)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise DataError(f"{where}: an array of {array.dtype}, shape {array.shape}; give token ids, integers of [T]")
        return array.tolist()
    if isinstance(prompt, Mapping) or hasattr(prompt, "keys"):
        raise DataError(f"{where}: a {type(prompt).__name__}, no list of token ids; give its ['input_ids']")
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise DataError(
            f"{where}: {_short(prompt)} is no text and no list of token ids; for one prompt of ids, give a list of one"
        )
    wrong = next((x for x in prompt if isinstance(x, bool) or not isinstance(x, (int, np.integer))), None)
    if wrong is not None or None in prompt:
        raise DataError(f"{where}: {_short(wrong)} is no token id; give whole numbers, as a tokenizer does")
    return [int(x) for x in prompt]
