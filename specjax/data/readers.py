"""Documents read from the records of files: text, JSONL, Parquet and data sets of the Hugging Face hub.

A record is a mapping with ``text``; or ``prompt`` and ``completion``, of text or of messages; or a chat: ``messages``,
ShareGPT's ``conversations`` (from, value), or Alpaca's ``instruction``, ``input`` and ``output``
(specjax.data.chats). ``source``, a string, labels its origin; ``cut: true`` says that a chat's last answer breaks off.
``columns`` maps these keys to a record's own names. Without it, a record with two of these shapes is refused, and so is
one with a field that changes the meaning of its prompt and is not read.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from specjax.config import Hub
from specjax.data import chats
from specjax.data.document import Document, Part
from specjax.errors import DataError

STDLIB, HUB = "python-stdlib", "hf:"
# Generated tables and topic texts, and bundled wheels: no source to learn from.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data", "ensurepip"}
_SHAPES = (("messages",), ("prompt", "completion"), ("text",), ("conversations",), ("instruction", "output"))
_OF_CHATS = ("system", "tools")
_BESIDE = {
    "messages": _OF_CHATS,
    "conversations": _OF_CHATS,
    "instruction": (*_OF_CHATS, "input", "history"),
    "prompt": (),
    "text": (),
}
"""First key of a shape -> other keys of a record that are read beside it. The label `source` is read, too."""
_SEEN = ("images", "image", "videos", "video", "audios", "audio")
_PROMPTING = ("system", "tools", "history", "functions", "documents", "context", "chat_template_kwargs")
"""Keys that change a prompt: a record is refused if one that is not read holds anything. (A text has no prompt, only
pictures.)"""
_NOTHING = (None, "", [], {}, "[]", "{}", "null")
_NESTED = ("messages", "conversations", "tools", "history", "prompt", "completion", *_SEEN, *_PROMPTING)
_WANTED = (
    "give 'text', or 'prompt' and 'completion', or 'messages', or say which columns are that: "
    "data.columns={prompt: question, completion: answer}"
)

_UNFINISHED = "an unfinished download, or a file to remove"


class BadRecordPolicy:
    """Handling of records that cannot be used: an error, or a skip that is counted. ``counts``: reason -> number of
    records skipped; ``first``: reason -> the first of them."""

    def __init__(self, on_bad: Literal["error", "skip"] = "error"):
        self._skips = on_bad == "skip"
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def found(self, reason: str, what: str) -> None:
        """Handle a record. ``what``: place, value, remedy. Raises `DataError` with it unless records are skipped."""
        if not self._skips:
            raise DataError(f"{what}; or set data.on_bad=skip to go on without it")
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, what)

    def __str__(self) -> str:
        return "; ".join(f"{n:,} skipped, {reason} (first: {self.first[reason]})" for reason, n in self.counts.items())


def parse(record: Any, name: str, source: str, where: str, columns: Mapping[str, str] | None = None) -> Document:
    """A record as a document. Raises `DataError` with ``where`` and the reason."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: no string under the key 'text'; {_WANTED}")
    shape = _shape_of(record, columns or {}, where)
    record = _renamed(record, columns or {}, where)
    label = record.get("source")
    source = label if isinstance(label, str) and label else source
    if shape[0] in ("messages", "conversations", "instruction") or isinstance(record.get("prompt"), list):
        try:
            messages, tools = chats.of_record(record, shape[0])
        except ValueError as error:
            raise DataError(f"{where}{error}") from None
        text = json.dumps([*messages, {"tools": tools}] if tools else messages, sort_keys=True, ensure_ascii=False)
        return Document(name, text, source, messages=messages, tools=tools, cut=record.get("cut") is True)
    texts = [_string(record, key, where) for key in shape]
    if len(texts) == 1:
        return Document(name, texts[0], source)
    if not texts[1]:
        raise DataError(f"{where}: 'completion' is empty, so there is nothing to predict; drop the record")
    parts = tuple(part for part in (Part(texts[0], True), Part(texts[1], False)) if part.text)
    return Document(name, "".join(texts), source, parts)


def _shape_of(record: Mapping[str, Any], columns: Mapping[str, str], where: str) -> tuple[str, ...]:
    """The keys of the record's shape. Raises `DataError` if it has two shapes, or a field that changes its prompt and
    is not read."""
    names = columns or [key for key, value in record.items() if value is not None]
    one_shape(names, f"{where}: the record")
    shape = next((shape for shape in _SHAPES if any(key in names for key in shape)), ("text",))
    if not columns:
        found = unread(record, shape[0])
        if found is not None:
            these = ", ".join(f"{key}: {key}" for key in shape)
            raise DataError(
                f"{where}: {found!r} changes what a prompt means, and is not read beside {shape[0]!r}; drop the "
                f"record, or say which columns count alone: data.columns={{{these}}}"
            )
    return shape


