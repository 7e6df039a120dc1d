"""A document: a text, perhaps in parts of which only some are to be predicted, or a chat still to be rendered."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Part:
    """Text that is tokenized by itself, as a prompt is when it is continued."""

    text: str
    is_prompt: bool


@dataclasses.dataclass(frozen=True)
class Document:
    """``source``: where it came from, for figures by source. ``parts``: of ``text`` in order; none: it is one part, all
    of it to be predicted. ``messages``: a chat, whose ``text`` is its JSON until `corpus.rendered`; ``tools``: that its
    assistant may call. ``cut_from``: the digest of the longer document that this is a piece of."""

    name: str
    text: str
    source: str = ""
    parts: tuple[Part, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    cut_from: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()
