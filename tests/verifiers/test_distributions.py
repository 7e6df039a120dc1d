"""Exact distributions of the shipped rules on enumerable tables, in float64: of the output, and of the number
accepted."""

from __future__ import annotations

from fractions import Fraction as F

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specjax import registry, sampling
from specjax.interfaces import Draft, Noise
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.greedy import Greedy
from specjax.verifiers.lenient import Lenient
from specjax.verifiers.speculative import Speculative
from specjax.verifiers.top_k import TopK
from specjax.verifiers.typical import Typical
from tests.verifiers.tables import Tables, context_free, random_tables, total_variation

LOSSLESS = [Speculative(), Block(), Coupled()]
SHAPES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)]
TABLES = 1112
"""Of each shape: 10,008 a rule."""
by_kind = pytest.mark.parametrize("verifier", LOSSLESS, ids=lambda v: v.kind)


@pytest.fixture(autouse=True)
def float64():
    # Integers are 64 bits wide then, which strict promotion would not mix with the 32 of a draft.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def test_every_registered_rule_is_one_of_these():
    kinds = {v.kind for v in (*LOSSLESS, Greedy(), Lenient(), TopK(), Typical())}
    assert kinds == set(registry.VERIFIERS)
    for kind in kinds:
        rule = registry.resolve(registry.VERIFIERS, kind, "")
        assert rule.lossless is (kind in {"greedy", "speculative", "block", "coupled"})
        assert rule.reference


@by_kind
@pytest.mark.parametrize(("size", "k"), SHAPES)
def test_the_output_has_the_targets_joint_distribution(verifier, size, k):
    tables = random_tables(size * 10 + k, TABLES, size, k)
    distribution = tables.distribution(verifier)
    drawn = tables.chance > 0
    np.testing.assert_allclose(distribution.num_accepted[drawn].sum(-1), 1.0, atol=1e-12)
    assert distribution.num_accepted[drawn].min() >= -1e-15
    assert np.abs(tables.output(distribution) - tables.joint).max() <= 1e-12


@by_kind
def test_a_draft_that_stops_early_keeps_the_distribution(verifier):
    """A proposal may end where the tokens before say so, never because of its own last token."""
    tables = random_tables(0, 60, 3, 3)
    valid = np.ones(tables.drafts.shape, bool)
    valid[:, 1] = tables.drafts[:, 0] != 1
    valid[:, 2] = valid[:, 1] & (tables.drafts[:, :2].sum(1) % 2 == 0)
    distribution = tables.distribution(verifier, valid)
    assert (distribution.num_accepted[:, ~valid[:, 1], 2:] == 0).all()
    assert np.abs(tables.output(distribution) - tables.joint).max() <= 1e-12


@by_kind
def test_a_certain_draft_keeps_the_distribution(verifier):
    tables = random_tables(1, 60, 3, 3)
    distribution = tables.distribution(verifier, certain=True)
    for draft in np.eye(len(tables.drafts)):
        assert np.abs(tables.output(distribution, np.tile(draft, (60, 1))) - tables.joint).max() <= 1e-12


def test_greedy_has_the_distribution_of_the_argmax():
    tables = random_tables(2, 600, 3, 3)
    best = Tables([np.eye(3)[x.argmax(-1)] for x in tables.p], tables.q)
    assert np.abs(best.output(tables.distribution(Greedy())) - best.joint).max() <= 1e-12


TWO = (F(1, 3), F(2, 3)), (F(2, 3), F(1, 3))
THREE = (F(1, 2), F(1, 3), F(1, 6)), (F(1, 6), F(1, 6), F(2, 3))


@pytest.mark.parametrize(
    ("verifier", "distributions", "expected"),
    [
        (Speculative(), TWO, ("2/3", "10/9", "38/27", "130/81")),
        (Block(), TWO, ("2/3", "11/9", "5/3", "166/81")),
        (Coupled(), TWO, ("2/3", "10/9", "38/27", "130/81")),
        (Speculative(), THREE, ("1/2", "3/4", "7/8")),
        (Block(), THREE, ("1/2", "5/6", "77/72")),
        (Coupled(), THREE, ("19/39", "1102/1521", "49837/59319")),
    ],
)
def test_the_expected_number_accepted_is_the_closed_form(verifier, distributions, expected):
    for k, value in enumerate(expected, 1):
        tables = context_free(distributions[0], distributions[1], k)
        assert tables.expected_accepted(tables.distribution(verifier))[0] == pytest.approx(float(F(value)), abs=1e-13)


