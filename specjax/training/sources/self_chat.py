"""Training data of which the target wrote both sides: chats (`specjax.data.self_chat`), stored as JSON lines in shards
that any tool reads. No shard depends on another, so several processes write one data set together.

A directory belongs to a target, settings and a seed. Each chat has its own seeds, and rows that come and go do not
change it. Each shard has a record with its SHA-256 and its settings, written after it. Near-duplicates are dropped once
all shards are there, in the order of the chats' numbers.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax import backend
from specjax.config.self_chat import SelfChat
from specjax.data import readers
from specjax.data import self_chat as text
from specjax.data.document import Document
from specjax.data.self_chat import Chat, Plan, Turns
from specjax.decode.decoder import Decoder
from specjax.decode.result import GenerationResult, check_finite
from specjax.errors import DataError, TrainingError
from specjax.interfaces import Target
from specjax.runtime import artifact, fingerprint
from specjax.runtime.log import note
from specjax.runtime.progress import StepProgress

_LEAST_KEPT = 0.1
"""Least share of the chats that must be kept: below it, the target does little but repeat itself."""
_JUDGED = 64
"""Number of chats after which that is judged while they are written."""
_BYTES_A_TOKEN = 8
"""Bytes that a token takes on disk, generously."""
_LEAST_ANSWER = 16
"""Least number of tokens that an answer has room for."""
_SHOWN = 160
"""Number of characters of a message that are shown."""


@dataclasses.dataclass(frozen=True)
class ChatFiles:
    """The shards of a data set. ``longest``: most tokens of a chat."""

    directory: Path
    settings: SelfChat
    target: Target
    longest: int
    seed: int

    @property
    def made_from(self) -> dict[str, Any]:
        """All that decides the chats."""
        params, config = fingerprint.of_model(self.target)
        # No chat depends on their number, on rows or on the place; near-duplicates are dropped when they are read.
        own = dataclasses.replace(self.settings, chats=1, rows=None, path=None, similar=1.0)
        return {
            "target": params,
            "target_config": config,
            "eos_ids": list(self.target.eos_ids),
            "template": fingerprint.of_json({"template": str(self.target.tokenizer.chat_template)}),
            "self_chat": json.loads(json.dumps(dataclasses.asdict(own))),
            "longest": self.longest,
            "seed": self.seed,
        }

    @property
    def count(self) -> int:
        return -(-self.settings.chats // self.settings.shard_size)

    def file(self, shard: int) -> Path:
        return self.directory / f"chats-{shard:05}.jsonl"

    def numbers(self, shard: int) -> range:
        """Numbers of the chats of a shard. The last one is as large as the others, so that a data set can grow."""
        size = self.settings.shard_size
        return range(shard * size, (shard + 1) * size)

    def record(self, shard: int) -> dict[str, Any] | None:
        """The record of a whole shard. Raises `TrainingError` for a shard of other settings."""
        found = artifact.record_of(self.file(shard))
        if found is not None and found["made_from"] != fingerprint.of_json(self.made_from):
            raise TrainingError(
                f"{self.file(shard)}: was made with other settings, or another target; remove it with its .json, or "
                "write it again with the settings of the others"
            )
        return found

    def missing(self, shards: Sequence[int]) -> list[int]:
        return [shard for shard in shards if self.record(shard) is None]


def write(files: ChatFiles, share: tuple[int, int] = (0, 1), progress: StepProgress | None = None) -> list[int]:
    """Write the shards that are missing among every n-th one, ``share`` = (i, n), and return those of the whole data
    set that are missing then. ``progress`` counts chats.

    Raises `TrainingError` if the directory was made from anything else or another process writes the same share, and
    `DataError` if the disk lacks room or the target does little but repeat itself.
    """
    begun, of = share
    own = range(begun, files.count, of)
    turns = Turns.of(files.target.tokenizer, files.settings.system)
    with artifact.in_turn(files.directory.with_name(f".{files.directory.name}.lock")):
        artifact.claim(files.directory, files.made_from)
    if files.missing(own):  # else another process may be adding to them
        with artifact.exclusive(files.directory / f".share-{begun}-of-{of}"):
            missing = files.missing(own)
            if missing:
                _check_room(files, len(missing))
                finished = (len(own) - len(missing)) * files.settings.shard_size
                _Writer(files, turns, missing, finished, progress).run()
    return files.missing(range(files.count))


def read(files: ChatFiles) -> tuple[list[Document], dict[str, Any]]:
    """(the chats of a data set that is whole, near-duplicates left out; their counts). Writes the provenance of the
    directory, unless that tells of more shards, which another run has asked for."""
    records, documents, duplicates = [], [], 0
    seen = text.NearDuplicates(files.settings.similar)
    for shard in range(files.count):
        record = files.record(shard)
        if record is None:
            raise DataError(f"{files.file(shard)}: missing; write it first with `specjax generate-data`")
        records.append(record)
        kept = files.file(shard) if record["kept"] else None
        for document in readers.read_json(kept, "self_chat", readers.BadRecordPolicy(), {}) if kept else ():
            said = "\n".join(message["content"] for message in document.messages if message["role"] != "system")
            if seen.has(files.target.tokenizer(said, add_special_tokens=False)["input_ids"]):
                duplicates += 1
            else:
                documents.append(document)
    dropped = collections.Counter[str]()
    for record in records:
        dropped.update(record["dropped"])
    dropped.update({text.SIMILAR: duplicates} if duplicates else {})
    totals = {name: sum(record[name] for record in records) for name in ("chats", "tokens", "seconds")}
    facts = {**totals, "kept": len(documents), "dropped": dict(sorted(dropped.items()))}
    _refuse_repetition(facts, files.directory)
    provenance = files.directory / artifact.PROVENANCE
    if not provenance.exists() or len(artifact.read_provenance(files.directory)["shards"]) <= len(records):
        artifact.write_provenance(files.directory, {**facts, "shards": records})
    return documents, facts


def _refuse_repetition(facts: dict[str, Any], where: Path) -> None:
    if facts["kept"] < _LEAST_KEPT * facts["chats"]:
        raise DataError(
            f"{where}: {text.summary(facts)}: the target does little but repeat itself or break off; raise "
            f"data.self_chat.question_temperature and answer_temperatures, or {text.OWN_TEXT}"
        )


def _check_room(files: ChatFiles, shards: int) -> None:
    size = shards * files.settings.shard_size * files.longest * _BYTES_A_TOKEN
    artifact.refuse_full_disk(files.directory, size, "the chats", "set data.self_chat.path to another disk")


@dataclasses.dataclass
class _Open:
    """A chat that is being written. ``asks``: True if its next message is a question."""

    number: int
    plan: Plan
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    tokens: int = 0

    @property
    def asks(self) -> bool:
        return len(self.messages) % 2 == 0

    @property
    def opening(self) -> str:
        return "" if self.messages else self.plan.opening


class _Writer:
    """Writes shards: all chats go through one queue of rows, and a shard is written when its last chat has ended.
    ``finished``: number of chats of this process's share that were there before."""

    def __init__(
        self, files: ChatFiles, turns: Turns, shards: Sequence[int], finished: int, progress: StepProgress | None
    ):
        self._files, self._turns, self._settings = files, turns, files.settings
        self._progress, self._tokenizer = progress, files.target.tokenizer
        self._special = text.special_ids(self._tokenizer)
        numbers = [number for shard in shards for number in files.numbers(shard)]
        self._waiting = collections.deque(_Open(n, text.plan_of(files.settings, n, files.seed)) for n in numbers)
        self._asked: list[_Open] = []  # by the number of the request
        self._left = {shard: len(files.numbers(shard)) for shard in shards}
        self._ended = collections.defaultdict[int, list[Chat]](list)
        self._counts, self._dropped = collections.Counter[str](), collections.Counter[str]()
        self._count, self._tokens, self._began = finished, 0, time.perf_counter()
        self._last = self._began

    def run(self) -> None:
        self._check_length()
        decoder, rows = Decoder(self._files.target), min(self._rows(), len(self._waiting))
        for number, result in decoder.generate_each(self._requests(), rows=rows, most_tokens=self._files.longest):
            check_finite(result, "no draft", f"target {self._files.target.name!r}")
            chat = self._asked[number]
            self._tokens += len(result.tokens[0])
            ended = self._heard(chat, result)
            if ended is None:
                self._waiting.appendleft(chat)
            else:
                self._end(ended)

    def _check_length(self) -> None:
        opened = max((self._turns.before_question([], o) for o in (*self._settings.openings, "")), key=len)
        least = len(opened) + self._settings.question_tokens + _LEAST_ANSWER
        if least > self._files.longest:
            raise DataError(
                f"data.seq_len: a chat of {self._files.longest} tokens has no room for an answer behind "
                f"{len(opened)} tokens of the template and {self._settings.question_tokens} of a question; set it to "
                f"{least + 1} or more, or lower data.self_chat.question_tokens"
            )

    def _rows(self) -> int:
        if self._settings.rows is not None:
            return self._settings.rows
        cache = jax.eval_shape(lambda: self._files.target.spec.init_cache(1, self._files.longest))
        return backend.queue_rows(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)))

    def _requests(self) -> Iterator[dict[str, Any] | None]:
        while any(self._left.values()):
            if not self._waiting:
                yield None
                continue
            chat = self._waiting.popleft()
            self._asked.append(chat)
            yield self._request(chat)

    def _request(self, chat: _Open) -> dict[str, Any]:
        asks, settings = chat.asks, self._settings
        turns = self._turns
        prompt = turns.before_question(chat.messages, chat.opening) if asks else turns.before_answer(chat.messages)
        room = self._files.longest - len(prompt)
        return {
            "prompt": prompt,
            "max_new_tokens": settings.question_tokens if asks else min(settings.answer_tokens, room),
            "seed": chat.plan.seeds[len(chat.messages)],
            "temperature": settings.question_temperature if asks else chat.plan.temperature,
            "stop_token_ids": turns.ends if asks else (),
        }

    def _heard(self, chat: _Open, result: GenerationResult) -> Chat | None:
        """The chat with its new message, if it ends there."""
        (tokens,), cut = result.tokens, result.finish_reasons[0] == "length"
        tokens = tokens if cut else tokens[:-1]
        said = self._tokenizer.decode(tokens)
        if chat.asks:
            if self._turns.closing and not self._turns.ends:
                # The target may go on with the template, and end its answer before this is looked for.
                said, closed, _ = said.partition(self._turns.closing)
                if closed:
                    cut, tokens = False, self._tokenizer(said, add_special_tokens=False)["input_ids"]
            said = (chat.opening + said).strip()
        message = {"role": "user" if chat.asks else "assistant", "content": said}
        fault = text.fault_of(said, tokens, self._special, self._settings)
        if chat.asks and fault is None and (cut or not self._leaves_room([*chat.messages, message])):
            fault = text.CUT
        chat.tokens += len(result.tokens[0])
        if fault is not None:
            whole = len(chat.messages) // 2 * 2
            return self._chat(chat, chat.messages[:whole], dropped=None if whole else fault)
        chat.messages.append(message)
        if not chat.asks:
            return None  # an answer comes
        goes_on = not cut and len(chat.messages) < 2 * chat.plan.turns and self._has_room(chat)
        return None if goes_on else self._chat(chat, chat.messages, cut)

    def _chat(
        self, chat: _Open, messages: Sequence[dict[str, str]], cut: bool = False, dropped: str | None = None
    ) -> Chat:
        first = [dict(message) for message in self._turns.first]
        return Chat(chat.number, (*first, *messages), chat.tokens, cut, dropped)

    def _leaves_room(self, messages: Sequence[dict[str, str]]) -> bool:
        """True if an answer has room behind these messages, whose text may have more tokens than the target wrote."""
        return len(self._turns.before_answer(messages)) < self._files.longest

    def _has_room(self, chat: _Open) -> bool:
        """True if the longest question and a short answer fit behind the chat."""
        wanted = self._settings.question_tokens + _LEAST_ANSWER
        return len(self._turns.before_question(chat.messages)) + wanted <= self._files.longest

    def _end(self, chat: Chat) -> None:
        shard = chat.number // self._settings.shard_size
        self._ended[shard].append(chat)
        self._left[shard] -= 1
        self._count += 1
        if self._progress is not None:
            self._progress(self._count, {"tokens_per_s": self._tokens / (time.perf_counter() - self._began)})
        if self._left[shard]:
            return
        chats, now = self._ended.pop(shard), time.perf_counter()
        facts = {**text.counts_of(chats), "seconds": round(now - self._last, 1)}
        self._last = now
        self._counts.update({name: facts[name] for name in ("chats", "kept")})
        self._dropped.update(facts["dropped"])
        if self._counts["chats"] >= _JUDGED:  # before more time goes into it
            _refuse_repetition({**facts, **self._counts, "dropped": self._dropped}, self._files.directory)
        made_from = {"made_from": fingerprint.of_json(self._files.made_from)}
        artifact.write(self._files.file(shard), text.to_bytes(chats), {**facts, **made_from})
        kept = next((found for found in chats if found.dropped is None), None)
        if kept is not None:
            said = kept.messages[len(self._turns.first) :]
            shown = "  ".join(f"{m['role']}: {_shortened(m['content'])}" for m in said[:2])
            note(f"{self._files.file(shard).name}: {text.summary(facts)}; one of them: {shown}")


def _shortened(said: str) -> str:
    said = " ".join(said.split())
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."
