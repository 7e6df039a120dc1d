"""What a draft's training forward says of its decoding is what its decoding does."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.evaluation.simulated import expected_blocks, simulated_block_efficiency
from specjax.models.hf import LoadedModel
from specjax.testing.heads import TrainedHeads
from tests.cases import in_proof, transformer
from tests.drafters.test_glide import glide_of, target_of

PROMPTS = [list(range(i, i + 3 + i % 5)) for i in range(24)]


def drafts_of(kind: str) -> tuple[LoadedModel, Any, Any, Any]:
    """(target, the drafter in training, its parameters, the drafter)"""
    target = target_of(num_layers=3, max_positions=512)
    if kind == "glide":
        params = jax.tree.map(lambda x: x + 0.02 * jnp.sin(1e4 * x), target.params)
        trained = glide_of(target, (0, 1, 2))
        return target, trained, params, trained.to_drafter(params, target, 4)
    near = transformer(0, num_layers=3, max_positions=512)
    params = {**near.params, "layers": {**near.params["layers"], 2: near.params["layers"][1]}}
    trained = TrainedDraftModel(near.spec)
    return target, trained, params, trained.to_drafter(params, target, 4)


@pytest.mark.parametrize("kind", ["glide", in_proof("separate")])
def test_greedy_it_is_exact(kind):
    """Row by row: after rejections, where the cache grows, and beside rows that end before."""
    target, trained, params, drafter = drafts_of(kind)
    decoder, prompts = Decoder(target, drafter), PROMPTS[:8]
    plain = Decoder(target).generate(prompts, max_new_tokens=300, temperature=0.0).tokens
    ends = [[row[50 * i]] if i < 4 else [] for i, row in enumerate(plain)]
    found = decoder.generate(prompts, max_new_tokens=300, temperature=0.0, stop_token_ids=ends)
    assert [len(row) == 300 for row in found.tokens] == [False] * 4 + [True] * 4
    for prompt, row, stats in zip(prompts, found.tokens, found.stats, strict=True):
        simulated = simulated_block_efficiency(
            trained, params, target, [[*prompt, *row]], [len(prompt)], 4, 0.0, "greedy"
        )
        assert simulated is not None
        assert len(row) / simulated == pytest.approx(stats.blocks, rel=1e-6)
    efficiency = functools.reduce(operator.add, found.stats).block_efficiency
    assert 1.05 < efficiency < 4.5


@pytest.mark.proof
@pytest.mark.parametrize("rule", ["block", "speculative"])
@pytest.mark.parametrize("kind", ["separate", "glide"])
def test_sampled_it_is_the_mean(kind, rule):
    target, trained, params, drafter = drafts_of(kind)
    decoder, texts, each = Decoder(target, drafter, rule), [], []
    for seed in range(8):
        found = decoder.generate(PROMPTS, max_new_tokens=60, temperature=0.7, seed=seed)
        texts += [[*prompt, *row] for prompt, row in zip(PROMPTS, found.tokens, strict=True)]
        each += found.stats
    lengths = list(map(len, PROMPTS)) * 8
    simulated = simulated_block_efficiency(trained, params, target, texts, lengths, 4, 0.7, rule)
    blocks = np.asarray([stats.blocks for stats in each])
    error = blocks.std() / np.sqrt(len(blocks)) / blocks.mean()
    assert simulated == pytest.approx(60 * len(blocks) / blocks.sum(), rel=4 * error)
    assert error < 0.02
    other = "speculative" if rule == "block" else "block"
    assert simulated_block_efficiency(trained, params, target, texts, lengths, 4, 0.7, other) != simulated


def test_blocks_counted_by_hand():
    """A text of four tokens behind a prompt of one, blocks of two."""
    ratios = np.full((2, 5), 0.5)
    # Roots at 0; 1 with 1/2; 2 with 1/4 from 0 and 1/2 from 1; 3 with 1/4 from 0, 1/4 from 1, 1/2 from 2.
    assert expected_blocks(ratios, 1, 5, "speculative") == pytest.approx(1 + 0.5 + 0.5 + 0.25 + 0.125 + 0.25)
    # What the first draft has too little of, block verification makes up for at the second.
    ratios = np.asarray([[2.0] * 9, [0.5] * 9])
    token, block = (expected_blocks(ratios, 1, 9, rule) for rule in ("speculative", "block"))
    assert block < token
    assert expected_blocks(np.ones((3, 9)), 1, 9, "block") == 2
    assert expected_blocks(np.zeros((3, 9)), 1, 9, "block") == 8


def test_what_it_cannot_tell_of():
    target = target_of(num_layers=3)
    heads = TrainedHeads(2, 4, 3)
    args = ({}, target, [[1, 2, 3]], [1])
    assert simulated_block_efficiency(heads, *args, 3, 1.0, "block") is None
    assert simulated_block_efficiency(glide_of(target, (0,)), *args, 3, 1.0, "coupled") is None