def test_the_block_rule_by_hand():
    """Acceptance and stops of the four drafts of the two-token toy at K = 2."""
    tables = context_free(*TWO, 2)
    distribution = tables.distribution(Block())
    pmf = (tables.chance[0][:, None] * distribution.num_accepted[0]).sum(0)
    np.testing.assert_allclose(pmf, [1 / 3, 1 / 9, 5 / 9], atol=1e-15)
    # AA, AB, BA, BB: the last token succeeds with 1/4, 1, 1/2, 1; the first with 0, 0, 1, 1.
    np.testing.assert_allclose(distribution.num_accepted[0, :, 2], [1 / 4, 1, 1 / 2, 1], atol=1e-15)
    np.testing.assert_allclose(distribution.num_accepted[0, :, 1], [0, 0, 1 / 2, 0], atol=1e-15)


def test_the_token_rule_accepts_the_overlap():
    """E[n] = sum over m and prefixes of the product of min(p, q)."""
    for size, k in SHAPES:
        tables = random_tables(size + k, 60, size, k)
        overlap, expected = np.ones((60, 1)), np.zeros(60)
        for p, q in zip(tables.p, tables.q, strict=False):
            overlap = (overlap[..., None] * np.minimum(p, q)).reshape(60, -1)
            expected += overlap.sum(-1)
        np.testing.assert_allclose(tables.expected_accepted(tables.distribution(Speculative())), expected, atol=1e-12)


weights = st.integers(0, 6)


@hypothesis.settings(max_examples=2500, deadline=None, derandomize=True, database=None)
@hypothesis.given(hnp.arrays(np.int8, (17, 3), elements=weights))
def test_block_verification_never_accepts_fewer_than_the_token_rule(table):
    distributions = table + np.eye(1, 3, dtype=np.int64) * (table.sum(1, keepdims=True) == 0)
    distributions = distributions / distributions.sum(1, keepdims=True)
    tables = Tables(
        [distributions[None, a:b] for a, b in ((0, 1), (1, 4), (4, 13))],
        [distributions[None, a:b] for a, b in ((13, 14), (14, 17))],
    )
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        token, block = (tables.expected_accepted(accepted(rule, tables))[0] for rule in (Speculative(), Block()))
    assert block >= token - 1e-12


_distributions = {rule: jax.jit(rule.distribution) for rule in (Speculative(), Block())}


def accepted(rule, tables: Tables):
    """`Tables.distribution` without compiling anew."""
    draft = Draft(jnp.asarray(tables.drafts), jnp.ones(tables.drafts.shape, bool))
    distribution = _distributions[rule](draft, jnp.asarray(tables.p_rows[0]), jnp.asarray(tables.q_rows[0]))
    return jax.tree.map(lambda x: np.asarray(x)[None], distribution)


def test_the_gain_of_block_verification_is_not_nothing():
    tables = random_tables(5, 600, 3, 3)
    token, block = (tables.expected_accepted(tables.distribution(rule)) for rule in (Speculative(), Block()))
    assert (block - token).mean() > 0.02


def test_lenience_has_its_closed_form():
    """V = 3, l = 1/2: the acceptance grows from 1/2 to 2/3, the output moves by 1/6."""
    tables = context_free(*THREE, 1)
    distribution = tables.distribution(Lenient(lenience=0.5))
    assert tables.expected_accepted(distribution)[0] == pytest.approx(2 / 3, abs=1e-14)
    first = tables.output(distribution).reshape(3, 3).sum(1)
    np.testing.assert_allclose(first, [3 / 8, 7 / 24, 1 / 3], atol=1e-14)
    assert np.abs(tables.output(tables.distribution(Lenient(lenience=1.0))) - tables.joint).max() <= 1e-14


def test_top_k_and_typical_accept_by_their_definition():
    p, q = (0.5, 0.3, 0.15, 0.05), (0.25, 0.25, 0.25, 0.25)
    tables = context_free(p, q, 1)
    np.testing.assert_array_equal(tables.distribution(TopK(k=2)).num_accepted[0, :, 1], [1, 1, 0, 0])
    entropy = -sum(x * np.log(x) for x in p)
    delta = 0.14 / np.exp(-entropy)
    np.testing.assert_array_equal(
        tables.distribution(Typical(epsilon=0.9, delta=delta)).num_accepted[0, :, 1], [1, 1, 1, 0]
    )
    np.testing.assert_array_equal(
        tables.distribution(Typical(epsilon=0.2, delta=99.0)).num_accepted[0, :, 1], [1, 1, 0, 0]
    )


