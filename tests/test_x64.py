"""JAX_ENABLE_X64 changes the default dtypes of JAX, and nothing that specjax computes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import config
from specjax.data.rows import ConcatenatedRows
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.drafters.ngram import NGram
from specjax.evaluation import forced
from specjax.interfaces import Batch, TargetView
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.testing.toys import context, neutral_sampling
from specjax.training.distributions import top_k_logits
from specjax.training.evaluate import evaluate
from specjax.training.layout import ONE_DEVICE
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import make_optimizer
from specjax.training.step import Update, start_state
from tests.cases import in_proof

SPEC = Model(ModelConfig(40, 16, 24, 1, 2, 1, 8, 256, tie_embeddings=False))
TOKENS = np.random.default_rng(0).integers(0, 40, (4, 17)).astype(np.int32)
PROMPTS, OUTPUTS = [[1, 2, 3, 4], [5, 6, 7]], [[8, 9, 1, 2, 3], [4, 5, 6, 7, 8]]


def same_with_64_bits(make) -> None:
    """``make()`` gives the same bits of the same dtypes."""
    want = jax.device_get(make())
    with jax.enable_x64(True):
        found = jax.device_get(make())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def pair() -> list[LoadedModel]:
    return [LoadedModel(SPEC, SPEC.init(jax.random.key(seed))) for seed in (0, 1)]


def test_training_is_the_same_with_64_bits():
    def train():
        target, draft = pair()
        settings = config.Optimizer(kind="muon", schedule="wsd", warmup_steps=2)
        optimizer = make_optimizer(config.Stage(steps=10, optimizer=settings))
        drafter = TrainedDraftModel(SPEC)
        state = start_state(draft.params, optimizer, True, ONE_DEVICE, drafter)
        uniform = jnp.full((4, 16), 0.3, jnp.float32)
        tokens, following = jnp.asarray(TOKENS[:, :-1]), jnp.asarray(TOKENS[:, 1:])
        batch = Batch(tokens, following, jnp.ones((4, 16), jnp.float32))
        batch = dataclasses.replace(batch, teacher=top_k_logits(target.logits(batch.tokens), 8, uniform, 2))
        update = Update(drafter, ForwardKL(), optimizer, None, 2, ema=0.9).jitted()
        for _ in range(3):
            state, metrics = update(state, None, batch, None)
        return state, metrics

    same_with_64_bits(train)


def test_evaluation_is_the_same_with_64_bits():
    rows = ConcatenatedRows(TOKENS.reshape(-1), np.asarray([0]), 16)

    def measured():
        target, draft = pair()
        return dataclasses.astuple(evaluate(TrainedDraftModel(SPEC), draft.params, target, rows, 64, 2))

    same_with_64_bits(measured)


def test_passes_over_a_cache_are_the_same_with_64_bits():
    same_with_64_bits(lambda: forced.output_logits(SPEC, pair()[0].params, PROMPTS, OUTPUTS, 3))


def test_lookup_proposes_the_same_with_64_bits():
    tokens = np.asarray([[1, 2, 3, 1, 2, 0, 0, 0]], np.int32)

    def proposed():
        draft, _ = NGram(3).draft({}, TargetView({}), {}, context(tokens, [5], neutral_sampling(1, 40)))
        return draft.tokens, draft.valid

    same_with_64_bits(proposed)


@pytest.mark.parametrize("verifier", ["block", *map(in_proof, ("speculative", "coupled"))])
def test_tokens_are_the_same_with_64_bits(verifier):
    def decoded():
        target, draft = pair()
        decoder = Decoder(target, DraftModel(draft, 3), verifier)
        options = {"temperature": [0.0, 0.8], "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
        return decoder.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, **options).tokens

    want = decoded()
    with jax.enable_x64(True):
        assert decoded() == want
