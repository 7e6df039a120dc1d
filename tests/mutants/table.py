"""Errors planted in the shipped code, each with the test of the suite that finds it. A patch keeps all of the real
function but its one mistake, as far as that can be done from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``killer``: a test function, called with ``parameters`` (or fixtures), which the suite runs it with too, and with
    ``tmp_path`` and ``monkeypatch`` if it takes them.
    ``lossless``: the output keeps its distribution, so that only a test of the acceptance can find it."""

    name: str
    part: str
    plant: Callable[[Patch], None]
    killer: Callable[..., None]
    parameters: dict[str, Any]
    lossless: bool

    @property
    def killed_by(self) -> str:
        named = (value for value in self.parameters.values() if not isinstance(value, tuple))
        values = "-".join(str(getattr(value, "kind", value)) for value in named)
        return self.killer.__name__ + (f"[{values}]" if values else "")


MUTANTS: list[Mutant] = []


def mutant(part: str, killer: Callable[..., None], *, lossless: bool = False, **parameters: Any):
    """Enters the decorated patch into the table, under the name of its function."""

    def enter(plant: Callable[[Patch], None]):
        MUTANTS.append(Mutant(plant.__name__.replace("_", " "), part, plant, killer, parameters, lossless))
        return plant

    return enter


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def replaced(context, **fields):
    """A context with other sampling parameters."""
    return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **fields))
