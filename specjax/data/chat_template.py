"""A chat model used as its authors meant it: messages go through the tokenizer's chat template, and the sampling
settings of generation_config.json apply only if asked for."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import DataError, ModelError
from specjax.models.checkpoint import checkpoint_of

_WARPERS = ("temperature", "top_k", "top_p", "min_p")
_NUMBERS = (*_WARPERS, "repetition_penalty", "max_new_tokens", "min_new_tokens")
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "repetition_penalty"), 1),
    **dict.fromkeys(("top_p", "encoder_repetition_penalty", "guidance_scale", "temperature", "length_penalty"), 1),
    "max_length": 20,
    "top_k": 50,
}
"""The value at which a setting changes nothing, if that is not 0, false, null or empty: transformers' default."""
_WITHOUT_EFFECT = re.compile(
    "do_sample|early_stopping|(bos|eos|pad|decoder_start)_token_id|transformers_version|_from_model_config|_?use_.*|cache_.*|max_cache_len|"
    "output_.*|return_.*|.*compile.*|low_memory|is_assistant|num_assistant_.*|assistant_.*|prefill_chunk_size|"
    "continuous_batching_config|prompt_lookup_num_tokens|max_matching_ngram_size|target_lookbehind|speculation_type|"
    "renormalize_logits|remove_invalid_values|trust_remote_code|chat_format"
)
"""Names of settings that change how a text is generated, and not the text."""


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings of a model's file. ``values``: arguments of `specjax.Decoder.generate`. ``source``: the file.
    ``unapplied``: other settings of the file that would change the text, and that specjax does not have."""

    values: Mapping[str, Any]
    source: str
    unapplied: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    except Exception as error:  # a template is a program: it may raise anything, and so may Jinja
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
    """Messages as the chat template writes them: token ids, or text. ``asks``: True to go up to where the next answer
    begins. ``today``: date for a template that prints one (`strftime_now`); None: the real date. A template may raise
    anything."""
    tools = list(tools) if tools else None
    options: dict[str, Any] = {"tools": tools, "tokenize": tokenize, "add_generation_prompt": asks}
    if today is not None:
        options["chat_template"] = _dated(source(tokenizer, tools), today)
    return tokenizer.apply_chat_template(list(messages), return_dict=False, **options)


def source(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """The template's own text; of several templates, the one for tools if there are any."""
    return tokenizer.get_chat_template(None, list(tools) if tools else None)


def _dated(template: str, today: datetime.date) -> str:
    """The template with its own `strftime_now`: no function can be handed to it. (`+` keeps a line end behind it.)"""
    midnight = datetime.datetime.combine(today, datetime.time())
    values = {f"%{code}": midnight.strftime(f"%{code}") for code in "aAbBcdfHIjmMpSUwWxXyY"}
    values |= {"%-d": str(today.day), "%e": f"{today.day:2}", "%-m": str(today.month), "%F": today.isoformat()}
    replaced = "".join(f" | replace({json.dumps(code)}, {json.dumps(value)})" for code, value in values.items())
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro +%}}{template}"


def prints_the_date(tokenizer: Any) -> bool:
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def generation_defaults(model: str | os.PathLike) -> GenerationDefaults:
    """Sampling settings in generation_config.json of a directory or hub id. As in transformers, ``do_sample`` decides
    whether temperature and cuts count; unlike there, an absent top_k is none (not 50). Raises `ModelError` if the file
    cannot be read; without a file there are no values."""
    checkpoint = checkpoint_of(model)
    file, found = checkpoint.generation_file, checkpoint.generation
    for name in _NUMBERS:
        if isinstance(found.get(name), bool) or not isinstance(found.get(name), int | float | None):
            raise ModelError(f"{file}: {name}={found[name]!r} is no number; correct it, or leave --defaults out")
    names = [name for name in _NUMBERS if found.get("do_sample") or name not in _WARPERS]
    values = {name: found[name] for name in names if found.get(name) is not None}
    if found.get("do_sample"):
        values = {"temperature": 1.0, **values}
    if found.get("stop_strings"):
        values["stop_strings"] = found["stop_strings"]
    # Tokens that must never come. Banned sequences of several tokens are not applied.
    banned = found.get("bad_words_ids") or []
    single = isinstance(banned, list) and all(isinstance(ids, list) and len(ids) == 1 for ids in banned)
    ids = [*(found.get("suppress_tokens") or []), *(ids[0] for ids in banned if single)]
    if ids:
        values["banned_tokens"] = ids
    applied = {*values, "suppress_tokens", *(["bad_words_ids"] if single else [])}
    others = {name: value for name, value in found.items() if name not in applied}
    unapplied = {name: value for name, value in others.items() if value and value != _NEUTRAL.get(name)}
    unapplied = {name: value for name, value in unapplied.items() if not _WITHOUT_EFFECT.fullmatch(name)}
    return GenerationDefaults(values, str(file), unapplied)
