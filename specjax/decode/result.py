"""Results of a generation: only new tokens, one entry a row everywhere."""

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
from specjax.types import ACCEPTED, FINISH_REASONS, ORIGINS, STOP_STRING, Counters


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive text of one origin: `accepted`, `corrected` or `bonus`."""

    text: str
    origin: str
    """`accepted` (the draft's, kept), `corrected` (the target's after a rejection) or `bonus` (the target's after a
    whole draft)."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens of one prompt as `Decoder.stream` commits them, by one block or several."""

    tokens: list[int]
    """New token ids since the last event."""
    text: str
    """Text that can no longer change, since the last event; empty without a tokenizer."""
    pieces: list[Piece]
    """The text cut where the origin of the tokens changes."""
    stats: DecodeStats
    """Counts from the start of the generation."""
    done: bool
    """Whether this is the last event."""
    logprobs: list[float] | None = None
    """Log-probabilities of ``tokens`` in nats, where asked for."""
    finish_reason: str | None = None
    """Reason of the end, as in `GenerationResult.finish_reasons`; None before the last event."""


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """The new tokens of a batch of prompts, their text, and how they came about; one entry a row."""

    tokens: list[list[int]]
    """New token ids only, without the prompt."""
    text: list[str]
    """Text of the new tokens, cut before a stop string; empty without a tokenizer."""
    origins: list[list[str]]
    """Origin of each token: `accepted` (the draft's, kept), `corrected` (the target's after a rejection) or `bonus`
    (the target's after a whole draft)."""
    stats: list[DecodeStats]
    """Counts of blocks, drafted, accepted and emitted tokens."""
    seeds: list[int]
    """The seed from which each row replays alone."""
    verifier: str
    """The kind that decided; `greedy` if all rows are at temperature 0."""
    lossless: bool
    """Whether the output has the target's distribution."""
    finish_reasons: list[str]
    """`stop` (a stop token), `length` (the budget), `stop_string`, or `invalid_logits`: the next token had no finite
    distribution to come from."""
    proposals: list[list[int]]
    """How many tokens each block of a row proposed, in order: 0 in one without a draft."""
    logprobs: list[list[float]] | None = None
    """Log-probabilities of the tokens in nats, where asked for."""
    detokenize: Detokenizer | None = dataclasses.field(default=None, repr=False)
    """Token ids to text; None without a tokenizer."""

    def pieces(self, row: int = 0) -> list[Piece]:
        """The row's text cut where the origin of the tokens changes.

        Args:
            row: the row.

        Returns:
            Texts with their origins, in order.

        Raises:
            ValueError: the target has no tokenizer.
        """
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
    """The text that each token adds, put together where consecutive tokens are of one origin."""
    with_text = (pair for pair in zip(shares, origins, strict=True) if pair[0])
    grouped = itertools.groupby(with_text, key=lambda pair: pair[1])
    return [Piece("".join(share for share, _ in pairs), origin) for origin, pairs in grouped]


def finish_reason(code: Any, cut: Any) -> str:
    """The name of a finish code. ``cut``: where the text of the row ends at a stop string, None without."""
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
    """The stats of each row. The counters are host arrays here."""
    columns = {field.name: getattr(counters, field.name).tolist() for field in dataclasses.fields(DecodeStats)}
    return [DecodeStats.of(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def origin_names(codes: np.ndarray | jax.Array) -> list[str]:
    """The names of origin codes."""
    return [ORIGINS[code % len(ORIGINS)] for code in codes.tolist()]


def proposals(codes: np.ndarray | jax.Array) -> list[int]:
    """How many tokens each block proposed, from the origin codes of a row's new tokens: every block ends with a token
    of the target's own, but for one that a stop token or the budget cut."""
    found = np.asarray(codes)
    ends = found % len(ORIGINS) != ACCEPTED
    ends[-1:] = True
    return (found[ends] // len(ORIGINS)).tolist()
