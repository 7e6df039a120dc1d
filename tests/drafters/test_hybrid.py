"""The hybrid: text first, else a model."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.controllers.adaptive import Adaptive
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.errors import ConfigError
from specjax.interfaces import Calibration, Draft
from specjax.testing.inhabitants import HiddenReader, Tree
from specjax.testing.toys import context, exact_distribution, neutral_sampling, prefix_model, related
from specjax.verifiers.block import Block
from tests.cases import in_proof
from tests.decode import distributions, test_lossless

TARGET = prefix_model(0, vocab_size=12)
PROMPTS = [[1, 2, 3, 1, 2], [5], [7, 7, 7, 7], [4, 9, 8, 2, 0, 3]]
ITSELF = {"draft_model": DraftModel(TARGET, 3), "hidden": HiddenReader(3)}


def blocks_of(result, row: int, prompt: list[int]):
    """(tokens before the block, number of proposed tokens, number of accepted ones) of each block."""
    text, accepted, proposals = list(prompt), 0, iter(result.proposals[row])
    before = list(text)
    for token, origin in zip(result.tokens[row], result.origins[row], strict=True):
        accepted += origin == "accepted"
        text.append(token)
        if origin != "accepted":
            yield before, next(proposals), accepted
            before, accepted = list(text), 0


def finds(text: list[int], min_n: int = 2) -> bool:
    """True if the last tokens of a text stand in it before."""
    return any(text[i : i + min_n] == text[-min_n:] for i in range(len(text) - min_n))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", ["draft_model", "hidden"])
@pytest.mark.parametrize("controller", ["fixed", "adaptive"])
def test_a_model_that_is_its_target_is_right_wherever_the_text_has_nothing(model, temperature, controller):
    """Also in the blocks after those that the text proposed, of which the model has read nothing, in rows side by side
    of which some ask it and some do not."""
    decoder = Decoder(TARGET, Hybrid(ITSELF[model], k=5), "block", controller)
    if controller == "adaptive":
        rows = decoder.program_of(PROMPTS, temperature=temperature)
        free = np.full(6, 1.0, np.float32)
        decoder.calibrations[rows] = Calibration(free, np.full(5, 0.9, np.float32), found=free)  # type: ignore[arg-type]
    result = decoder.generate(PROMPTS, max_new_tokens=40, temperature=temperature, ignore_eos=True)
    asked, found = [], 0
    for row, prompt in enumerate(PROMPTS):
        for before, proposed, accepted in blocks_of(result, row, prompt):
            if finds(before):
                found += proposed > 0
            else:
                asked.append(proposed)
                assert accepted == proposed, (row, before)
                assert proposed <= 3
    assert found > 10
    assert sum(asked) > 20


def test_rows_of_both_kinds_have_exactly_the_targets_joint_distribution():
    target = test_lossless.TARGET
    hybrid = Hybrid(DraftModel(test_lossless.DRAFT, 2), k=2, max_n=3, min_n=1)
    distribution = exact_distribution(target, test_lossless.PROMPT, 3)
    distributions.check_law(
        Decoder(target, hybrid, Block()), test_lossless.PROMPT, 3, distribution, distributions.SMOKE
    )


def test_the_text_proposes_what_lookup_does_and_asks_nothing_of_the_model():
    """Its weights are not numbers, and no row waits for it."""
    broken = dataclasses.replace(TARGET, params=jax.tree.map(lambda x: x * jnp.nan, TARGET.params))
    certain = jnp.where(jnp.arange(12) == 3, 0.0, -jnp.inf)
    target = dataclasses.replace(TARGET, params={**TARGET.params, "bias": certain})
    prompts = [[3] * 6, [1, 3, 3, 3]]
    options = {"max_new_tokens": 30, "ignore_eos": True}
    results = [
        Decoder(target, drafter, "block", "fixed").generate(prompts, **options)
        for drafter in (Hybrid(DraftModel(broken, 4), k=4), NGram(4))
    ]
    assert results[0].tokens == results[1].tokens
    assert [s.invalid_drafts for s in results[0].stats] == [0, 0]
    assert [s.accepted for s in results[0].stats] == [s.accepted for s in results[1].stats]


def test_costs_of_blocks_with_and_without_the_model_are_measured_apart():
    decoder = Decoder(TARGET, Hybrid(DraftModel(related(TARGET, 1), 3), k=5), "block")
    known = decoder.calibrate(PROMPTS, blocks=2, seconds=0, temperature=0)
    assert known is not None
    assert known.found is not None
    assert known.found.shape == known.seconds.shape == (6,)
    assert np.isfinite(known.found).all()


def test_acceptance_of_text_and_model_is_counted_apart():
    """The model is its target; the text is a random one's, and seldom right."""
    decoder = Decoder(TARGET, Hybrid(DraftModel(TARGET, 3), k=5, min_n=1), "block")
    known = decoder.calibrate([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]], blocks=12, seconds=0, temperature=0)
    assert known is not None
    assert known.by_class is not None
    assert known.by_class.shape == (5, 5)
    of_model, of_text = known.by_class[-1, :3], known.by_class[:-1]
    assert of_model.min() > of_text[0, 0]
    assert of_model.min() > known.acceptance[:3].max()


