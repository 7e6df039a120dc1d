"""Results of a generation: new tokens only, one entry a row everywhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.text import Detokenizer
from specjax.errors import DataError, ModelError
from specjax.interfaces import ACCEPTED, FINISH_REASONS, ORIGINS, STOP_STRING, Counters, DecodeState
from specjax.metrics import DecodeStats, RequestMetrics, cost


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive text of one origin: `accepted`, `corrected` or `bonus`."""

    text: str
    origin: str
    """Origin of the tokens: `accepted` (proposed and accepted), `corrected` (the target's after a rejection) or `bonus`
    (the target's after a proposal accepted whole)."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens of one prompt that one block or several of `Decoder.stream` committed."""

    tokens: list[int]
    """New token ids since the last event."""
    text: str
    """Text that can no longer change, since the last event; empty without a tokenizer."""
    pieces: list[Piece]
    """The text cut where the origin of the tokens changes."""
    stats: DecodeStats
    """Counts from the start of the generation."""
    done: bool
    """True for the last event."""
    seconds: float
    """Wall seconds from the call to the host sync after the commit of ``tokens``."""
    logprobs: list[float] | None = None
    """Log-probabilities of ``tokens`` in nats, where asked for."""
    finish_reason: str | None = None
    """Reason of the end, as in `GenerationResult.finish_reasons`; None before the last event."""


@dataclasses.dataclass(frozen=True)
class HostSync:
    """A host sync: the host's view of a batch between two chunks of blocks."""

    seconds: float
    """Wall seconds since the call."""
    lengths: np.ndarray
    """Number of tokens of each row, ``[B]``, its prompt included."""


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """The new tokens of a batch of prompts, their text, and how they came about; one entry a row."""

    tokens: list[list[int]]
    """New token ids only, without the prompt."""
    text: list[str]
    """Text of the new tokens, cut before a stop string; empty without a tokenizer."""
    origins: list[list[str]]
    """Origin of each token: `accepted` (proposed and accepted), `corrected` (the target's after a rejection) or `bonus`
    (the target's after a proposal accepted whole)."""
    stats: list[DecodeStats]
    """Counts of blocks, of proposed, accepted and emitted tokens."""
    seeds: list[int]
    """Seed from which each row replays alone. At temperatures above 0, lengths that a controller chooses by measured
    costs (`Decoder.calibrate`) decide which sample of its distribution a row gets; with the `coupled` rule they do
    not."""
    verifier: str
    """Kind of the verifier that decided; `greedy` if all rows are at temperature 0."""
    lossless: bool
    """True if the output has the target's distribution."""
    finish_reasons: list[str]
    """Reason for the end of each row: `stop` (a stop token), `length` (the budget), `stop_string`, or `invalid_logits`:
    the next token had no finite distribution to come from."""
    proposals: list[list[int]]
    """Number of tokens that each block of a row proposed, in order; 0 for a block without a draft."""
    commit_times: list[list[float]]
    """Wall seconds from the call to the commit of each token; the tokens of a block share theirs. Host syncs
    (``looks``) measure them, so after the first block and at the end; the blocks between two syncs are assumed to take
    equally long. A call of new sizes compiles, and the times include that: call `Decoder.compile` before."""
    looks: list[float]
    """Wall seconds from the call to each host sync, at the end of a chunk of blocks. A commit time that is among them
    is measured, any other interpolated."""
    seconds: float
    """Wall seconds of the whole call, detokenization included."""
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

    def metrics(self, row: int | None = None, price_per_hour: float | None = None) -> RequestMetrics:
        """Latencies, throughput, acceptance and cost, under the names of `specjax.metrics`.

        Args:
            row: the row; None for all rows pooled.
            price_per_hour: price of the machine, in any currency; without it there is no cost.

        Returns:
            Metrics of the request, up to its last token. The machine's price until the batch's last token is split in
            proportion to the rows' blocks, so that their costs add up.

        Raises:
            DataError: the price is negative or not finite.
        """
        if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
            raise DataError(f"price_per_hour: {price_per_hour!r}; give a price of at least 0")
        seconds = max((times[-1] for times in self.commit_times if times), default=self.looks[-1])
        price = None if price_per_hour is None else cost(price_per_hour, seconds)
        rows = range(len(self.tokens)) if row is None else [row]
        of_rows = [self._metrics(i, price) for i in rows]
        return RequestMetrics.pooled(of_rows, seconds) if row is None else of_rows[0]

    def _metrics(self, row: int, price: float | None) -> RequestMetrics:
        """Metrics of one row. ``price``: cost of the whole batch."""
        times, stats, measured = self.commit_times[row], self.stats[row], set(self.looks)
        return RequestMetrics(
            stats=stats,
            commit_times=[times],
            seconds=times[-1] if times else self.looks[-1],
            interpolated=sum(time not in measured for time in times),
            cost=None if price is None else price * stats.blocks / sum(each.blocks for each in self.stats),
        )


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
    """The texts that the tokens add, joined where consecutive tokens have one origin."""
    with_text = (pair for pair in zip(shares, origins, strict=True) if pair[0])
    grouped = itertools.groupby(with_text, key=lambda pair: pair[1])
    return [Piece("".join(share for share, _ in pairs), origin) for origin, pairs in grouped]


