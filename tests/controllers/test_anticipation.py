"""Whether a token is proposed is known before it is drawn: other random numbers for it and for those after it change
nothing of the answer. Of the compiled block with everything in it that can cut a draft, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.controllers.confidence import Confidence
from specjax.decode import engine
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.interfaces import Calibration
from specjax.testing.toys import prefix_model, related
from tests.cases import in_proof
from tests.controllers.choices import of_rows, of_total

K, ROWS, BLOCKS = 3, 256, 4
TARGET = prefix_model(0, vocab_size=5)
DRAFT = related(TARGET, 1, 0.5)
PROMPTS = [[1], [1, 2, 3], [3, 1, 2, 0, 2], [2] * 9] * (ROWS // 4)
QUICK = {"ks": (0, 1, 3), "decay": 0.6, "trust": 1.0, "margin": 0.0, "probe": 3}
CONTROLLERS: dict[str, Any] = {
    "rows": of_rows(**QUICK),
    "total": of_total(ROWS, **QUICK),
    "confidence": Confidence(0.7, ks=(0, 3)),
}


@pytest.mark.parametrize("controller", ["rows", "confidence", in_proof("total")])
def test_whether_a_token_is_proposed_is_known_before_it_is_drawn(controller):
    decoder = Decoder(TARGET, DraftModel(DRAFT, K), "speculative", CONTROLLERS[controller])
    costs = 1.0 + 0.2 * np.arange(K + 1, dtype=np.float32), np.full(K, 0.7, np.float32)
    decoder.calibrations[False, ROWS] = Calibration(*costs)  # type: ignore[arg-type]
    state = decoder.prefilled(PROMPTS, max_new_tokens=100, temperature=1.0)
    static, params = decoder.engine(False, ROWS)

    @jax.jit
    def step(params, state, noise):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "block_noise", lambda *_: noise)
            return engine.step(static, params, state)

    fresh = jax.jit(lambda seeds, lengths: sampling.fresh_noise(seeds, lengths, K))
    for _ in range(BLOCKS):  # until rows differ in what they know
        state = step(params, state, fresh(state.seeds, state.lengths))
    one, other = (fresh(state.seeds + jnp.uint32(more), state.lengths) for more in (0, 1))

    def proposed(first_other: int) -> np.ndarray:
        """``[B, K]``, with the other numbers for the draws from this place on."""
        words = [(one if place < first_other else other).draft_words[:, place] for place in range(K)]
        noise = dataclasses.replace(one, draft_words=jnp.stack(words, axis=1))
        return np.asarray(step(params, state, noise).counters.drafted_at - state.counters.drafted_at)

    as_it_is = proposed(K)
    for place in range(K):
        np.testing.assert_array_equal(proposed(place)[:, : place + 1], as_it_is[:, : place + 1])
    assert len(np.unique(as_it_is.sum(1))) > 1
    if controller == "confidence":
        assert np.any(proposed(0) != as_it_is), "what was drawn decides of the places after it"
