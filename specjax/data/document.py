"""A document: a text, perhaps in parts of which only some are to be predicted, or a chat that is not rendered yet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """Text that is tokenized by itself, as a prompt is when it is continued."""

    text: str
    is_prompt: bool


@dataclasses.dataclass(frozen=True)
class Document:
    """One document. ``source``: its origin, for figures by source. ``parts``: parts of ``text`` in order; if there are
    none, all of the text is to be predicted. ``messages``: a chat, whose ``text`` is its JSON until `corpus.rendered`;
    ``tools``: tools that its assistant may call; ``asks``: text that its template writes between a question and an
    answer to come, and leaves out once the answer is there (the opening of a thought). ``cut_from``: digest of the
    longer document that this is a piece of. ``cut``: True for a chat whose last answer breaks off."""

    name: str
    text: str
    source: str = ""
    parts: tuple[Part, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    asks: str = ""
    cut_from: str = ""
    cut: bool = False

    @property
    def digest(self) -> str:
        return _digest(self.text)

    @property
    def group(self) -> str:
        """Name of the documents that stay on one side of a split: the pieces of one document, or all answers to one
        prompt. The prompt of a chat is everything up to the first answer to a user."""
        if self.cut_from:
            return self.cut_from
        if self.messages:
            asked = next((i for i, message in enumerate(self.messages) if message["role"] == "user"), None)
            answers = (i for i, message in enumerate(self.messages) if message["role"] == "assistant")
            end = None if asked is None else next((i for i in answers if i > asked), None)
            if end is not None:
                return _digest(json.dumps([*self.messages[:end], self.tools], sort_keys=True))
        elif self.parts and self.parts[0].is_prompt:
            return _digest(self.parts[0].text)
        return self.digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
