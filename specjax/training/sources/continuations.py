"""Continuations of prompts by a model: the common part of target-generated and on-policy data."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import grain
import numpy as np
from jaxtyping import Bool, Int
from pydantic import Field

from specjax.data import chat_template as chat
from specjax.data import chats, encoding, readers
from specjax.data.readers import BadRecordPolicy
from specjax.data.rows import ConcatenatedRows
from specjax.decode.decoder import Decoder
from specjax.decode.result import check_finite
from specjax.errors import ConfigError, DataError
from specjax.metrics import DecodeStats
from specjax.runtime import fingerprint
from specjax.training.sources.text import SourceContext

_PROMPTS = ("messages", "conversations", "instruction", "prompt", "text")
_log = logging.getLogger(__name__)
Positive = Annotated[int, Field(ge=1)]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Settings for continuing prompts. ``prompt_tokens``: number of tokens at a text's beginning that are its prompt; a
    document with its own prompt, or a chat, is continued after that. ``batch_size``: number of rows decoded together.
    ``prompt_weight``: weight of the predictions of a prompt's tokens; None: 1 if the loss learns from the target's
    distribution, `data.prompt_weight` if from the text. The others are arguments of `Decoder.generate`."""

    prompt_tokens: Positive = 64
    new_tokens: Positive = 192
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    batch_size: Positive = 16
    prompt_weight: Annotated[float, Field(ge=0, le=1)] | None = None

    def weight_of_prompts(self, context: SourceContext) -> float:
        if self.prompt_weight is not None:
            return self.prompt_weight
        return context.prompt_weight if context.needs_labels else 1.0

    def check_fits(self, length: int, what: str) -> None:
        """Raises `ConfigError` if prompt and continuation exceed a row of ``length`` tokens."""
        if self.prompt_tokens + self.new_tokens > length:
            raise ConfigError(
                f"{what}: prompt_tokens={self.prompt_tokens} and new_tokens={self.new_tokens} exceed "
                f"data.seq_len={length}; lower one of them"
            )


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts by number, as token ids: ``tokens[begin:end]`` for each of ``spans``. A prompt that begins ``inside`` a
    document has its first tokens replaced by ``opening``, the tokens that open a text."""

    tokens: Int[np.ndarray, " tokens"]
    spans: Int[np.ndarray, "prompts 2"]
    inside: Bool[np.ndarray, " prompts"] | None = None
    opening: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> list[int]:
        begin, end = self.spans[index]
        found = self.tokens[begin:end].tolist()
        if self.inside is not None and self.inside[index] and len(found) > len(self.opening):
            found[: len(self.opening)] = self.opening
        return found

    @property
    def digest(self) -> str:
        opening = (np.asarray(self.opening, np.int32),) if self.opening else ()
        return fingerprint.digest((self.tokens, self.spans, *opening))

    def shuffled(self, seed: int) -> Callable[[int], list[int]]:
        """Function number -> prompt: all prompts in an order set by ``seed``, then all of them in another order."""
        order: Any = grain.MapDataset.range(len(self)).seed(seed).shuffle().repeat()
        return lambda number: self[int(order[number])]


def prompts_of_text(rows: ConcatenatedRows, settings: Sampled) -> Prompts:
    """Prompts of the training text. A document with its own prompt gives that one. Plain text gives one for each row's
    worth of it, the first at the document's beginning. Prompts that leave no room in a row for ``new_tokens`` are left
    out. Raises `DataError` if none is left."""
    room = rows.length - settings.new_tokens
    ends = np.append(rows.starts[1:], len(rows.stream))
    own = np.zeros(len(ends), np.int64)
    if rows.prompt is not None:
        predicted = np.append(np.flatnonzero(~rows.prompt), len(rows.stream))
        own = np.minimum(predicted[np.searchsorted(predicted, rows.starts)], ends) - rows.starts
    plain = own == 0
    written = [np.asarray(prompt, np.int32) for prompt in rows.asked.values() if len(prompt) <= room]
    own[[*rows.asked]] = 0  # such a chat's prompt is not the beginning of its rows
    spans = [np.stack([rows.starts, rows.starts + own], axis=1)[(own > 0) & (own <= room)]]
    sizes = [*map(len, written)]
    behind = len(rows.stream) + np.cumsum(sizes)
    spans.append(np.stack([behind - sizes, behind], axis=1).astype(np.int64))
    pieces = np.where(plain, -(-(ends - rows.starts) // rows.length), 0)
    first = np.repeat(rows.starts, pieces)
    begins = first + rows.length * (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    # Leave out a piece's last token: the one that closes a document is no prompt.
    stops = np.minimum(begins + settings.prompt_tokens, np.minimum(np.repeat(ends, pieces), begins + rows.length) - 1)
    spans.append(np.stack([begins, stops], axis=1)[stops > begins])
    found = np.concatenate(spans)
    if not len(found):
        raise DataError(f"no prompt of the training text leaves room for new_tokens={settings.new_tokens}; lower it")
    tokens = np.concatenate([rows.stream, *written])
    inside = ~np.isin(found[:, 0], [*rows.starts, *(behind - sizes)])
    return Prompts(tokens, found, inside, rows.opening)


def prompts_of_file(
    path: str, tokenizer: Any, room: int, bad: BadRecordPolicy, today: datetime.date | None = None
) -> Prompts:
    """Prompts of a JSON file with ``prompt``, ``text`` or a chat, or of a text file with one prompt a line; the file's
    name says which it is. A chat is continued by an answer to its last question, as the chat template asks for it; an
    answer in the file is left out. A prompt of more than ``room`` tokens goes to ``bad``, as does a malformed line.
    ``today``: date for templates that ask."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"data.prompts: {path!r} is no file; give a .jsonl file or a text file with one prompt a line")
    found = []
    reader = readers.reader_of(file)
    if reader is readers.read_parquet:
        raise DataError(f"data.prompts: {path!r}: Parquet holds no prompts here; give a .jsonl or a .txt file")
    records = readers.json_records(file, bad) if reader is readers.read_json else _lines(file)
    for _, where, record in records:
        try:
            ids = _prompt_ids(record, tokenizer, today)
        except Exception as error:  # a template is a program: it may raise anything, and so may Jinja
            bad.found("unusable prompts", f"{where}: {_reason(error)}")
            continue
        if not 0 < len(ids) <= room:
            bad.found("prompts that do not fit", f"{where}: a prompt of {len(ids)} tokens, there is room for {room}")
            continue
        found.append(np.asarray(ids, np.int32))
    if not found:
        raise DataError(f"data.prompts: {path!r} holds no prompt{f'; {bad}' if bad.counts else ''}")
    if bad.counts:
        _log.warning("data.prompts: %r: %s", path, bad)
    ends = np.cumsum([*map(len, found)])
    return Prompts(np.concatenate(found), np.stack([ends - [*map(len, found)], ends], axis=1))


