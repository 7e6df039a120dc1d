"""Text in, documents out: nothing lost, nothing on both sides of the split."""

import copy
import datetime
import json
import sys
import types
from types import SimpleNamespace

import pytest

from specjax import config
from specjax.data import corpus
from specjax.data.corpus import Document, Part
from specjax.data.prompts import for_benchmark, for_selection
from specjax.data.rows import pack
from specjax.errors import DataError


def test_one_long_file_is_cut_at_line_ends(tmp_path):
    lines = [f"line {i} of a long file\n" for i in range(20_000)]
    one_line = " ".join(map(str, range(8_000)))
    (tmp_path / "long.txt").write_text("".join(lines) + one_line)
    documents = corpus.read_documents(str(tmp_path / "long.txt"))
    assert "".join(d.text for d in documents) == "".join(lines) + one_line
    assert max(len(d.text) for d in documents) <= 16_384
    assert all(d.text.endswith("\n") for d in documents if "line" in d.text and "7999" not in d.text)


def long_files(directory, count: int) -> str:
    for number in range(count):
        (directory / f"{number}.txt").write_text("".join(f"{number}: line {i}\n" for i in range(4_000)))
    return str(directory)


def file_of(document) -> str:
    return document.name.rpartition(":")[0] or document.name


@pytest.mark.parametrize("fraction", [0.2, 1e-9])
def test_no_held_out_document_shares_a_file_with_what_is_trained_on(tmp_path, fraction):
    documents = corpus.read_documents(long_files(tmp_path, 9))
    assert len(documents) > 2 * 9
    train, held_out = ({file_of(d) for d in side} for side in corpus.split_held_out(documents, fraction))
    assert train
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 9


def test_of_a_single_long_file_the_end_is_held_out_and_that_is_said(tmp_path, caplog):
    documents = corpus.read_documents(long_files(tmp_path, 1))
    train, held_out = corpus.split_held_out(documents, 0.4)
    assert (train + held_out, len(held_out)) == (documents, round(0.4 * len(documents)))
    assert "0.txt is the only document: its end is held out" in caplog.text
    assert corpus.split_held_out(documents[:1], 0.4) == (documents[:1], [])


def documents_of(*texts: str) -> list[Document]:
    return [Document(f"{number}.txt", text) for number, text in enumerate(texts)]


def test_the_shortest_of_few_documents_is_held_out_where_the_hashes_choose_none(caplog):
    for seed in range(4):  # whichever has the smaller hash
        documents = documents_of(f"a long book {seed} " * 5_000, f"a short note {seed} " * 10)
        assert corpus.split_held_out(documents, 0.0) == (documents[:1], documents[1:])
    assert not caplog.messages


@pytest.mark.parametrize(
    ("texts", "fraction", "told"),
    [
        (("a" * 50_000, "b" * 100), 1e-3, None),
        (("a" * 50_000, "b" * 10), 1e-3, "0.02% of the text is held out, where data.held_out asks for 0.1%"),
        (("a" * 100, "b" * 100), 1e-3, "50% of the text is held out, where data.held_out asks for 0.1%"),
    ],
)
def test_a_held_out_share_far_from_the_one_asked_for_is_told(texts, fraction, told, caplog):
    train, held_out = corpus.split_held_out(documents_of(*texts), fraction)
    assert (len(train), len(held_out)) == (1, 1)
    assert told in caplog.text if told else not caplog.messages


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


CHATS = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"instruction": "Greet", "output": "Hello"},
]


