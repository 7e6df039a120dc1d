"""What a caller names or hands in, checked where it enters: drafter, verifier, token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import registry
from specjax.errors import ConfigError, DataError
from specjax.models.files import named
from specjax.models.sharding import beside
from specjax.types import Bound, Calibration, Controller, Drafter, Verifier

_short = reprlib.Repr().repr
_HOW = (
    "give None, a name such as 'ngram', or an instance such as specjax.NGram(k=5) or "
    "specjax.DraftModel(specjax.load_model(PATH), k=5)"
)


def drafter_of(drafter: Any) -> Drafter | None:
    """A drafter, or the one that a name or a mapping ``{kind: ..., field: value}`` asks for. Raises `ConfigError`, with
    the known names and the nearest one, for anything else, and for a field out of range."""
    if drafter is None:
        return None
    if isinstance(drafter, str):
        if drafter not in registry.DRAFTERS:
            try:
                registry.resolve(registry.DRAFTERS, drafter, "drafter")
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; a model is given as specjax.DraftModel(specjax.load_model(PATH))"
                ) from None
        drafter = {"kind": drafter}
    if isinstance(drafter, Mapping):
        return registry.build(registry.DRAFTERS, drafter, "drafter")
    if isinstance(drafter, type) or not all(hasattr(drafter, name) for name in ("kind", "k", "bind")):
        instance = f"; {drafter.__name__} is a class, {drafter.__name__}() its instance" if _is_class(drafter) else ""
        raise ConfigError(f"drafter: {named(drafter)} is no drafter{instance}; {_HOW}")
    checked = registry.checked(registry.DRAFTERS, drafter, "drafter")
    if not isinstance(checked.k, int) or checked.k < 1:  # of a class that the registry does not know
        raise ConfigError(f"drafter {checked.kind!r}: k={checked.k!r}; a block needs at least one proposal")
    return checked


def verifier_of(verifier: Any) -> Verifier:
    """A verifier, or the one that a name or a mapping asks for; errors as in `drafter_of`."""
    if isinstance(verifier, (str, Mapping)):
        return registry.build(registry.VERIFIERS, verifier, "verifier")
    if isinstance(verifier, type) or not (hasattr(verifier, "kind") and callable(verifier)):
        instance = (
            f"; {verifier.__name__} is a class, {verifier.__name__}() its instance" if _is_class(verifier) else ""
        )
        known = ", ".join(sorted(registry.VERIFIERS))
        raise ConfigError(f"verifier: {named(verifier)} is no verifier{instance}; give a kind ({known}) or an instance")
    return registry.checked(registry.VERIFIERS, verifier, "verifier")


def controller_of(controller: Any) -> Controller:
    """A controller, or the one that a name or a mapping asks for; errors as in `drafter_of`."""
    if isinstance(controller, (str, Mapping)):
        return registry.build(registry.CONTROLLERS, controller, "controller")
    if isinstance(controller, type) or not all(hasattr(controller, name) for name in ("kind", "choose", "adapt")):
        known = ", ".join(sorted(registry.CONTROLLERS))
        raise ConfigError(
            f"controller: {named(controller)} is no controller; give a kind ({known}) or an instance, such as "
            "specjax.controllers.fixed.Fixed(k=3)"
        )
    return registry.checked(registry.CONTROLLERS, controller, "controller")


def controller_for(controller: Any, depth: int) -> Controller:
    """`controller_of` for a drafter of that depth; one of depth 0 proposes nothing, and there is nothing to choose."""
    found = controller_of(controller)
    if depth == 0:
        return registry.build(registry.CONTROLLERS, "fixed", "controller")
    bind = getattr(found, "bind", None)
    return found if bind is None else bind(depth)


def bound(drafter: Drafter, target: Any) -> Bound:
    """The drafter that knows its target. Raises `ConfigError` where what it binds to cannot be run."""
    spec, params = drafter.bind(target)
    missing = [name for name in ("k", "init", "extend", "draft", "commit") if not hasattr(spec, name)]
    if missing:
        raise ConfigError(
            f"drafter {drafter.kind!r}: its bind gives {named(spec)} without {', '.join(missing)}; see "
            "docs/extending.md, and inherit specjax.drafters.base.StatelessDrafter if it keeps nothing"
        )
    return Bound(spec, beside(params, target.mesh))


def weights_of(drafter: Drafter | None, target: Any) -> list[Any]:
    """The target's layout and the arrays of the drafter's own model: a bound drafter was made of them, and a user may
    have replaced one since."""
    model = getattr(drafter, "model", None)
    own = getattr(model, "__dict__", {}).get("params")  # not of a model that made its layout of them and let them go
    return [target.layout(), *jax.tree.leaves(own)]


def check_calibration(calibration: Any, where: tuple[bool, int], depth: int) -> None:
    """Raises `ConfigError` for one that nothing can be weighed with."""
    name = f"decoder.calibrations[{where[0]}, {where[1]}]"
    if not isinstance(calibration, Calibration):
        raise ConfigError(f"{name}: a {type(calibration).__name__}; give a specjax.types.Calibration, or calibrate")
    seconds, acceptance = (np.asarray(x) for x in (calibration.seconds, calibration.acceptance))
    if seconds.shape != (depth + 1,) or acceptance.shape != (depth,):
        raise ConfigError(
            f"{name}: seconds of {list(seconds.shape)} and acceptance of {list(acceptance.shape)}, and the drafter "
            f"proposes up to {depth} tokens; give [{depth + 1}] and [{depth}]"
        )
    if not (np.all(seconds > 0) and np.isfinite(seconds).any()):  # infinitely much: never
        raise ConfigError(f"{name}: seconds={seconds.tolist()}; give what blocks take, above 0")
    if not (np.all(acceptance >= 0) and np.all(acceptance <= 1)):
        raise ConfigError(f"{name}: acceptance={acceptance.tolist()}; give chances from 0 to 1")


def token_ids(prompt: Any, where: str) -> list[int]:
    """Ids as plain numbers. Raises `DataError` for what is no list or array of whole numbers: nothing is truncated."""
    if hasattr(prompt, "dtype"):
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


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and hasattr(value, "kind")
