"""A chat model used as its authors meant it: messages through the tokenizer's chat template, and the sampling settings
of generation_config.json, which are applied only where asked for."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
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
        return render(tokenizer, messages, tokenize=True)
    except Exception as error:  # a template is a program: it raises what it likes, and Jinja more
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "leave --system out, or mend the template" if system is not None else "mend the template"
        raise DataError(f"--chat: the target's chat template fails ({reason}); {remedy}") from error


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    *,
    tokenize: bool,
    asks: bool = True,
    today: datetime.date | None = None,
) -> Any:
    """Messages as the chat template writes them: token ids, or text. ``asks``: up to where the next answer begins.
    ``today``: what a template that prints the date is told (`strftime_now`); None: the real one. A template raises what
    it likes."""
    tools = list(tools) if tools else None
    options: dict[str, Any] = {"tools": tools, "tokenize": tokenize, "add_generation_prompt": asks}
    if today is not None:
        options["chat_template"] = _dated(source(tokenizer, tools), today)
    return tokenizer.apply_chat_template(list(messages), return_dict=False, **options)


def source(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """The template's own text, of several that for tools if there are any."""
    return tokenizer.get_chat_template(None, list(tools) if tools else None)


def _dated(template: str, today: datetime.date) -> str:
    """The template with a `strftime_now` of its own: functions cannot be handed to it. (`+` keeps what follows.)"""
    midnight = datetime.datetime.combine(today, datetime.time())
    values = {f"%{code}": midnight.strftime(f"%{code}") for code in "aAbBcdfHIjmMpSUwWxXyY"}
    values |= {"%-d": str(today.day), "%e": f"{today.day:2}", "%-m": str(today.month), "%F": today.isoformat()}
    replaced = "".join(f" | replace({json.dumps(code)}, {json.dumps(value)})" for code, value in values.items())
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro +%}}{template}"


def prints_the_date(tokenizer: Any) -> bool:
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


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
