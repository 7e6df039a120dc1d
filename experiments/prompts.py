"""Question files that users bring, as prompts of a chat model, by category; nothing is downloaded.

    python experiments/prompts.py FILE ... [--target MODEL] [--columns turns=conversation category=topic] [--limit 10]

Read are Spec-Bench's and MT-Bench's question.jsonl (`turns`, `category`), HumanEval (`prompt`), GSM8K (`question`), and
any JSONL whose fields are named by --columns. Spec-Bench's eight topics of conversation are one category, as its
authors count them (2401.07851). Printed are the questions and tokens of each category, and what a table of them has to
say.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import specjax
from specjax.data.chat_template import render
from specjax.errors import DataError

FEWEST = 20
"""Fewest questions of a category that a figure should rest on."""
_TOPICS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CATEGORIES: dict[str, str] = dict.fromkeys(_TOPICS, "conversation")
_FIELDS = {"turns": ("turns", "question", "prompt"), "category": ("category",), "id": ("question_id", "task_id")}
"""Ours -> the fields of known files, the first that a record has."""
_OF_FILES = {"task_id": "code", "question": "arithmetic"}
"""Field of a file without categories -> the category of all its questions: HumanEval's, GSM8K's."""


@dataclasses.dataclass(frozen=True)
class Question:
    """``turns``: the user's messages, one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]

    def chat(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Messages up to the user's next one, after so many ``answers`` of the model."""
        messages = []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


def read_questions(file: Path, columns: Mapping[str, str] | None = None) -> list[Question]:
    """All questions of a JSONL file. ``columns``: our field (`turns`, `category`, `id`) -> the file's. Raises
    `DataError` naming the line that is none."""
    found = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_question(line, f"{file}, line {number}", file.stem, number, columns or {}))
    if not found:
        raise DataError(f"{file}: holds no question")
    return found


def _question(line: str, where: str, name: str, number: int, columns: Mapping[str, str]) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: holds {type(record).__name__}, expected an object")
    fields = {ours: (columns[ours],) if ours in columns else theirs for ours, theirs in _FIELDS.items()}
    told = {ours: next((field for field in theirs if field in record), None) for ours, theirs in fields.items()}
    if told["turns"] is None:
        raise DataError(f"{where}: has none of {', '.join(fields['turns'])}; name its field by --columns turns=NAME")
    turns = record[told["turns"]]
    turns = (turns,) if isinstance(turns, str) else tuple(turns) if isinstance(turns, list) else ()
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DataError(f"{where}: {told['turns']} is no text and no list of texts")
    of_file = next((category for field, category in _OF_FILES.items() if field in record), name)
    category = of_file if told["category"] is None else str(record[told["category"]])
    identity = str(number) if told["id"] is None else str(record[told["id"]])
    return Question(identity, CATEGORIES.get(category, category), turns)


def columns_of(pairs: Iterable[str]) -> dict[str, str]:
    """Our field -> the file's, from texts such as `turns=conversation`. Raises `DataError` for any other."""
    found = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals or not theirs or ours not in _FIELDS:
            raise DataError(f"--columns {pair}: give OURS=THEIRS, where OURS is one of {', '.join(_FIELDS)}")
        found[ours] = theirs
    return found


def by_category(questions: Iterable[Question], limit: int | None = None, offset: int = 0) -> dict[str, list[Question]]:
    """The categories in alphabetical order, each with at most ``limit`` questions, spread over the file. ``offset``:
    number of questions by which all of them are moved on, and around the end."""
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.category, []).append(question)
    return {name: _spread(of_it, limit, offset) for name, of_it in sorted(found.items())}


def _spread(questions: list[Question], limit: int | None, offset: int) -> list[Question]:
    if limit is None or len(questions) <= limit:
        return questions
    count = len(questions)
    return [questions[(i * count // limit + offset) % count] for i in range(limit)]


def tokens_of(tokenizer: Any, question: Question, answers: Sequence[str] = ()) -> list[int]:
    """The question in the model's chat template, up to where its answer begins. Raises `DataError` for a template that
    leaves the question out."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError("the target has no chat template, which questions need; use the chat version of the model")
    chat = question.chat(answers)
    try:
        text = render(tokenizer, chat, tokenize=False)
    except Exception as error:  # a template is a program: it may raise anything, and so may Jinja
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"question {question.id}: the target's chat template fails ({reason})") from None
    if chat[-1]["content"].strip() not in text:
        raise DataError("the target's chat template leaves out the user's message")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def doubts(questions: Sequence[Question]) -> list[str]:
    """Reasons why figures of these questions say less than they seem to. Turns of a conversation are no further
    questions."""
    found = []
    if len(questions) < FEWEST:
        found.append(f"fewer than {FEWEST} questions")
    counted = collections.Counter(question.turns for question in questions)
    if repeated := sum(count - 1 for count in counted.values()):
        found.append(f"{repeated} repeated")
    if filler := sum(_is_filler(question.turns[0]) for question in questions):
        found.append(f"{filler} of filler")
    return found


def _is_filler(text: str) -> bool:
    """True for a text of more than 20 words that says the same again and again."""
    words = text.split()
    return len(words) > 20 and len({*words}) < len(words) / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", default="models/demo-target")
    parser.add_argument("--columns", nargs="+", default=[], metavar="OURS=THEIRS")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    tokenizer = specjax.load_model(args.target).tokenizer
    columns = columns_of(args.columns)
    table = Table("category", "questions", "turns", "tokens of a prompt, median", "most", "to be said", box=None)
    questions = [question for file in args.files for question in read_questions(file, columns)]
    for category, of_it in by_category(questions, args.limit).items():
        lengths = sorted(len(tokens_of(tokenizer, question)) for question in of_it)
        turns = sum(len(question.turns) for question in of_it)
        middle, most = lengths[len(lengths) // 2], lengths[-1]
        table.add_row(category, *map(str, (len(of_it), turns, middle, most)), ", ".join(doubts(of_it)) or "-")
    Console().print(table)


if __name__ == "__main__":
    try:
        main()
    except specjax.SpecjaxError as error:
        sys.exit(str(error))
