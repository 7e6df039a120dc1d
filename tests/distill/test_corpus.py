"""Text in, documents out: nothing lost, nothing on both sides of the split."""

import json

import pytest

from specjax.distill import corpus
from specjax.errors import DataError


def test_one_long_file_is_cut_at_line_ends_and_can_be_split(tmp_path):
    lines = [f"line {i} of a long file\n" for i in range(20_000)]
    one_line = " ".join(map(str, range(8_000)))
    (tmp_path / "long.txt").write_text("".join(lines) + one_line)
    documents = corpus.read_documents(str(tmp_path / "long.txt"))
    assert "".join(d.text for d in documents) == "".join(lines) + one_line
    assert max(len(d.text) for d in documents) <= 16_384
    assert all(d.text.endswith("\n") for d in documents if "line" in d.text and "7999" not in d.text)
    train, held_out = corpus.split_held_out(documents, 0.2)
    assert train
    assert held_out
    assert not {d.digest for d in train} & {d.digest for d in held_out}


def test_a_short_file_stays_whole(tmp_path):
    (tmp_path / "short.txt").write_text("a\n" * 100)
    (document,) = corpus.read_documents(str(tmp_path))
    assert document.text == "a\n" * 100


def test_duplicates_and_empty_documents_are_dropped(tmp_path):
    rows = ["same", "same", "  \n", "other"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert sorted(d.text for d in corpus.read_documents(str(tmp_path))) == ["other", "same"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b"\xff\xfe\x00bad", "UTF-8"), (b"\n \n", "holds no text")],
)
def test_unusable_text_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        corpus.read_documents(str(tmp_path / "bad.txt"))
    assert "bad.txt" in str(refused.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 3}', "line 2: no string under the key 'text'"),
        (b'["text"]', "line 2: no string under the key 'text'"),
        (b'{"text": ', "line 2: not a JSON object"),
        (b'{"text": "\xff"}', "line 2: not a JSON object in UTF-8"),
        (b'{"text": "\\ud800"}', "line 2: 'text' holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message) as refused:
        corpus.read_documents(str(tmp_path / "rows.jsonl"))
    assert "rows.jsonl" in str(refused.value)


def test_parquet_is_read_by_its_text_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one\n", None, "two\n"]}), file)
    assert sorted(d.text for d in corpus.read_documents(str(tmp_path))) == ["one\n", "two\n"]
    for table, message in (
        ({"id": [1]}, "no column 'text' \\(columns: id\\)"),
        ({"text": [1]}, "holds int64, expected strings"),
        ({"text": [b"x"]}, "holds binary, expected strings"),
    ):
        parquet.write_table(pyarrow.table(table), file)
        with pytest.raises(DataError, match=message):
            corpus.read_documents(str(file))
    file.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match="not a Parquet file"):
        corpus.read_documents(str(file))


def test_a_directory_named_like_a_file_is_entered(tmp_path):
    (tmp_path / "package.py").mkdir()
    (tmp_path / "package.py" / "a.py").write_text("text\n")
    (document,) = corpus.read_documents(str(tmp_path))
    assert document.text == "text\n"