@pytest.mark.parametrize("name", ["chats.json", "CHATS.JSON", "chats.ndjson", "chats.JSONL", "lines.json"])
def test_chats_in_any_form_of_json_are_chats(tmp_path, name):
    """ShareGPT and Alpaca are published as lists in a .json file; nothing of it is text."""
    listed = name.lower() == "chats.json"
    text = json.dumps(CHATS) if listed else "\n".join(map(json.dumps, CHATS))
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    for path in (tmp_path, tmp_path / name):
        found = corpus.read_documents(str(path))
        assert [[m["role"] for m in d.messages] for d in found] == [["user", "assistant"]] * 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("chats.json", '[{"conversations": 3}]', "chats.json, record 1: 'conversations' is no list"),
        ("one.json", '{"data": [{"text": "a"}]}', "one.json, record 1: no string under the key 'text'"),
        ("none.json", "[]", "none.json: holds no records"),
        ("half.json", '[{"text": "a"},', "half.json, line 1: not a JSON object"),
        ("table.csv", "text\na\n", "table.csv: is not read; convert it to .jsonl"),
        ("rows.jsonl.gz", "x", "rows.jsonl.gz: is not read"),
    ],
)
def test_what_may_hold_records_and_is_not_read_is_refused_by_name(tmp_path, name, text, message):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        corpus.read_documents(str(tmp_path))
    bad = corpus.BadRecordPolicy("skip")
    assert [d.text for d in corpus.read_documents(str(tmp_path), bad)] == ["a text"]
    assert sum(bad.counts.values()) == 1


@pytest.mark.parametrize("name", ["corpus.dat", "corpus", "rows.csv", "rows.jsonl.gz"])
def test_what_a_file_holds_is_never_guessed(tmp_path, name):
    (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(
        DataError, match=f"{name}: what it holds is not known by its name; give a file that ends in .txt"
    ):
        corpus.read_documents(str(tmp_path / name))


def test_what_tools_and_publishers_leave_in_a_directory_is_no_document_and_is_told(tmp_path, caplog):
    for name in (
        "a.txt",
        "sub/B.TXT",
        "README.md",
        ".git/c.txt",
        ".ipynb_checkpoints/d.py",
        "e.txt~",
        "f.png",
        "#g.txt#",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    found = corpus.read_documents(str(tmp_path))
    assert sorted(d.text for d in found) == ["text of a.txt", "text of sub/B.TXT"]
    assert "6 files are no documents and not read: " in caplog.text
    assert [d.text for d in corpus.read_documents(str(tmp_path / "README.md"))] == ["text of README.md"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfimport os\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "import sys"}\n')
    assert sorted(d.text for d in corpus.read_documents(str(tmp_path))) == ["import os\n", "import sys"]


def test_a_directory_named_like_a_file_is_entered(tmp_path):
    (tmp_path / "package.py").mkdir()
    (tmp_path / "package.py" / "a.py").write_text("text\n")
    (document,) = corpus.read_documents(str(tmp_path))
    assert document.text == "text\n"


def written(directory, *records) -> str:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_a_record_may_be_a_prompt_and_its_completion(tmp_path):
    (document,) = corpus.read_documents(written(tmp_path, {"prompt": "2 + 2 = ", "completion": "4"}))
    assert document.text == "2 + 2 = 4"
    assert document.parts == (Part("2 + 2 = ", True), Part("4", False))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "2 + 2 ="}, "line 1: no string under the key 'completion'"),
        ({"prompt": "2 + 2 =", "completion": ""}, "line 1: 'completion' is empty"),
        ({"messages": "hello"}, "line 1: 'messages' is no list of mappings"),
        ({"messages": [{"role": "user", "content": 3}]}, "line 1, message 1: no string under the key 'content'"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "line 1: no message of the role 'assistant'"),
    ],
)
def test_a_record_without_anything_to_predict_is_named(tmp_path, record, message):
    with pytest.raises(DataError, match=f"rows.jsonl, {message}.*data.on_bad=skip"):
        corpus.read_documents(written(tmp_path, record))


