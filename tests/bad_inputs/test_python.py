"""Arguments of the Python interface: decoders, prompts, options, logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import specjax
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import ConfigError, DataError, ModelError
from specjax.verifiers.lenient import Lenient
from specjax.verifiers.top_k import TopK
from specjax.verifiers.typical import Typical

from .table import World, check, row


def generate(prompts: Any = None, **options: Any):
    """A row's call: decode ``prompts`` with ``options``."""

    def call(world: World):
        return Decoder(world.target).generate([[1, 2]] if prompts is None else prompts, **options)

    return call


def decoder(drafter: Any = None, verifier: Any = "speculative"):
    return lambda world: Decoder(world.target, drafter, verifier)


def unchecked(kind: type, **fields: Any) -> Any:
    """An instance as a user makes it: the tests' own check of types would refuse it first."""
    made = object.__new__(kind)
    given = {field.name: field.default for field in dataclasses.fields(kind)} | fields
    for name, value in given.items():
        object.__setattr__(made, name, value)
    return made


def decoder_of_draft(world: World):
    draft: Any = world.draft
    return Decoder(world.target, draft)


def stream(prompt: Any, **options: Any):
    return lambda world: list(Decoder(world.target).stream(prompt, **options))


def logits(tokens: Any):
    return lambda world: world.target.logits(tokens)


DECODERS = {
    "a drafter that needs a model, by name": row(
        ConfigError, decoder("draft_model"), "drafter", "'draft_model' needs", "model", "DraftModel("
    ),
    "a drafter of an unknown name": row(ConfigError, decoder("ngrams"), "'ngrams'", "known are", "'ngram'?"),
    "the path of a draft as drafter": row(
        ConfigError, decoder("runs/demo/draft"), "'runs/demo/draft'", "known are", "specjax.DraftModel("
    ),
    "a model as drafter": row(ConfigError, decoder_of_draft, "drafter", "LoadedModel", "specjax.DraftModel("),
    "a class as drafter": row(ConfigError, decoder(NGram), "drafter", "NGram", "NGram()"),
    "a number as drafter": row(ConfigError, decoder(5), "drafter", "5", "specjax.NGram(k=5)"),
    "a mapping with an unknown field": row(
        ConfigError, decoder({"kind": "ngram", "n": 3}), "drafter.n", "'ngram'", "known are"
    ),
    "a fraction as k of a drafter": row(ConfigError, decoder(unchecked(NGram, k=2.5)), "drafter.k", "2.5", "integer"),  # type: ignore
    "text as k of a drafter": row(ConfigError, decoder(unchecked(NGram, k="3")), "drafter.k", "'3'", "integer"),  # type: ignore
    "a truth value as k of a drafter": row(
        ConfigError, decoder(unchecked(NGram, k=True)), "drafter.k", "True", "integer"
    ),
    "k of 0": row(ConfigError, decoder(unchecked(NGram, k=0)), "drafter.k", "0", "greater than or equal to 1"),
    "k of 65": row(ConfigError, decoder(unchecked(NGram, k=65)), "drafter.k", "65", "less than or equal to 64"),
    "a fraction as k of a draft": row(
        ConfigError,
        lambda w: Decoder(w.target, unchecked(DraftModel, model=w.draft, k=2.5)),
        "drafter.k",
        "2.5",
        "integer",
    ),
    "n-grams of 0 tokens": row(ConfigError, decoder(unchecked(NGram, min_n=0)), "drafter.min_n", "0"),
    "n-grams that shrink": row(ConfigError, lambda w: NGram(min_n=5, max_n=4), "min_n=5", "max_n=4"),
    "no draft": row(ModelError, decoder(DraftModel(None)), "draft", "None", "specjax.load_model"),
    "a mapping as draft": row(ModelError, decoder(DraftModel({"a": 1})), "draft", "dict", "specjax.load_model"),
    "a tokenizer as draft": row(
        ModelError, lambda w: Decoder(w.target, DraftModel(w.target.tokenizer)), "draft", "specjax.load_model"
    ),
    "a draft that is not there": row(
        ModelError, lambda w: Decoder(w.target, DraftModel(f"{w.tmp}/none")), "{tmp}/none", "no such directory"
    ),
    "an empty path as draft": row(ModelError, decoder(DraftModel("")), "''", "directory"),
    "a path as target": row(ModelError, lambda w: Decoder("models/x"), "target", "'models/x'", "specjax.load_model"),
    "no target": row(ModelError, lambda w: Decoder(None), "target", "None", "specjax.load_model"),
    "an unknown verifier": row(
        ConfigError, decoder(verifier="speculativ"), "verifier", "'speculativ'", "known are", "'speculative'?"
    ),
    "a number as verifier": row(ConfigError, decoder(verifier=3), "verifier", "3", "kind"),
    "no verifier": row(ConfigError, decoder(verifier=None), "verifier", "None", "kind"),
    "a class as verifier": row(ConfigError, decoder(verifier=TopK), "verifier", "TopK", "TopK()"),
    "a fraction as k of a verifier": row(
        ConfigError, decoder(verifier=unchecked(TopK, k=2.5)), "verifier.k", "2.5", "integer"
    ),  # type: ignore
    "k of 0 of a verifier": row(ConfigError, decoder(verifier=unchecked(TopK, k=0)), "verifier.k", "0"),
    "lenience above 1": row(
        ConfigError, decoder(verifier=unchecked(Lenient, lenience=1.5)), "verifier.lenience", "1.5", "equal to 1"
    ),
    "lenience of NaN": row(
        ConfigError, decoder(verifier=unchecked(Lenient, lenience=float("nan"))), "verifier.lenience", "nan"
    ),
    "epsilon of 1": row(
        ConfigError, decoder(verifier=unchecked(Typical, epsilon=1.0)), "verifier.epsilon", "1.0", "less than 1"
    ),
    "a draft of another vocabulary": row(
        ModelError,
        lambda w: Decoder(w.textless, DraftModel(resized(w.draft, vocab_size=250))),
        "vocabulary",
        "250",
        "300",
    ),
    "a name that the package does not have": row(
        AttributeError,
        lambda w: specjax.load_modle,
        "load_modle",
        "public names",
        "load_model",  # type: ignore
    ),
}


