"""A text as token ids, opened the way its tokenizer opens texts: the one place that training and decoding share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROBE = "a"


def added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before a text (beginning-of-sequence, say), and those that it puts behind it."""
    if not tokenizer("")["input_ids"]:
        return [], []
    (bare,) = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]
    whole = tokenizer(_PROBE)["input_ids"]
    for begin in range(len(whole) - len(bare), -1, -1):
        # From the back: of an unknown token that also opens texts, the last one is the text.
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    return whole, []


def opening(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: beginning-of-sequence, or nothing."""
    return added(tokenizer)[0]


def begins_with(ids: Sequence[int], opening: Sequence[int]) -> bool:
    """Whether a text brings its opening itself: it is not put there twice."""
    return list(ids[: len(opening)]) == list(opening)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that is to be continued: opened as the tokenizer opens a text, and never closed, even where
    the tokenizer closes every text."""
    before, behind = added(tokenizer)
    ids = tokenizer(text)["input_ids"]
    ids = ids[: len(ids) - len(behind)]
    return ids[len(before) :] if begins_with(ids[len(before) :], before) else ids
