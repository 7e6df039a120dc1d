"""Where a condition would wait for the host, what a batch asks for is settled when its program is made: the same
tokens, and no condition left in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk
from specjax.decode.request import prepare
from specjax.decode.scheduler import Scheduler
from specjax.drafters.draft_model import DraftModel
from specjax.errors import DataError
from specjax.sampling import extras_of
from specjax.testing.toys import prefix_model, related

TARGET = prefix_model(0, vocab_size=7, eos_ids=(4,))
DRAFT = DraftModel(related(TARGET, 1, 0.7), 3)
PROMPTS = [[1], [1, 2, 3], [3, 1, 2, 0, 2]]
ASKED: dict[str, dict[str, Any]] = {
    "": {"temperature": 1.0, "banned_tokens": [5]},
    "penalties": {"temperature": 0.0, "repetition_penalty": [1.0, 1.7, 1.3], "min_new_tokens": 6},
    "top_k": {"temperature": [0.8, 1.0, 0.0], "top_k": [0, 3, 2]},
    "top_p min_p": {"temperature": 1.2, "top_p": [0.8, 1.0, 0.9], "min_p": 0.1},
    "penalties top_k top_p": {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "frequency_penalty": 0.4},
}


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(backend, "asks_the_host", lambda: True)


@pytest.mark.parametrize("asked", ASKED)
def test_tokens_are_those_of_the_program_that_decides_by_itself(asked, request):
    options: dict[str, Any] = {"max_new_tokens": 24, "seed": 3} | ASKED[asked]
    expected = Decoder(TARGET, DRAFT, controller="fixed").generate(PROMPTS, **options)
    request.getfixturevalue("settled")
    found = Decoder(TARGET, DRAFT, controller="fixed").generate(PROMPTS, **options)
    assert found.tokens == expected.tokens
    assert prepare(TARGET, 3, PROMPTS, 24, 3, False, ASKED[asked]).extras == tuple(asked.split())


@pytest.mark.parametrize("drafter", [None, DRAFT], ids=["plain", "draft"])
@pytest.mark.parametrize("asked", ASKED)
def test_no_condition_is_left(settled, drafter, asked):
    decoder = Decoder(TARGET, drafter, controller="fixed")
    engine, params = decoder.engine(False, 4, tuple(asked.split()))
    state = decoder.prefilled(PROMPTS, max_new_tokens=8, temperature=1.0)
    text = compiled_chunk(engine).lower(params, state, np.int32(5)).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


def test_each_step_is_asked_for_by_its_parameters():
    assert extras_of(()) == ()
    assert extras_of({"temperature"}) == ()
    assert extras_of({"presence_penalty", "min_p"}) == ("penalties", "min_p")


def test_a_request_that_asks_for_more_than_the_program_has_is_refused(settled):
    decoder = Decoder(TARGET)
    scheduler = Scheduler(*decoder.engine(False, 2, ("top_p",)), rows=2)

    def of(**options):
        return prepare(TARGET, 0, [[1, 2]], 4, 0, False, {"temperature": 1.0, **options})

    scheduler.insert(of(top_p=0.9))
    scheduler.insert(of())
    scheduler.release([0])
    with pytest.raises(DataError, match="a request that asks for top_k among others that do not"):
        scheduler.insert(of(top_p=0.9, top_k=2))


def test_counts_follow_what_is_committed():
    """Those that are carried are those of the row's tokens, prompt and generated apart."""
    decoder = Decoder(TARGET, DRAFT, controller="fixed")
    engine, params = decoder.engine(False, 4)
    state = decoder.prefilled(PROMPTS, max_new_tokens=20, temperature=1.0)
    state = jax.device_get(compiled_chunk(engine)(params, state, np.int32(3)))
    for row, prompt in enumerate(PROMPTS):
        new = state.tokens[row, len(prompt) : state.lengths[row]]
        assert len(new) > 3
        for counts, tokens in ((state.counts.prompt, np.asarray(prompt)), (state.counts.generated, new)):
            np.testing.assert_array_equal(counts[row], np.bincount(tokens, minlength=7))
    assert jnp.sum(state.counts.prompt[3]) <= 1  # a row that pads the batch


def test_a_program_that_is_told_nothing_sees_for_itself(settled):
    """So that nothing that rows ask for is dropped by who asks for an engine alone."""
    assert Decoder(TARGET).engine(False)[0].extras is None
    assert Decoder(TARGET).engine(False, 1, ())[0].extras == ()
