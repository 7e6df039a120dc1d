"""Sampling parameters, stop strings, logprobs and logits processors through the whole decoder: speculation changes
nothing of what they mean, nothing is compiled anew for them, and bad ones are refused in one line."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import DataError, SpecjaxError
from specjax.evaluation.references import sampling_logits, softmax
from specjax.registry import VERIFIERS, resolve
from specjax.runtime.compile_cache import count_compiles
from specjax.testing.toys import ToyModel, prefix_model, related
from tests.cases import in_proof
from tests.decode import mixed_requests

SIZE = 12
TARGET = prefix_model(0, vocab_size=SIZE, scale=2.0, eos_ids=(3,))
DRAFT = related(TARGET, 1)
PROMPTS = [[1, 2, 1], [5], [1, 2, 6, 7, 1, 2], [4, 4]]
PER_ROW: dict[str, Any] = {
    "repetition_penalty": [1.0, 1.5, 0.8, 1.2],
    "presence_penalty": [0.7, 0.0, -0.4, 0.0],
    "frequency_penalty": [0.0, 0.9, 0.3, 0.0],
    "logit_bias": [{0: 2.0}, {}, {4: -3.0, 5: 1.0}, {}],
    "banned_tokens": [[], [2, 7], [], [0]],
    "allowed_tokens": [[], [], [], [0, 1, 3, 5, 8]],
    "min_new_tokens": [0, 9, 20, 3],
    "stop_token_ids": [[], [6], [8, 9], []],
}
CUTS = {"top_k": [0, 4, 0, 6], "top_p": [0.8, 1.0, 0.95, 1.0], "min_p": [0.0, 0.0, 0.1, 0.05]}


class Letters:
    """A tokenizer of one letter a token, but for token 11, which is two."""

    TEXT = (*"abcdefghijk", "xy")

    def __call__(self, text):
        return {"input_ids": [self.TEXT.index(letter) for letter in text]}

    def get_vocab(self):
        return {text: i for i, text in enumerate(self.TEXT)}

    def decode(self, ids, **_):
        return "".join(self.TEXT[i] for i in ids)


def with_text(model: ToyModel) -> ToyModel:
    return ToyModel(model.spec, model.params, model.eos_ids, Letters())


@pytest.mark.parametrize("drafter", [DraftModel(DRAFT, 3), NGram(4, min_n=1)], ids=["draft", "ngram"])
def test_greedy_output_with_every_parameter_is_the_autoregressive_one(drafter):
    options: dict[str, Any] = {"max_new_tokens": 24, **PER_ROW}
    plain = Decoder(TARGET).generate(PROMPTS, **options)
    assert Decoder(TARGET, drafter).generate(PROMPTS, **options).tokens == plain.tokens
    for i, row in enumerate(plain.tokens):  # and it is what the definition says, token by token
        bias = np.zeros(SIZE)
        bias[list(PER_ROW["logit_bias"][i])] = list(PER_ROW["logit_bias"][i].values())
        bias[PER_ROW["banned_tokens"][i]] = -np.inf
        if PER_ROW["allowed_tokens"][i]:
            bias[[t for t in range(SIZE) if t not in PER_ROW["allowed_tokens"][i]]] = -np.inf
        stops = [3, *PER_ROW["stop_token_ids"][i]]
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")
        settings = {name: PER_ROW[name][i] for name in names}
        logits = np.asarray(TARGET.logits([[*PROMPTS[i], *row]]))[0, len(PROMPTS[i]) - 1 : -1]
        for j, token in enumerate(row):
            distribution = sampling_logits(logits[j], PROMPTS[i], row[:j], bias=bias, stop_ids=stops, **settings)
            assert token == distribution.argmax()
        assert not set(row[:-1]) & set(stops)
        assert len(row) == 24 or row[-1] in stops
        assert len(row) > settings["min_new_tokens"] or settings["min_new_tokens"] == 0


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        ("draft", 3),
        ("self", 1),
        ("ngram", 6),
        *(in_proof("draft", k) for k in (1, 6)),
        *(in_proof(kind, 3) for kind in ("self", "ngram")),
    ],
)
def test_coupled_output_is_plain_samplings_token_for_token(kind, k):
    drafter = {"draft": DraftModel(DRAFT, k), "self": DraftModel(TARGET, k), "ngram": NGram(k, min_n=1)}[kind]
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": [1.0, 0.7, 0.0, 1.3], "seed": 5, **PER_ROW, **CUTS}
    plain = Decoder(TARGET, verifier="coupled").generate(PROMPTS, **options)
    fast = Decoder(TARGET, drafter, verifier="coupled").generate(PROMPTS, **options)
    assert fast.tokens == plain.tokens
    assert kind != "self" or all(s.accepted == s.drafted for s in fast.stats)
    options["seed"] = 6
    assert plain.tokens != Decoder(TARGET, verifier="coupled").generate(PROMPTS, **options).tokens


@pytest.mark.more
@pytest.mark.parametrize("kind", sorted(set(VERIFIERS) - {"greedy"}))
def test_every_rule_takes_sampled_and_certain_drafts_and_greedy_rows_stay_greedy(kind):
    verifier = resolve(VERIFIERS, kind, "")()
    temperature = [0.0, 1.0, 0.0, 0.8]
    want = Decoder(TARGET).generate(PROMPTS, max_new_tokens=16).tokens
    for drafter in (DraftModel(DRAFT, 3), NGram(3, min_n=1)):
        result = Decoder(TARGET, drafter, verifier).generate(PROMPTS, max_new_tokens=16, temperature=temperature)
        assert [result.tokens[0], result.tokens[2]] == [want[0], want[2]]
        assert sum(s.accepted for s in result.stats) > 0


@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
def test_a_draft_equal_to_its_target_is_always_accepted_with_every_parameter(verifier):
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": [1.0, 0.7, 0.0, 1.3], **PER_ROW, **CUTS}
    result = Decoder(TARGET, DraftModel(TARGET, 4), verifier).generate(PROMPTS, **options)
    assert all(s.accepted == s.drafted > 0 for s in result.stats)


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_logprobs_are_those_of_the_emitted_tokens(kind):
    options: dict[str, Any] = {
        "max_new_tokens": 14,
        "temperature": [1.0, 0.6, 0.0, 1.0],
        "seed": 3,
        "top_k": [0, 5, 0, 4],
    }
    result = Decoder(TARGET, DraftModel(DRAFT, 3)).generate(PROMPTS, logprobs=kind, presence_penalty=0.5, **options)
    assert result.logprobs is not None
    for i, (row, got) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        logits = np.asarray(TARGET.logits([[*PROMPTS[i], *row]]))[0, len(PROMPTS[i]) - 1 : -1]
        for j, token in enumerate(row):
            settings: dict[str, Any] = {name: options[name][i] for name in ("temperature", "top_k")} | {
                "presence_penalty": 0.5
            }
            distribution = sampling_logits(logits[j], PROMPTS[i], row[:j], **({} if kind == "raw" else settings))
            assert got[j] == pytest.approx(np.log(softmax(distribution)[token]), abs=1e-5)
    events = list(Decoder(TARGET, DraftModel(DRAFT, 3)).stream(PROMPTS[0], max_new_tokens=8, logprobs=True))
    whole = Decoder(TARGET).generate(PROMPTS[:1], max_new_tokens=8, logprobs="raw")
    assert [t for e in events for t in e.tokens] == whole.tokens[0]
    assert whole.logprobs is not None
    np.testing.assert_allclose([x for e in events for x in e.logprobs or ()], whole.logprobs[0], atol=1e-5)


def test_a_stop_string_cuts_where_it_is_completed():
    target, draft = with_text(TARGET), with_text(DRAFT)
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    free = Decoder(target, verifier="coupled").generate(PROMPTS, **options)
    stops = [free.text[0][7:9], free.text[1][20:23], "never there", free.text[3][0]]
    rows = [[stops[0]], [stops[1], "zz"], [stops[2]], [stops[3]]]
    for drafter in (None, DraftModel(draft, 4)):
        result = Decoder(target, drafter, verifier="coupled").generate(PROMPTS, stop_strings=rows, **options)
        assert [len(times) for times in result.commit_times] == [len(row) for row in result.tokens]
        assert result.metrics().tokens < result.metrics().stats.emitted, "blocks were decoded behind a stop"
        for i, text in enumerate(free.text):
            at = min((text.find(s) for s in rows[i] if s in text), default=len(text))
            assert result.text[i] == text[:at]
            assert "".join(p.text for p in result.pieces(i)) == result.text[i]
            completed = Letters().decode(result.tokens[i])
            assert text.startswith(completed)
            assert at == len(text) or any(s in completed for s in rows[i])
            assert not any(s in Letters().decode(result.tokens[i][:-1]) for s in rows[i])


def test_a_stream_never_shows_a_part_of_a_stop_string():
    target = with_text(TARGET)
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    decoder = Decoder(target, DraftModel(with_text(DRAFT), 3), verifier="coupled")
    free = decoder.generate(PROMPTS[:1], **options).text[0]
    for stop in (free[9:13], free[30:32], free[:2]):
        whole = decoder.generate(PROMPTS[:1], stop_strings=stop, **options)
        shown, tokens, event = "", [], None
        for event in decoder.stream(PROMPTS[0], stop_strings=stop, **options):
            shown, tokens = shown + event.text, tokens + event.tokens
            assert whole.text[0].startswith(shown)
        assert event is not None
        assert event.done
        assert (shown, tokens) == (whole.text[0], whole.tokens[0])


def test_a_processor_sees_the_prefix_of_every_draft_position():
    def no_repeats(logits, context):
        """Forbids the last token."""
        last = jnp.take_along_axis(context.tokens, (context.lengths - 1)[:, None], axis=1)
        index = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        return jnp.where((index == last) & (context.lengths > context.prompt_lengths)[:, None], -jnp.inf, logits)

    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "logits_processor": no_repeats}
    plain = Decoder(TARGET).generate(PROMPTS, **options)
    assert plain.tokens != Decoder(TARGET).generate(PROMPTS, max_new_tokens=24, ignore_eos=True).tokens
    assert all(a != b for row in plain.tokens for a, b in itertools.pairwise(row))
    assert Decoder(TARGET, DraftModel(DRAFT, 4)).generate(PROMPTS, **options).tokens == plain.tokens
    sampled = {**options, "temperature": 1.0, "top_p": 0.9}
    result = Decoder(TARGET, DraftModel(TARGET, 4)).generate(PROMPTS, **sampled)
    assert all(s.accepted == s.drafted > 0 for s in result.stats)
    assert all(a != b for row in result.tokens for a, b in itertools.pairwise(row))


def test_a_processor_of_another_shape_is_refused_before_decoding():
    decoder: Any = Decoder(TARGET)
    for wrong, found in (
        (lambda logits, context: logits[:, :-1], r"float32\[4, 11\]"),
        (lambda logits, context: logits.astype(jnp.bfloat16), r"bfloat16\[4, 12\]"),
        (lambda logits, context: None, "NoneType"),
        (lambda logits: logits, "cannot be called"),
    ):
        with pytest.raises(DataError, match=found):
            decoder.generate(PROMPTS, logits_processor=wrong)


def test_a_draft_beyond_what_a_processor_allows_is_cut_and_plain_decoding_is_unchanged():
    """No token is left after a forbidden one: plain decoding never gets there, an n-gram proposal does."""

    def grammar(logits, context):
        index = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        seen = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
        new = (seen >= context.prompt_lengths[:, None]) & (seen < context.lengths[:, None])
        broken = jnp.any(new & (context.tokens == 2), axis=1)[:, None]
        return jnp.where((index == 2) | broken, -jnp.inf, logits)

    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "logits_processor": grammar}
    plain = Decoder(TARGET).generate(PROMPTS, **options)
    assert Decoder(TARGET, NGram(4, min_n=1)).generate(PROMPTS, **options).tokens == plain.tokens
    sampled = Decoder(TARGET, NGram(4, min_n=1), "block").generate(PROMPTS, temperature=1.0, **options)
    assert all(2 not in row for row in sampled.tokens)


def test_a_processor_that_leaves_the_draft_no_distribution_ends_the_proposal():
    """By what it is given it tells draft from target, and takes everything from the draft."""
    bound = float(np.asarray(TARGET.logits([PROMPTS[0]])).max())
    draft = ToyModel(DRAFT.spec, jax.tree.map(lambda x: x * 50, DRAFT.params))

    def only_small(logits, context):
        return jnp.where(jnp.max(logits, axis=1, keepdims=True) > 10 * bound, jnp.nan, logits)

    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    for verifier in ("speculative", "block"):
        result = Decoder(TARGET, DraftModel(draft, 3), verifier).generate(
            PROMPTS, logits_processor=only_small, **options
        )
        assert sum(s.drafted for s in result.stats) < 3 * sum(s.blocks for s in result.stats)
        assert [len(row) for row in result.tokens] == [16] * 4
    coupled = [
        Decoder(TARGET, drafter, "coupled").generate(PROMPTS, logits_processor=only_small, **options).tokens
        for drafter in (None, DraftModel(draft, 3))
    ]
    assert coupled[0] == coupled[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_distribution_missing_after_the_budget_is_not_missed(temperature):
    def ends(logits, context):
        return jnp.where((context.lengths - context.prompt_lengths >= 9)[:, None], jnp.nan, logits)

    options: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "logits_processor": ends}
    result = Decoder(TARGET, DraftModel(TARGET, 4)).generate(PROMPTS, max_new_tokens=9, **options)
    assert [len(row) for row in result.tokens] == [9] * 4


def test_processed_logprobs_of_a_greedy_row_are_the_same_beside_a_sampled_one():
    decoder, options = Decoder(TARGET, DraftModel(DRAFT, 3)), {"max_new_tokens": 8, "ignore_eos": True}
    alone = decoder.generate(PROMPTS, logprobs="processed", **options)
    mixed = decoder.generate(PROMPTS, logprobs="processed", temperature=[0.0, 0.0, 0.0, 1.0], **options)
    assert alone.logprobs is not None
    assert mixed.logprobs is not None
    assert alone.logprobs[:3] == mixed.logprobs[:3] == [[0.0] * 8] * 3


@pytest.mark.proof
def test_coupled_output_is_plain_samplings_in_optimised_code():
    test_coupled_output_is_plain_samplings_token_for_token("draft", 3)


def test_a_stream_holds_back_a_stop_string_that_ends_in_half_a_character():
    class Bytes(Letters):
        """Tokens 4 and 7 are the two bytes of one character."""

        def decode(self, ids, **_):
            table = [b"\xc3" if i == 4 else b"\xa9" if i == 7 else self.TEXT[i].encode() for i in range(SIZE)]
            return b"".join(table[i] for i in ids).decode("utf-8", errors="replace")

    target = ToyModel(TARGET.spec, TARGET.params, (), Bytes())
    script = [1, 2, 5, 4, 7, 6, 1, 0]

    def scripted(logits, context):
        at = jnp.minimum(context.lengths - context.prompt_lengths, len(script) - 1)
        wanted = jnp.asarray(script, jnp.int32)[at][:, None]
        return jnp.where(jnp.arange(SIZE, dtype=jnp.int32)[None] == wanted, 0.0, -jnp.inf)

    options: dict[str, Any] = {"max_new_tokens": 8, "stop_strings": "f\u00e9", "logits_processor": scripted}
    whole = Decoder(target).generate([[1]], **options)
    assert whole.text == ["bc"]
    shown = ""
    for event in Decoder(target).stream([1], **options):
        shown += event.text
        assert whole.text[0].startswith(shown)
    assert shown == "bc"


@pytest.mark.parametrize("drafter", [None, DraftModel(DRAFT, 3)], ids=["plain", "draft"])
def test_a_processor_that_returns_nan_ends_its_row_and_no_other(drafter):
    def fails(logits, context):
        at = (context.lengths - context.prompt_lengths == 5) & (jnp.arange(len(logits)) == 2)
        return jnp.where(at[:, None], jnp.nan, logits)

    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "ignore_eos": True}
        found = Decoder(TARGET, drafter).generate(PROMPTS, logits_processor=fails, **options)
        assert found.finish_reasons == ["length", "length", "invalid_logits", "length"]
        assert [len(row) for row in found.tokens] == [20, 20, 5, 20]


def test_requests_of_any_size_share_a_bounded_number_of_programs():
    """Prompts, budgets and batches all vary: nothing but their buckets makes a program."""
    target = prefix_model(7, vocab_size=SIZE)
    decoder = Decoder(target, DraftModel(target, 3))
    bound, formula = mixed_requests.most_programs(target, 3, rows=2, prompt=40, new=300)
    assert bound == 20, formula
    with count_compiles() as count:
        for request in mixed_requests.requests(40, seed=0, vocabulary=SIZE, rows=2, prompt=40, new=300):
            decoder.generate(**request)
    assert 8 <= count.programs <= bound


def test_nothing_is_compiled_for_other_parameters():
    rng, decoder = np.random.default_rng(0), Decoder(TARGET, DraftModel(DRAFT, 3))
    for temperature in (0.0, 1.0):
        decoder.generate(PROMPTS, max_new_tokens=16, temperature=temperature)
    with count_compiles() as count:
        for i in range(100):
            decoder.generate(
                [rng.integers(0, SIZE, rng.integers(1, 12)).tolist() for _ in PROMPTS],
                max_new_tokens=int(rng.integers(4, 17)),
                temperature=[float(rng.choice([0.0, 0.5, 1.0, 1.5])) for _ in PROMPTS],
                top_k=rng.integers(0, SIZE + 1, 4).tolist(),
                top_p=rng.uniform(0.1, 1.0, 4).tolist(),
                min_p=rng.uniform(0.0, 0.5, 4).tolist(),
                repetition_penalty=rng.uniform(0.5, 2.0, 4).tolist(),
                presence_penalty=rng.normal(size=4).tolist(),
                frequency_penalty=rng.normal(size=4).tolist(),
                min_new_tokens=rng.integers(0, 4, 4).tolist(),
                logit_bias=[{int(rng.integers(SIZE)): float(rng.normal())} for _ in PROMPTS],
                banned_tokens=[[int(rng.integers(SIZE))] for _ in PROMPTS],
                stop_token_ids=[rng.integers(0, SIZE, rng.integers(0, 4)).tolist() for _ in PROMPTS],
                seed=i,
            )
    assert count.programs == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature of row 0: -0.5 is not a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature of row 0: nan"),
        ({"top_p": [1.0, 0.0, 1.0, 1.0]}, r"top_p of row 1: 0.0 is not in \(0, 1\]"),
        ({"top_p": 1.2}, "top_p of row 0: 1.2"),
        ({"top_k": SIZE + 1}, "top_k of row 0: 13 exceeds the vocabulary of 12"),
        ({"top_k": -1}, "top_k of row 0: -1"),
        ({"top_k": 2.5}, "top_k of row 0: 2.5 is not a whole number"),
        ({"min_p": 1.5}, "min_p of row 0: 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty of row 0: 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty of row 0: inf"),
        ({"min_new_tokens": 99}, "min_new_tokens of row 0: 99 exceeds max_new_tokens=8"),
        ({"logit_bias": {99: 1.0}}, "logit_bias of row 0: 99 is no token id"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of row 0: nan for token 1"),
        ({"banned_tokens": [[], [-1], [], []]}, "banned_tokens of row 1: -1 is no token id"),
        ({"banned_tokens": list(range(SIZE))}, "row 0: .* leave no token"),
        ({"allowed_tokens": [3], "min_new_tokens": 2}, "row 0: .* leave no token"),
        ({"stop_token_ids": [12]}, "stop_token_ids of row 0: 12"),
        ({"top_k": [1, 2]}, "top_k: 2 values for 4 prompts"),
        ({"stop_strings": "a"}, "stop_strings need text"),
        ({"temperature": None}, "temperature: None; give one value"),
        ({"temperature": 1e-38}, "temperature of row 0: 1e-38"),
        ({"presence_penalty": 1e300}, r"presence_penalty of row 0: 1e\+300"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty of row 0: 1e-50"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty of row 0: 1e-40 is not a finite number > 0, from 1e-20"),
        ({"top_p": 1e-40}, "top_p of row 0: 1e-40 is not in"),
        ({"logit_bias": {1: 1e300}}, r"logit_bias of row 0: 1e\+300"),
        ({"logit_bias": {1: None}}, "logit_bias of row 0: None"),
        ({"stop_token_ids": 5}, "stop_token_ids: 5; give a list"),
        ({"banned_tokens": ["a"] * 4}, "banned_tokens of row 0: 'a' is no list"),
        ({"logprobs": "all"}, "logprobs: 'all'"),
    ],
)
def test_bad_options_name_argument_row_and_value(options, message):
    with pytest.raises(SpecjaxError, match=message):
        Decoder(TARGET).generate(PROMPTS, max_new_tokens=8, **options)


def test_the_least_numbers_that_are_taken_have_a_distribution():
    """A temperature of 1e-5 takes the most likely token, and so does the least top_p."""
    greedy = Decoder(TARGET).generate(PROMPTS, max_new_tokens=8, temperature=0.0)
    for options in ({"temperature": 1e-5}, {"temperature": 1.0, "top_p": 1.2e-38}):
        found = Decoder(TARGET).generate(PROMPTS, max_new_tokens=8, **options)
        assert found.tokens == greedy.tokens
    for penalty in (1e-19, 1e19):
        found = Decoder(TARGET).generate(PROMPTS, max_new_tokens=8, repetition_penalty=penalty)
        assert set(found.finish_reasons) <= {"length", "stop"}


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="top_q"):
        Decoder(TARGET).generate(PROMPTS, top_q=0.5)  # pyright: ignore[reportCallIssue]


def test_stop_strings_must_be_text():
    for wrong in ("", ["a", ""], [["a"], ["b"], ["c"], [1]]):
        with pytest.raises(DataError, match="stop_strings"):
            Decoder(with_text(TARGET)).generate(PROMPTS, stop_strings=wrong)


def test_arrays_of_numpy_are_taken_as_the_numbers_and_lists_in_them():
    decoder = Decoder(TARGET)
    plain: Any = {"max_new_tokens": 5, "seed": 5, "temperature": 0.5, "banned_tokens": [[1], [2]]}
    arrays: Any = {name: np.array(value) for name, value in plain.items()}
    found, want = decoder.generate([[1, 2], [1]], **arrays), decoder.generate([[1, 2], [1]], **plain)
    assert (found.tokens, found.seeds) == (want.tokens, want.seeds)
    by_row: Any = plain | {"banned_tokens": [np.array([1]), np.array([2])]}
    rows = decoder.generate([[1, 2], [1]], **by_row)
    assert rows.tokens == want.tokens
    two: Any = np.int64(2)
    assert len(list(decoder.stream([1], max_new_tokens=4, steps_per_event=two))) == 2
    bias: Any = {2: -(10**400), 3: np.float16(-1)}
    least = decoder.generate([[1, 2]], max_new_tokens=4, logit_bias=bias)
    assert 2 not in least.tokens[0]
