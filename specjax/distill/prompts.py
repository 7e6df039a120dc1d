"""Prompts out of held-out documents, each with the source of its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from specjax.distill.corpus import Document

PLACES = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8)
"""Where in a document a prompt may begin, as a share of its tokens."""
_UNNAMED = "text"


@dataclasses.dataclass(frozen=True)
class HeldOutPrompt:
    tokens: list[int]
    source: str


def source_of(document: Document) -> str:
    """The data source that a document comes from."""
    return document.source or _UNNAMED


def by_source(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """The sources in alphabetical order, each with its documents."""
    found: dict[str, list[Document]] = {}
    for document in documents:
        found.setdefault(source_of(document), []).append(document)
    return dict(sorted(found.items()))


def cut_prompts(
    documents: Sequence[Document], tokenizer: Any, length: int, count: int, places: Sequence[float] = PLACES
) -> list[HeldOutPrompt]:
    """At most ``count`` prompts of ``length`` tokens: at the first of ``places`` in each document, in the order of
    their content hashes, then at the others."""
    ordered = sorted(documents, key=lambda d: d.digest)
    texts = [(tokenizer(d.text)["input_ids"], source_of(d)) for d in ordered]
    found = []
    for place in places:
        for tokens, source in texts:
            start = int(len(tokens) * place)
            if start + length <= len(tokens):
                found.append(HeldOutPrompt(tokens[start : start + length], source))
            if len(found) == count:
                return found
    return found