def _reason(error: Exception) -> str:
    return (str(error).lstrip(":, ") or type(error).__name__).splitlines()[0]


def _lines(file: Path) -> list[tuple[int, str, bytes]]:
    lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    return [(number, f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt_ids(record: Any, tokenizer: Any, today: datetime.date | None) -> list[int]:
    if isinstance(record, bytes):
        return encoding.encode(tokenizer, record.decode("utf-8"))
    found = [key for key in _PROMPTS if record.get(key)] if isinstance(record, dict) else []
    if len(found) > 1:
        raise DataError(f"both {found[0]!r} and {found[1]!r}, which may be different prompts; keep one of them")
    key = next(iter(found), "prompt")
    if found and (other := readers.unread(record, key)) is not None:
        raise DataError(f"{other!r} changes what a prompt means, and is not read beside {key!r}; drop it")
    if found and (key not in ("prompt", "text") or isinstance(record[key], list)):
        messages, tools = chats.read(record, key)
        messages = chats.for_template(chats.question(messages), tools, chat.source(tokenizer, tools))
        return chat.render(tokenizer, messages, tools, today=today, tokenize=True)
    if not found or not isinstance(record[key], str):
        raise DataError(f"no string under the key {key!r}; give one of {', '.join(_PROMPTS)}")
    return encoding.encode(tokenizer, record[key])


@dataclasses.dataclass(frozen=True)
class Continued:
    """Continuations of prompts. ``tokens``: new tokens only, with end-of-sequence, one list a prompt. ``stats``: of all
    of them together."""

    tokens: list[list[int]]
    stats: DecodeStats | None


def continue_prompts(
    decoder: Decoder, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Sampled
) -> Continued:
    """Continue each prompt from its own seed, so that neither order nor ``batch_size`` matters."""
    found, total = [], None
    names = ("temperature", "top_k", "top_p", "min_p")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    for begin in range(0, len(prompts), settings.batch_size):
        chosen, own = prompts[begin : begin + settings.batch_size], seeds[begin : begin + settings.batch_size]
        # Fill the last batch up with one prompt, so that it compiles nothing new.
        spare = settings.batch_size - len(chosen)
        batch, all_seeds = [*chosen, *[chosen[0]] * spare], [*own, *[own[0]] * spare]
        result = decoder.generate(batch, max_new_tokens=settings.new_tokens, seed=all_seeds, **options)
        check_finite(result, "the draft that helps", f"target {decoder.target.name!r}")
        found += result.tokens[: len(chosen)]
        for stats in result.stats[: len(chosen)]:
            total = stats if total is None else total + stats
    return Continued(found, total)
