"""A whole job in seconds: a small target, 40 documents, few steps."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from specjax import config
from specjax.models.hf import LoadedModel, save_model

LENGTH = 16


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """40 small Python files."""
    directory = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        lines = (f"def function_{i}_{j}(value):\n    return value * {i * j}\n" for j in range(6))
        (directory / f"{i}.py").write_text("".join(lines))
    return directory


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory, tiny_target):
    directory = tmp_path_factory.mktemp("models") / "target"
    eos = (tiny_target.tokenizer.eos_token_id,)
    # Scaled up, so that its distribution is not flat and there is something to distill.
    params = {**tiny_target.params, "embedding": 30.0 * tiny_target.params["embedding"]}
    save_model(LoadedModel(tiny_target.spec, params, tiny_target.tokenizer, eos, "target"), directory)
    return directory


@pytest.fixture(scope="module")
def settings(target_directory, documents):
    def make(out, **changes) -> config.RunConfig:
        shape = config.Architecture(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1)
        often: dict[str, Any] = {"batch_size": 2, "eval_every": 2, "save_every": 2, "eval_positions": 2 * LENGTH}
        run = config.RunConfig(
            target=config.Target(path=str(target_directory)),
            data=config.Data(path=str(documents), held_out=0.25, seq_len=LENGTH),
            draft=config.Draft(architecture=shape, pretrain=config.Stage(loss="cross_entropy", steps=2, **often)),
            distill=config.Stage(steps=6, **often),
            control=config.Control(learning_rates=(0.01,)),
            selection=config.Selection(prompts=0),
            eval=config.Eval(positions=100, batch_size=2),
            out=str(out),
        )
        return dataclasses.replace(run, **changes)

    return make


@pytest.fixture
def chats(tiny_target, tmp_path):
    """Fields of a run on 40 chats, for a target whose template begins with ``head``."""

    def make(head: str = "") -> dict[str, Any]:
        tokenizer = copy.deepcopy(tiny_target.tokenizer)
        tokenizer.chat_template = (
            head + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        save_model(dataclasses.replace(tiny_target, tokenizer=tokenizer, eos_ids=(0,)), tmp_path / "target")
        said = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "return first + second " * 9}]
        records = [{"messages": [{**said[0], "content": f"add {i}"}, said[1]]} for i in range(40)]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        data = config.Data(path=str(tmp_path / "chats.jsonl"), held_out=0.3, seq_len=LENGTH)
        return {"target": config.Target(path=str(tmp_path / "target")), "data": data}

    return make
