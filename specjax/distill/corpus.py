"""Text in, documents out: local files, JSONL, Parquet or the running Python's standard library.

Held-out documents are chosen by the hash of their content, so that no run over the same text, on any machine, with any
seed, ever trains on them. (An edited file is another document: the standard library of another Python version holds
near copies of what the shipped target was trained on.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from specjax.errors import DataError

STDLIB = "python-stdlib"
# Generated tables and topic texts, and bundled wheels: no source to learn from.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data", "ensurepip"}
_LONGEST_PART = 16_384
_TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst", ".text"}


@dataclasses.dataclass(frozen=True)
class Document:
    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_documents(path: str) -> list[Document]:
    """Every document under ``path``: `python-stdlib`, a text file, a ``.jsonl`` or ``.parquet`` file with a ``text``
    column, or a directory of such files. Sorted by name; duplicates by content and empty documents are dropped. What a
    user brings is cut at line ends into parts of at most `_LONGEST_PART` characters, so that one long file can be split
    into text to train on and text to measure on.

    Raises `DataError` naming the file (and line) for anything missing, empty or not UTF-8.
    """
    if path == STDLIB:
        documents = _read_stdlib()
    else:
        root = Path(path).expanduser()
        if not root.exists():
            raise DataError(
                f"data.path: {path!r} does not exist; "
                f"give a text, .jsonl or .parquet file, a directory of them, or {STDLIB!r}"
            )
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.suffix in _READERS and f.is_file())
        if not files:
            raise DataError(f"data.path: {path!r} holds no file ending in {', '.join(sorted(_READERS))}")
        whole = (document for file in files for document in _READERS.get(file.suffix, _read_text)(file))
        documents = [part for document in whole for part in _parts(document)]
    unique = {d.digest: d for d in documents if d.text.strip()}
    if not unique:
        raise DataError(f"data.path: {path!r} holds no text (every document is empty)")
    return sorted(unique.values(), key=lambda d: d.name)


def _parts(document: Document) -> Iterator[Document]:
    if len(document.text) <= _LONGEST_PART:
        yield document
        return
    start, number = 0, 1
    while start < len(document.text):
        end = start + _LONGEST_PART
        if end < len(document.text):
            # After the last line end that fits; a longer line is cut where it must be.
            end = document.text.rfind("\n", start, end) + 1 or end
        yield Document(f"{document.name}:{number:06}", document.text[start:end])
        start, number = end, number + 1


def split_held_out(documents: Iterable[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(train, held out): held out is a document whose content hash, as a number in [0, 1), is below ``fraction``."""
    train, held_out = [], []
    for document in documents:
        (held_out if int(document.digest[:16], 16) / 2**64 < fraction else train).append(document)
    return train, held_out


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 over the sorted content hashes: names the exact set of texts."""
    return hashlib.sha256("".join(sorted(d.digest for d in documents)).encode()).hexdigest()


def _read_stdlib() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        if _STDLIB_SKIPPED.isdisjoint(relative.parts):
            # A handful of files declare another encoding; they are not worth a special case.
            raw = file.read_bytes()
            try:
                documents.append(Document(relative.as_posix(), raw.decode("utf-8")))
            except UnicodeDecodeError:
                continue
    if not documents:
        raise DataError(f"data.path: {STDLIB!r} found no source files under {root}; give a path instead")
    return documents


def _read_text(file: Path) -> Iterator[Document]:
    try:
        yield Document(file.as_posix(), file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); "
            "convert it, for example with iconv"
        ) from None


def _read_jsonl(file: Path) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise DataError(f"{file}, line {number}: not a JSON object in UTF-8 ({error})") from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise DataError(f"{file}, line {number}: no string under the key 'text'")
            try:
                record["text"].encode("utf-8")
            except UnicodeEncodeError:
                raise DataError(f"{file}, line {number}: 'text' holds half of a surrogate pair; drop it") from None
            yield Document(f"{file.as_posix()}:{number}", record["text"])


def _read_parquet(file: Path) -> Iterator[Document]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs pyarrow; pip install 'specjax[parquet]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a Parquet file ({str(error).splitlines()[0]})") from None
    if "text" not in table.schema_arrow.names:
        raise DataError(f"{file}: no column 'text' (columns: {', '.join(table.schema_arrow.names)})")
    kind = table.schema_arrow.field("text").type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{file}: the column 'text' holds {kind}, expected strings")
    row = 0
    for batch in table.iter_batches(columns=["text"]):
        for text in batch.column(0).to_pylist():
            row += 1
            yield Document(f"{file.as_posix()}:{row}", text or "")


_READERS = {**dict.fromkeys(_TEXT_SUFFIXES, _read_text), ".jsonl": _read_jsonl, ".parquet": _read_parquet}
