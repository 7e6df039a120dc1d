"""Prompts cut from held-out documents, each with the source of its text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.data import encoding
from specjax.data.corpus import Document
from specjax.data.rows import asked_prompt, encode_parts

PLACES = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8)
"""Points of a document at which a prompt may begin, as shares of its tokens."""
_UNNAMED = "text"
_SHARE = 4
"""Number of held-out documents of which one is for selection."""
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


def for_benchmark(held_out: Sequence[Document]) -> list[Document]:
    """The held-out documents that benchmarks take their prompts from: all except those for selection."""
    return _sides(held_out)[0]


def for_selection(held_out: Sequence[Document]) -> list[Document]:
    """The held-out documents whose prompts select a checkpoint: a quarter of them, the last by hash. No benchmark uses
    a prompt of theirs, nor another answer to it: a checkpoint looks better on prompts that selected it. A single
    document serves both, with a warning."""
    return _sides(held_out)[1]


def _sides(held_out: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    ordered = sorted(held_out, key=lambda d: (d.group, d.digest))
    groups = [d.group for d in ordered]
    if len({*groups}) == 1:  # pieces of one text, or answers to one prompt: the training text is as near
        groups = [d.digest for d in ordered]
    names = sorted({*groups})
    if len(names) == 1:
        _log.warning("there is one held-out document: the checkpoint that it selects is measured on it too")
        return ordered, ordered
    last = {*names[-max(1, len(names) // _SHARE) :]}
    sides: tuple[list[Document], list[Document]] = [], []
    for document, name in zip(ordered, groups, strict=True):
        sides[name in last].append(document)
    return sides


def cut_prompts(
    documents: Sequence[Document], tokenizer: Any, length: int, count: int, places: Sequence[float] = PLACES
) -> list[HeldOutPrompt]:
    """Cut at most ``count`` prompts: at the first of ``places`` in each document, in the order of their content hashes,
    then at the others. A prompt of plain text has ``length`` tokens. A prompt of a chat, or of a document with its own
    prompt, is everything up to where an answer begins. If too few of these have at most ``length`` tokens, longer ones
    give their last ``length``. A prompt from inside a text opens as a text does: its first tokens are replaced. A chat
    is opened by its template alone."""
    ordered = sorted(documents, key=lambda d: d.digest)
    texts = [*map(functools.partial(_tokenized, tokenizer), ordered)]
    found: dict[tuple[int, int, int], HeldOutPrompt] = {}
    for whole in (True, False):
        for place in places:
            for i, text in enumerate(texts):
                span = text.span(place, length, whole)
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
    """The tokens of a document that prompts are cut from. ``answers``: indices of ``tokens`` at which answers begin.
    ``opening``: tokens that open such a text. ``asked``: prompts of a chat by their lengths, if its text goes on
    differently (`Document.asks`); their lengths are then the ``answers``."""

    tokens: list[int]
    answers: list[int]
    opening: list[int]
    asked: Mapping[int, list[int]] = dataclasses.field(default_factory=dict)

    def prompt(self, begin: int, end: int) -> list[int]:
        opened = len(self.opening) if begin and end - begin > len(self.opening) else 0
        return [*self.opening[:opened], *self.asked.get(end, self.tokens)[begin + opened : end]]

    def span(self, place: float, length: int, whole: bool) -> tuple[int, int] | None:
        if not self.answers:
            start = int(len(self.tokens) * place)
            return (start, start + length) if start + length <= len(self.tokens) else None
        ends = [end for end in self.answers if (end <= length) == whole]
        if not ends:
            return None
        end = ends[int(len(ends) * place)]
        return max(0, end - length), end


def _tokenized(tokenizer: Any, document: Document) -> _Text:
    opening = [] if document.messages else encoding.opening(tokenizer)
    if not any(part.is_prompt for part in document.parts):
        return _Text(encoding.encode(tokenizer, document.text), [], opening)
    answers = [
        number
        for number, (one, following) in enumerate(itertools.pairwise(document.parts), 1)
        if one.is_prompt and not following.is_prompt
    ]
    if document.asks:
        asked = [asked_prompt(tokenizer, document, number) for number in answers]
        return _Text([], [*map(len, asked)], opening, {len(prompt): prompt for prompt in asked})
    parts = [part.tolist() for part in next(encode_parts(tokenizer, [document]))]
    before = [] if encoding.begins_with(parts[0], opening) else opening
    ends = (len(before) + np.cumsum([*map(len, parts)])).tolist()
    return _Text([*before, *itertools.chain(*parts)], [ends[number - 1] for number in answers], opening)
