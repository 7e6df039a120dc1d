"""Documents read from local files, JSONL, Parquet, a data set of the hub or the running Python's standard library.

Held-out documents are chosen by the hash of their content, so that no run over the same text, on any machine, with any
seed, ever trains on them. A long document is on one side with all of its pieces, a prompt with all of its answers. (An
edited file is another document: the standard library of another Python version holds near copies of what the shipped
target was trained on.)
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.data import chat_template as chat
from specjax.data import chats, readers
from specjax.data.document import Document, Part
from specjax.data.readers import STDLIB, BadRecordPolicy, Hub
from specjax.errors import DataError

__all__ = [
    "STDLIB",
    "BadRecordPolicy",
    "Document",
    "Hub",
    "Part",
    "corpus_digest",
    "read_documents",
    "rendered",
    "split_held_out",
]
_LONGEST_PIECE = 16_384
_MUCH = 0.05
"""Share of a text by which the held-out part may exceed its fraction: hashes of many documents stay within it."""
_NO_TEXT = "\ue000"
_log = logging.getLogger(__name__)


def read_documents(
    path: str, bad: BadRecordPolicy | None = None, hub: Hub | None = None, columns: Mapping[str, str] | None = None
) -> list[Document]:
    """Every document under ``path``: `python-stdlib`, a text file, a ``.jsonl`` or ``.parquet`` file, a directory of
    such files, or ``hf:NAME`` (``hub`` names the part of it). Records are described in `specjax.data.readers`;
    ``columns``: their keys that have another name.

    Documents are sorted by name; duplicates by content and empty ones are dropped. A user's plain text is cut at line
    ends into pieces of at most `_LONGEST_PIECE` characters (`Document.cut_from`). A document's source is the one that
    its record names, else the subdirectory of ``path`` that it is in, else the name of ``path``.

    Raises `DataError` naming the file (and line) for anything missing, malformed, empty or not UTF-8. A ``bad`` that
    skips counts faults inside ``path`` instead.
    """
    bad, columns = BadRecordPolicy() if bad is None else bad, columns or {}
    if path == STDLIB:
        documents = readers.read_stdlib()
    elif path.startswith(readers.HUB):
        found = readers.read_hub(path, hub or Hub(), bad, columns)
        documents = [piece for document in found for piece in _pieces(document)]
    else:
        documents = [piece for document in _read_files(path, bad, columns) for piece in _pieces(document)]
    unique = {d.digest: d for d in documents if d.text.strip()}
    if not unique:
        skipped = f"; {bad}" if bad.counts else ""
        raise DataError(f"data.path: {path!r} holds no text (every document is empty){skipped}")
    return sorted(unique.values(), key=lambda d: d.name)


def _read_files(path: str, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Iterator[Document]:
    root = Path(path).expanduser()
    if not root.exists():
        raise DataError(
            f"data.path: {path!r} does not exist; "
            f"give a text, .jsonl or .parquet file, a directory of them, {STDLIB!r} or {readers.HUB}NAME"
        )
    files, passed = ([root], []) if root.is_file() else readers.files_of(root, bad)
    if passed:
        some = ", ".join(str(file.relative_to(root)) for file in passed[:3]) + ", ..." * (len(passed) > 3)
        _log.warning("data.path: %r: %d files are no documents and not read: %s", path, len(passed), some)
    if not files:
        raise DataError(f"data.path: {path!r} holds no file ending in {', '.join(sorted(readers.READERS))}")
    for file in files:
        inside = file.relative_to(root).parts
        source = inside[0] if len(inside) > 1 else root.resolve().stem
        yield from readers.reader_of(file)(file, source, bad, columns)


def _pieces(document: Document) -> Iterator[Document]:
    if len(document.text) <= _LONGEST_PIECE or document.parts or document.messages:
        yield document
        return
    start, number, whole = 0, 1, document.digest
    while start < len(document.text):
        end = start + _LONGEST_PIECE
        if end < len(document.text):
            # Cut after the last line end that fits; a longer line is cut where it must be.
            end = document.text.rfind("\n", start, end) + 1 or end
        name, text = f"{document.name}:{number:06}", document.text[start:end]
        yield dataclasses.replace(document, name=name, text=text, cut_from=whole)
        start, number = end, number + 1


def split_held_out(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(train, held out) documents. A document is held out, with all of its pieces, if its content hash, as a number in
    [0, 1), is below ``fraction``; if none is, the shortest is. All answers to a prompt go by the hash of the prompt. If
    there is only one document, its last pieces are held out, with a warning: they are close to the training text. If
    there is only one prompt, its last answers are, likewise. Another warning tells if few documents make the held-out
    share of the characters far from ``fraction``."""
    of = [document.group for document in documents]
    whole = sorted(set(of))
    if len(whole) == 1 and len(documents) > 1:
        pieces = bool(documents[0].cut_from)
        only = documents[0].name.rpartition(":")[0] if pieces else "the prompt of all documents"
        what = "the only document: its end is" if pieces else "the same: the last answers to it are"
        _log.warning("%s is %s held out, and close to what is trained on", only, what)
        kept = min(len(documents) - 1, max(1, round(fraction * len(documents))))
        return [*documents[:-kept]], [*documents[-kept:]]
    chosen = {digest for digest in whole if int(digest[:16], 16) / 2**64 < fraction}
    sizes = dict.fromkeys(whole, 0)
    for document, digest in zip(documents, of, strict=True):
        sizes[digest] += len(document.text)
    by_hash = bool(chosen)
    if not by_hash and len(whole) > 1:
        chosen = {min(whole, key=lambda digest: (sizes[digest], digest))}
    share = sum(sizes[digest] for digest in chosen) / max(1, sum(sizes.values()))
    too_little = chosen and not by_hash and share < fraction / 2
    if too_little or share > max(2 * fraction, fraction + _MUCH):
        _log.warning(
            "%.3g%% of the text is held out, where data.held_out asks for %.3g%%: a document is held out whole, and "
            "these are few or of very different lengths; give more, of similar lengths",
            *(100 * share, 100 * fraction),
        )
    sides: tuple[list[Document], list[Document]] = [], []
    for document, digest in zip(documents, of, strict=True):
        sides[digest in chosen].append(document)
    return sides


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 over the sorted content hashes: names the exact set of texts."""
    return hashlib.sha256("".join(sorted(d.digest for d in documents)).encode()).hexdigest()


def rendered(
    documents: Iterable[Document],
    tokenizer: Any,
    bad: BadRecordPolicy | None = None,
    today: datetime.date | None = None,
    ends: Collection[str] = (),
) -> list[Document]:
    """The documents, with every chat as the tokenizer's chat template writes it. Each answer of the assistant is
    predicted after the chat so far as the template writes it, up to the token that ends its turn, one of ``ends``, or,
    without one, to where the next message begins. (Nobody generates the template's text behind that token.) If the
    template writes earlier turns differently than when they were the last (without their reasoning, say), the chat
    becomes several documents. If it opens a thought for an answer to come and none for an answer that is there, the
    answer is predicted after the part that both share (`Document.asks`). ``today``: date for templates that print it.

    Raises `DataError` if there are chats and no template; a chat that the template does not take goes to ``bad``.
    """
    bad, found = BadRecordPolicy() if bad is None else bad, []
    for document in documents:
        if not document.messages:
            found.append(document)
            continue
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{document.name}: 'messages' need a chat template, and the target's tokenizer has none; use a chat "
                "model as the target, or give 'prompt' and 'completion'"
            )
        try:
            turns = _turns(document, tokenizer, today, ends)
        except Exception as error:  # a template is a program: it may raise anything, and so may Jinja
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            bad.found("chats", f"{document.name}: the chat template does not take its messages ({reason}); mend them")
            continue
        for number, (parts, asks) in enumerate(turns, 1):
            name = document.name if len(turns) == 1 else f"{document.name}:{number}"
            text = "".join(part.text for part in parts)
            found.append(dataclasses.replace(document, name=name, text=text, parts=parts, asks=asks))
    return found


def _turns(
    document: Document, tokenizer: Any, today: datetime.date | None, ends: Collection[str]
) -> list[tuple[tuple[Part, ...], str]]:
    """Pairs (parts, `Document.asks`): one for the document, or for each of several that it becomes."""
    messages = chats.for_template(document.messages, document.tools, chat.source(tokenizer, document.tools))

    def render_all(messages: Sequence[Mapping[str, Any]], asks: bool) -> str:
        return chat.render(tokenizer, messages, document.tools, tokenize=False, asks=asks, today=today)

    def render(count: int, asks: bool) -> str:
        return render_all(messages[:count], asks)

    documents: list[tuple[tuple[Part, ...], str]] = []
    written: str | None = None
    after = ""
    for i, message in enumerate(document.messages):
        if message["role"] != "assistant":
            continue
        before, after, asks = render(i, True), render(i + 1, False), ""
        if not after.startswith(before):
            # Compare with an answer that has no character in common with a thought.
            other = [*messages[:i], {**messages[i], "content": _NO_TEXT}]
            before, asks = _parted(before, render_all(other, False))
            if not before.startswith(render(i, False)) or not after.startswith(before):
                raise ValueError(f"what precedes message {i + 1} changes when the message is there")
        closed = max((after.rfind(end) + len(end) for end in ends if end in after), default=0)
        answered = Part(after[len(before) : closed if closed > len(before) else None], not chats.counts(message))
        if written is not None and before.startswith(written) and asks == documents[-1][1]:
            documents[-1] = ((*documents[-1][0], Part(before[len(written) :], True), answered), asks)
        else:
            documents.append(((Part(before, True), answered), asks))
        written = before + answered.text
    if documents and document.cut:
        documents[-1] = _broken_off(*documents[-1], document.messages[-1])
    elif written is not None and after.startswith(written) and len(after) > len(written):
        parts, asks = documents[-1]
        documents[-1] = ((*parts, Part(after[len(written) :], True)), asks)
    return [(parts, asks) for parts, asks in documents if not all(part.is_prompt for part in parts)]


def _broken_off(parts: tuple[Part, ...], asks: str, answer: Mapping[str, Any]) -> tuple[tuple[Part, ...], str]:
    """The parts without what the template writes behind the words of the last ``answer``, which breaks off."""
    *before, last = parts
    at = last.text.rfind(answer["content"].strip())
    end = at + len(answer["content"].strip())
    return (*before, dataclasses.replace(last, text=last.text[: end if at >= 0 else None])), asks


def _parted(text: str, other: str) -> tuple[str, str]:
    """``text`` up to where it differs from ``other``, and the rest of it."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
    return text[:same], text[same:]