def test_what_cannot_be_used_is_counted_by_reason_if_it_is_to_be_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": \n{"text": "\xff"}\n{"text": 3}\n')
    (tmp_path / "b.jsonl").write_bytes(b"\n")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "d.txt").write_bytes(b"also good")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 and then nothing")
    bad = corpus.BadRecordPolicy("skip")
    assert sorted(d.text for d in corpus.read_documents(str(tmp_path), bad)) == ["also good", "good"]
    counts = {"malformed lines": 2, "unusable records": 1, "empty shards": 1, "not UTF-8": 1, "damaged files": 1}
    assert bad.counts == counts
    assert "a.jsonl, line 2" in bad.first["malformed lines"]
    assert "2 skipped, malformed lines (first: " in str(bad)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2.*data\.on_bad=skip"):
        corpus.read_documents(str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl: holds no records"):
        corpus.read_documents(str(tmp_path))


def test_a_document_says_where_it_came_from(tmp_path):
    for name in ("code/deep/a.txt", "prose/b.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "d.jsonl").write_text('{"text": "labelled", "source": "forum"}\n')
    sources = {d.text: d.source for d in corpus.read_documents(str(tmp_path))}
    assert sources == {
        "code/deep/a.txt": "code",
        "prose/b.txt": "prose",
        "c.txt": tmp_path.name,
        "labelled": "forum",
    }
    assert corpus.read_documents(str(tmp_path / "c.txt"))[0].source == "c"


def test_parquet_holds_prompts_and_chats_too(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "hello", "name": None}, {"role": "assistant", "content": "hi", "name": "x"}]
    parquet.write_table(pyarrow.table({"messages": [chat], "source": ["forum"]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["1 + "], "completion": ["1"]}), tmp_path / "b.parquet")
    first, second = corpus.read_documents(str(tmp_path))
    assert first.messages == ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi", "name": "x"})
    assert first.source == "forum"
    assert [part.is_prompt for part in second.parts] == [True, False]


def test_a_row_of_parquet_that_is_null_is_an_empty_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": [[*SAID], None], "system": [None, "s"]}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", None], "completion": ["b", None]}), tmp_path / "b.parquet")
    assert [d.text for d in corpus.read_documents(str(tmp_path)) if d.parts] == ["ab"]
    assert len(corpus.read_documents(str(tmp_path))) == 2


@pytest.mark.parametrize("columns", [{}, {"prompt": "q", "completion": "a"}])
def test_a_source_that_is_no_string_is_no_label(tmp_path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"q": ["1 + "], "a": ["1"], "text": ["x"], "source": [3]}), file)
    (document,) = corpus.read_documents(str(file), columns=columns)
    assert document.source == "a"
    with pytest.raises(DataError, match="the column 'source' holds int64, expected strings"):
        corpus.read_documents(str(file), columns={"text": "text", "source": "source"})


class Rows(list):
    """As much of `datasets.Dataset` as is used."""

    @property
    def column_names(self):
        return [*self[0]]

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)


@pytest.fixture
def hub(monkeypatch):
    """Stands for the `datasets` library: a function to replace, and the arguments it was called with."""
    calls, module = [], types.ModuleType("datasets")
    rows = Rows([{"text": "one", "id": 1}, {"text": None, "id": 2}, {"text": "two", "id": 3}])

    def load_dataset(*args, **options):
        calls.append((args, options))
        return rows

    vars(module).update(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return SimpleNamespace(module=module, calls=calls, rows=rows)


def test_a_data_set_of_the_hub_is_read_by_its_columns(hub):
    bad = corpus.BadRecordPolicy("skip")
    documents = corpus.read_documents("hf:org/name", bad, config.Hub("main", "train[:1%]", "abc"))
    assert sorted(d.text for d in documents) == ["one", "two"]
    assert {d.source for d in documents} == {"org/name"}
    assert bad.counts == {"unusable records": 1}
    assert hub.calls == [(("org/name", "main"), {"split": "train[:1%]", "revision": "abc"})]
    hub.rows[:] = [{"question": "?"}]
    with pytest.raises(DataError, match=r"'hf:org/name': no column 'text' \(columns: question\)"):
        corpus.read_documents("hf:org/name")


def test_a_data_set_that_cannot_be_loaded_is_one_line(hub, monkeypatch):
    def offline(*args, **options):
        raise ConnectionError("Couldn't reach the hub\nand so on")

    monkeypatch.setattr(hub.module, "load_dataset", offline)
    with pytest.raises(DataError, match=r"'hf:org/name', split 'train', .*Couldn't reach the hub\); correct") as error:
        corpus.read_documents("hf:org/name")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs datasets; pip install 'specjax\[hf-data\]'"):
        corpus.read_documents("hf:org/name")


def test_a_directory_is_loaded_by_the_library_itself(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "1 + ", "completion": "1"}\n')
    (document,) = corpus.read_documents(f"hf:{tmp_path / 'set'}")
    assert document.parts == (Part("1 + ", True), Part("1", False))
    with pytest.raises(DataError, match="cannot be loaded"):
        corpus.read_documents(f"hf:{tmp_path / 'set'}", hub=config.Hub(split="nowhere"))


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
ASKING = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"
# Says less about an answer once it is no longer the last message.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}(thought){% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
]


