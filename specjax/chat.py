"""A chat model used as its authors meant it: a prompt through the tokenizer's chat template, and the sampling settings
of generation_config.json, which are applied only where asked for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from specjax.errors import DataError, ModelError
from specjax.models.files import read_json

_WARPERS = ("temperature", "top_k", "top_p", "min_p")
_SETTINGS = (*_WARPERS, "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """``values``: arguments of `specjax.Decoder.generate`. ``source``: where they stand."""

    values: Mapping[str, Any]
    source: str


def encode(tokenizer: Any, message: str, system: str | None = None) -> list[int]:
    """Token ids of a user's message in a chat, up to where the model's answer begins. The template alone decides which
    special tokens there are. Raises `DataError` without a template, or if it does not take these messages."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        missing = "tokenizer" if tokenizer is None else "chat template"
        raise DataError(f"--chat: the target has no {missing}; use a chat model, or leave --chat out")
    messages = [{"role": "user", "content": message}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program: it raises what it likes, and Jinja more
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "leave --system out, or mend the template" if system is not None else "mend the template"
        raise DataError(f"--chat: the target's chat template fails ({reason}); {remedy}") from error


def generation_defaults(model: str | os.PathLike) -> GenerationDefaults:
    """What generation_config.json of a directory or hub id says of sampling. As for transformers, ``do_sample`` decides
    whether temperature and cuts count; unlike there, an absent top_k is none (not 50). Raises `ModelError` if the file
    cannot be read; without one there are no values."""
    from specjax.models import hf

    file = hf.resolve(model) / "generation_config.json"
    found = read_json(file) if file.exists() else {}
    for name in _SETTINGS:
        if isinstance(found.get(name), bool) or not isinstance(found.get(name), int | float | None):
            raise ModelError(f"{file}: {name}={found[name]!r} is no number; correct it, or leave --defaults out")
    names = _SETTINGS if found.get("do_sample") else ("repetition_penalty",)
    values = {name: found[name] for name in names if found.get(name) is not None}
    if found.get("do_sample"):
        values = {"temperature": 1.0, **values}
    return GenerationDefaults(values, str(file))