def resized(model: Any, **sizes: int):
    config = dataclasses.replace(model.config, **sizes)
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=config))


PROMPTS = {
    "text instead of a list": row(DataError, generate("abc"), "prompts", "list"),
    "a number instead of a list": row(DataError, generate(7), "prompts", "7", "list"),
    "a mapping of prompts": row(DataError, generate({"a": "b"}), "prompts", "dict", "list"),
    "no prompts": row(DataError, generate([]), "prompts", "empty", "at least one"),
    "token ids without their list": row(DataError, generate([1, 2, 3]), "prompt 0", "1", "list of one"),
    "an empty text": row(DataError, generate(["x", ""]), "prompt 1", "empty", "at least one token"),
    "an empty list of ids": row(DataError, generate([[]]), "prompt 0", "empty", "at least one token"),
    "None as prompt": row(DataError, generate([None]), "prompt 0", "None", "token ids"),
    "bytes as prompt": row(DataError, generate([b"abc"]), "prompt 0", "b'abc'", "token ids"),
    "a mapping as prompt": row(DataError, generate([{"input_ids": [1]}]), "prompt 0", "dict", "input_ids"),
    "a fraction as token id": row(DataError, generate([[1, 3.5]]), "prompt 0", "3.5", "token id"),
    "a whole float as token id": row(DataError, generate([[1, 3.0]]), "prompt 0", "3.0", "token id"),
    "text as token id": row(DataError, generate([[1, "7"]]), "prompt 0", "'7'", "token id"),
    "a truth value as token id": row(DataError, generate([[1, True]]), "prompt 0", "True", "token id"),
    "None as token id": row(DataError, generate([[1, None]]), "prompt 0", "None", "token id"),
    "an array of floats": row(DataError, generate([np.array([1.0, 2.0])]), "prompt 0", "float64", "token ids"),
    "an array of two dimensions": row(DataError, generate([np.array([[1, 2]])]), "prompt 0", "(1, 2)", "token ids"),
    "a nested list": row(DataError, generate([[[1, 2]]]), "prompt 0", "[1, 2]", "token id"),
    "an id below 0": row(DataError, generate([[-1]]), "prompt 0", "-1", "vocabulary of 300"),
    "an id past the vocabulary": row(DataError, generate([[300]]), "prompt 0", "300", "vocabulary of 300"),
    "an id that is padding": row(
        DataError,
        lambda w: Decoder(resized(w.target, vocab_size=400)).generate([[399]]),
        "prompt 0",
        "399",
        "tokenizer",
    ),
    "text without a tokenizer": row(
        DataError, lambda w: Decoder(w.textless).generate(["x"]), "prompt 0", "no tokenizer", "token ids"
    ),
    "a prompt that does not fit": row(DataError, generate([[1] * 250], max_new_tokens=10), "prompt 0", "250", "256"),
    "a list of prompts for a stream": row(DataError, stream(["a", "b"]), "prompt 0", "'a'", "token id"),
}