def chats(tokenizer, template, directory, messages=CHAT, bad=None):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return corpus.rendered(corpus.read_documents(written(directory, {"messages": messages})), tokenizer, bad)


def test_what_the_assistant_says_is_predicted_as_the_template_writes_it(tiny_tokenizer, tmp_path):
    (document,) = chats(tiny_tokenizer, ASKING, tmp_path)
    assert document.parts == (
        Part("<system>s</><user>one</><assistant>", True),
        Part("1</>", False),
        Part("<user>two</><assistant>", True),
        Part("2</>", False),
    )
    assert document.text == "<system>s</><user>one</><assistant>1</><user>two</><assistant>2</>"


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each(tiny_tokenizer, tmp_path):
    first, second = chats(tiny_tokenizer, FORGETFUL, tmp_path)
    assert first.parts == (Part("<system>s</><user>one</><assistant>", True), Part("(thought)1</>", False))
    prompt = Part("<system>s</><user>one</><assistant>1</><user>two</><assistant>", True)
    assert second.parts == (prompt, Part("(thought)2</>", False))


def test_a_chat_that_the_template_does_not_take_is_refused_or_skipped(tiny_tokenizer, tmp_path):
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*roles must alternate.*data\.on_bad=skip"):
        chats(tiny_tokenizer, refusing, tmp_path)
    bad = corpus.BadRecordPolicy("skip")
    assert chats(tiny_tokenizer, refusing, tmp_path, bad=bad) == []
    assert bad.counts == {"chats": 1}
    with pytest.raises(DataError, match=r"'messages' need a chat template, and the target's tokenizer has none"):
        chats(tiny_tokenizer, None, tmp_path, bad=bad)


# --- chats as they are published --------------------------------------------------------------------------------------

SAID = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "1"})
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [*SAID]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}]},
        {"conversations": [*SAID]},
        {"instruction": "one", "input": "", "output": "1"},
        {"instruction": "one", "output": "1"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "o"}, {"text": "ne"}]}, SAID[1]]},
    ],
)
def test_chats_of_every_known_form_are_the_same_messages(tmp_path, record):
    (document,) = corpus.read_documents(written(tmp_path, record))
    assert document.messages == SAID


