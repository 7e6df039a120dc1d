"""What a generation returns. Only new tokens; one entry a row everywhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.text import Detokenizer
from specjax.errors import ModelError
from specjax.metrics import DecodeStats
from specjax.types import FINISH_REASONS, ORIGINS, STOP_STRING, Counters


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive text of one origin: `accepted`, `corrected` or `bonus`."""

    text: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens as they are committed, by one block or several. ``stats`` count from the start of the generation.
    ``logprobs``: of these tokens, where asked for."""

    tokens: list[int]
    text: str
    pieces: list[Piece]
    stats: DecodeStats
    done: bool
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    """Of the last event."""


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """``tokens``: new tokens only. ``seeds``: the seed from which each row replays alone. ``verifier``: the kind that
    decided (`greedy` if all rows are at temperature 0), ``lossless`` unless it changes the target's distribution.
    ``finish_reasons``: `stop` (a stop token), `length` (the budget), `stop_string`, or `invalid_logits`: the next token
    had no finite distribution to come from. ``logprobs``: logs of the tokens' probabilities, where asked for."""

    tokens: list[list[int]]
    text: list[str]
    origins: list[list[str]]
    stats: list[DecodeStats]
    seeds: list[int]
    verifier: str
    lossless: bool
    finish_reasons: list[str]
    logprobs: list[list[float]] | None = None
    detokenize: Detokenizer | None = dataclasses.field(default=None, repr=False)

    def pieces(self, row: int = 0) -> list[Piece]:
        """The row's text cut where the origin of the tokens changes. Raises `ValueError` without a tokenizer."""
        if self.detokenize is None:
            raise ValueError("pieces need a tokenizer, and the target has none")
        pieces = pieces_of(self.detokenize.shares(self.tokens[row]), self.origins[row])
        return cut_text(pieces, len(self.text[row]))


def cut_text(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces of the first ``length`` characters."""
    kept = []
    for piece in pieces:
        text = piece.text[: max(length, 0)]
        length -= len(piece.text)
        if text:
            kept.append(Piece(text, piece.origin))
    return kept


def pieces_of(shares: Sequence[str], origins: Sequence[str]) -> list[Piece]:
    """The text that each token adds, put together where consecutive ones are of one origin."""
    with_text = (pair for pair in zip(shares, origins, strict=True) if pair[0])
    grouped = itertools.groupby(with_text, key=lambda pair: pair[1])
    return [Piece("".join(share for share, _ in pairs), origin) for origin, pairs in grouped]


def finish_reason(code: Any, cut: Any) -> str:
    """``cut``: where the text of the row ends at a stop string, None without."""
    return FINISH_REASONS[int(code) if cut is None else STOP_STRING]


def check_finite(result: GenerationResult, drafter: str, target: str) -> None:
    """Raises `ModelError` if the distributions of draft or target were not finite: no figure of such a pair means
    anything. ``drafter``, ``target``: their names in the message."""
    failed, blocks = (sum(getattr(stats, name) for stats in result.stats) for name in ("invalid_drafts", "blocks"))
    remedy = "look for NaN or infinite weights (load_model checks them), or compute in float32 if it overflows"
    if failed:
        raise ModelError(f"{drafter}: its logits are NaN or infinite in {failed} of {blocks} blocks; {remedy}")
    row = next((i for i, reason in enumerate(result.finish_reasons) if reason == "invalid_logits"), None)
    if row is not None:
        new = len(result.tokens[row]) + 1
        raise ModelError(f"{target}: its logits are NaN or infinite at new token {new} of prompt {row}; {remedy}")


def stats_by_row(counters: Counters) -> list[DecodeStats]:
    """Counters are host arrays here."""
    columns = {field.name: getattr(counters, field.name).tolist() for field in dataclasses.fields(DecodeStats)}
    return [DecodeStats.of(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def origin_names(codes: np.ndarray | jax.Array) -> list[str]:
    return [ORIGINS[code] for code in codes.tolist()]
