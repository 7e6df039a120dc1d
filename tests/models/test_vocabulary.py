"""Which models share a vocabulary, and that rows without a token change nothing, however large their logits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import DataError, ModelError
from specjax.evaluation.bench import count_recompiles
from specjax.evaluation.numerics import compare_paths
from specjax.evaluation.target_distribution import TargetDistribution
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.models.vocabulary import check_same_vocabulary, unused_ids
from specjax.testing.toys import ToyModel, exact_distribution, prefix_model, related
from specjax.verifiers.block import Block
from tests.cases import in_proof
from tests.decode.distributions import SMOKE, check_law
from tests.models.directories import make_tokenizer

SIZE, HUGE = 4, 50.0
TARGET = prefix_model(0, vocab_size=SIZE)
DRAFT = related(TARGET, 1)
PROMPTS = [[1, 2, 1], [3], [0, 2, 3, 0]]


class Letters:
    def __call__(self, text):
        return {"input_ids": ["abcd".index(letter) for letter in text]}

    def get_vocab(self):
        return {letter: i for i, letter in enumerate("abcd")}

    def decode(self, ids, **_):
        return "".join("abcd"[i] for i in ids)


def with_rows(model: ToyModel, rows: int) -> ToyModel:
    """With a tokenizer, and rows that it does not have, always by far the most likely ones."""
    extra = rows - model.vocab_size
    params = {
        "table": jnp.pad(model.params["table"], ((0, 0), (0, extra), (0, extra)), constant_values=HUGE),
        "bias": jnp.pad(model.params["bias"], (0, extra), constant_values=HUGE),
    }
    config = dataclasses.replace(model.config, vocab_size=rows)
    return ToyModel(dataclasses.replace(model.spec, config=config), params, tokenizer=Letters())


OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": [0.0, 1.0, 0.7], "seed": 3}


def same(padded: Decoder, plain: Decoder) -> bool:
    found, expected = (decoder.generate(PROMPTS, **OPTIONS) for decoder in (padded, plain))
    return (found.tokens, found.origins, found.stats) == (expected.tokens, expected.origins, expected.stats)


@pytest.mark.parametrize(
    ("rows", "verifier"), [((6, SIZE), "block"), ((SIZE, 7), "speculative"), in_proof((7, 5), "speculative")]
)
def test_padding_changes_nothing_of_what_is_drafted_accepted_and_emitted(rows, verifier):
    target, draft = map(with_rows, (TARGET, DRAFT), rows)
    assert same(Decoder(target, DraftModel(draft, 3), verifier), Decoder(TARGET, DraftModel(DRAFT, 3), verifier))


@pytest.mark.parametrize("drafter", [None, in_proof(NGram(3, min_n=1))])
def test_padding_changes_nothing_of_what_is_decoded_plainly(drafter):
    assert same(Decoder(with_rows(TARGET, 6), drafter), Decoder(TARGET, drafter))


def test_raw_logprobs_are_over_tokens_alone():
    padded, plain = (
        Decoder(target).generate(PROMPTS, logprobs="raw", **OPTIONS) for target in (with_rows(TARGET, 6), TARGET)
    )
    assert padded.logprobs is not None
    assert plain.logprobs is not None
    for found, expected in zip(padded.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [(7, 5), in_proof((SIZE, 6))])
def test_a_draft_equal_to_its_target_but_for_the_padding_is_always_accepted(rows):
    target, draft = (with_rows(TARGET, count) for count in rows)
    result = Decoder(target, DraftModel(draft, 3)).generate(PROMPTS, **OPTIONS)
    assert all("corrected" not in origins for origins in result.origins)


def test_the_distribution_is_the_targets_over_the_ids_of_its_tokenizer():
    target, draft = with_rows(TARGET, 6), with_rows(DRAFT, 7)
    check_law(Decoder(target, DraftModel(draft, 2)), [1, 2, 1], 3, exact_distribution(TARGET, [1, 2, 1], 3), SMOKE)


def test_the_distribution_that_certificates_expect_has_no_padding():
    distribution = TargetDistribution(with_rows(TARGET, 6), {}, 4)
    logits = distribution.logits([1, 2], [0, 3])
    assert np.isfinite(logits).all()
    assert list(np.isfinite(distribution.transformed(logits[1], [1, 2], [0], 1.0))) == [True] * SIZE + [False] * 2


def padded_transformer(model: LoadedModel, rows: int) -> LoadedModel:
    size = model.vocab_size

    def pad(x):
        return jnp.pad(x, [(0, rows - n if n == size else 0) for n in x.shape], constant_values=3.0)

    spec = Model(dataclasses.replace(model.config, vocab_size=rows))
    return dataclasses.replace(model, spec=spec, params=jax.tree.map(pad, model.params))


def test_a_transformer_decodes_as_without_its_padding(tiny_target, tiny_draft):
    prompts = ["def add(", "for number in"]
    target, draft = padded_transformer(tiny_target, 320), padded_transformer(tiny_draft, 304)
    expected = Decoder(tiny_target).generate(prompts, max_new_tokens=20)
    assert Decoder(target, DraftModel(draft, 3)).generate(prompts, max_new_tokens=20).tokens == expected.tokens


@pytest.mark.more
def test_padding_compiles_nothing_anew(tiny_target, tiny_draft):
    target, draft = padded_transformer(tiny_target, 320), padded_transformer(tiny_draft, 304)
    assert count_recompiles(target, DraftModel(draft, 3), Block(), prompts=20) == 0


def test_numerics_compare_what_the_loop_can_choose(tiny_target):
    target = padded_transformer(tiny_target, 320)
    prompts = np.asarray([target.tokenizer("def add(first")["input_ids"][:4]], np.int32)
    first = next(iter(compare_paths(target, prompts, count=4, k=2, rows=2)))
    assert first.differences == []


def test_prompts_of_padded_rows_are_refused():
    with pytest.raises(DataError, match=r"prompt 1: token id 4 is no token of the target's tokenizer, .* 4 for 6 rows"):
        Decoder(with_rows(TARGET, 6), NGram(2)).generate([[1], [2, 4, 5]])


def test_asking_for_padded_rows_alone_leaves_no_token():
    with pytest.raises(DataError, match="leave no token"):
        Decoder(with_rows(TARGET, 6)).generate([[1]], allowed_tokens=[4, 5])


def test_unused_ids_follow_the_tokenizer(tiny_target):
    assert unused_ids(TARGET).tolist() == unused_ids(tiny_target).tolist() == []
    assert unused_ids(with_rows(TARGET, 6)).tolist() == [4, 5]
    model = dataclasses.replace(tiny_target, tokenizer=make_tokenizer("abc"))
    assert unused_ids(model).tolist() == list(range(4, 300))
    model.tokenizer.add_tokens(["<new>"])
    assert unused_ids(model).tolist() == list(range(5, 300))


# --- pairing --------------------------------------------------------------------------------------------------------


def tokenizer(merges=("ab", "cd"), added=("<x>",), lower: bool = False, prefix: bool = False):
    pairs = [(merge[0], merge[1]) for merge in merges]
    ids = {token: i for i, token in enumerate(["<end>", *"abcd", "ab", "cd", "bc"])}
    backend = Tokenizer(models.BPE(ids, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)  # type: ignore[assignment]
    if lower:
        backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    made.add_tokens(list(added))
    return made


def model_of(tokenizer: Any, rows: int, name: str = "model") -> Any:
    spec = prefix_model(0, vocab_size=rows).spec
    return ToyModel(spec, {}, tokenizer=tokenizer, name=name)


@pytest.mark.parametrize("rows", [(9, 9), (12, 9), (9, 12), (64, 12)])
def test_tokenizers_pair_by_content_and_padding_does_not_count(rows):
    ours, theirs = (model_of(tokenizer(), count, name) for count, name in zip(rows, "ab", strict=True))
    assert ours.tokenizer is not theirs.tokenizer
    check_same_vocabulary(ours, theirs)


def other_file(change: Callable[[dict[str, Any]], None]) -> Any:
    """The same tokenizer, of a file that ``change`` wrote otherwise."""
    stored = json.loads(tokenizer().backend_tokenizer.to_str())
    change(stored)
    backend = Tokenizer.from_str(json.dumps(stored))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


NOTHING_CHANGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty for null": lambda f: f["model"].update(continuing_subword_prefix="", end_of_word_suffix=""),
    "zero for null": lambda f: f["model"].update(dropout=0.0),
    "nothing to fuse": lambda f: f["model"].update(fuse_unk=True),
    "default left out": lambda f: [f["model"].pop(name) for name in ("byte_fallback", "ignore_merges")],
    "no step": lambda f: f.update(normalizer={"type": "Sequence", "normalizers": []}),
    "one step": lambda f: f.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [f["pre_tokenizer"]]}),
    "spans alone": lambda f: f["pre_tokenizer"].update(trim_offsets=False),
}


@pytest.mark.parametrize("change", NOTHING_CHANGED)
def test_files_that_differ_in_nothing_that_has_an_effect_are_one_tokenizer(change):
    check_same_vocabulary(model_of(tokenizer(), 12), model_of(other_file(NOTHING_CHANGED[change]), 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["model"].update(ignore_merges=True), "'model'.*ignore_merges: False and True"),
        (lambda f: f["model"].update(end_of_word_suffix="w"), "'model'.*end_of_word_suffix: None and 'w'"),
        (
            lambda f: f.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}),
            "'normalizer'.*'Lowercase'",
        ),
    ],
)
def test_files_that_differ_in_what_has_an_effect_are_two(change, message):
    with pytest.raises(ModelError, match=message):
        check_same_vocabulary(model_of(tokenizer(), 12), model_of(other_file(change), 12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added": ("<y>",)}, r"differ in 1 entries of 'tokens' \(target and draft: 8: '<x>' and '<y>'\)"),
        ({"added": ("<y>", "<x>")}, r"2 entries of 'tokens' \(target and draft: 8: '<x>' and '<y>', 9: None and '<x>'"),
        ({"merges": ("cd", "ab")}, r"2 entries of 'merges' \(target and draft: 0: \['a', 'b'\] and \['c', 'd'\], 1: "),
        ({"merges": ("ab",)}, r"1 entries of 'merges' \(target and draft: 1: \['c', 'd'\] and None\)"),
        ({"lower": True}, r"1 entries of 'normalizer' \(target and draft: type: None and 'Lowercase'\)"),
        ({"prefix": True}, r"1 entries of 'pre_tokenizer' \(target and draft: add_prefix_space: False and True\)"),
    ],
)
def test_other_tokenizers_are_refused_with_the_first_differing_entries(changes, message):
    with pytest.raises(ModelError, match=message + ".*; use a draft of the same tokenizer, or distill") as refused:
        check_same_vocabulary(model_of(tokenizer(), 12), model_of(tokenizer(**changes), 12))
    assert "\n" not in str(refused.value)


def test_a_draft_without_a_row_for_every_token_is_refused():
    with pytest.raises(ModelError, match=r"embeddings for 8 tokens, and the last token of the target has id 8; resize"):
        check_same_vocabulary(model_of(tokenizer(), 12), model_of(tokenizer(), 8))
    # A token that the target has no row for either is never seen.
    check_same_vocabulary(model_of(tokenizer(), 8), model_of(tokenizer(), 8))


# --- one of them has a token more -----------------------------------------------------------------------------------

ONE, TWO = ("<x>",), ("<x>", "<y>")
LARGE = prefix_model(3, vocab_size=10)
SMALL = related(LARGE, 4)


def with_added(model: ToyModel, added: tuple[str, ...], rows: int) -> ToyModel:
    """With the tokenizer's 8 tokens and those ``added``; of ``rows``, those that no token has are the likeliest."""
    known = 8 + len(added)
    params = {
        "table": jnp.full((7, rows, rows), HUGE).at[:, :known, :known].set(model.params["table"][:, :known, :known]),
        "bias": jnp.full(rows, HUGE).at[:known].set(model.params["bias"][:known]),
    }
    spec = dataclasses.replace(model.spec, config=dataclasses.replace(model.config, vocab_size=rows))
    return ToyModel(spec, params, tokenizer=tokenizer(added=added))