OPTIONS = {
    "a budget of 0": row(DataError, generate(max_new_tokens=0), "max_new_tokens", "row 0", "0", "at least 1"),
    "a budget of text": row(DataError, generate(max_new_tokens="8"), "max_new_tokens", "'8'"),
    "a budget of a fraction": row(DataError, generate(max_new_tokens=2.5), "max_new_tokens", "row 0", "2.5", "whole"),
    "budgets for other rows": row(
        DataError, generate(max_new_tokens=[8, 8]), "max_new_tokens", "2 values for 1 prompt"
    ),
    "a seed of text": row(DataError, generate(seed="0"), "seed", "'0'"),
    "no seed": row(DataError, generate(seed=None), "seed", "None"),
    "a temperature below 0": row(DataError, generate(temperature=-1), "temperature", "row 0", "-1", ">= 0"),
    "a temperature of NaN": row(DataError, generate(temperature=float("nan")), "temperature", "row 0", "nan"),
    "a temperature too close to 0": row(DataError, generate(temperature=1e-9), "temperature", "1e-09", "1e-5"),
    "a temperature of text": row(DataError, generate(temperature="1"), "temperature", "'1'"),
    "a temperature of hundreds of digits": row(
        DataError, generate(temperature=10**400), "temperature", "row 0", "1000", "finite"
    ),
    "a complex temperature": row(DataError, generate(temperature=np.complex64(1)), "temperature", "(1+0j)", "finite"),
    "a truth value as temperature": row(DataError, generate(temperature=True), "temperature", "True", "finite"),
    "a truth value as top_k": row(DataError, generate(top_k=True), "top_k", "True", "whole number"),
    "no temperature": row(DataError, generate(temperature=None), "temperature", "None"),
    "top_k below 0": row(DataError, generate(top_k=-1), "top_k", "row 0", "-1"),
    "top_k of a fraction": row(DataError, generate(top_k=1.5), "top_k", "1.5", "whole number"),
    "top_k past the vocabulary": row(DataError, generate(top_k=301), "top_k", "301", "vocabulary of 300"),
    "top_p of 0": row(DataError, generate(top_p=0.0), "top_p", "0.0", "(0, 1]"),
    "top_p above 1": row(DataError, generate(top_p=1.1), "top_p", "1.1", "(0, 1]"),
    "top_p of two rows for one": row(DataError, generate(top_p=[0.5, 0.5]), "top_p", "2 values for 1 prompt"),
    "min_p above 1": row(DataError, generate(min_p=2), "min_p", "2", "[0, 1]"),
    "repetition_penalty of 0": row(DataError, generate(repetition_penalty=0), "repetition_penalty", "0", "> 0"),
    "an infinite presence_penalty": row(
        DataError, generate(presence_penalty=float("inf")), "presence_penalty", "inf", "finite"
    ),
    "frequency_penalty of text": row(DataError, generate(frequency_penalty="a"), "frequency_penalty", "'a'"),
    "more least tokens than most": row(
        DataError, generate(min_new_tokens=9, max_new_tokens=8), "min_new_tokens", "9", "max_new_tokens=8"
    ),
    "a bias of a token that is none": row(
        DataError, generate(logit_bias={300: 1.0}), "logit_bias", "300", "vocabulary"
    ),
    "a bias of NaN": row(DataError, generate(logit_bias={1: float("nan")}), "logit_bias", "nan", "token 1"),
    "a bias of hundreds of digits": row(
        DataError, generate(logit_bias={1: 10**400}), "logit_bias", "token 1", "below 1e30"
    ),
    "a bias of text": row(DataError, generate(logit_bias="1=2"), "logit_bias", "'1=2'", "mapping"),
    "a bias as a list of numbers": row(DataError, generate(logit_bias=[1, 2]), "logit_bias", "[1, 2]", "mapping"),
    "banned tokens as a number": row(DataError, generate(banned_tokens=5), "banned_tokens", "5", "list"),
    "a banned token that is none": row(DataError, generate(banned_tokens=[[-1]]), "banned_tokens", "-1", "token id"),
    "a banned token of text": row(DataError, generate(banned_tokens=["a"]), "banned_tokens", "'a'"),
    "every token banned": row(
        DataError, generate(banned_tokens=list(range(300))), "row 0", "banned_tokens", "allow one"
    ),
    "an allowed token that is a fraction": row(DataError, generate(allowed_tokens=[[1.5]]), "allowed_tokens", "1.5"),
    "a stop token past the vocabulary": row(DataError, generate(stop_token_ids=[300]), "stop_token_ids", "300"),
    "an empty stop string": row(DataError, generate(stop_strings=""), "stop_strings", "''"),
    "a number as stop string": row(DataError, generate(stop_strings=5), "stop_strings", "5"),
    "a number among stop strings": row(DataError, generate(stop_strings=[5]), "stop_strings", "row 0", "5", "no text"),
    "a number as a row's stop strings": row(
        DataError, generate([[1], [2]], stop_strings=[["a"], 0]), "stop_strings", "row 1", "0", "no text"
    ),
    "bytes as stop string": row(DataError, generate(stop_strings=b"ab"), "stop_strings", "b'ab'", "give a text"),
    "stop strings without a tokenizer": row(
        DataError, lambda w: Decoder(w.textless).generate([[1]], stop_strings="a"), "stop_strings", "tokenizer"
    ),
    "unknown logprobs": row(DataError, generate(logprobs="all"), "logprobs", "'all'", "'raw'"),
    "a processor that is none": row(DataError, generate(logits_processor=3), "logits_processor", "int", "f(logits"),
    "a processor of one argument": row(
        DataError, generate(logits_processor=lambda x: x), "logits_processor", "f(logits, context)"
    ),
    "a processor that returns a sum": row(
        DataError, generate(logits_processor=lambda x, c: x.sum()), "logits_processor", "float32[]", "same shape"
    ),
    "events of no block": row(DataError, stream([1], steps_per_event=0), "steps_per_event", "0", "at least one"),
    "events of half a block": row(DataError, stream([1], steps_per_event=0.5), "steps_per_event", "0.5", "whole"),
    "sampling with a greedy rule": row(
        DataError,
        lambda w: Decoder(w.target, None, "greedy").generate([[1]], temperature=1.0),
        "verifier 'greedy'",
        "temperature 0",
        "'speculative'",
    ),
    "an unknown option": row(TypeError, generate(top_q=1), "'top_q'", "known are", "top_p"),
}

LOGITS = {
    "an id past the vocabulary": row(DataError, logits([[300]]), "300", "row 0", "vocabulary of 300"),
    "an id below 0": row(DataError, logits([[1], [-1]]), "-1", "row 1", "vocabulary of 300"),
    "ids of floats": row(DataError, logits([[1.5]]), "float64", "token ids"),
    "ids of truth values": row(DataError, logits([[True]]), "truth value", "token id"),
    "an id that is a truth value": row(DataError, logits([[True, 2]]), "truth value", "token id"),
    "one dimension": row(DataError, logits([1, 2]), "(2,)", "[B, T]"),
    "rows of different lengths": row(DataError, logits([[1, 2], [3]]), "one length", "pad"),
    "text": row(DataError, logits(["abc"]), "token ids"),
    "no tokens": row(DataError, logits([[]]), "(1, 0)", "[B, T]"),
}

ROWS = {**DECODERS, **PROMPTS, **OPTIONS, **{f"logits: {name}": found for name, found in LOGITS.items()}}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_argument_is_told_in_one_line(name, world):
    check(ROWS[name], world)
