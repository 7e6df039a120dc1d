"""Stop strings: the check of each row's list, and the search for them, which reads new text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.decode.request import per_row
from specjax.errors import DataError


def check(value: Any, count: int, has_tokenizer: bool) -> list[tuple[str, ...]]:
    """Stop strings of every row. ``value``: a string or a list of strings, for all rows, or a list of lists. Raises
    `DataError` for anything else."""
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


class Search:
    """A search for ``stops`` in a text that comes in parts, some of which are not shown."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1
        self._tail: list[tuple[str, bool]] = []
        """The last characters, in which a stop string may have begun; True for each that is shown."""

    def push(self, shown: str, hidden: str) -> int | None:
        """Search the next part. Returns the number of shown characters from the first stop string on; None without
        one."""
        if not self._stops:
            return None
        window = [*self._tail, *((character, True) for character in shown), *((c, False) for c in hidden)]
        text = "".join(character for character, _ in window)
        start = min((place for stop in self._stops if (place := text.find(stop)) >= 0), default=None)
        self._tail = window[-self._reach :] if self._reach else []
        return None if start is None else _shown(window[start:])

    @property
    def undecided(self) -> int:
        """Number of shown characters at the end that may begin a stop string: a stream holds them back."""
        longest, text = 0, "".join(character for character, _ in self._tail)
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return _shown(self._tail[len(self._tail) - longest :])


def _shown(characters: Sequence[tuple[str, bool]]) -> int:
    return sum(shown for _, shown in characters)