SPOKEN = [[1, 9, 1], [9], [0, 2, 3, 9]]


def test_a_draft_without_the_targets_new_token_follows_it_and_never_proposes_it():
    target = with_added(LARGE, TWO, 10)
    plain = Decoder(target).generate(SPOKEN, max_new_tokens=40)
    options: dict[str, Any] = {"max_new_tokens": 40, "seed": 5}
    found = []
    for rows in (9, 12):  # with no row for the token, with an untrained one
        decoder = Decoder(target, DraftModel(with_added(SMALL, ONE, rows), 3), "block")
        assert decoder.generate(SPOKEN, **options).tokens == plain.tokens
        sampled = decoder.generate(SPOKEN, temperature=1.0, **options)
        flat = zip(itertools.chain(*sampled.tokens), itertools.chain(*sampled.origins), strict=True)
        origins = {origin for token, origin in flat if token == 9}
        assert origins
        assert "accepted" not in origins
        assert sum(stats.accepted for stats in sampled.stats) > 0
        found.append((sampled.tokens, sampled.origins))
    assert found[0] == found[1]


def test_a_draft_with_a_token_of_its_own_never_proposes_it():
    target, draft = with_added(LARGE, ONE, 12), with_added(LARGE, TWO, 10)
    prompts = [[1, 8, 1], [8]]
    options: dict[str, Any] = {"max_new_tokens": 40, "seed": 5, "temperature": [0.0, 1.0]}
    fast = Decoder(target, DraftModel(draft, 3)).generate(prompts, **options)
    assert fast.tokens[0] == Decoder(target).generate(prompts, **options).tokens[0]
    assert all(token < 9 for row in fast.tokens for token in row)
    assert all("corrected" not in origins for origins in fast.origins)


