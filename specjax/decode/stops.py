"""Stop strings: which rows have which, and where a text holds one. They are looked for in the new text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.decode.request import per_row
from specjax.errors import DataError


def check(value: Any, count: int, has_tokenizer: bool) -> list[tuple[str, ...]]:
    """Stop strings of every row. ``value``: a string, a list of strings for all rows, or a list of lists."""
    if isinstance(value, str):
        value = [value]
    if value is not None and (not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray))):
        raise DataError(f"stop_strings: {value!r}; give a text, a list of texts, or one list a row")
    if value is None or all(isinstance(x, str) for x in value):
        rows = [tuple(value or ())] * count
    else:
        rows = [(x,) if isinstance(x, str) else () if x is None else x for x in per_row("stop_strings", value, count)]
    for i, stops in enumerate(rows):
        if isinstance(stops, (bytes, bytearray)) or not isinstance(stops, Sequence):
            raise DataError(f"stop_strings of row {i}: {stops!r} is no text; give non-empty strings")
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise DataError(
                f"stop_strings of row {i}: {list(stops)} has something else than text; give non-empty strings"
            )
    if any(rows) and not has_tokenizer:
        raise DataError("stop_strings need text, and the target has no tokenizer; use stop_token_ids")
    return [tuple(stops) for stops in rows]


def undecided(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may begin a stop string: a stream holds them back."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def find(text: str, stops: Sequence[str]) -> int | None:
    """The place in ``text`` where the first of its stop strings begins."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=None)
