"""Text to train on, and run directories that hold something else than the run."""

from __future__ import annotations

import datetime
import json
import types
from typing import Any

import pytest

from specjax.config import Data, RunConfig, Target
from specjax.data.corpus import read_documents
from specjax.errors import DataError, SpecjaxError, TrainingError
from specjax.interfaces import Source
from specjax.jobs import inputs
from specjax.runtime import artifact, log
from specjax.training import exports
from specjax.training.sources.text import SourceContext

from .table import Row, World, check, row


def text(name: str, content: str | bytes, *says: str) -> Row:
    """A corpus that is one file."""
    return row(DataError, lambda world: read_documents(str(world.file(name, content))), f"{{tmp}}/{name}", *says)


def record(value: Any, *says: str) -> Row:
    return text("a.jsonl", json.dumps(value) + "\n", "line 1", *says)


def claimed(*says: str, **changes: Any) -> Row:
    """A stage's directory, asked for again with ``changes``."""

    def call(world: World):
        made = {"seed": 0, "stage": {"steps": 3}, "train_rows": "a" * 64, "target_params": "b" * 64}
        artifact.claim(world.tmp / "stage", made)
        with inputs.naming_inputs(RunConfig(Target("models/t"), Data("texts/corpus"))):
            artifact.claim(world.tmp / "stage", made | changes)

    return row(TrainingError, call, "{tmp}/stage", *says)


def prompts_of_another_day(world: World):
    """A directory that runs share; the chat template of the target prints the date."""
    artifact.claim(world.tmp / "shared", {"prompts": "a" * 64})

    class Asked(Source):
        prompts = "texts/asked.jsonl"

        def rows(self, context: SourceContext):
            artifact.claim(context.directory, {"prompts": "b" * 64})

    context: Any = types.SimpleNamespace(directory=world.tmp / "shared", today=datetime.date(2030, 1, 2))
    inputs.rows_of(RunConfig(Target("models/t"), Data("texts/corpus"), out="runs/b"), Asked(), context)


DATED = ("{tmp}/shared", "the prompts (data.prompts: 'texts/asked.jsonl', ", "2030-01-02 of runs/b/chat_date.json")


def damaged(content: str):
    def call(world: World):
        artifact.claim(world.file("stage/fingerprint.json", content).parent, {"seed": 0})

    return call


def in_use(world: World):
    with artifact.exclusive(world.tmp / "run"), artifact.exclusive(world.tmp / "run"):
        pass


def foreign(world: World):
    world.file("run/draft/notes.txt", "mine")
    exports.refuse_foreign(world.tmp / "run/draft")


MESSAGES = [{"role": "user", "content": "hi"}]

ROWS = {
    "a path that is not there": row(
        DataError,
        lambda w: read_documents(f"{w.tmp}/none"),
        "data.path",
        "{tmp}/none",
        "does not exist",
        "python-stdlib",
    ),
    "an empty path": row(DataError, lambda w: read_documents(f"{w.tmp}/"), "data.path", "no file ending in", ".jsonl"),
    "an empty file": text("a.txt", "", "data.path", "no text"),
    "a file of spaces": text("a.txt", " \n\n", "data.path", "no text"),
    "text that is not UTF-8": text("a.txt", b"ab\xff", "UTF-8", "byte 2 is 0xff", "iconv", "data.on_bad=skip"),
    "a line that is no JSON": text("a.jsonl", "{\n", "line 1", "JSON", "data.on_bad=skip"),
    "a second line that is no JSON": text("a.jsonl", '{"text": "a"}\nb\n', "line 2", "JSON"),
    "records of nothing": text("a.jsonl", "", "no records"),
    "a record that is a list": record(["a"], "'text'", "'messages'"),
    "a record without its text": record({"txt": "a"}, "'text'", "'messages'"),
    "a text that is a number": record({"text": 3}, "'text'", "string"),
    "half a surrogate pair": record({"text": "\ud800"}, "'text'", "surrogate"),
    "a prompt without its completion": record({"prompt": "a"}, "'completion'", "string"),
    "an empty completion": record({"prompt": "a", "completion": ""}, "'completion'", "empty", "drop the record"),
    "messages that are text": record({"messages": "hi"}, "'messages'", "list", "'role'"),
    "a message without its role": record({"messages": [{"content": "a"}]}, "message 1", "'role'"),
    "a message that is a number": record({"messages": [3]}, "'messages'", "mappings"),
    "a speaker that is a list": record({"conversations": [{"from": ["human"], "value": "x"}]}, "from ['human']", "gpt"),
    "a chat without an answer": record({"messages": MESSAGES}, "assistant", "nothing to predict", "drop the record"),
    "no Parquet": text("a.parquet", "x", "not a Parquet file", "data.on_bad=skip"),
    "a changed corpus": claimed(
        "the training text (data.path: 'texts/corpus')", "changed", "restore", train_rows="c" * 64
    ),
    "a changed target": claimed("the target's weights (target.path: 'models/t')", "changed", target_params="c" * 64),
    "changed prompts": claimed("the prompts (data.path: 'texts/corpus')", "changed", prompts="c" * 64),
    "another target of generated data": claimed(
        "the target's weights (target.path: 'models/t')", "changed", target="c" * 64
    ),
    "changed prompts of a file": row(TrainingError, prompts_of_another_day, *DATED),
    "a changed setting": claimed("other settings", "stage.steps (3 then, 5 now)", "another `out`", stage={"steps": 5}),
    "a changed setting and corpus": claimed("seed (0 then, 1 now)", "(data.path: ", seed=1, train_rows="c" * 64),
    "a damaged fingerprint": row(TrainingError, damaged("{"), "{tmp}/stage/fingerprint.json", "damaged"),
    "files of another origin": row(
        TrainingError,
        lambda w: artifact.claim(w.file("stage/x", "y").parent, {"seed": 0}),
        "{tmp}/stage",
        "holds files but no fingerprint.json",
        "another `out`",
    ),
    "a run that is in use": row(TrainingError, in_use, "{tmp}/run", "in use", "process", "another `out`"),
    "a run directory below a file": row(
        TrainingError,
        lambda w: artifact.exclusive(w.file("file") / "run").__enter__(),
        "{tmp}/file/run",
        "another `out`",
    ),
    "a folder of the user's where the draft goes": row(
        SpecjaxError, foreign, "{tmp}/run/draft", "something else", "another `out`"
    ),
    "a damaged log": row(
        TrainingError,
        lambda w: log.read_log(w.file("log.jsonl", '{"step": 1}\n{\n').parent),
        "{tmp}/log.jsonl, line 2",
        "damaged",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_bad_data_is_told_in_one_line(name, world):
    check(ROWS[name], world)


def test_the_table_is_large():
    from tests.bad_inputs import test_commands, test_configs, test_models, test_python

    assert (
        sum(len(module.ROWS) for module in (test_python, test_models, test_configs, test_commands)) + len(ROWS) >= 300
    )
