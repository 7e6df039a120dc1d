"""Chats as they are published, as messages of role and content: what a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from specjax.errors import DataError

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    "tool": "tool",
}
"""ShareGPT's names of the roles, which differ from set to set."""
Messages = tuple[dict[str, Any], ...]


def of_record(record: Mapping[str, Any], key: str) -> tuple[Messages, tuple[Any, ...]]:
    """Messages, and the tools that the assistant may call. ``key``: `messages`, `conversations` or `instruction`.

    Raises `DataError` with what is wrong, and what to write; its text goes on from the name of the record."""
    if key == "instruction":
        asked = [_text(record, name, "", "") for name in ("instruction", "input")]
        question = "\n\n".join(text for text in asked if text)
        answer = {"role": "assistant", "content": _text(record, "output", "", None)}
        messages = [{"role": "user", "content": question}, answer]
    else:
        messages = [*checked(record[key], key)]
    system = record.get("system")
    if isinstance(system, str) and system and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in messages):
        raise DataError(": no message of the role 'assistant', so there is nothing to predict; drop the record")
    return tuple(messages), tools_of(record)


def checked(messages: Any, key: str = "messages") -> Messages:
    """A list of messages, those of ``conversations`` under the names that templates know. Contents are strings."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        keys = "{'from': ..., 'value': ...}" if key == "conversations" else "{'role': ..., 'content': ...}"
        raise DataError(f": {key!r} is no list of mappings; give {keys} each")
    return tuple(_message(message, f", message {number}") for number, message in enumerate(messages, 1))


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
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
    return message


def _text(record: Mapping[str, Any], key: str, where: str, empty: str | None) -> str:
    """``empty``: what null means; None: nothing good."""
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
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: {key!r} holds half of a surrogate pair; drop it") from None
    return value


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
    """A list under the key `tools`, or its JSON."""
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
