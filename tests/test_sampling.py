"""Draws follow their weights, and never land on a weight of zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.evaluation.references import sampling_logits
from specjax.testing.toys import context, neutral_sampling
from tests.cases import NEUTRAL, in_proof


def transformed(logits, tokens=((0,),), prompt_lengths=None, drafted=None, first=0, **fields):
    """The transform after ``tokens`` (one list a row) and ``drafted``."""
    batch, nodes, size = logits.shape
    lengths = [len(t) for t in tokens]
    buffer = np.zeros((len(tokens), max(lengths) + nodes), np.int32)
    for i, row in enumerate(tokens):
        buffer[i, : len(row)] = row
    buffer, lengths = np.resize(buffer, (batch, buffer.shape[1])), np.resize(lengths, batch)
    prompts = lengths if prompt_lengths is None else np.resize(prompt_lengths, batch)
    drafted = jnp.zeros((batch, nodes - 1), jnp.int32) if drafted is None else jnp.asarray(drafted, jnp.int32)
    at = context(buffer, lengths, neutral_sampling(batch, size, **fields), None, prompts)
    return jax.jit(sampling.transform)(logits, at, drafted, first)


def random_words(rng, rows: int):
    return jnp.asarray(rng.integers(0, 2**32, (rows, 2), np.uint32))


def share_of_words(weights: np.ndarray, shares, choose) -> np.ndarray:
    """Of the 2^32 words, the share with which each index is chosen by ``weights [N]``. Both ends of every index's
    interval are put to the shipped functions."""
    tiled = jnp.tile(weights, (len(weights), 1))  # a sum's order may depend on the shape
    own = np.asarray(shares(tiled))[0].astype(np.uint64)
    edges = np.cumsum(own)
    # The smallest words whose thresholds reach the edge below, and the one above.
    first, after = (((x << np.uint64(32)) + edges[-1] - np.uint64(1)) // edges[-1] for x in (edges - own, edges))
    found = after > first
    for words in (first, np.where(found, after - 1, first)):
        chosen = np.asarray(choose(tiled, jnp.asarray(words.clip(max=2**32 - 1).astype(np.uint32))))
        np.testing.assert_array_equal(chosen[found], np.flatnonzero(found))
    return (after - first) / 2**32


def distributions_of_large_vocabularies(size: int) -> dict[str, np.ndarray]:
    rng, rank = np.random.default_rng(0), np.arange(1, size + 1)
    likely = np.where(rank <= 20, 5.0, -5.0) + rng.normal(size=size)
    zipf = {f"zipf {a}": -a * np.log(rank) for a in (1.2, 2.0)}
    distributions = {"normal": 3 * rng.normal(size=size), **zipf, "20 likely and a tail": likely}
    return {name: rng.permutation(x).astype(np.float32) for name, x in distributions.items()}


@pytest.mark.parametrize("name", ["normal", *map(in_proof, ("zipf 1.2", "zipf 2.0", "20 likely and a tail"))])
def test_the_distribution_over_all_words_is_that_of_the_logits(name):
    """The exact distribution of a draw at V = 151,936, over every pair of words. One uniform of 23 bits against
    cumulative sums in float32 is 2e-3 to 3e-3 away, and never draws up to two thirds of these tokens."""
    size = 151_936
    logits = distributions_of_large_vocabularies(size)[name]
    want = np.exp(logits.astype(float) - logits.max())
    want /= want.sum()
    weights = np.asarray(jnp.exp(logits - logits.max()))
    width = sampling._group_width(size)
    grouped = np.pad(weights, (0, -size % width)).reshape(-1, width)
    shipped = jax.jit(sampling.shares), jax.jit(sampling._choose)
    of_group = share_of_words(np.asarray(jnp.sum(jnp.asarray(grouped), axis=-1)), *shipped)
    got = np.concatenate([p * share_of_words(row, *shipped) for p, row in zip(of_group, grouped, strict=True)])[:size]
    assert 0.5 * np.abs(got - want).sum() <= 1e-6
    assert want[got == 0].sum() == 0
    # And the two levels are put together as computed here.
    rng = np.random.default_rng(1)
    words = random_words(rng, 256)
    drawn = np.asarray(sampling.draw(jnp.broadcast_to(jnp.asarray(logits), (256, size)), words))
    group = np.asarray(sampling._choose(jnp.broadcast_to(grouped.sum(1), (256, len(grouped))), words[:, 0]))
    np.testing.assert_array_equal(drawn // width, group)


@pytest.mark.parametrize("size", [1, 3, 64, 65, 1000, 4096])
def test_draws_follow_the_weights_and_never_land_on_a_weight_of_zero(size):
    rng = np.random.default_rng(size)
    weights = rng.gamma(0.3, size=size).astype(np.float32) * (rng.random(size) < 0.7)
    weights[0] += 1e-3
    rows = 20_000
    got = np.asarray(sampling.inverse_cdf(jnp.broadcast_to(weights, (rows, size)), random_words(rng, rows)))
    assert (weights[got] > 0).all()
    share = np.bincount(got, minlength=size) / rows
    want = weights.astype(float) / weights.sum(dtype=float)
    assert 0.5 * np.abs(share - want).sum() <= np.sqrt(want * (1 - want) / rows).sum()


def test_a_zero_weight_is_never_drawn_even_at_the_edges():
    weights = np.zeros((4, 200), np.float32)
    weights[:, 130] = 1e-30
    weights[1, 7] = 1.0
    weights[2:, 199] = 3.0
    for word in (0, 2**31, 2**32 - 1):
        got = np.asarray(sampling.inverse_cdf(jnp.asarray(weights), jnp.full((4, 2), word, jnp.uint32)))
        assert (weights[np.arange(4), got] > 0).all()


def test_a_draw_from_nothing_is_an_id_all_the_same():
    for weights in (jnp.full((1, 100), jnp.nan), jnp.zeros((1, 100)), jnp.full((1, 100), jnp.inf)):
        for word in (0, 2**32 - 1):
            assert 0 <= int(sampling.inverse_cdf(weights, jnp.full((1, 2), word, jnp.uint32))[0]) < 100


def test_argmax_ties_go_to_the_lowest_index():
    x = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, 0.0]])
    assert sampling.argmax(x).tolist() == [1, 0, 2]


def test_temperature_is_a_division_and_zero_a_log_one_hot():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.float32)
    out = transformed(logits, temperature=[0.5, 0.0, 1.0])
    np.testing.assert_allclose(out[0], logits[0] * 2, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(jax.nn.softmax(out[1])), np.eye(5)[np.asarray(logits[1]).argmax(-1)])
    np.testing.assert_array_equal(out[2], logits[2])


def test_bfloat16_logits_are_compared_in_float32():
    out = transformed(jnp.zeros((1, 1, 4), jnp.bfloat16))
    assert out.dtype == jnp.float32


def test_noise_depends_on_seed_and_length_alone_and_no_number_is_used_twice():
    seeds = jnp.asarray([[1, 2], [1, 2], [3, 4]], jnp.uint32)
    lengths = jnp.asarray([5, 6, 5])
    noise = sampling.fresh_noise(seeds, lengths, 4)
    swapped = sampling.fresh_noise(seeds[::-1], lengths, 4)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[2]), noise, swapped)
    accepts = (np.asarray(noise.accept) * 2**24).astype(np.uint32)
    assert ((noise.accept >= 0) & (noise.accept < 1)).all()
    # Told apart by 24 bits, as the uniforms keep no more.
    words = [np.asarray(noise.draft_words) >> 8, accepts, np.asarray(noise.next_words) >> 8]
    numbers = np.concatenate([x.ravel() for x in words]).tolist()
    assert len(set(numbers)) == len(numbers) == 3 * (4 * 2 + 4 + 2)


def test_another_k_moves_nobodys_noise():
    seeds, lengths = jnp.asarray([[1, 2], [3, 4]], jnp.uint32), jnp.asarray([5, 6])
    long = sampling.fresh_noise(seeds, lengths, 7)
    for k in (0, 1, 5):
        short = sampling.fresh_noise(seeds, lengths, k)
        np.testing.assert_array_equal(short.draft_words, long.draft_words[:, :k])
        np.testing.assert_array_equal(short.accept, long.accept[:, :k])
        np.testing.assert_array_equal(short.next_words, long.next_words)


SETTINGS = [
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.6},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"min_p": 0.3},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.4, "frequency_penalty": 0.8, "top_p": 0.8},
    {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    {"min_new_tokens": 6},
    {"min_new_tokens": 4, "top_k": 3},
    {},
]


def test_every_parameter_at_every_draft_position_is_its_definition():
    """All settings as rows of one batch: what a row asks for changes no other, and the drafts before a node count."""
    rng = np.random.default_rng(0)
    batch, nodes, size = len(SETTINGS), 4, 40
    logits = rng.normal(size=(batch, nodes, size)).astype(np.float32) * 2
    tokens, drafted = rng.integers(0, 12, (batch, 9)), rng.integers(0, 12, (batch, nodes - 1))
    bias = np.where(rng.random((batch, size)) < 0.2, rng.normal(size=(batch, size)), 0.0)
    bias[3:6, 20:30], bias[9] = -np.inf, 0.0
    fields = {name: np.asarray([s.get(name, neutral) for s in SETTINGS]) for name, neutral in NEUTRAL.items()}
    sampled = neutral_sampling(batch, size, bias=bias, **fields)
    buffer = np.concatenate([tokens, np.full((batch, nodes), 1)], axis=1)  # stale entries count for nothing
    at = context(buffer, [9] * batch, sampled, None, [6] * batch, stop_ids=(3, 7, -1))
    transform, drafts = jax.jit(sampling.transform), jnp.asarray(drafted, jnp.int32)
    got = np.asarray(transform(jnp.asarray(logits), at, drafts, 0))
    for row, settings in enumerate(SETTINGS):
        for node in range(nodes):
            generated = [*tokens[row, 6:], *drafted[row, :node]]
            want = sampling_logits(
                logits[row, node], tokens[row, :6].tolist(), generated, bias=bias[row], stop_ids=(3, 7), **settings
            )
            kept = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got[row, node]), kept, err_msg=f"{settings} at node {node}")
            np.testing.assert_allclose(got[row, node][kept], want[kept], rtol=2e-5, atol=2e-5)
            # The draft sees one node at a time, through the same function.
            alone = transform(jnp.asarray(logits[:, node : node + 1]), at, drafts, node)
            np.testing.assert_allclose(alone[row, 0][kept], got[row, node][kept], rtol=1e-6, atol=1e-6)


def test_a_row_without_parameters_is_untouched_by_its_neighbours():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 50)), jnp.float32)
    out = transformed(logits, top_k=[0, 5], top_p=[1.0, 0.5], min_p=[0.0, 0.2], repetition_penalty=[1.0, 1.5])
    np.testing.assert_array_equal(out[0], logits[0])
    assert np.isinf(np.asarray(out[1])).any()


def test_ties_with_the_last_token_kept_are_kept():
    logits = jnp.asarray([[[2.0, 1.0, 1.0, 0.0, -0.0, -3.0]]])
    cuts: list[dict[str, Any]] = [{"top_k": [2]}, {"top_p": [0.6]}]
    kept = [np.isfinite(np.asarray(transformed(logits, **cut))).sum() for cut in cuts]
    assert kept == [3, 3]
    assert np.isfinite(np.asarray(transformed(logits, top_k=[4]))).sum() == 5


@pytest.mark.parametrize("top_p", [1e-6, 0.999999])
def test_the_most_likely_token_always_stays(top_p):
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, 1, 1000)) * 5, jnp.float32)
    out = np.asarray(transformed(logits, top_p=[top_p] * 8))
    np.testing.assert_array_equal(out.argmax(-1), np.asarray(logits).argmax(-1))
    assert (np.isfinite(out).sum(-1) >= 1).all()


@pytest.mark.parametrize("top_p", [0.9999999, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_a_top_p_that_rounding_never_reaches_keeps_all(top_p):
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, 1, 128_000)), jnp.float32)
    assert np.isfinite(np.asarray(transformed(logits, top_p=[top_p] * 4))).mean() > 0.98


def test_coupled_noise_is_a_function_of_seed_and_position():
    seeds = jnp.asarray([[1, 2], [1, 2], [3, 4]], jnp.uint32)
    noise = sampling.coupled_noise(seeds, jnp.asarray([5, 7, 5], jnp.int32), 3, 10).gumbel
    np.testing.assert_array_equal(noise[0, 2:], noise[1, :2])
    assert len(set(np.asarray(noise).ravel().tolist())) == noise.size - 2 * 10