def test_an_instruction_is_asked_with_its_input_and_a_system_message_stands_first(tmp_path):
    record = {"instruction": "add", "input": "1 and 1", "output": "2", "system": "be brief"}
    (document,) = corpus.read_documents(written(tmp_path, record))
    assert [message["content"] for message in document.messages] == ["be brief", "add\n\n1 and 1", "2"]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_a_message_may_call_a_tool_in_place_of_text(tmp_path, tiny_tokenizer, arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [SAID[0], asked, {"role": "tool", "content": "2"}, SAID[1]], "tools": [{"name": "add"}]}
    path = written(tmp_path, record)
    (document,) = corpus.read_documents(path)
    assert document.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (document,) = corpus.rendered([document], tokenizer)
    assert [part.text for part in document.parts if not part.is_prompt] == ['{"a": 1}</>', "1</>"]
    assert document.text.startswith('[{"name": "add"}]<user>')


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": [SAID[0], {"role": "assistant", "content": None}]},
            r"message 2: no string .*'content' \(it is None",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID[1]]},
            "message 1: 'content' has a part of the type 'image_url', and only text is read",
        ),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "message 1: from 'narrator' is none of user, human"),
        ({"conversations": "x"}, r"'conversations' is no list of mappings; give \{'from': "),
        ({"messages": [{"content": "x"}]}, "message 1: no string under the key 'role'; give 'user'"),
        ({"messages": [{**SAID[1], "tool_calls": [{}]}]}, "message 1: 'tool_calls' cannot be read; give "),
        (
            {"messages": [{**SAID[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "message 1: 'tool_calls' cannot be read",
        ),
        ({"messages": [*SAID], "tools": "["}, "'tools' is no JSON; give a list"),
        ({"instruction": "x", "output": ""}, "no message of the role 'assistant'"),
        ({"instruction": 3, "output": "x"}, r"no string under the key 'instruction' \(it is 3\)"),
        ({"messages": [*SAID], "system": 3}, r"no string under the key 'system' \(it is 3\)"),
        (
            {"messages": [{"role": "system", "content": "a"}, *SAID], "system": "b"},
            "'system' is not what the first message says",
        ),
        ({"messages": [SAID[0], {**SAID[1], "weight": 0.5}]}, "message 2: weight=0.5; give 0 or 1, once"),
        ({"messages": [SAID[0], {**SAID[1], "weight": 1, "train": False}]}, "message 2: weight=1, train=False; give 0"),
        ({"messages": [{**SAID[0], "weight": 1}, SAID[1]]}, "message 1: weight=1, but only what the assistant says"),
        ({"messages": [SAID[0], {**SAID[1], "weight": 0}]}, "every answer says that it is not to be predicted"),
        ({"messages": [SAID[0], {**SAID[1], "from": "gpt"}]}, "message 2: both 'role' and 'from'"),
        ({"messages": [SAID[0], {**SAID[1], "value": "2"}]}, "message 2: both 'content' and 'value'"),
        (
            {"messages": [SAID[0], {**SAID[1], "function_call": {"name": "f"}}]},
            "message 2: 'function_call' is not read",
        ),
        ({"messages": [{**SAID[0], "images": ["a.png"]}, SAID[1]]}, "message 1: 'images' is not read"),
        (
            {"messages": [*SAID], "images": ["a.png"]},
            "'images' changes what a prompt means.*columns={messages: messages}",
        ),
        ({"text": "a", "image": {"bytes": "x"}}, r"'image' changes what a prompt means.*data\.columns=\{text: text\}"),
        ({"prompt": "a", "completion": "b", "system": "s"}, "'system' changes what a prompt means.*beside 'prompt'"),
        ({"prompt": "a", "completion": "b", "history": [["x", "y"]]}, "'history' changes what a prompt means"),
        ({"messages": [*SAID], "functions": [{"name": "f"}]}, "'functions' changes what a prompt means"),
        (
            {"instruction": "a", "output": "b", "history": ["x"]},
            r"'history' is no list of pairs; give \[question, answer",
        ),
        (
            {"text": "a", "messages": [*SAID]},
            r"has 'messages' and 'text', which may be different texts; say which: data",
        ),
        (
            {"instruction": "a", "output": "b", "text": "c"},
            r"has 'text' and 'instruction'\+'output', .*data\.columns=\{text: text\}",
        ),
        ({"text": "a", "prompt": "b"}, "has 'text' and 'prompt', which may be different texts"),
        ({"text": "a", "instruction": "b"}, "has 'text' and 'instruction', which may be"),
        ({"prompt": [SAID[0]], "completion": "b"}, "'completion' is no list of mappings"),
        ({"question": "x", "answer": "y"}, r"no string under the key 'text'.*data\.columns=\{prompt: question, "),
    ],
)
def test_a_chat_that_cannot_be_read_says_what_to_write(tmp_path, record, message):
    with pytest.raises(DataError, match=f"rows.jsonl, line 1.*{message}") as refused:
        corpus.read_documents(written(tmp_path, record))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize("no", [0, False, 0.0])
def test_an_answer_that_is_not_to_be_trained_on_is_part_of_the_prompt(tmp_path, tiny_tokenizer, name, no):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = ASKING
    first, second = ({"role": "user", "content": f"q{i}"} for i in range(2))
    record = [first, {**SAID[1], name: no}, second, {"role": "assistant", "content": "2", name: 1}]
    (document,) = corpus.rendered(corpus.read_documents(written(tmp_path, {"messages": record})), tokenizer)
    assert [part.text for part in document.parts if not part.is_prompt] == ["2</>"]
    plain = [{key: value for key, value in message.items() if key != name} for message in record]
    assert document.text == tokenizer.apply_chat_template(plain, tokenize=False)
    rows = pack(tokenizer, [document], 0, 4)
    assert rows.prompt is not None
    assert tokenizer.decode(rows.stream[~rows.prompt]) == "2</>"


def test_of_a_prompt_of_messages_nothing_is_predicted(tmp_path, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = ASKING
    record = {"prompt": [*SAID, SAID[0]], "completion": [{"role": "assistant", "content": "2"}]}
    (document,) = corpus.rendered(corpus.read_documents(written(tmp_path, record)), tokenizer)
    assert [part.text for part in document.parts if not part.is_prompt] == ["2</>"]
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({key: [value] for key, value in record.items()}), tmp_path / "a.parquet")
    (same,) = corpus.rendered(corpus.read_documents(str(tmp_path / "a.parquet")), tokenizer)
    assert same.parts == document.parts


def test_earlier_turns_of_an_instruction_stand_before_it(tmp_path):
    record = {"instruction": "three", "output": "3", "history": [["one", "1"], ["two", "2"]]}
    (document,) = corpus.read_documents(written(tmp_path, record))
    assert [message["content"] for message in document.messages] == ["one", "1", "two", "2", "three", "3"]


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({"tools": [{"name": "add"}]}, "it does not write 'tools'"),
        (
            {"messages": [SAID[0], {**SAID[1], "reasoning_content": "hm"}]},
            "it does not write 'reasoning_content' of mess",
        ),
        ({"messages": [SAID[0], {**SAID[1], "tool_calls": [CALL]}]}, "it does not write 'tool_calls' of message 2"),
    ],
)
def test_what_the_template_would_drop_is_refused(tmp_path, tiny_tokenizer, changes, dropped):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = ASKING
    documents = corpus.read_documents(written(tmp_path, {"messages": [*SAID], **changes}))
    with pytest.raises(DataError, match=dropped):
        corpus.rendered(documents, tokenizer)