def chosen(with_model: float, kept: float = 0.9, per: str = "batch") -> list[int]:
    """Lengths of four rows of which the last two ask the model, if that makes a block cost so many times as much."""
    drafter = Hybrid(DraftModel(TARGET, 3), k=3).bind(TARGET).spec
    controller = Adaptive(ks=(0, 1, 2, 3), per=per).bind(drafter)  # type: ignore[arg-type]
    found = np.asarray([1.0, 1.1, 1.2, 1.3], np.float32)
    seconds = np.where(np.arange(4) > 0, with_model * found, found).astype(np.float32)
    known = Calibration(seconds, np.full(3, kept, np.float32), found=found)  # type: ignore[arg-type]
    seen = context([[1, 2]] * 4, [2] * 4, neutral_sampling(4, 12))
    seen = dataclasses.replace(seen, controller=controller, calibration=known)
    draft = Draft(jnp.zeros((4, 3), jnp.int32), jnp.ones((4, 3), bool), match_class=jnp.asarray([0, 1, 3, 3]))
    return controller.review(controller.init(4), seen, draft).tolist()  # type: ignore[union-attr]


def test_a_batch_asks_the_model_where_that_pays_for_all_rows():
    assert chosen(1.1) == [3, 3, 3, 3]
    assert chosen(3.0) == [3, 3, 0, 0]


def test_each_row_alone_weighs_what_its_own_proposal_costs():
    assert chosen(1.1, per="row") == [3, 3, 3, 3]
    assert chosen(4.0, per="row") == [3, 3, 0, 0]


BAD = {
    "a number": (lambda: Hybrid(5), "model=5"),
    "lookup in lookup": (lambda: Hybrid(NGram(3)), "give a drafter with weights"),
    "a longer model": (lambda: Hybrid(DraftModel(TARGET, 6), k=5), "k=5, and its model proposes k=6"),
    "n-grams that shrink": (lambda: Hybrid(DraftModel(TARGET, 2), min_n=5), "min_n=5, max_n=4"),
    "an unknown kind": (lambda: Hybrid({"kind": "eagle", "model": "d"}), "hybrid.model: 'eagle' is unknown"),
    "trees": (lambda: Hybrid(Tree(TARGET, 2, 2)).bind(TARGET), "proposes trees"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name):
    make, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("verifier", "rows"), [("speculative", 1), in_proof("coupled", 3), in_proof("block", 2)])
def test_greedy_output_is_the_targets(verifier, rows):
    decoder = Decoder(TARGET, Hybrid({"kind": "draft_model", "model": related(TARGET, 2), "k": 3}), verifier, "fixed")
    for prompts in itertools.islice(itertools.combinations(PROMPTS, rows), 2):
        options = {"max_new_tokens": 30, "ignore_eos": True}
        assert decoder.generate(prompts, **options).tokens == Decoder(TARGET).generate(prompts, **options).tokens
