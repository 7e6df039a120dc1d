"""Model families of Hugging Face. A module of this package that holds a `Family` adds it, and `register` adds one that
lives elsewhere: no other code changes."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from specjax.errors import ConfigError, ModelError
from specjax.models.families.base import Family
from specjax.models.families.settings import Settings

__all__ = ["FAMILIES", "Family", "Settings", "family_of", "register"]

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    family.model_type: family for module in _MODULES for family in vars(module).values() if isinstance(family, Family)
}


_GEMMA4 = (
    "its global layers have heads of another size and number than its local ones, and keys that are its values as well"
)
_DELTA = (
    "most of its layers keep one recurrent state a row instead of a slot a token, and a rejected token cannot be taken "
    "out of a state"
)
_LATENT = "its cache holds one compressed vector a token, from which keys and values are made"
MISSING = {
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma3n": "its layers share keys and values, and add embeddings of their own",
    "gpt_oss": "its softmax has a learned sink a head, and its experts are stored in MXFP4",
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
}
"""Model types that people ask for -> what they have that no family here has."""


def register(family: Family | str) -> Family:
    """Adds a family of yours, or the one at ``package.module:NAME``: `load_model` and `save_model` then know its
    ``model_type`` until the process ends. Adding the same family again changes nothing. Raises `ConfigError` if there
    is no such name, if it is no `Family`, or if another family has its ``model_type``."""
    found = _named(family) if isinstance(family, str) else family
    if not isinstance(found, Family):
        raise ConfigError(f"family: {family!r} is no Family; make one with specjax.models.families.Family(...)")
    known = FAMILIES.setdefault(found.model_type, found)
    if known != found:
        raise ConfigError(f"family: model_type={found.model_type!r} is {known.architecture} already; choose another")
    return known


def _named(where: str) -> object:
    module, _, name = where.partition(":")
    if not module or not name:
        raise ConfigError(f"family: {where!r} should be package.module:NAME, where NAME is a Family")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"family: {where!r}: no module {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from None
    except AttributeError:
        raise ConfigError(f"family: {where!r}: {module} has no {name}") from None


def family_of(model_type: object, where: object) -> Family:
    """Family of ``model_type``. Raises `ModelError` for an unknown one, with the nearest and all known families, or
    with what a family of it would need."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type is None:
        raise ModelError(f"{where}: model_type is missing; it says which family this is: {', '.join(sorted(FAMILIES))}")
    if model_type in MISSING:
        raise ModelError(
            f"{where}: model_type={model_type!r} is not implemented: {MISSING[str(model_type)]}; known are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    nearest = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    raise ModelError(
        f"{where}: model_type={model_type!r} is not implemented{hint}; known are {', '.join(sorted(FAMILIES))}; one of "
        "your own is added by specjax.models.families.register, in a config by target.family"
    )
