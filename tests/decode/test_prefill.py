"""Prompts fed a piece at a time are prompts fed at once, for the target and for whoever drafts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.decode import programs
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError
from specjax.models import cache as cache_lib
from specjax.testing.inhabitants import CacheReader, HiddenReader, Tree
from specjax.testing.toys import prefix_model
from tests.cases import in_proof, transformer

TARGET = prefix_model(0, vocab_size=5, eos_ids=(4,))
PROMPTS = [[int(x) for x in np.random.default_rng(i).integers(0, 4, size)] for i, size in enumerate((1, 9, 17, 30))]
OPTIONS = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0}
SELF = {"model": DraftModel(TARGET, 3), "tree": Tree(TARGET, 2, 3), "hidden": HiddenReader(3), "cache": CacheReader(3)}


@pytest.mark.parametrize(("name", "piece"), [*((name, 7) for name in SELF), *(in_proof(name, 8) for name in SELF)])
def test_a_drafter_that_equals_its_target_has_every_token_accepted_after_pieces(name, piece):
    """Whether they divide the padded prompt, 32 tokens, or not."""
    result = Decoder(TARGET, SELF[name], "coupled", prefill_chunk=piece).generate(PROMPTS, **OPTIONS)
    assert result.tokens == Decoder(TARGET, None, "coupled").generate(PROMPTS, **OPTIONS).tokens
    assert all(stats.accepted == stats.drafted > 0 for stats in result.stats)


def test_pieces_leave_what_the_whole_prompt_does():
    """The caches of target and draft, slot by slot, as far as they count."""
    target, draft = transformer(0), transformer(1)
    whole, pieces = (
        Decoder(target, DraftModel(draft, 2), prefill_chunk=piece).prefilled(PROMPTS, max_new_tokens=4, temperature=1.0)
        for piece in (None, 6)
    )
    for found, expected in ((pieces.cache, whole.cache), (pieces.drafter.cache, whole.drafter.cache)):
        for a, b in zip(found.layers, expected.layers, strict=True):
            for row, prompt in enumerate(PROMPTS):
                for x, y in ((a.keys, b.keys), (a.values.swapaxes(2, 3), b.values.swapaxes(2, 3))):
                    x, y = (np.asarray(z[row, :, : len(prompt)]) for z in (x, y))
                    assert np.abs(x - y).max() < 1e-4 * np.abs(y).max()
    np.testing.assert_array_equal(pieces.drafter.lengths, whole.drafter.lengths)


def test_a_prompt_is_fed_as_far_as_it_goes():
    """Padding behind the longest one costs no piece: its slots are as they were."""
    decoder = Decoder(transformer(0), prefill_chunk=8)
    state = decoder.prefilled([[1] * 17], max_new_tokens=4, temperature=0.0)  # padded to 32
    keys = cache_lib.first(state.cache).layers[0].keys[0, :, :32]
    assert np.asarray(jnp.any(keys != 0, axis=(0, 2))).tolist() == [True] * 24 + [False] * 8


def test_a_large_batch_is_fed_in_smaller_pieces_by_itself(monkeypatch):
    """Of as many tokens as are worth a pass, all rows together."""
    programs.compiled_prefill.cache_clear()
    monkeypatch.setattr(backend, "prefill_tokens", lambda token_bytes, rows: 32 // rows)
    target, fed = transformer(5), []
    real = type(target.spec).__call__

    def seen(self, params, tokens, *args, **options):
        fed.append(tokens.shape)
        return real(self, params, tokens, *args, **options)

    monkeypatch.setattr(type(target.spec), "__call__", seen)
    Decoder(target).prefilled(PROMPTS, max_new_tokens=4, temperature=0.0)
    assert fed == [(4, 8)]
    programs.compiled_prefill.cache_clear()


@pytest.mark.parametrize(
    ("platform", "rows", "tokens"), [("cpu", 1, 256), ("cpu", 32, 64), ("cpu", 5000, 1), ("tpu", 4, 2048)]
)
def test_a_cpu_feeds_short_pieces_since_it_computes_the_padding_too(platform, rows, tokens):
    with backend.lowering_for(platform, 2**34):
        assert backend.prefill_tokens(10**5, rows) == tokens


def test_no_piece_is_refused():
    with pytest.raises(ConfigError, match="prefill_chunk: 0; give at least 1 token"):
        Decoder(TARGET, prefill_chunk=0)
