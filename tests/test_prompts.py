"""Question files of several kinds as prompts of a chat model (experiments/prompts.py)."""

from __future__ import annotations

import json

import prompts
import pytest

from specjax.errors import DataError
from tests.models.directories import make_tokenizer


def written(tmp_path, *records, name="questions.jsonl"):
    file = tmp_path / name
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n\n", encoding="utf-8")
    return file


def test_known_files_are_read_by_their_fields(tmp_path):
    file = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 9, "category": "rag", "turns": ["Given ..."]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
        {"question": "2 + 2?", "answer": "#### 4"},
    )
    assert prompts.read_questions(file) == [
        prompts.Question("81", "conversation", ("Write.", "Again.")),
        prompts.Question("9", "rag", ("Given ...",)),
        prompts.Question("HumanEval/0", "code", ("def f():",)),
        prompts.Question("4", "arithmetic", ("2 + 2?",)),
    ]


def test_any_file_is_read_by_named_columns(tmp_path):
    file = written(tmp_path, {"ask": "Who?", "topic": "people"}, {"ask": "Where?", "topic": "places"}, name="own.jsonl")
    found = prompts.read_questions(file, {"turns": "ask", "category": "topic"})
    assert [(question.category, question.turns) for question in found] == [
        ("people", ("Who?",)),
        ("places", ("Where?",)),
    ]
    assert [question.category for question in prompts.read_questions(file, {"turns": "ask"})] == ["own", "own"]


def test_a_line_may_hold_the_ends_of_lines_that_json_allows(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "a\u2028b\x85c"}\n{"question": "d"}\n', encoding="utf-8")
    assert [question.turns for question in prompts.read_questions(file)] == [("a\u2028b\x85c",), ("d",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("[1]", "line 1: holds list, expected an object"),
        ('{"turns": ["a"]}\n{"other": 1}', "line 2: has none of turns, question, prompt; name its field by --columns"),
        ('{"turns": []}', "turns is no text and no list of texts"),
        ('{"turns": ["a", 3]}', "turns is no text and no list of texts"),
        ('{"prompt": "  "}', "prompt is no text"),
        ("", "holds no question"),
    ],
)
def test_a_file_that_holds_no_questions_is_refused(text, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        prompts.read_questions(tmp_path / "bad.jsonl")


def test_a_category_is_thinned_evenly():
    questions = [prompts.Question(str(i), "ab"[i % 2], ("text",)) for i in range(20)]
    found = prompts.by_category(questions, 5)
    assert [q.id for q in found["a"]] == ["0", "4", "8", "12", "16"]
    assert [q.id for q in found["b"]] == ["1", "5", "9", "13", "17"]
    assert len(prompts.by_category(questions)["a"]) == 10
    assert [q.id for q in prompts.by_category(questions, 5, 3)["a"]] == ["6", "10", "14", "18", "2"]


def text_of(tokens):
    return "".join(chat_tokenizer().convert_ids_to_tokens(tokens))


def chat_tokenizer(template: str | None = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"):
    tokenizer = make_tokenizer("abcdefgh<>u")
    tokenizer.chat_template = template
    return tokenizer


def test_a_prompt_is_the_chat_up_to_the_next_answer():
    question, tokenizer = prompts.Question("1", "c", ("ab", "cd")), chat_tokenizer()
    assert text_of(prompts.tokens_of(tokenizer, question)) == "<u>ab"
    assert text_of(prompts.tokens_of(tokenizer, question, ["e"])) == "<u>ab<a>e<u>cd"
    with pytest.raises(DataError, match="leaves out the user's message"):
        prompts.tokens_of(chat_tokenizer("{% for m in messages %}<u>{% endfor %}"), question)
    with pytest.raises(DataError, match="no chat template"):
        prompts.tokens_of(chat_tokenizer(None), question)


def test_what_a_table_of_questions_has_to_say():
    different = [prompts.Question(str(i), "c", (f"text {i}",)) for i in range(20)]
    assert prompts.doubts(different) == []
    assert prompts.doubts(different[:19]) == ["fewer than 20 questions"]
    assert prompts.doubts([*different, different[3], different[3]]) == ["2 repeated"]
    filler = prompts.Question("f", "c", ("the same words " * 20,))
    assert prompts.doubts([*different, filler]) == ["1 of filler"]
