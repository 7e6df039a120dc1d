"""What every block proposes, accepts and counts, held against a simulation on the host that has no cache: the output
alone cannot show a drafter that proposes badly, nor a counter that is wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.metrics import DecodeStats
from specjax.testing.toys import prefix_model, related

TARGET = prefix_model(6, vocab_size=5, scale=4.0)
DRAFT = related(TARGET, 1, share=0.8)
PROMPTS = [[1, 2, 3], [0], [1, 3] * 9, [2, 1, 4]]
BUDGETS, STOPS = [40, 11, 33, 40], [[], [], [], [4]]
DRAFTERS = {"k1": DraftModel(DRAFT, 1), "k4": DraftModel(DRAFT, 4), "ngram": NGram(4, max_n=3, min_n=1)}


def best(model, tokens: list[int]) -> int:
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return int(np.asarray(model.logits(padded))[0, len(tokens) - 1].argmax())


def continued(model, tokens: list[int], count: int) -> list[int]:
    new: list[int] = []
    for _ in range(count):
        new.append(best(model, [*tokens, *new]))
    return new


def proposals(drafter, tokens: list[int]) -> list[int]:
    if isinstance(drafter, DraftModel):
        return continued(drafter.model, tokens, drafter.k)
    for size in range(drafter.max_n, drafter.min_n - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return list(itertools.islice(itertools.cycle(tokens[start + size :]), drafter.k))
    return []


def simulate(drafter, prompt: list[int], budget: int, stops: list[int]) -> tuple[list[int], list[str], DecodeStats]:
    tokens, origins, blocks = list(prompt), [], []
    while True:
        drafts = proposals(drafter, tokens)
        own = continued(
            TARGET, tokens, drafter.k + 1
        )  # as long as they agree, the target's distribution after the drafts
        n = next((i for i, (x, y) in enumerate(zip(drafts, own, strict=False)) if x != y), len(drafts))
        blocks.append((len(drafts), n))
        names = [*["accepted"] * n, "corrected" if n < len(drafts) else "bonus"]
        for token, origin in zip(own, names, strict=False):
            tokens.append(token)
            origins.append(origin)
            if token in stops or len(origins) == budget:
                at = range(1, drafter.k + 1)
                stats = DecodeStats(
                    len(blocks),
                    len(origins),
                    tuple(sum(k >= j for k, _ in blocks) for j in at),
                    tuple(sum(k >= j and n >= j - 1 for k, n in blocks) for j in at),
                    tuple(sum(n >= j for _, n in blocks) for j in at),
                )
                return tokens[len(prompt) :], origins, stats


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_blocks_are_those_of_a_simulation_without_caches(name):
    drafter = DRAFTERS[name]
    got = Decoder(TARGET, drafter).generate(PROMPTS, max_new_tokens=BUDGETS, stop_token_ids=STOPS)
    want = [simulate(drafter, *row) for row in zip(PROMPTS, BUDGETS, STOPS, strict=True)]
    assert got.tokens == [tokens for tokens, _, _ in want]
    assert got.origins == [origins for _, origins, _ in want]
    assert got.stats == [stats for _, _, stats in want]
    assert len(got.tokens[3]) < 40, "a stop token ends a row"
    total = sum(got.stats[1:], got.stats[0])
    assert 0.1 < total.acceptance_rate < 0.95, "blocks are accepted in part"
    assert name != "ngram" or total.drafted < drafter.k * total.blocks, "some blocks have no proposal"
