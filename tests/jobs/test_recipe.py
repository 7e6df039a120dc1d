"""`specjax distill`: from nothing but a chat model to a draft, and on after an interruption."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

import specjax
from specjax import backend, cli
from specjax.config import RunConfig, load_config
from specjax.config.recipe import KINDS, recipe
from specjax.errors import ConfigError
from specjax.jobs import recipe as job
from specjax.models.hf import save_model
from tests.training.test_self_chat import TEMPLATE


@pytest.fixture(scope="module")
def chat_model(tiny_target, tmp_path_factory):
    """A random model, of whose ids many end a turn."""
    tokenizer = copy.deepcopy(tiny_target.tokenizer)
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("models") / "chat"
    made = dataclasses.replace(tiny_target, tokenizer=tokenizer, eos_ids=(tokenizer.eos_token_id, *range(200, 260)))
    save_model(made, directory)
    return str(directory)


@pytest.fixture
def small(monkeypatch):
    """The recipe, with sizes for a toy."""

    def made(*arguments):
        sections = recipe(*arguments)
        own = {"chats": 48, "shard_size": 48, "question_tokens": 24, "answer_tokens": 24, "rows": 4, "repeated": 0.95}
        sections["data"] |= {"seq_len": 128, "self_chat": sections["data"]["self_chat"] | own, "held_out": 0.2}
        sections["draft"] |= {"depths": 2, "draft_vocab_size": 100}
        sections["eval"] = {"positions": 64}
        sections["bench"] = {
            "prompts": 64, "prompt_tokens": 48, "new_tokens": 8, "batch_sizes": [1], "ks": [1, 2], "repeats": 1,
            "adaptive": False, "drafters": [],
        }  # fmt: skip
        return sections

    monkeypatch.setattr(job, "recipe", made)
    monkeypatch.setattr(job, "_LEAST_STEPS", 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_is_a_config(kind, tiny_config):
    sizes = dataclasses.replace(tiny_config, vocab_size=49_152, num_layers=30, hidden_size=576)
    sections = json.loads(json.dumps(recipe("x", "runs/x", kind, sizes, "own.jsonl", 0.25)))
    made = TypeAdapter(RunConfig).validate_python(sections)
    assert (made.data.kind, made.data.path, made.data.mixed) == ("self_chat", "own.jsonl", 0.25)
    assert made.draft.kind == kind
    assert "draft_vocab_size" in made.draft.settings if kind in ("eagle3", "dspark") else made.draft.architecture


@pytest.mark.parametrize("able", [False, True])
def test_products_are_rounded_where_the_processor_multiplies_such_numbers(chat_model, tmp_path, monkeypatch, able):
    monkeypatch.setattr(backend, "multiplies_bfloat16", lambda: able)
    monkeypatch.setattr(job, "run", lambda config: config)
    for name in ("_with_chats", "_with_steps"):
        monkeypatch.setattr(job, name, lambda sections, *_: sections)
    made = job.distill_target(chat_model, str(tmp_path))
    assert made.distill.matmul_dtype == ("bfloat16" if able else None)


def test_chats_and_steps_are_decided_by_pace_and_kept(chat_model, small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(job, "run", lambda config: config)
    config = job.distill_target(chat_model, str(out), minutes=0.05)
    decided = (out / "config.yaml").read_text()
    assert load_config(out / "config.yaml") == config
    chats, steps = config.data.chats.chats, config.distill.num_steps
    assert chats % 48 == 0
    assert config.data.held_out == max(0.2, 20 / chats)
    assert config.bench.prompts == 2, "of 64, as many as the time is for"
    assert steps >= 4
    assert json.loads((out / "self-chat" / "provenance.json").read_text())["chats"] == chats
    said = capsys.readouterr()
    assert said.out.startswith("plan: 1.2 s for chats, 1.3 s for training with the target's passes, 0.5 s for")
    assert f"chats: {chats} in about" in said.out
    assert f"training: {steps} steps, " in said.out
    assert job.distill_target(chat_model, str(out), minutes=5) == config
    assert (out / "config.yaml").read_text() == decided
    assert "goes on as decided there" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"config.yaml: of another job \(target: .*; give another --out"):
        job.distill_target(f"{chat_model}/", str(out))
    shared = out / "self-chat"
    written = {file: file.stat().st_mtime_ns for file in shared.glob("*.jsonl")}
    monkeypatch.setattr(job, "_SECONDS_A_PROMPT", 0.01)
    other = job.distill_target(chat_model, str(tmp_path / "other"), minutes=0.05, chats=str(shared))
    assert 2 < other.bench.prompts < 64, "as many as the chats that are held out give"
    assert other.data.chats.path == str(shared)
    assert not (tmp_path / "other" / "self-chat").exists()
    assert {file: file.stat().st_mtime_ns for file in written} == written


@pytest.mark.more
def test_a_chat_model_is_all_it_takes(chat_model, small, tmp_path):
    summary = job.distill_target(chat_model, str(tmp_path / "out"), minutes=0.05)
    assert summary["greedy_identical"]
    assert (tmp_path / "out" / "report" / "report.html").is_file()
    target = specjax.load_model(chat_model)
    assert specjax.load_drafter(tmp_path / "out" / "draft", target, k=2).kind == "eagle3"


def test_parts_of_a_data_set_are_trained_on_from_yaml(chat_model, tmp_path, capsys):
    """Two processes write it, `train` reads it; a part of other settings does not belong to it."""
    own = {"chats": 48, "shard_size": 24, "question_tokens": 24, "answer_tokens": 24, "rows": 4, "repeated": 0.95}
    sections: dict[str, Any] = {
        "target": {"path": chat_model},
        "data": {"kind": "self_chat", "seq_len": 128, "held_out": 0.4, "self_chat": own},
        "draft": {"architecture": {"num_layers": 1}, "pretrain": {"steps": 0, "batch_size": 2}},
        "distill": {"steps": 2, "batch_size": 2, "eval_every": 2},
        "control": {"learning_rates": []},
        "selection": {"prompts": 0},
        "eval": {"positions": 64},
        "out": str(tmp_path / "run"),
    }
    file, chats = tmp_path / "run.yaml", tmp_path / "chats"

    def command(name: str, *more: str, code: int = 0) -> str:
        file.write_text(yaml.safe_dump(sections))
        with pytest.raises(SystemExit) as exit_:
            cli.app([name, str(file), *more])
        said = capsys.readouterr()
        assert exit_.value.code == code, said.err
        return said.err if code else said.out

    part = ("generate-data", "--out", str(chats), "--shard")
    assert f"{chats}: shards that other parts write, or missing: 1" in command(*part, "1/2")
    sections["data"]["self_chat"] = {**own, "answer_tokens": 20}
    assert "was made with other settings: self_chat.answer_tokens (24 then, 20 now)" in command(*part, "2/2", code=2)
    sections["data"]["self_chat"] = own
    assert "of 48 chats kept" in command(*part, "2/2")
    sections["data"]["self_chat"] = {**own, "path": str(chats)}
    command("train")
    assert specjax.load_model(tmp_path / "run" / "draft").config.num_layers == 1
    assert not (tmp_path / "run" / "self-chat").exists()
