"""Prompts out of held-out documents, each with the source of its text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specjax.data.corpus import Document
from specjax.data.rows import encode_parts, opening_ids

PLACES = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8)
"""Where in a document a prompt may begin, as a share of its tokens."""
_UNNAMED = "text"
_log = logging.getLogger(__name__)


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
    """Cut at most ``count`` prompts: at the first of ``places`` in each document, in the order of their content hashes,
    then at the others. Of plain text ``length`` tokens; of a chat, or what has a prompt of its own, all up to where an
    answer begins. Where no more of those have at most ``length`` tokens, the last ``length`` of longer ones. What
    begins inside a text opens as a text does: its first tokens are replaced. A chat is opened by its template alone."""
    ordered = sorted(documents, key=lambda d: d.digest)
    texts = [*map(functools.partial(_tokenized, tokenizer), ordered)]
    found: dict[tuple[int, int, int], HeldOutPrompt] = {}
    for whole in (True, False):
        for place in places:
            for i, text in enumerate(texts):
                span = _span(len(text.tokens), text.answers, place, length, whole)
                if span is not None and len(found) < count:
                    found.setdefault((i, *span), HeldOutPrompt(text.prompt(*span), source_of(ordered[i])))
    cut = sum(begin > 0 for i, begin, _ in found if texts[i].answers)
    if cut:
        _log.warning(
            "%d of %d held-out prompts are the end of a longer chat; more prompt_tokens than %d take in all of it",
            cut,
            len(found),
            length,
        )
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class _Text:
    """``answers``: where they begin among ``tokens``. ``opening``: what such a text opens with."""

    tokens: list[int]
    answers: list[int]
    opening: list[int]

    def prompt(self, begin: int, end: int) -> list[int]:
        opened = len(self.opening) if begin and end - begin > len(self.opening) else 0
        return [*self.opening[:opened], *self.tokens[begin + opened : end]]


def _tokenized(tokenizer: Any, document: Document) -> _Text:
    opening = [] if document.messages else opening_ids(tokenizer, tokenizer.eos_token_id)
    if not any(part.is_prompt for part in document.parts):
        return _Text(tokenizer(document.text)["input_ids"], [], opening)
    parts = [part.tolist() for part in next(encode_parts(tokenizer, [document]))]
    ends = (len(opening) + np.cumsum([*map(len, parts)])).tolist()
    pairs = zip(ends, itertools.pairwise(document.parts), strict=False)
    answers = [end for end, (one, following) in pairs if one.is_prompt and not following.is_prompt]
    return _Text([*opening, *itertools.chain(*parts)], answers, opening)


def _span(size: int, answers: Sequence[int], place: float, length: int, whole: bool) -> tuple[int, int] | None:
    if not answers:
        start = int(size * place)
        return (start, start + length) if start + length <= size else None
    ends = [end for end in answers if (end <= length) == whole]
    if not ends:
        return None
    end = ends[int(len(ends) * place)]
    return max(0, end - length), end
