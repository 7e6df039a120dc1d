"""The output distribution of the whole jitted path is the target's: joint distributions of three tokens by chi-square,
the target's by enumeration. What these tests cannot see (a drafter that only accepts less) the acceptance tests do, and
the other way round; `tests/mutants` shows which test sees what."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import pytest

from specjax.decode.decoder import Decoder
from specjax.decode.options import SamplingOptions
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.hybrid import Hybrid
from specjax.drafters.ngram import NGram
from specjax.testing.toys import ToyModel, exact_distribution, prefix_model, related
from specjax.verifiers.block import Block
from tests.cases import in_proof
from tests.decode import distributions


def coin(head: float) -> ToyModel:
    """The same distribution after every prefix: 0 or 1, never another token."""
    model = prefix_model(0)
    distribution = jnp.log(jnp.asarray([head, 1 - head, 0.0, 0.0]))
    return dataclasses.replace(model, params={"table": 0 * model.params["table"], "bias": distribution})


TARGET = prefix_model(0, scale=1.2)
STOPPING = prefix_model(0, eos_ids=(3,), scale=1.2)
DRAFT, PROMPT = related(TARGET, 1), [1, 2]
SHAPED = prefix_model(3, eos_ids=(3,), scale=1.2)
"""The target of the sampling parameters: each of them moves its distribution."""
SHAPED_DRAFT = related(SHAPED, 1)
COIN, COIN_DRAFT = coin(1 / 3), coin(2 / 3)
VERIFIERS = ("speculative", "block", "coupled")
DRAFTERS = {
    "autoregressive": None,
    "k1": DraftModel(DRAFT, 1),
    "k2": DraftModel(DRAFT, 2),
    "k4": DraftModel(DRAFT, 4),
    "self": DraftModel(TARGET, 2),
    "ngram": NGram(2, 3, 1),
    "hybrid": Hybrid(DraftModel(DRAFT, 2), 2, 3, 1),
}


def shy(logits, context):
    """Makes the last token less likely, and the first one after an even number of new tokens."""
    last = jnp.take_along_axis(context.tokens, (context.lengths - 1)[:, None], axis=1)
    even = (context.lengths - context.prompt_lengths) % 2 == 0
    token = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return logits - jnp.where(token == last, 2.0, 0.0) - jnp.where((token == 0) & even[:, None], 1.0, 0.0)


def shy_reference(logits, prompt, generated):
    logits = logits.copy()
    logits[[*prompt, *generated][-1]] -= 2.0
    logits[0] -= 1.0 * (len(generated) % 2 == 0)
    return logits


PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "min_new_tokens": {"min_new_tokens": 2},
    "logit_bias": {"logit_bias": {0: 1.0, 2: -0.7}},
    "banned_tokens": {"banned_tokens": [1]},
    "allowed_tokens": {"allowed_tokens": [0, 2, 3]},
    "stop_token_ids": {"stop_token_ids": [2]},
    "logits_processor": {"logits_processor": shy},
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "cuts": {
        "temperature": 2.0,
        "top_k": 3,
        "top_p": 0.8,
        "repetition_penalty": 1.8,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    },
    "stops": {
        "temperature": 0.6,
        "min_p": 0.1,
        "logit_bias": {0: 1.0, 2: -0.7},
        "min_new_tokens": 2,
        "stop_token_ids": [2],
        "logits_processor": shy,
    },
}
SETTINGS = PARAMETERS | COMBINATIONS
proof = pytest.mark.proof
by_verifier = pytest.mark.parametrize("verifier", VERIFIERS)
# A rule has nothing to judge where nothing is drafted.
JOINT = [("block", "autoregressive"), *itertools.product(VERIFIERS, ("k1", "k4", "self", "ngram", "hybrid"))]


def distribution_of(settings: dict[str, Any]) -> dict[tuple[int, ...], float]:
    names = {"logits_processor": "processor"}
    options: dict[str, Any] = {names.get(name, name): value for name, value in settings.items()}
    if "processor" in options:
        options["processor"] = shy_reference
    return exact_distribution(SHAPED, PROMPT, 3, **options)


def test_the_rows_suffice_for_99_percent_power():
    """At the level of each of all distribution tests, against any distribution at a total variation of 0.02 (0.04 of
    the short ones) over 64 cells, however early a test ends."""
    tests = len(JOINT) + len(VERIFIERS) * (2 + len(COMBINATIONS)) + len(PARAMETERS) + 2
    tests += len(VERIFIERS)  # of a drafter that reads its target: tests/drafters/test_glide.py
    assert tests <= distributions.LAWS
    assert (distributions.WHOLE.distance, distributions.SMOKE.distance) == (0.02, 0.04)
    for plan in (distributions.WHOLE, distributions.SMOKE):
        assert plan.power() >= 0.99
        ends = [plan.enough(calls) for calls in plan.looks]
        assert ends == sorted(ends, reverse=True)
        assert ends[-1] == plan.level


def test_every_parameter_has_a_distribution_of_its_own():
    """None is forgotten, and dropping one, alone or out of a combination, would be seen."""
    assert set(PARAMETERS) == {*SamplingOptions.__annotations__, "logits_processor"}
    for name, settings in SETTINGS.items():
        distribution = distribution_of(settings)
        assert sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
        for dropped in settings:
            other = distribution_of({k: v for k, v in settings.items() if k != dropped})
            distance = sum(abs(distribution.get(x, 0.0) - other.get(x, 0.0)) for x in {*distribution, *other}) / 2
            assert distance > 0.05, (name, dropped)


def test_the_distribution_of_three_tokens_in_short():
    """The distribution tests of `make proof` with fewer rows, so that every run of the suite has one."""
    distribution = exact_distribution(TARGET, PROMPT, 3)
    distributions.check_law(Decoder(TARGET, DRAFTERS["k2"], Block()), PROMPT, 3, distribution, distributions.SMOKE)


@proof
@pytest.mark.parametrize(("verifier", "drafter"), JOINT)
def test_three_tokens_have_exactly_the_targets_joint_distribution(verifier, drafter):
    decoder = Decoder(TARGET, DRAFTERS[drafter], verifier)
    distributions.check_law(decoder, PROMPT, 3, exact_distribution(TARGET, PROMPT, 3))


@proof
@by_verifier
def test_a_stop_token_inside_a_block_keeps_the_distribution_of_the_cut_sequences(verifier):
    distribution = exact_distribution(STOPPING, PROMPT, 3)
    assert {len(sequence) for sequence in distribution} == {1, 2, 3}
    distributions.check_law(Decoder(STOPPING, DRAFTERS["k4"], verifier), PROMPT, 3, distribution)


@proof
def test_three_coins_show_noise_that_decides_twice():
    """Block verification needs fresh noise: a rejection that looked at later drafts must not draw them again from the
    same uniforms. Nowhere is the difference larger than where draft and target are the two sides of a coin: 0.066 in
    total variation, 0.01 of `TARGET`."""
    decoder = Decoder(COIN, DraftModel(COIN_DRAFT, 2), Block())
    distributions.check_law(decoder, PROMPT, 3, exact_distribution(COIN, PROMPT, 3))


@proof
@pytest.mark.parametrize(
    ("verifier", "setting"),
    [
        # A rule knows nothing of parameters but what they leave of p and q: in turn, and together under each.
        *zip(itertools.cycle(("speculative", "block")), PARAMETERS),
        *((verifier, name) for verifier in VERIFIERS for name in COMBINATIONS),
    ],
)
def test_every_sampling_parameter_has_the_distribution_of_its_definition(verifier, setting):
    settings: dict[str, Any] = SETTINGS[setting]
    decoder = Decoder(SHAPED, DraftModel(SHAPED_DRAFT, 3), verifier)
    distribution = distribution_of(settings)
    distributions.check_law(decoder, PROMPT, 3, distribution, neighbours=distributions.OTHERS, **settings)


@proof
@by_verifier
def test_a_certain_draft_with_all_parameters_has_the_distribution_of_their_definition(verifier):
    settings: dict[str, Any] = COMBINATIONS["cuts"]
    decoder, distribution = Decoder(SHAPED, NGram(3, min_n=1), verifier), distribution_of(settings)
    distributions.check_law(decoder, PROMPT, 3, distribution, neighbours=distributions.OTHERS, **settings)


def all_accepted(drafter, temperature) -> bool:
    result = Decoder(TARGET, drafter).generate(
        [[1, 2, 3], [0], [1] * 20, [2, 1]], max_new_tokens=41, temperature=temperature
    )
    return all(s.accepted == s.drafted and s.drafted > 0 for s in result.stats)


@pytest.mark.parametrize("k", [2, 5, in_proof(1), in_proof(8)])
def test_draft_equal_to_target_is_always_accepted(k):
    for temperature in (0.0, 1.0, [0.0, 1.0, 0.7, 1.3]):
        assert all_accepted(DraftModel(TARGET, k), temperature), temperature
