"""Text from token ids, whole or as the tokens come; the parts join to the whole.

The text of the first tokens is not always a prefix of the whole text: a character may be split over tokens, a run of
byte-fallback tokens is UTF-8 or a row of U+FFFD as a whole, and the first token of a row may lose its space. So the
text that tokens add is read after some tokens of context, and is held back while later tokens can change it. The work
is linear in the number of tokens. For decoders that rewrite text across tokens, all text waits for the end of the row.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from specjax.decode.stops import Search

_INCOMPLETE = "\ufffd"
_UTF8 = 4
"""Bytes of the longest character: a token to come changes no text from more than so many tokens back."""
_MOST_READINGS = 128
_BY_TOKEN = {"ByteFallback", "ByteLevel", "BPEDecoder", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
_BY_CHARACTER = {"Fuse", "Metaspace", "Strip"}
"""Steps of a decoder that treat each token (first set) or each character (second set) by itself, except at the two ends
of a row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Detokenizer:
    """Token ids to text, as ``tokenizer`` writes it, without special tokens where asked for."""

    tokenizer: Any
    skip_special_tokens: bool = True

    def __call__(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(tokens), skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def shares(self, tokens: Iterable[int]) -> list[str]:
        """Text that each of ``tokens`` adds to the whole; a split character comes with the token that completes it."""
        shares = Shares(self)
        return [*(share for token in tokens for share in shares.push(token)), *shares.finish()]

    @functools.cached_property
    def left_out(self) -> frozenset[int]:
        """Ids without text, chosen as the libraries choose: every special token of a fast tokenizer, the named special
        tokens of others."""
        if not self.skip_special_tokens:
            return frozenset()
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return frozenset(getattr(self.tokenizer, "all_special_ids", ()))
        return frozenset(id_ for id_, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @functools.cached_property
    def hidden(self) -> dict[int, str]:
        """Text of each token that is left out, as it would be written."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        plainly = dataclasses.replace(self, skip_special_tokens=False)
        return {token: added[token].content if token in added else plainly([token]) for token in self.left_out}

    @functools.cached_property
    def byte_of(self) -> dict[int, int]:
        """Id -> byte, for tokens that stand for one byte (`<0xE2>`)."""
        if not hasattr(self.tokenizer, "convert_tokens_to_ids"):
            return {}
        if self._steps is not None and not any(step["type"] == "ByteFallback" for step in self._steps):
            return {}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self.tokenizer.convert_tokens_to_ids(names)
        known = {id_: byte for byte, id_ in enumerate(ids) if id_ is not None}
        # An unknown name has the id of another token.
        return {id_: byte for id_, byte in known.items() if self.tokenizer.convert_ids_to_tokens(id_) == names[byte]}

    @functools.cached_property
    def is_local(self) -> bool:
        """True if a token's text, once complete, never changes; assumed of unknown decoders."""
        fused = False
        for step in self._steps or ():
            kind, pattern = step["type"], step.get("pattern", {}).get("String", "")
            if kind not in (_BY_CHARACTER if fused else _BY_TOKEN) and not (kind == "Replace" and len(pattern) == 1):
                return False
            fused |= kind in ("Fuse", "ByteLevel")
        return True

    @functools.cached_property
    def _steps(self) -> list[dict[str, Any]] | None:
        """The steps of the tokenizer's decoder, flat; None for a tokenizer that does not run on the tokenizers
        library."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        return [] if backend.decoder is None else list(_flat(json.loads(backend.decoder.__getstate__())))


def _flat(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _flat(part)


class Shares:
    """Shares of a row's tokens, in order: the text that each one adds, as soon as no later token can change it."""

    def __init__(self, detokenize: Detokenizer):
        self._detokenize = detokenize
        self._context: list[int] = []
        self._context_text = ""
        self._silent: list[int] = []
        """Tokens after the context that have no text yet; a token that follows may give them some."""
        self._waiting: list[int] = []
        """Tokens whose share is not settled; the first of them has text, or is a byte."""
        self._are_bytes = False
        self._texts: list[str] = []
        """Text after the context up to each waiting token; none for bytes."""

    def push(self, token: int) -> list[str]:
        """Shares that ``token`` settles, from the first unsettled one on."""
        d = self._detokenize
        if not d.is_local:
            self._waiting.append(token)
            return []
        if token in d.left_out:
            if not self._waiting:
                return [""]
            self._waiting.append(token)
            self._texts += self._texts[-1:]
            return []
        is_byte = token in d.byte_of
        settled = self._settle_all() if is_byte != self._are_bytes else []
        self._are_bytes = is_byte
        self._waiting.append(token)
        if is_byte:
            return settled
        self._texts.append(self._text(self._waiting) if self._shows(self._waiting) else "")
        if not self._texts[-1].endswith(_INCOMPLETE):
            return settled + self._settle_all()
        return settled + self._settle_part()

    def finish(self) -> list[str]:
        """The unsettled shares; no token follows. If the decoder is not local, a long row is read in some hundred
        steps, and the last token of each step gets its text: token by token would be quadratic."""
        if not self._detokenize.is_local:
            count = len(self._waiting)
            stride = max(1, count // _MOST_READINGS)
            for i in range(count):
                reads = (i + 1) % stride == 0 or i + 1 == count
                before = self._texts[-1] if self._texts else ""
                self._texts.append(self._text(self._waiting[: i + 1]) if reads else before)
        return self._settle_all()

    def _settle_all(self) -> list[str]:
        if not self._waiting:
            return []
        return self._settle_bytes() if self._are_bytes else self._settle(len(self._waiting))

    def _settle(self, count: int) -> list[str]:
        """Shares of the first ``count`` waiting tokens, by what their texts have in common with the text of all of
        them. If they end within a character, that character is left to the token that completes it."""
        text, shares, done = self._texts[count - 1], [], 0
        begun = not self._texts[-1].startswith(text)
        text = text[:-1] if begun else text
        for some in self._texts[:count]:
            end = max(done, _agreeing(some, text))
            shares.append(text[done:end])
            done = end
        self._texts = [some.removeprefix(text) for some in self._texts[count:]]
        self._go_on_after(count, bool(text), begun)
        return shares

    def _settle_part(self) -> list[str]:
        """Settle all waiting tokens but the last few, which may begin a character, once more of them wait than a
        character has bytes."""
        visible = [i for i, token in enumerate(self._waiting) if token not in self._detokenize.left_out]
        if len(visible) < 2 * _UTF8:
            return []
        count = visible[-_UTF8]
        text = self._texts[count - 1]
        decided = text[:-1] if text.endswith(_INCOMPLETE) else text
        return self._settle(count) if self._texts[-1].startswith(decided) else []

    def _settle_bytes(self) -> list[str]:
        d = self._detokenize
        values = [d.byte_of[token] for token in self._waiting if token not in d.left_out]
        text = self._text(self._waiting)
        of_bytes = iter(_shares_of_bytes(text, values))
        shares = ["" if token in d.left_out else next(of_bytes) for token in self._waiting]
        self._go_on_after(len(self._waiting), bool(text))
        return shares

    def _text(self, tokens: list[int]) -> str:
        return self._detokenize(self._context + self._silent + tokens)[len(self._context_text) :]

    def _shows(self, tokens: list[int]) -> bool:
        """True if ``tokens`` add any text; after many silent tokens, only the last of these are read before them."""
        if len(self._silent) < 2 * _UTF8:
            return True
        few = self._context + self._silent[-_UTF8:] + tokens
        return len(self._detokenize(few)) > len(self._context_text)

    def _go_on_after(self, count: int, shown: bool, begun: bool = False) -> None:
        """Make the tokens settled last the context. It must have text, since the first token of a row may be written
        otherwise. ``shown``: they have text. ``begun``: they end in a character that is not complete, which their text
        leaves out."""
        tokens, self._waiting = self._waiting[:count], self._waiting[count:]
        if not shown:
            self._silent += tokens
            return
        before, text = self._context + self._silent, self._detokenize(tokens)
        size = len(tokens)
        while not text and size < len(before) + len(tokens):
            size *= 2
            text = self._detokenize((before + tokens)[-size:])
        self._context, self._context_text, self._silent = (before + tokens)[-size:], text[:-1] if begun else text, []


@functools.lru_cache(maxsize=1)
def _agreeing(a: str, b: str) -> int:
    """Number of leading characters that are equal."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _shares_of_bytes(text: str, values: list[int]) -> list[str]:
    """Share of each byte in ``text``."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shares = [decoder.decode(bytes([value])) for value in values]
    if "".join(shares) == text:
        return shares
    return list(text) if len(text) == len(values) else [*[""] * (len(values) - 1), text]


@dataclasses.dataclass(frozen=True)
class Cut:
    """End of a row at a stop string: after ``tokens`` tokens, of whose text the first ``length`` characters are
    left."""

    tokens: int
    length: int


class RowText:
    """The text of a row as its tokens come, with the stop strings found and the part that can be handed out."""

    def __init__(self, detokenize: Detokenizer, stops: Sequence[str] = ()):
        self.cut: Cut | None = None
        """Cut after the first token with which the text contains a stop string; None while there is none."""
        self.fed = 0
        """Number of tokens fed."""
        self._stops, self._writer = stops, Shares(detokenize)
        self._hidden = detokenize.hidden if stops else {}
        written = [stop for stop in stops if any(text in stop for text in self._hidden.values() if text)]
        self._searches = Search([stop for stop in stops if stop not in written]), Search(written)
        """One search in the text, one in the text with all special tokens written."""
        self._ids: list[int] = []
        self._shares: list[str] = []
        self._length, self._last = 0, False
        self._sent_shares, self._sent_of_share, self._sent = 0, 0, 0

    def feed(self, tokens: Sequence[int], last: bool) -> None:
        """Feed the next tokens. ``last``: none will follow."""
        self._ids += tokens
        for token in tokens:
            self._settle(self._writer.push(token))
        self.fed += len(tokens)
        if last and not self._last:
            self._last = True
            self._settle(self._writer.finish())

    def _settle(self, shares: Sequence[str]) -> None:
        for share in shares:
            if self.cut is not None:
                return
            hidden = self._hidden.get(self._ids[len(self._shares)], "")
            self._shares.append(share)
            self._length += len(share)
            text, written = self._searches
            found = text.push(share, ""), written.push(share, hidden)
            behind = max((count for count in found if count is not None), default=None)
            if behind is not None:
                self.cut = Cut(len(self._shares), self._length - behind)

    @property
    def text(self) -> str:
        """The settled text, up to a stop string."""
        return "".join(self._shares)[: None if self.cut is None else self.cut.length]

    @property
    def tokens(self) -> int:
        """Number of tokens that can be handed out; with stop strings, only those whose text was searched."""
        if self.cut is not None:
            return self.cut.tokens
        return len(self._shares) if self._stops and not self._last else self.fed

    def release(self) -> tuple[int, list[str]]:
        """The text that can be handed out and was not yet: (index of the token that it begins with, a share for each
        token from there). Text that may begin a stop string is held back."""
        limit = self._length - (0 if self._last else max(search.undecided for search in self._searches))
        limit = limit if self.cut is None else self.cut.length
        first, shares = self._sent_shares, []
        while self._sent_shares < len(self._shares):
            whole = self._shares[self._sent_shares][self._sent_of_share :]
            share = whole[: max(limit - self._sent, 0)]
            shares.append(share)
            self._sent += len(share)
            if len(share) < len(whole):
                self._sent_of_share += len(share)
                break
            self._sent_shares, self._sent_of_share = self._sent_shares + 1, 0
        return first, shares