def finish_reason(code: Any, cut: Any) -> str:
    """The name of a finish code. ``cut``: the row's cut at a stop string; None without one."""
    return FINISH_REASONS[int(code) if cut is None else STOP_STRING]


def check_finite(result: GenerationResult, drafter: str, target: str) -> None:
    """Raise `ModelError` if the distributions of draft or target were not finite: no figure of such a pair means
    anything. ``drafter``, ``target``: their names in the message."""
    failed, blocks = (sum(getattr(stats, name) for stats in result.stats) for name in ("invalid_drafts", "blocks"))
    remedy = "look for NaN or infinite weights (load_model checks them), or compute in float32 if it overflows"
    if failed:
        raise ModelError(f"{drafter}: its logits are NaN or infinite in {failed} of {blocks} blocks; {remedy}")
    row = next((i for i, reason in enumerate(result.finish_reasons) if reason == "invalid_logits"), None)
    if row is not None:
        new = len(result.tokens[row]) + 1
        raise ModelError(f"{target}: its logits are NaN or infinite at new token {new} of prompt {row}; {remedy}")


def stats_by_row(state: DecodeState, depth: int) -> list[DecodeStats]:
    """Stats of each row, from the host's part of a state (`specjax.decode.scheduler.without_caches`). ``depth``: number
    of depths that the drafter has; a program that never asks it counts none of them."""
    counts = {field.name: getattr(state.counters, field.name) for field in dataclasses.fields(Counters)}
    counts |= {} if state.controller is None else {"probes": state.controller}
    if state.counters.accepted_at.shape[1] < depth:
        at = ("drafted_at", "reached_at", "accepted_at")
        counts |= {name: np.zeros((len(counts[name]), depth), np.int32) for name in at}
    columns = {name: column.tolist() for name, column in counts.items()}
    return [DecodeStats.of(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def origin_names(codes: np.ndarray | jax.Array) -> list[str]:
    """The names of origin codes."""
    return [ORIGINS[code % len(ORIGINS)] for code in codes.tolist()]


def proposals(codes: np.ndarray | jax.Array) -> list[int]:
    """Number of tokens that each block proposed, from the origin codes of a row's new tokens."""
    found = np.asarray(codes)
    return (found[_ends(found)] // len(ORIGINS)).tolist()


def _ends(codes: np.ndarray) -> np.ndarray:
    """True for each token that is the last of its block. Every block ends with a token of the target's own, except one
    that a stop token or the budget cut, which is a row's last."""
    ends = codes % len(ORIGINS) != ACCEPTED
    ends[-1:] = True
    return ends


def commit_times(codes: Sequence[np.ndarray], starts: Sequence[int], looks: Sequence[HostSync]) -> list[list[float]]:
    """Seconds from the call to the commit of each new token, row by row. A block that ends at a host sync has its time;
    the blocks between two syncs are assumed to take equally long. The first sync is after one block.

    ``codes``: origin codes of all new tokens of a row; ``starts``: lengths of the prompts.
    """
    # A row takes part in every block of the batch until it is done, so its block numbers are those of the batch.
    blocks = [np.cumsum(ends) - ends + 1 for ends in map(_ends, codes)]
    counts = [
        max(int(block[length - start - 1]) if length > start else 0 for block, start, length in seen)
        for look in looks
        for seen in [zip(blocks, starts, look.lengths, strict=False)]
    ]
    # Of several syncs at one number of blocks, the first: before the later ones, rows ended without a token.
    counts, first = np.unique(counts, return_index=True)
    seconds = np.asarray([look.seconds for look in looks])[first]
    return [np.interp(block, counts, seconds).tolist() for block in blocks]
