"""Rows of tokens to train and to measure on, made from documents, and batches of rows in an order that can be resumed.

A row is ``length + 1`` consecutive tokens of the concatenated documents, each closed by end-of-sequence; rows overlap
by one token. Attention and positions stay inside a document, and no document is asked to predict the next one's start.
A row that begins inside a document opens as a text does: beginning-of-sequence replaces the overlapping token.
Sequences made for training (`WholeSequenceRows`) are never cut: a row holds as many as fit, and padding.

Dims: N rows, B rows of a batch, T predicted positions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.data import encoding
from specjax.data.corpus import BadRecordPolicy, Document
from specjax.errors import DataError
from specjax.interfaces import Batch, Params, Reads
from specjax.runtime import fingerprint

_TOKENIZED_AT_ONCE = 512


class Rows(Protocol):
    """Rows of T positions, by number; a number names the same row in every process and after every restart."""

    @property
    def length(self) -> int:
        """Number of positions of a row, T."""
        ...

    @property
    def digest(self) -> str:
        """Digest that names the content of all rows."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch:
        """One row, of numpy arrays without a batch axis."""
        ...


def row_of(
    tokens: Int[np.ndarray, " T1"],
    document: Int[np.ndarray, " T1"],
    positions: Int[np.ndarray, " T1"],
    weight: Float[np.ndarray, " T1"],
) -> Batch:
    """A row of T1 - 1 predictions. ``document``: number of the document that each token belongs to, rising by one.
    ``weight``: weight of each token's prediction by the token before it in its document."""
    arrays: dict[str, Any] = {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "weight": np.where(document[1:] == document[:-1], weight[1:], 0).astype(np.float32),
        "positions": positions[:-1].astype(np.int32),
        "segments": (document - document[0])[:-1].astype(np.int32),
    }
    return Batch(**arrays)


