"""Token ids of a text, opened the way its tokenizer opens texts: the one place for it in training and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_PROBE = "a"


def added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before a text (beginning-of-sequence, say), and those that it puts behind it."""
    if not tokenizer("")["input_ids"]:
        return [], []
    (bare,) = tokenizer([_PROBE], add_special_tokens=False)["input_ids"]
    whole = tokenizer(_PROBE)["input_ids"]
    for begin in range(len(whole) - len(bare), -1, -1):
        # Search from the back: if an unknown token also opens texts, its last occurrence is the text.
        if whole[begin : begin + len(bare)] == bare:
            return whole[:begin], whole[begin + len(bare) :]
    return whole, []


def opening(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text: beginning-of-sequence, or none."""
    return added(tokenizer)[0]


def begins_with(ids: Sequence[int] | np.ndarray, opening: Sequence[int]) -> bool:
    """True if a text brings its opening itself: it is then not put there twice."""
    return list(ids[: len(opening)]) == list(opening)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that is to be continued: opened as the tokenizer opens a text, and never closed, even where
    the tokenizer closes every text."""
    before, behind = added(tokenizer)
    ids = tokenizer(text)["input_ids"]
    ids = ids[: len(ids) - len(behind)]
    return ids[len(before) :] if begins_with(ids[len(before) :], before) else ids
