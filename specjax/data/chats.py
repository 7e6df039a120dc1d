"""Chats as they are published, read as messages of role and content, which a chat template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specjax.errors import DataError

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    "tool": "tool",
}
"""ShareGPT's names of the roles, which differ between data sets -> the names that templates know."""
_WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_mask")
"""Keys that say if a message is to be predicted: OpenAI's and ShareGPT's 0 and 1, others' true and false."""
_UNREAD = ("function_call", "images", "image", "audios", "audio", "videos", "video", "documents")
"""Keys that change the meaning of a message, and are not read."""
_BY_TEMPLATE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that only some templates write."""
Messages = tuple[dict[str, Any], ...]


def of_record(record: Mapping[str, Any], key: str) -> tuple[Messages, tuple[Any, ...]]:
    """Messages with an answer to predict, and the tools that the assistant may call; see `read`."""
    messages, tools = read(record, key)
    answers = [m for m in messages if m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls"))]
    if not answers:
        raise DataError(": no message of the role 'assistant', so there is nothing to predict; drop the record")
    if not any(map(counts, answers)):
        raise DataError(": every answer says that it is not to be predicted; drop the record")
    return messages, tools


def read(record: Mapping[str, Any], key: str) -> tuple[Messages, tuple[Any, ...]]:
    """Messages, and the tools that the assistant may call. ``key``: `messages`, `conversations`, `instruction` (with
    `history`, earlier questions and answers), or `prompt`, messages of which none is to be predicted, before those of
    `completion`.

    Raises `DataError` with the fault and the remedy; its text goes on from the name of the record."""
    if key == "instruction":
        messages = _instructed(record)
    elif key == "prompt":
        asked = [m | {"weight": 0} if m["role"] == "assistant" else m for m in checked(record["prompt"], "prompt")]
        messages = [*asked, *checked(record.get("completion") or [], "completion")]
    else:
        messages = [*checked(record[key], key)]
    system = _text(record, "system", "", "")
    if system and messages[:1] and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise DataError(": 'system' is not what the first message says, of the role 'system'; keep one of them")
    elif system:
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages), tools_of(record)


def _instructed(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of a record of Alpaca's shape."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(t, list | tuple) and len(t) == 2 for t in history):
        raise DataError(": 'history' is no list of pairs; give [question, answer] each")
    asked = [_text(record, name, "", "") for name in ("instruction", "input")]
    said = [*(text for turn in history for text in turn), "\n\n".join(text for text in asked if text)]
    if record.get("output") is not None:
        said.append(record["output"])
    messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
    return [*checked(messages, "history and instruction")]


def question(messages: Messages) -> Messages:
    """The messages that an answer is to follow: all up to the last one that is not the assistant's."""
    end = max((i for i, message in enumerate(messages, 1) if message["role"] != "assistant"), default=0)
    if not any(message["role"] == "user" for message in messages[:end]):
        raise DataError(": no message of the role 'user', so there is nothing to answer; drop the record")
    return messages[:end]


def counts(message: Mapping[str, Any]) -> bool:
    """True if this message of the assistant's is to be predicted."""
    return message.get("weight", 1) != 0


def for_template(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """The messages that a chat template gets. Raises `DataError` for a key that it would drop without a word."""
    for number, message in enumerate(messages, 1):
        dropped = next((key for key in _BY_TEMPLATE if message.get(key) and not _names(template, key)), None)
        if dropped is not None:
            raise DataError(f"it does not write {dropped!r} of message {number}; put it into 'content', or drop it")
    if tools and not _names(template, "tools"):
        raise DataError("it does not write 'tools'; put them into a message, or drop them")
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def checked(messages: Any, key: str = "messages") -> Messages:
    """A list of messages, in which `conversations` have the names that templates know. Contents are strings."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        keys = "{'from': ..., 'value': ...}" if key == "conversations" else "{'role': ..., 'content': ...}"
        raise DataError(f": {key!r} is no list of mappings; give {keys} each")
    return tuple(_message(message, f", message {number}") for number, message in enumerate(messages, 1))


def _names(template: str, key: str) -> bool:
    return re.search(rf"\b{key}\b", template) is not None


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    for one, other in (("role", "from"), ("content", "value")):
        if one in message and other in message and message[one] is not None:
            raise DataError(f"{where}: both {one!r} and {other!r}, which may differ; keep one of them")
    unread = next((name for name in _UNREAD if message.get(name)), None)
    if unread is not None:
        raise DataError(f"{where}: {unread!r} is not read; give text and 'tool_calls', or drop the record")
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise DataError(f"{where}: from {speaker!r} is none of {', '.join(_ROLES)}; write one of them")
        message |= {"role": _ROLES[speaker], "content": message.pop("value", None)}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{where}: no string under the key 'role'; give 'user', 'assistant', 'system' or 'tool'")
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, where) for call in calls] if isinstance(calls, list) else _refuse(where)
    else:
        message.pop("tool_calls", None)
    message["content"] = _text(message, "content", where, "" if calls else None)
    return _weighed(message, where)


def _weighed(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with a ``weight`` of 0 or 1, if it says under any name whether it is to be predicted."""
    found = {name: message[name] for name in _WEIGHTS if name in message}
    message = {name: value for name, value in message.items() if name not in found}
    if not found:
        return message
    if any(value not in (0, 1) for value in found.values()) or len({*found.values()}) > 1:
        raise DataError(f"{where}: {', '.join(f'{k}={v!r}' for k, v in found.items())}; give 0 or 1, once")
    name, value = next(iter(found.items()))
    if value and message["role"] != "assistant":
        raise DataError(f"{where}: {name}={value!r}, but only what the assistant says is predicted; drop the key")
    return message | {"weight": int(value)}


def _text(record: Mapping[str, Any], key: str, where: str, empty: str | None) -> str:
    """The text under ``key``, a string or a list of parts. ``empty``: text that null means; None: null is refused."""
    value = record.get(key)
    if isinstance(value, list):
        other = next((part for part in value if not _is_text(part)), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, Mapping) else type(other).__name__
            raise DataError(f"{where}: {key!r} has a part of the type {kind!r}, and only text is read; drop the record")
        value = "".join(part["text"] for part in value)
    value = empty if value is None else value
    if not isinstance(value, str):
        raise DataError(f"{where}: no string under the key {key!r} (it is {record.get(key)!r}); give text")
    return encodable(value, f"{where}: {key!r}")


def encodable(text: str, where: str) -> str:
    """``text``. Raises `DataError` for one that UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair; drop it") from None
    return text


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: templates write them as JSON, APIs give them as JSON already."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        _refuse(where)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _refuse(where: str) -> NoReturn:
    wanted = "[{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}]"
    raise DataError(f"{where}: 'tool_calls' cannot be read; give {wanted}")


def tools_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tools of a record: a list under the key `tools`, or its JSON."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            raise DataError(": 'tools' is no JSON; give a list of JSON schemas") from None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(": 'tools' is no list of mappings; give a list of JSON schemas")
    return tuple(tools)