@pytest.mark.parametrize("verifier", [Lenient(lenience=0.5), TopK(k=2), Typical()], ids=lambda v: v.kind)
def test_a_lossy_rule_is_lossy_and_accepts_more(verifier):
    tables = random_tables(7, 600, 4, 3)
    distribution = tables.distribution(verifier)
    np.testing.assert_allclose(tables.output(distribution).sum(-1), 1.0, atol=1e-12)
    assert total_variation(tables.output(distribution), tables.joint).mean() > 0.01
    assert (
        tables.expected_accepted(distribution).mean()
        > tables.expected_accepted(tables.distribution(Speculative())).mean()
    )


@pytest.mark.parametrize("verifier", [Speculative(), Block(), Lenient(), TopK(k=2), Typical()], ids=lambda v: v.kind)
def test_a_call_samples_from_the_distribution(verifier):
    """The rule itself, at a grid of uniforms fine enough to read its distribution off."""
    tables = random_tables(11, 6, 3, 2)
    distribution, steps = tables.distribution(verifier), 60
    middle = (np.arange(steps) + 0.5) / steps
    grid = np.stack(np.meshgrid(middle, middle, indexing="ij"), -1).reshape(-1, 2)
    call = jax.jit(verifier.__call__)
    for t in range(tables.count):
        for d, draft in enumerate(tables.drafts):
            if tables.chance[t, d] == 0:
                continue
            zeros = np.zeros((len(grid), 2, 2), np.uint32)
            noise = Noise(jnp.asarray(zeros), jnp.asarray(grid), jnp.asarray(zeros[:, 0]))
            rows = [
                np.log(x, where=x > 0, out=np.full_like(x, -np.inf)) for x in (tables.p_rows[t, d], tables.q_rows[t, d])
            ]
            p, q = (jnp.asarray(np.broadcast_to(x, (len(grid), *x.shape))) for x in rows)
            tokens = jnp.asarray(np.tile(draft, (len(grid), 1)))
            verdict = call(Draft(tokens, jnp.ones(tokens.shape, bool), q), p, noise)
            counts = np.bincount(np.asarray(verdict.num_accepted), minlength=3) / len(grid)
            np.testing.assert_allclose(counts, distribution.num_accepted[t, d], atol=2 / steps)
            # And the next token, by its own words, where the block stopped: a small vocabulary is one group.
            n = int(np.argmax(counts))
            row = int(np.flatnonzero(np.asarray(verdict.num_accepted) == n)[0])
            fixed = np.stack([np.zeros(steps), middle * 2**32], axis=1).astype(np.uint32)
            stopped = Noise(noise.draft_words[:steps], jnp.tile(noise.accept[row], (steps, 1)), jnp.asarray(fixed))
            one = jax.tree.map(lambda x: x[:steps], (Draft(tokens, jnp.ones(tokens.shape, bool), q), p))
            following = call(*one, stopped).next_token
            share = np.bincount(np.asarray(following), minlength=3) / steps
            np.testing.assert_allclose(share, distribution.next_token[t, d, n], atol=1.5 / steps)


def test_coupled_choices_follow_its_distribution():
    """Draft and target by their Gumbel races, many times, against the integral."""
    p, q = (np.asarray(x, float) for x in THREE)
    rows = 200_000
    noise = sampling.coupled_noise(jnp.asarray([[0, 1]], jnp.uint32), jnp.zeros(1, jnp.int32), rows - 1, 3).gumbel[0]
    x, y = (
        np.asarray(sampling.draw(jnp.log(jnp.asarray(distribution))[None] + 0 * noise, noise))
        for distribution in (q, p)
    )
    distribution = context_free(*THREE, 1).distribution(Coupled())
    for a in range(3):
        chosen = np.bincount(y[x == a], minlength=3) / (x == a).sum()
        want = distribution.num_accepted[0, a, 0] * distribution.next_token[0, a, 0]
        want[a] += distribution.num_accepted[0, a, 1]
        np.testing.assert_allclose(chosen, want, atol=5 * 0.5 / np.sqrt((x == a).sum()))
