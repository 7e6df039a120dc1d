from __future__ import annotations

import copy
import json
import types

import pytest
import transformers
from typer.testing import CliRunner

import specjax
from specjax import cli
from specjax.data import chat_template as chat
from specjax.errors import DataError, ModelError
from specjax.jobs import generate
from specjax.metrics import DecodeStats

CUTS = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and 'forbidden' in m.content %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_tokenizer):
    made = copy.deepcopy(tiny_tokenizer)
    made.chat_template = TEMPLATE
    return made


def test_a_message_is_put_into_the_template_up_to_the_answer(tokenizer):
    assert tokenizer.decode(chat.encode(tokenizer, "add 1")) == f"{tokenizer.bos_token}[user] add 1\n[assistant]"
    ids = chat.encode(tokenizer, "add 1", "be brief")
    assert tokenizer.decode(ids) == f"{tokenizer.bos_token}[system] be brief\n[user] add 1\n[assistant]"
    assert ids.count(tokenizer.bos_token_id) == 1
    assert all(type(token) is int for token in ids)


def test_what_the_template_cannot_do_is_one_line(tokenizer, tiny_tokenizer):
    for given, found in ((None, "no tokenizer"), (tiny_tokenizer, "no chat template")):
        with pytest.raises(DataError, match=f"--chat: the target has {found}; use a chat model"):
            chat.encode(given, "x")
    with pytest.raises(DataError, match=r"template fails \(no such role\); leave --system out") as refused:
        chat.encode(tokenizer, "x", "forbidden")
    assert "\n" not in str(refused.value)


def written(directory, **settings):
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_sample": True, **CUTS}, CUTS),
        ({"do_sample": True, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": None, "eos_token_id": 3}, {"temperature": 1.0}),
        ({"max_new_tokens": 9, "min_new_tokens": 2}, {"max_new_tokens": 9, "min_new_tokens": 2}),
        ({"stop_strings": ["a", "b"], "top_k": 3}, {"stop_strings": ["a", "b"]}),
        ({"suppress_tokens": [3], "bad_words_ids": [[4], [5]]}, {"banned_tokens": [3, 4, 5]}),
        ({"suppress_tokens": [3], "bad_words_ids": [[4], [5, 6]]}, {"banned_tokens": [3]}),
        ({}, {}),
    ],
)
def test_defaults_are_those_that_transformers_would_sample_with(tmp_path, settings, expected):
    assert chat.generation_defaults(written(tmp_path, **settings)).values == expected


def test_defaults_name_what_they_do_not_apply(tmp_path):
    """Each setting of transformers: applied, named, or without effect on what is generated."""
    changing = {
        "num_beams": 4,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4, 5]],
        "max_length": 4096,
        "sequence_bias": [[[3], 1.0]],
        "forced_eos_token_id": 2,
        "guidance_scale": 1.5,
        "min_length": 5,
        "exponential_decay_length_penalty": [3, 1.1],
        "temperature": 0.6,
        "top_p": 0.9,
        "penalty_alpha": 0.6,
    }
    silent = {
        "num_beams": 1,
        "typical_p": 1.0,
        "eos_token_id": [3, 4],
        "bos_token_id": 1,
        "pad_token_id": None,
        "transformers_version": "4.51.0",
        "use_cache": True,
        "cache_implementation": "hybrid",
        "top_k": 50,
        "_from_model_config": True,
        "num_assistant_tokens": 5,
        "max_length": 20,
        "do_sample": False,
    }
    found = chat.generation_defaults(written(tmp_path, **{**silent, **changing}))
    assert (found.values, found.unapplied) == ({}, changing)
    assert chat.generation_defaults(written(tmp_path, **silent)).unapplied == {}
    known = {name for name, value in vars(transformers.GenerationConfig()).items() if value is not None}
    assert not known  # transformers' own defaults are told by none


def test_defaults_without_a_file_or_with_a_broken_one(tmp_path):
    assert chat.generation_defaults(tmp_path).values == {}
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p='most' is no number"):
        chat.generation_defaults(written(tmp_path, do_sample=True, top_p="most"))


class Decoder:
    """Stands for `specjax.Decoder`: keeps what it was given."""

    lossless, weighs = True, False

    def __init__(self, target, drafter=None, verifier="speculative", controller="adaptive", prefill_chunk=None):
        self.target = target

    def compile(self, prompts, **options):
        pass

    def stream(self, prompt, **options):
        Decoder.given = (prompt, options)
        stats = DecodeStats(1, 0, (), (), ())
        return iter(
            [types.SimpleNamespace(tokens=[], pieces=[], text="", finish_reason="length", seconds=1.0, stats=stats)]
        )


@pytest.fixture
def run(monkeypatch, tokenizer):
    model = types.SimpleNamespace(tokenizer=tokenizer)
    monkeypatch.setattr(specjax, "load_model", lambda path, **_: model)
    monkeypatch.setattr(specjax, "Decoder", Decoder)
    monkeypatch.setattr(generate, "tell_memory", lambda *arguments: None)

    def call(*arguments):
        result = CliRunner().invoke(cli.app, ["generate", "--prompt", "add 1", *map(str, arguments)])
        return result, getattr(Decoder, "given", None)

    return call


def test_the_command_gives_the_decoder_the_whole_chat(run, tokenizer):
    result, (prompt, _) = run("--target", "t", "--chat", "--system", "be brief")
    assert result.exit_code == 0
    assert prompt == chat.encode(tokenizer, "add 1", "be brief")
    assert run("--target", "t")[1][0] == "add 1"


def test_a_system_message_needs_a_chat(run):
    result, _ = run("--target", "t", "--system", "be brief")
    assert (result.exit_code, "add --chat" in result.stderr) == (2, True)


def test_a_target_without_a_template_is_one_line_and_status_2(run, tokenizer):
    tokenizer.chat_template = None
    result, _ = run("--target", "t", "--chat")
    assert result.exit_code == 2
    assert result.stderr == "error: --chat: the target has no chat template; use a chat model, or leave --chat out\n"


def test_defaults_are_applied_where_asked_for_told_and_overruled_by_options(run, tmp_path):
    where = written(tmp_path, do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    result, (_, options) = run("--target", where)
    assert (options["temperature"], options["top_k"], options["top_p"]) == (0.0, 0, 1.0)
    assert "note:" not in result.stderr
    result, (_, options) = run("--target", where, "--defaults", "--top-p", "1.0")
    assert (options["temperature"], options["top_k"], options["top_p"]) == (0.7, 20, 1.0)
    told = "temperature 0.7, top_k 20 (as given on the command line: top_p)"
    assert result.stderr.startswith(f"note: from {where / 'generation_config.json'}: {told}\n")
    result, (_, options) = run("--target", written(tmp_path, temperature=0.7), "--defaults")
    assert options["temperature"] == 0.0
    assert "nothing to apply" in result.stderr
    assert "note: not applied of it: temperature 0.7; without do_sample nothing is sampled\n" in result.stderr
    where = written(tmp_path, max_new_tokens=9, stop_strings=["x"], suppress_tokens=[3], num_beams=4)
    result, (_, options) = run("--target", where, "--defaults", "--stop", "y")
    names = ("max_new_tokens", "stop_strings", "banned_tokens")
    assert [options[name] for name in names] == [9, ["y"], [3]]
    assert "max_new_tokens 9, banned_tokens [3] (as given on the command line: stop_strings)\n" in result.stderr
    assert "note: not applied of it: num_beams 4\n" in result.stderr
