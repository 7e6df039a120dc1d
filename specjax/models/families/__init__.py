"""Model families of Hugging Face. A module of this package that holds a `Family` adds it: nothing else is touched."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from specjax.errors import ModelError
from specjax.models.families.base import Family, parameters_of
from specjax.models.families.settings import Settings

__all__ = ["FAMILIES", "Family", "Settings", "family_of", "parameters_of"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    family.model_type: family for module in _MODULES for family in vars(module).values() if isinstance(family, Family)
}


def family_of(model_type: object, where: object) -> Family:
    """Raises `ModelError` with the known families, the nearest one first named, for any other ``model_type``."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type is None:
        raise ModelError(f"{where}: model_type is missing; it says which family this is: {', '.join(sorted(FAMILIES))}")
    nearest = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    raise ModelError(
        f"{where}: model_type={model_type!r} is not implemented{hint}; known are {', '.join(sorted(FAMILIES))}"
    )