@pytest.mark.parametrize("rows", [9, in_proof(12)])
def test_the_distribution_with_a_token_that_the_draft_lacks_is_the_targets(rows):
    target, draft = with_added(LARGE, TWO, 10), with_added(SMALL, ONE, rows)
    distribution = exact_distribution(LARGE, [1, 9, 1], 2)
    assert sum(chance for sequence, chance in distribution.items() if 9 in sequence) > 0.005  # some twenty rows a look
    check_law(Decoder(target, DraftModel(draft, 2)), [1, 9, 1], 2, distribution, SMOKE)


def test_tokens_of_one_side_only_are_told_once(caplog):
    target, draft = model_of(tokenizer(added=TWO), 12), model_of(tokenizer(added=ONE), 9)
    for _ in range(2):
        Decoder(target, DraftModel(draft, 2))
    assert [record.getMessage() for record in caplog.records] == [
        "the tokenizers differ in added tokens, which are never drafted: only the target has 9: '<y>'"
    ]
    Decoder(draft, DraftModel(target, 2))
    assert caplog.records[-1].getMessage().endswith("only the draft has 9: '<y>'")


def test_a_draft_to_train_needs_a_row_for_every_token_of_the_target():
    target = model_of(tokenizer(added=TWO), 12)
    check_same_vocabulary(target, model_of(tokenizer(added=ONE), 10))
    with pytest.raises(ModelError, match=r"embeddings for 9 tokens, and the last token of the target has id 9; resize"):
        check_same_vocabulary(target, model_of(tokenizer(added=ONE), 9))


def test_an_added_token_under_another_id_is_refused():
    ours, theirs = tokenizer(added=ONE), tokenizer(added=())
    theirs.add_tokens(["<y>", "<x>"])
    with pytest.raises(ModelError, match=r"8: '<x>' and '<y>', 9: None and '<x>'"):
        check_same_vocabulary(model_of(ours, 12), model_of(theirs, 12))


@pytest.mark.parametrize("sizes", [(37, 40), (40, 37)])
@pytest.mark.parametrize(
    ("tokenizers", "which"),
    [((None, None), "target and draft"), ((Letters(), None), "draft"), ((None, Letters()), "target")],
)
def test_without_tokenizers_sizes_must_be_equal(sizes, tokenizers, which):
    target, draft = map(model_of, tokenizers, sizes)
    told = f"draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}.*the {which} has none"
    with pytest.raises(ModelError, match=told):
        check_same_vocabulary(target, draft)
    check_same_vocabulary(target, model_of(draft.tokenizer, sizes[0]))
