"""Chats in which a model writes both sides (2406.08464), as far as they are text: where its chat template is cut, what
is dropped, and the records of those that are kept."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.config.self_chat import SelfChat
from specjax.data import chat_template as chat
from specjax.errors import DataError

EMPTY, CUT, REPEATED, MARKED, SIMILAR = "empty", "cut", "repeated", "with special tokens", "near-duplicates"
"""Reasons for which a chat is dropped."""
_USER = "\ue000"
_RUN = 8
"""Number of tokens of a run that is looked for elsewhere."""
_KEPT_RUNS = 4
"""One of so many runs of a chat is remembered, by its hash, and at least one."""
Message = Mapping[str, str]
OWN_TEXT = "distill on text of your own with `specjax train` (data.kind=text, data.path)"


@dataclasses.dataclass(frozen=True)
class Turns:
    """The places of a chat template at which a model goes on by itself. ``ends``: ids of tokens that end a user's
    words; ``closing``: first line of the text with which a template without such a token goes on; ``first``: messages
    with which every chat begins."""

    tokenizer: Any
    ends: tuple[int, ...]
    closing: str
    first: tuple[Message, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, system: str | None = None) -> Turns:
        """The places in the template of ``tokenizer``, in chats with a message ``system`` if there is one. Raises
        `DataError` without a template, or for one that writes no user's words or refuses these messages."""
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(f"data.kind=self_chat: the target has no chat template; use a chat model, or {OWN_TEXT}")
        first = () if system is None else ({"role": "system", "content": system},)
        _, behind = _around(tokenizer, first)
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        closing = next(iter(behind.strip().splitlines()), "")
        return cls(tokenizer, tuple(ids[:1]) if ids and ids[0] in special_ids(tokenizer) else (), closing, first)

    def before_question(self, messages: Sequence[Message], opening: str = "") -> list[int]:
        """Token ids of a chat up to where the next question begins, with the ``opening`` of that question."""
        before, _ = _around(self.tokenizer, [*self.first, *messages])
        # A space behind the mark of a turn is the first character of the next token.
        text = before + opening if opening else before.rstrip(" ")
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def before_answer(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat up to where the next answer begins."""
        return chat.render(self.tokenizer, [*self.first, *messages], tokenize=True)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of all tokens that are marked as special; libraries list those alone that have a name, as bos and eos."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def _around(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, str]:
    """The template's text before and behind the words of a user who speaks after ``messages``."""
    try:
        asked = chat.render(tokenizer, [*messages, {"role": "user", "content": _USER}], tokenize=False)
    except Exception as error:  # a template is a program: it may raise anything, and so may Jinja
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        system = any(message["role"] == "system" for message in messages)
        remedy = "leave data.self_chat.system out, or mend it" if system else "mend it"
        raise DataError(f"data.kind=self_chat: the target's chat template fails ({reason}); {remedy}") from None
    before, found, behind = asked.rpartition(_USER)
    if not found:
        raise DataError(
            "data.kind=self_chat: the target's chat template does not write what a user says, so there is no place for "
            f"a question; mend the template, or {OWN_TEXT}"
        )
    return before, behind


@dataclasses.dataclass(frozen=True)
class Plan:
    """Random choices of a chat, made before it is written. ``opening``: first words of its first question."""

    opening: str
    temperature: float
    turns: int
    seeds: tuple[int, ...]


def plan_of(settings: SelfChat, number: int, seed: int) -> Plan:
    """The choices of chat ``number``, a function of the settings and the seed alone."""
    random = np.random.default_rng([seed, number])
    opens = settings.openings and random.random() < settings.opened
    opening = settings.openings[random.integers(len(settings.openings))] if opens else ""
    temperature = settings.answer_temperatures[random.integers(len(settings.answer_temperatures))]
    turns = 1
    while turns < settings.turns and random.random() < settings.another_turn:
        turns += 1
    seeds = tuple(random.integers(2**63, size=2 * turns).tolist())
    return Plan(opening, temperature, turns, seeds)


def share_repeated(tokens: Sequence[int]) -> float:
    """Share of a text's runs of tokens that stand in it before; runs are as in near-duplicates, shorter in a short
    text."""
    runs = [*_runs(tokens, min(_RUN, max(1, len(tokens) // 4)))]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _runs(tokens: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(length)), strict=False)


def fault_of(text: str, tokens: Sequence[int], special: Collection[int], settings: SelfChat) -> str | None:
    """Reason for which a message is dropped, None if there is none. ``tokens``: without the one that ends the turn."""
    if not text.strip():
        return EMPTY
    if not set(special).isdisjoint(tokens):
        return MARKED
    return REPEATED if share_repeated(tokens) > settings.repeated else None


class NearDuplicates:
    """Finds chats most of whose runs of tokens stand in earlier ones. ``most``: the largest share that may."""

    def __init__(self, most: float):
        self._most, self._seen = most, set[int]()

    def has(self, tokens: Sequence[int]) -> bool:
        """True if a chat is close to earlier ones; otherwise it is remembered."""
        # A chat shorter than a run is compared as a whole.
        hashes = {hash(run) for run in _runs(tokens, _RUN)} or {hash(tuple(tokens))}
        kept = {found for found in hashes if found % _KEPT_RUNS == 0} or {min(hashes)}
        if len(kept & self._seen) > self._most * len(kept):
            return True
        self._seen |= kept
        return False


@dataclasses.dataclass(frozen=True)
class Chat:
    """A finished chat. ``cut``: True if its last answer has no end. ``dropped``: reason for which it is dropped."""

    number: int
    messages: tuple[dict[str, str], ...]
    tokens: int
    cut: bool = False
    dropped: str | None = None

    def record(self) -> dict[str, Any]:
        """The line of a JSONL file."""
        return {"messages": self.messages, "number": self.number, **({"cut": True} if self.cut else {})}


def counts_of(chats: Sequence[Chat]) -> dict[str, Any]:
    """Number of chats that are kept and dropped, by reason, and of tokens that were written."""
    dropped = collections.Counter(found.dropped for found in chats if found.dropped is not None)
    kept = sum(found.dropped is None for found in chats)
    tokens = sum(found.tokens for found in chats)
    return {"chats": len(chats), "kept": kept, "dropped": dict(sorted(dropped.items())), "tokens": tokens}


def summary(facts: Mapping[str, Any]) -> str:
    """Counts of a data set, or of a shard, in words."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in facts["dropped"].items())
    return (
        f"{facts['kept']:,} of {facts['chats']:,} chats kept ({dropped or 'none'} dropped), {facts['tokens']:,} tokens"
    )


def to_bytes(chats: Sequence[Chat]) -> bytes:
    """JSON lines of the chats that are kept, in the order of their numbers."""
    kept = sorted((found for found in chats if found.dropped is None), key=lambda found: found.number)
    return "".join(json.dumps(found.record(), ensure_ascii=False) + "\n" for found in kept).encode()