@dataclasses.dataclass(frozen=True)
class ConcatenatedRows:
    """Rows cut from concatenated documents. ``stream``: their tokens; ``starts``: index of each document's first token;
    ``length``: T; ``prompt``: mask of tokens whose prediction counts ``prompt_weight`` instead of 1 (None: there are
    none); ``opening``: the tokens that open a text, which replace the first of a row that begins inside a document;
    ``asked``: by a document's number, its prompt as decoding sees it, if the document begins differently
    (`Document.asks`)."""

    stream: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " documents"]
    length: int
    prompt: Bool[np.ndarray, " tokens"] | None = None
    prompt_weight: float = 0.0
    opening: tuple[int, ...] = ()
    asked: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self):
            raise DataError(
                f"the corpus has {len(self.stream)} tokens, too few for one window of {self.length + 1}; "
                "use more text, a smaller data.seq_len or another data.held_out"
            )
        if self.prompt is not None and not self.prompt_weight and not self._predicts():
            raise DataError(
                f"nothing of the corpus's {len(self.stream)} tokens is to be predicted, they are all prompts; give "
                "completions or answers, or a data.prompt_weight above 0"
            )

    def _predicts(self) -> bool:
        """True if a token of an answer follows another token of its document."""
        counts = ~np.asarray(self.prompt)
        counts[self.starts] = False
        return bool(counts.any())

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.length

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.length
        places = np.arange(begin, begin + self.length + 1)
        document = np.searchsorted(self.starts, places, side="right") - 1
        positions = places - np.maximum(self.starts[document], begin)
        weight = np.ones(len(places), np.float32)
        if self.prompt is not None:
            weight[self.prompt[places]] = self.prompt_weight
        tokens, opened = self.stream[places], len(self.opening)
        # A document that ends within the opening keeps its tokens.
        if begin > self.starts[document[0]] and document[min(opened, self.length)] == document[0]:
            tokens[:opened] = self.opening
            weight[:opened] = 0
        return row_of(tokens, document, positions, weight)

    @property
    def digest(self) -> str:
        parts = [self.stream, self.starts, np.asarray(self.length)]
        if self.prompt is not None:
            parts += [self.prompt, np.asarray(self.prompt_weight)]
        if self.opening:
            parts.append(np.asarray(self.opening, np.int32))
        return fingerprint.digest(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token ids of sequences, one after another. ``ends``: index at which each sequence ends; ``prompts``: number of
    prompt tokens of each."""

    tokens: Int[np.ndarray, " tokens"]
    ends: Int[np.ndarray, " sequences"]
    prompts: Int[np.ndarray, " sequences"]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> Sequences:
        pairs = list(zip(prompts, continuations, strict=True))
        tokens = np.fromiter(itertools.chain.from_iterable(itertools.chain(*pairs)), np.int32)
        return cls(tokens, np.cumsum([len(p) + len(c) for p, c in pairs]), np.asarray([len(p) for p, _ in pairs]))

    @classmethod
    def joined(cls, several: Sequence[Sequences]) -> Sequences:
        offsets = np.cumsum([0, *(len(some.tokens) for some in several[:-1])])
        ends = [some.ends + offset for some, offset in zip(several, offsets, strict=True)]
        tokens, prompts = ([getattr(some, name) for some in several] for name in ("tokens", "prompts"))
        return cls(np.concatenate(tokens), np.concatenate(ends), np.concatenate(prompts))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def sizes(self) -> Int[np.ndarray, " sequences"]:
        return np.diff(self.ends, prepend=0)


@dataclasses.dataclass(frozen=True)
class WholeSequenceRows:
    """Rows of whole sequences, in their order: a row ends where the next sequence does not fit. The prediction of a
    prompt's tokens counts ``prompt_weight``. ``alone``: True for one sequence a row."""

    sequences: Sequences
    length: int
    prompt_weight: float = 0.0
    alone: bool = False
    _first: Int[np.ndarray, " N1"] = dataclasses.field(init=False, repr=False)
    """Index of the first sequence of each row, and behind them the number of sequences."""

    def __post_init__(self) -> None:
        sizes, first, filled = self.sequences.sizes, [], self.length + 2
        if len(sizes) and sizes.max() > self.length + 1:
            raise DataError(f"a sequence of {sizes.max()} tokens does not fit a row of {self.length + 1}")
        for i, size in enumerate(sizes.tolist()):
            if self.alone or filled + size > self.length + 1:
                first.append(i)
                filled = 0
            filled += size
        object.__setattr__(self, "_first", np.asarray([*first, len(sizes)]))

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        chosen = range(self._first[index], self._first[index + 1])
        sizes = self.sequences.sizes[chosen.start : chosen.stop]
        end = self.sequences.ends[chosen.stop - 1]
        used, room = int(sizes.sum()), self.length + 1
        tokens, document, weight = np.zeros(room, np.int32), np.full(room, len(sizes)), np.zeros(room, np.float32)
        tokens[:used] = self.sequences.tokens[end - used : end]
        document[:used] = np.repeat(np.arange(len(sizes)), sizes)
        starts = np.cumsum(sizes) - sizes
        positions = np.arange(room) - np.append(starts, used)[document]
        is_prompt = positions[:used] < self.sequences.prompts[chosen.start : chosen.stop][document[:used]]
        weight[:used] = np.where(is_prompt, self.prompt_weight, 1)
        return row_of(tokens, document, positions, weight)

    @property
    def digest(self) -> str:
        s = self.sequences
        return fingerprint.digest((s.tokens, s.ends, s.prompts, np.asarray((self.length, self.prompt_weight))))


def pack(
    tokenizer: Any,
    documents: Sequence[Document],
    eos_id: int,
    length: int,
    prompt_weight: float = 0.0,
    bad: BadRecordPolicy | None = None,
) -> ConcatenatedRows:
    """Rows of the documents, ordered by content hash, so that names do not matter. A chat is opened and closed by its
    template. Any other document is opened as the tokenizer opens a text and closed by ``eos_id``, unless its text does
    so itself. A document of fewer than two tokens of its own goes to ``bad``."""
    bad, opening = BadRecordPolicy() if bad is None else bad, encoding.opening(tokenizer)
    ordered = sorted(documents, key=lambda d: d.digest)
    tokens, prompt, sizes, asked = [np.zeros(0, np.int32)], [np.zeros(0, bool)], [], {}
    for document, ids in zip(ordered, encode_parts(tokenizer, ordered), strict=True):
        if sum(map(len, ids)) < 2:
            found = f"{document.name}: {document.text[:40]!r} has {sum(map(len, ids))} of the tokenizer's tokens"
            bad.found("documents shorter than two tokens", f"{found}, a document needs two; drop it")
            continue
        is_prompt = [part.is_prompt for part in document.parts] or [False]
        if not document.messages:
            opens = [] if encoding.begins_with(ids[0], opening) else opening
            closes = [] if ids[-1][-1:].tolist() == [eos_id] else [eos_id]
            ids = [np.asarray(opens, np.int32), *ids, np.asarray(closes, np.int32)]
            is_prompt = [is_prompt[0], *is_prompt, False]
        elif document.asks:
            asked[len(sizes)] = asked_prompt(tokenizer, document, is_prompt.index(False))
        tokens.append(np.concatenate(ids))
        prompt.append(np.repeat(is_prompt, [*map(len, ids)]))
        sizes.append(len(tokens[-1]))
    mask = np.concatenate(prompt)
    starts = np.cumsum([0, *sizes[:-1]])
    prompts = mask if mask.any() else None
    return ConcatenatedRows(np.concatenate(tokens), starts, length, prompts, prompt_weight, tuple(opening), asked)


def asked_prompt(tokenizer: Any, document: Document, answer: int) -> list[int]:
    """Token ids of a chat up to part ``answer`` as decoding sees them: with the template's generation prompt."""
    text = "".join(part.text for part in document.parts[:answer]) + document.asks
    (ids,) = tokenizer([text], add_special_tokens=False)["input_ids"]
    return ids


def encode_parts(tokenizer: Any, documents: Sequence[Document]) -> Iterator[list[Int[np.ndarray, " tokens"]]]:
    """The token ids of each document's parts; few documents are held as lists at a time. A prompt and its completion
    are tokenized apart, as they are when the prompt is continued. A chat is tokenized as a whole, as its template's
    tokens are: a tokenizer may put a space before every text. A token belongs to the part that it ends in."""
    for begin in range(0, len(documents), _TOKENIZED_AT_ONCE):
        some = documents[begin : begin + _TOKENIZED_AT_ONCE]
        apart = [[d.text] if d.messages or not d.parts else [part.text for part in d.parts] for d in some]
        texts = [text for parts in apart for text in parts]
        tells = any(d.messages for d in some) and getattr(tokenizer, "is_fast", False)
        told = {"return_offsets_mapping": True} if tells else {}
        encoded = tokenizer(texts, add_special_tokens=False, **told)
        spans = encoded["offset_mapping"] if told else [None] * len(texts)
        found = zip(encoded["input_ids"], spans, strict=True)
        for document, parts in zip(some, apart, strict=True):
            if document.messages and document.parts:
                yield _split(tokenizer, document, *next(found))
            else:
                yield [np.asarray(ids, np.int32) for ids, _ in itertools.islice(found, len(parts))]


def _split(
    tokenizer: Any, document: Document, ids: Sequence[int], spans: Sequence[tuple[int, int]] | None
) -> list[Int[np.ndarray, " tokens"]]:
    """Token ids of a whole text, split by its parts. ``spans``: span of each token in characters; None: the tokenizer
    gives none, and the text is tokenized up to each part's end, to find the number of tokens before it."""
    ends = np.cumsum([len(part.text) for part in document.parts])
    if spans is None:
        before = [tokenizer(document.text[:end], add_special_tokens=False)["input_ids"] for end in ends[:-1]]
        pairs = ([*zip(some, ids, strict=False)] for some in before)
        cuts = [next((i for i, (x, y) in enumerate(both) if x != y), len(both)) for both in pairs]
    else:
        # A token on both sides of a cut belongs to the part behind it.
        last = np.maximum.accumulate([max(begin, end - 1) for begin, end in spans] or [0])
        cuts = np.searchsorted(last, ends[:-1], side="left").tolist()
    return [*np.split(np.asarray(ids, np.int32), np.maximum.accumulate(cuts or [0])[: len(ends) - 1])]


@dataclasses.dataclass(frozen=True)
class RowsWithMore:
    """Base of ``rows`` with more data beside each: a subclass has ``__getitem__``."""

    rows: Rows

    @property
    def length(self) -> int:
        return self.rows.length

    @property
    def digest(self) -> str:
        return self.rows.digest

    def __len__(self) -> int:
        return len(self.rows)


@dataclasses.dataclass(frozen=True)
class NumberedRows(RowsWithMore):
    """Rows that are drawn for the step ``number``."""

    number: int

    def __getitem__(self, index: int) -> Batch:
        number: Any = np.int32(self.number)
        return dataclasses.replace(self.rows[index], number=number)


@dataclasses.dataclass(frozen=True)
class StartRows(RowsWithMore):
    """Rows of text that a draft's first weights are made from, and beside them what else these may need, made when it
    is asked for. ``counted``: the rows in which ids are counted, those that the draft is trained to predict, in parts,
    each with its share of the training rows. ``kept``: (the rows with the target's output beside them, numbers of the
    rows that have it), a function of what the draft reads of it; None: training keeps none."""

    counted: Callable[[], Sequence[tuple[Rows, float]]]
    kept: Callable[[Reads], tuple[Rows, Int[np.ndarray, " rows"]]] | None = None

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def take(rows: Rows, indices: Sequence[int] | np.ndarray) -> Batch:
    """The rows numbered ``indices`` as one batch of numpy arrays."""
    return Batch.of_rows(rows[int(i)] for i in indices)


def spread(rows: Rows, positions: int) -> Batch:
    """A batch of rows, evenly spread, that hold ``positions`` tokens; all rows if they are fewer."""
    return take(rows, spread_numbers(rows, positions))


def spread_numbers(rows: Rows, positions: int) -> Int[np.ndarray, " rows"]:
    """Numbers of the rows of `spread`."""
    count = min(len(rows), -(-positions // rows.length))
    return np.arange(count) * len(rows) // count


def spread_predictions(rows: Rows, positions: int) -> Batch:
    """A batch of rows, evenly spread, that hold ``positions`` tokens whose prediction counts; all rows if they are
    fewer. (A twentieth less is as good: documents begin in the rows.)"""
    found, wanted = spread(rows, positions), 0.95 * positions
    while (counted := np.count_nonzero(found.weight)) < wanted and len(found.tokens) < len(rows):
        # Extrapolate from the share that counts in these rows, to at most about four times as many.
        share = max(counted / found.weight.size, 0.25 * wanted / found.weight.size)
        found = spread(rows, max(int(positions / share), (len(found.tokens) + 1) * rows.length))
    return found


class Batches:
    """Endless batches of rows, reshuffled every epoch. Batch i is a function of (seed, i): resuming needs nothing but
    the step."""

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        if len(rows) < batch_size:
            raise DataError(
                f"the corpus has {len(rows)} windows of {rows.length} tokens, too few for one batch of "
                f"{batch_size}; use more text, a smaller batch_size or a smaller seq_len"
            )
        self.rows: Rows = rows
        self.batch_size, self.seed = batch_size, seed
        self._order: Any = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch_size)

    def indices(self, step: int) -> Int[np.ndarray, " B"]:
        """Numbers of the rows of batch ``step``."""
        return self._order[step]

    def refresh(self, step: int, params: Params, oldest: int | None) -> None:
        """Prepare for batch ``step``, before it is asked for, with the weights after so many steps. ``oldest``: step of
        the first checkpoint that is stored. Rows of text need no preparation."""

    def __getitem__(self, step: int) -> Batch:
        return take(self.rows, self.indices(step))
