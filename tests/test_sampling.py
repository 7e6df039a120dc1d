"""Draws follow their weights, and never land on a weight of zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.types import SamplingParams


@pytest.mark.parametrize("size", [1, 3, 64, 65, 1000, 4096])
def test_inverse_cdf_equals_the_sequential_definition(size):
    rng = np.random.default_rng(size)
    weights = rng.gamma(0.3, size=(200, size)).astype(np.float32) * (rng.random((200, size)) < 0.7)
    weights[:, 0] += 1e-3
    u = rng.random(200).astype(np.float32)
    got = np.asarray(sampling.inverse_cdf(jnp.asarray(weights), jnp.asarray(u)))
    exact = weights.astype(np.float64)
    cdf = exact.cumsum(1)
    want = (cdf <= u[:, None].astype(np.float64) * cdf[:, -1:]).sum(1)
    # Rounding may move a threshold across an edge, to the neighbour of positive weight.
    assert (got != want).mean() <= 0.01
    assert (weights[np.arange(200), got] > 0).all()


def test_a_zero_weight_is_never_drawn_even_at_the_edges():
    weights = np.zeros((4, 200), np.float32)
    weights[:, 130] = 1e-30
    weights[1, 7] = 1.0
    weights[2:, 199] = 3.0
    for u in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        got = np.asarray(sampling.inverse_cdf(jnp.asarray(weights), jnp.full(4, u, jnp.float32)))
        assert (weights[np.arange(4), got] > 0).all()


def test_argmax_ties_go_to_the_lowest_index():
    x = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, 0.0]])
    assert sampling.argmax(x).tolist() == [1, 0, 2]


def test_temperature_is_a_division_and_zero_a_log_one_hot():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.float32)
    out = sampling.transform(logits, SamplingParams(jnp.asarray([0.5, 0.0, 1.0])))
    np.testing.assert_allclose(out[0], logits[0] * 2, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(jax.nn.softmax(out[1])), np.eye(5)[np.asarray(logits[1]).argmax(-1)])
    np.testing.assert_array_equal(out[2], logits[2])


def test_bfloat16_logits_are_compared_in_float32():
    out = sampling.transform(jnp.zeros((1, 1, 4), jnp.bfloat16), SamplingParams(jnp.ones(1)))
    assert out.dtype == jnp.float32


def test_noise_depends_on_seed_and_length_alone_and_no_uniform_is_used_twice():
    seeds = jnp.asarray([[1, 2], [1, 2], [3, 4]], jnp.uint32)
    noise = sampling.fresh_noise(seeds, jnp.asarray([5, 6, 5]), 4)
    swapped = sampling.fresh_noise(seeds[::-1], jnp.asarray([5, 6, 5]), 4)
    np.testing.assert_array_equal(noise.uniforms[0], swapped.uniforms[2])
    values = np.asarray(noise.uniforms).ravel()
    assert len(set(values.tolist())) == values.size == 3 * 3 * 5
    assert (values >= 0).all()
    assert (values < 1).all()