def test_a_table_of_several_shapes_is_refused_until_columns_say_which(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    table = {"instruction": ["add"], "input": ["1 and 1"], "output": ["2"], "text": ["add 1 and 1: 2"]}
    parquet.write_table(pyarrow.table(table), file)
    with pytest.raises(DataError, match=r"a\.parquet: the table has 'text' and 'instruction'\+'output'"):
        corpus.read_documents(str(file))
    (document,) = corpus.read_documents(str(file), columns={"text": "text"})
    assert document.text == "add 1 and 1: 2"
    (document,) = corpus.read_documents(str(file), columns={n: n for n in ("instruction", "input", "output")})
    assert [message["content"] for message in document.messages] == ["add\n\n1 and 1", "2"]
    with pytest.raises(DataError, match=r"data\.columns has 'text' and 'instruction'\+'output'"):
        corpus.read_documents(str(file), columns={n: n for n in ("instruction", "output", "text")})


def test_a_picture_beside_a_row_of_a_table_is_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"messages": [[*SAID], [*SAID]], "images": [None, [{"bytes": b"x"}]]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2: 'images' changes what a prompt means"):
        corpus.read_documents(str(tmp_path / "a.parquet"))


# --- both sides of the split ------------------------------------------------------------------------------------------

ANSWERED = {
    "text": lambda i, j: {"text": f"text {i} {j}"},
    "prompt and completion": lambda i, j: {"prompt": f"ask {i}", "completion": f"answer {j}"},
    "chat": lambda i, j: {"messages": [{"role": "user", "content": f"ask {i}"}, {**SAID[1], "content": f"answer {j}"}]},
    "chat of several turns": lambda i, j: {
        "messages": [{"role": "user", "content": f"ask {i}"}, {**SAID[1], "content": f"answer {j}"}, *SAID]
    },
}


@pytest.mark.parametrize("kind", ANSWERED)
def test_answers_to_one_prompt_stay_on_one_side_and_select_on_other_documents_than_are_measured(
    kind, tmp_path, tiny_tokenizer
):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = ASKING
    documents = corpus.read_documents(written(tmp_path, *(ANSWERED[kind](i, j) for i in range(40) for j in range(4))))
    assert len({document.group for document in documents}) == (160 if kind == "text" else 40)
    train, held_out = corpus.split_held_out(documents, 0.4)
    sides = [train, for_benchmark(corpus.rendered(held_out, tokenizer)), for_selection(held_out)]
    groups = [{document.group for document in side} for side in sides]
    assert all(groups)
    assert sum(map(len, groups)) == len(set.union(*groups))
    if kind != "text":
        assert {len(side) for side in sides} == {4 * len(group) for group in groups}


def test_of_a_single_prompt_the_last_answers_are_held_out_and_that_is_said(tmp_path, caplog):
    path = written(tmp_path, *({"prompt": "ask", "completion": f"answer {i}"} for i in range(10)))
    train, held_out = corpus.split_held_out(corpus.read_documents(path), 0.2)
    assert (len(train), len(held_out)) == (8, 2)
    assert "the prompt of all documents is the same: the last answers to it are held out" in caplog.text
    assert len(for_benchmark(held_out)) == len(for_selection(held_out)) == 1
    assert for_benchmark(held_out) != for_selection(held_out)


def test_columns_say_what_stands_under_another_name(tmp_path):
    path = written(tmp_path, {"question": "1 + ", "answer": "1", "text": "not this", "source": "forum"})
    columns = {"prompt": "question", "completion": "answer"}
    (document,) = corpus.read_documents(path, columns=columns)
    assert (document.parts, document.source) == ((Part("1 + ", True), Part("1", False)), "forum")
    with pytest.raises(DataError, match=r"line 1: no 'q', which data\.columns names \(it has question, answer, text, "):
        corpus.read_documents(path, columns={"prompt": "q"})
    (document,) = corpus.read_documents(written(tmp_path, {"dialogue": [*SAID]}), columns={"messages": "dialogue"})
    assert document.messages == SAID


def test_columns_of_tables_are_mapped_and_nulls_of_their_structs_dropped(tmp_path, hub):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    said = [{"from": "human", "value": "one", "weight": None}, {"from": "gpt", "value": "1", "weight": 1}]
    parquet.write_table(pyarrow.table({"chat": [said], "id": [1]}), file)
    (document,) = corpus.read_documents(str(file), columns={"conversations": "chat"})
    assert document.messages == (SAID[0], {**SAID[1], "weight": 1})
    with pytest.raises(DataError, match=r"no column 'c', which data\.columns names \(columns: chat, id\)"):
        corpus.read_documents(str(file), columns={"conversations": "c"})
    documents = corpus.read_documents(
        "hf:org/name", corpus.BadRecordPolicy("skip"), columns={"completion": "text", "prompt": "text"}
    )
    assert [document.text for document in documents] == ["oneone", "twotwo"]


def test_a_template_that_prints_the_date_prints_the_one_that_is_kept(tiny_tokenizer, tmp_path):
    dated = "\n{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %-d %B') }}{% endif %}" + ASKING
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = dated
    documents = corpus.read_documents(written(tmp_path, {"messages": CHAT}))
    (document,) = corpus.rendered(documents, tokenizer, today=datetime.date(2020, 2, 29))
    assert document.text.startswith("\n29 Feb 2020, 29 February<system>")
    (other,) = corpus.rendered(documents, tokenizer, today=datetime.date(2020, 3, 1))
    assert other.text == document.text.replace("29 Feb 2020, 29 February", "01 Mar 2020, 1 March")
    (now,) = corpus.rendered(documents, tokenizer)
    assert len(now.text) > 30
    assert "2020" not in now.text