def unread(record: Mapping[str, Any], key: str) -> str | None:
    """The first field of a record that changes its prompt and is not read beside ``key``, the first key of its shape;
    None if there is none."""
    is_chat = isinstance(record.get(key), list) and key == "prompt"
    read = _OF_CHATS if is_chat else _BESIDE[key]
    others = _SEEN if key == "text" else (*_SEEN, *_PROMPTING)
    return next((name for name in others if name not in read and record.get(name) not in _NOTHING), None)


def one_shape(names: Collection[str], what: str) -> None:
    """Raises `DataError` if the keys make a record of more than one shape: none of them has precedence."""
    whole = [shape for shape in _SHAPES if all(key in names for key in shape)]
    if whole == [("text",)]:
        # Beside a key of another shape `text` may be an answer, or a piece of one.
        whole += [(key,) for shape in _SHAPES for key in shape if key in names and key != "text"][:1]
    if len(whole) > 1:
        told = " and ".join("+".join(map(repr, shape)) for shape in whole)
        these = ", ".join(f"{key}: {key}" for key in whole[0])
        raise DataError(f"{what} has {told}, which may be different texts; say which: data.columns={{{these}}}")


def _renamed(record: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Mapping[str, Any]:
    """The record with our keys in place of the user's. Fields that are not named are dropped, except the label."""
    if not columns:
        return record
    missing = next((column for column in columns.values() if column not in record), None)
    if missing is not None:
        raise DataError(f"{where}: no {missing!r}, which data.columns names (it has {', '.join(map(str, record))})")
    return {"source": record.get("source"), **{ours: record[theirs] for ours, theirs in columns.items()}}


def _string(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: no string under the key {key!r}; {_WANTED}")
    return chats.encodable(value, f"{where}: {key!r}")


def read_stdlib() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in root.rglob("*.py"):
        relative = file.relative_to(root)
        if _STDLIB_SKIPPED.isdisjoint(relative.parts):
            # A handful of files declare another encoding; they are not worth a special case.
            raw = file.read_bytes()
            try:
                documents.append(Document(relative.as_posix(), raw.decode("utf-8"), STDLIB))
            except UnicodeDecodeError:
                continue
    if not documents:
        raise DataError(f"data.path: {STDLIB!r} found no source files under {root}; give a path instead")
    return documents


def read_text(file: Path, source: str, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Iterator[Document]:
    try:
        yield Document(file.as_posix(), decoded(file.read_bytes()), source)
    except UnicodeDecodeError as error:
        found = f"{file}: not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})"
        bad.found("not UTF-8", f"{found}; convert it, for example with iconv")


def decoded(raw: bytes) -> str:
    """The text of UTF-8 bytes, without the byte order mark that some editors put first. Raises `UnicodeDecodeError`."""
    return raw.decode("utf-8-sig")


def read_json(file: Path, source: str, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Iterator[Document]:
    return _documents(json_records(file, bad), bad, file.as_posix(), source, columns)


Records = Iterator[tuple[int, str, Any]]
"""Records with their numbers, and their places in words."""


def _documents(
    records: Records, bad: BadRecordPolicy, name: str, source: str, columns: Mapping[str, str] | None = None
) -> Iterator[Document]:
    """The records as documents ``name:number``; those that cannot be used go to ``bad``."""
    for number, where, record in records:
        try:
            document = parse(record, f"{name}:{number}", source, where, columns)
        except DataError as reason:
            bad.found("unusable records", str(reason))
        else:
            yield document


def json_records(file: Path, bad: BadRecordPolicy) -> Records:
    """Every record of a JSON file, which holds a list of records, or one a line; a line that is no JSON goes to
    ``bad``."""
    listed, number = _listed(file) if file.suffix.lower() == ".json" else None, 0
    if listed is None:
        with file.open("rb") as lines:
            for at, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                number += 1
                try:
                    record = json.loads(decoded(line) if at == 1 else line.decode("utf-8"))
                except (ValueError, RecursionError) as error:  # bad UTF-8 and bad JSON are ValueErrors
                    bad.found("malformed lines", f"{file}, line {at}: not a JSON object in UTF-8 ({error})")
                    continue
                yield at, f"{file}, line {at}", record
    for number, record in enumerate(listed or (), 1):
        yield number, f"{file}, record {number}", record
    if not number:
        bad.found("empty shards", f"{file}: holds no records; {_UNFINISHED}")


def _listed(file: Path) -> list[Any] | None:
    """The records of a file that is one JSON value: a list of them, or a single one; None: it may have one a line."""
    try:
        found = json.loads(decoded(file.read_bytes()))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else [found]


def read_parquet(file: Path, source: str, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Iterator[Document]:
    return _documents(_parquet_records(file, bad, columns), bad, file.as_posix(), source)


def _parquet_records(file: Path, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Records:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs pyarrow; pip install 'specjax[parquet]'") from None
    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        names = _columns(table.schema_arrow.names, str(file), columns)
        for name, column in [*names.items()]:
            kind = table.schema_arrow.field(column).type
            if name in _NESTED or pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
                continue
            if name != "source" or name in columns:
                raise DataError(f"{file}: the column {column!r} holds {kind}, expected strings")
            del names[name]  # a column of that name that is no label
        for batch in table.iter_batches(columns=[*names.values()]):
            for record in batch.to_pylist():
                row, record = row + 1, _of_columns(record, names)
                # A row that is null in all keys of a shape is an empty document.
                record = record if any(key in record for shape in _SHAPES for key in shape) else {"text": ""}
                yield row, f"{file}, row {row}", record
    except (pyarrow.ArrowException, OSError) as error:
        after = f" after row {row}" if row else ""
        bad.found("damaged files", f"{file}: not a Parquet file{after} ({str(error).splitlines()[0]})")
    else:
        if not row:
            bad.found("empty shards", f"{file}: holds no rows; {_UNFINISHED}")


def read_hub(path: str, hub: Hub, bad: BadRecordPolicy, columns: Mapping[str, str]) -> Iterator[Document]:
    """Documents of a data set that the `datasets` library loads: ``hf:NAME``, where NAME is an id on the hub or a local
    directory. Raises `DataError` if it cannot be loaded; without a network, the library's cache is used."""
    name = path.removeprefix(HUB)
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"data.path: {path!r} needs datasets; pip install 'specjax[hf-data]'") from None
    try:
        rows = datasets.load_dataset(name, hub.subset, split=hub.split, revision=hub.revision)
    except Exception as error:  # from the library, the hub's client, the file formats or the network
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"data.path: {path!r}, split {hub.split!r}, cannot be loaded ({type(error).__name__}: {reason}); correct "
            "the name or data.hub, or, without a network, load it once with one or give local files"
        ) from None
    names, where = _columns(rows.column_names, f"data.path: {path!r}", columns), f"{path}:{hub.split}"
    found = enumerate(rows.select_columns([*names.values()]), 1)
    records = ((number, f"{where}:{number}", _of_columns(record, names)) for number, record in found)
    return _documents(records, bad, where, name)


def _columns(names: Collection[str], where: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Columns to read of a table, our name -> its own: those of ``columns``, or the keys of the first shape that it has
    and of the fields that may stand beside it."""
    missing = next((column for column in columns.values() if column not in names), None)
    if missing is not None:
        raise DataError(f"{where}: no column {missing!r}, which data.columns names (columns: {', '.join(names)})")
    if columns:
        one_shape(columns, f"{where}: data.columns")
        return {**({"source": "source"} if "source" in names else {}), **columns}
    one_shape(names, f"{where}: the table")
    shape = next((shape for shape in _SHAPES if set(shape) <= set(names)), None)
    if shape is None:
        raise DataError(f"{where}: no column 'text' (columns: {', '.join(names)}); {_WANTED}")
    beside = dict.fromkeys((*_BESIDE[shape[0]], *_SEEN, *_PROMPTING, "source"))
    return {name: name for name in (*shape, *(name for name in beside if name in names))}


def _of_columns(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A row of a table under our names (`_columns`)."""
    return _without_nulls({ours: record[theirs] for ours, theirs in names.items()})


def _without_nulls(value: Any) -> Any:
    """``value`` without nulls in its mappings: a table gives every message every key."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


READERS = {
    **dict.fromkeys((".txt", ".md", ".py", ".rst", ".text"), read_text),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), read_json),
    ".parquet": read_parquet,
}
"""Readers by the end of a file's name, in small letters."""
_DATA = (".csv", ".tsv", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".arrow", ".feather", ".xml", ".yaml", ".yml")
"""Ends of the names of files that may hold records and are not read. Even in a directory they are not passed over."""


def reader_of(file: Path) -> Any:
    """The reader of a file, by its name. Raises `DataError` for any other name: the content is not guessed."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(
            f"{file}: what it holds is not known by its name; give a file that ends in {', '.join(READERS)}: text of "
            "any kind as .txt, records as .jsonl"
        )
    return reader


def files_of(root: Path, bad: BadRecordPolicy) -> tuple[list[Path], list[Path]]:
    """(the files of a directory to be read, those that are passed over). A file that may hold records and is not read
    goes to ``bad``. Files that tools keep for themselves, and files about the directory itself, are no documents."""
    read, passed = [], []
    for file in sorted(file for file in root.rglob("*") if file.is_file()):
        inside, name = file.relative_to(root).parts, file.name
        hidden = any(part.startswith((".", "__pycache__")) for part in inside)
        saved = name.endswith(("~", ".bak", ".orig", ".swp")) or name.startswith("#")
        about = file.stem.upper() in ("README", "LICENSE", "LICENCE", "CHANGELOG", "CONTRIBUTING", "DATASET_INFOS")
        if hidden or saved or about:
            passed.append(file)
        elif file.suffix.lower() in READERS:
            read.append(file)
        elif file.suffix.lower() in _DATA:
            bad.found("files of another kind", f"{file}: is not read; convert it to .jsonl, .parquet or .txt")
        else:
            passed.append(file)
    return read, passed
