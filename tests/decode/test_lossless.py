"""The output law of the whole jitted path is the target's, and planted mistakes are found.

Losslessness tests cannot see drafter bugs and acceptance tests cannot see verifier bugs, so both kinds are here, and
each is shown to fail on errors planted on purpose.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax import sampling
from specjax.decode import engine as engine_lib
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.testing.toys import exact_law, prefix_model, related
from specjax.types import Draft, Noise, Verdict, Verifier
from specjax.verifiers.chain import at, leading_run, row
from specjax.verifiers.speculative import Speculative
from tests.decode.laws import LEVEL, decode_counts, p_value

TARGET = prefix_model(0, scale=1.2)
DRAFT, PROMPT = related(TARGET, 1), [1, 2]
CAUGHT = 1e-9


@pytest.fixture(autouse=True)
def fresh_programs():
    """Mutants change functions that compiled programs would remember."""
    engine_lib.prefill.cache_clear()
    engine_lib.chunk.cache_clear()
    yield
    engine_lib.prefill.cache_clear()
    engine_lib.chunk.cache_clear()


def law_p_value(drafter, verifier: str | Verifier = "speculative", calls=None, **kwargs) -> float:
    decoder = Decoder(TARGET, drafter, verifier)
    counts = decode_counts(decoder, PROMPT, 3, **kwargs, **({} if calls is None else {"calls": calls}))
    return p_value(counts, exact_law(TARGET, PROMPT, 3, kwargs.get("temperature", 1.0)))


@pytest.mark.parametrize(
    "drafter",
    [None, DraftModel(DRAFT, 1), DraftModel(DRAFT, 2), DraftModel(DRAFT, 4), DraftModel(TARGET, 2), NGram(2, 3, 1)],
    ids=["autoregressive", "k1", "k2", "k4", "self", "ngram"],
)
def test_three_tokens_have_exactly_the_targets_joint_law(drafter):
    assert law_p_value(drafter) > LEVEL


def test_temperature_shapes_draft_and_target_alike():
    assert law_p_value(DraftModel(DRAFT, 3), temperature=0.6) > LEVEL


def test_a_stop_token_inside_a_block_keeps_the_law_of_the_cut_sequences():
    target = prefix_model(0, eos_ids=(3,), scale=1.2)
    counts = decode_counts(Decoder(target, DraftModel(DRAFT, 4)), PROMPT, 3)
    assert p_value(counts, exact_law(target, PROMPT, 3, stop_ids=(3,))) > LEVEL


def all_accepted(drafter, temperature) -> bool:
    result = Decoder(TARGET, drafter).generate(
        [[1, 2, 3], [0], [1] * 20, [2, 1]], max_new_tokens=41, temperature=temperature
    )
    return all(s.accepted == s.drafted and s.drafted > 0 for s in result.stats)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_draft_equal_to_target_is_always_accepted(k):
    for temperature in (0.0, 1.0, [0.0, 1.0, 0.7, 1.3]):
        assert all_accepted(DraftModel(TARGET, k), temperature), temperature


class Mutant(Speculative):
    """Speculative sampling with room for one mistake."""

    def accept_noise(self, noise):
        return noise.accept

    def accepts(self, u, p, q):
        return u * q < p

    def run(self, accepted):
        return leading_run(accepted)

    def target_row(self, n, k):
        return n

    def draft_row(self, n, k):
        return jnp.minimum(n, k - 1)

    def residual(self, p, q, rejected, token):
        return jnp.maximum(p - jnp.where(rejected[:, None], q, 0.0), 0.0)

    def pick(self, residual, noise, n):
        return sampling.inverse_cdf(residual, noise.next_token)

    def __call__(self, draft, p_logits, noise):
        p = jax.nn.softmax(p_logits, axis=-1)
        assert draft.logits is not None
        q = jax.nn.softmax(draft.logits, axis=-1)
        k = draft.tokens.shape[1]
        u = self.accept_noise(noise)
        n = self.run(self.accepts(u, at(p[:, :-1], draft.tokens), at(q, draft.tokens)) & draft.valid)
        p_next, q_next = row(p, self.target_row(n, k)), row(q, self.draft_row(n, k))
        token = jnp.take_along_axis(draft.tokens, self.draft_row(n, k)[:, None], axis=1)
        residual = self.residual(p_next, q_next, n < k, token)
        residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 1e-12, residual, p_next)
        return Verdict(n, self.pick(residual, noise, n))


class ResidualIsTarget(Mutant):
    def residual(self, p, q, rejected, token):
        return p


class ResidualIsAbsolute(Mutant):
    def residual(self, p, q, rejected, token):
        return jnp.abs(p - jnp.where(rejected[:, None], q, 0.0))


class ResidualOfFirstPosition(Mutant):
    def draft_row(self, n, k):
        return jnp.zeros_like(n)


class BonusFromLastDraftRow(Mutant):
    def target_row(self, n, k):
        return jnp.minimum(n, k - 1)


class DraftSubtractedFromBonus(Mutant):
    def residual(self, p, q, rejected, token):
        return jnp.maximum(p - q, 0.0)


class OneUniformForAllPositions(Mutant):
    def accept_noise(self, noise):
        return jnp.broadcast_to(noise.accept[:, :1], noise.accept.shape)


class AcceptByTargetProbability(Mutant):
    def accepts(self, u, p, q):
        return u < p


class CountsAcceptsInsteadOfTheRun(Mutant):
    def run(self, accepted):
        return jnp.sum(accepted, axis=1)


class ArgmaxOfResidual(Mutant):
    def pick(self, residual, noise, n):
        return sampling.argmax(residual)


class RejectingUniformReused(Mutant):
    def pick(self, residual, noise, n):
        u = jnp.take_along_axis(noise.accept, jnp.minimum(n, noise.accept.shape[1] - 1)[:, None], axis=1)[:, 0]
        return sampling.inverse_cdf(residual, u)


class LastDraftNeverAccepted(Mutant):
    def run(self, accepted):
        return leading_run(accepted.at[:, -1].set(False))


class TargetRowsOffByOne(Mutant):
    def __call__(self, draft, p_logits, noise):
        return super().__call__(draft, jnp.roll(p_logits, 1, axis=1), noise)


class ResidualOnlyDropsTheRejectedToken(Mutant):
    """Right for a point mass, wrong for a draft that was sampled and accepted by p/q."""

    def residual(self, p, q, rejected, token):
        index = jax.lax.broadcasted_iota(jnp.int32, p.shape, 1)
        return jnp.where(rejected[:, None] & (index == token), 0.0, p)


class SampledDraftTakenAsCertain(Speculative):
    def __call__(self, draft, p_logits, noise):
        return super().__call__(dataclasses.replace(draft, logits=None), p_logits, noise)


def test_a_sampled_draft_taken_as_certain_keeps_the_law_but_accepts_less():
    """Given any x, the point-mass rule gives p, so a mixture over x does too: only the acceptance tells it apart."""
    assert law_p_value(DraftModel(DRAFT, 2), SampledDraftTakenAsCertain()) > LEVEL
    accepted = [
        sum(
            s.accepted for s in Decoder(TARGET, DraftModel(DRAFT, 2), v).generate([PROMPT] * 512, temperature=1.0).stats
        )
        for v in (Speculative(), SampledDraftTakenAsCertain())
    ]
    assert accepted[1] < 0.9 * accepted[0]


def test_the_mutant_frame_itself_is_lossless():
    assert law_p_value(DraftModel(DRAFT, 3), Mutant()) > LEVEL


@pytest.mark.parametrize(
    "mutant",
    [
        ResidualIsTarget,
        ResidualIsAbsolute,
        ResidualOfFirstPosition,
        BonusFromLastDraftRow,
        DraftSubtractedFromBonus,
        OneUniformForAllPositions,
        AcceptByTargetProbability,
        CountsAcceptsInsteadOfTheRun,
        ArgmaxOfResidual,
        RejectingUniformReused,
        TargetRowsOffByOne,
        ResidualOnlyDropsTheRejectedToken,
    ],
)
def test_a_wrong_verifier_is_caught_by_the_law(mutant):
    assert law_p_value(DraftModel(DRAFT, 2), mutant(), calls=12) < CAUGHT


def test_never_accepting_the_last_draft_keeps_the_law_wrong_or_the_acceptance_low():
    """Treated as a rejection it subtracts q without having tested it, which the law shows."""
    assert law_p_value(DraftModel(DRAFT, 2), LastDraftNeverAccepted(), calls=12) < CAUGHT


def test_a_draft_without_the_temperature_is_caught():
    @dataclasses.dataclass(frozen=True)
    class ColdDraft(DraftModel):
        def _propose(self, out, context, tokens, offset):
            tokens, _ = super()._propose(out, context, tokens, offset)
            return tokens, out.logits[:, 0].astype(jnp.float32)

    assert law_p_value(ColdDraft(DRAFT, 2), calls=12, temperature=0.6) < CAUGHT


def test_noise_that_ignores_the_length_is_caught(monkeypatch):
    real = sampling.fresh_noise
    monkeypatch.setattr(sampling, "fresh_noise", lambda s, n, k: real(s, jnp.zeros_like(n), k))
    assert law_p_value(DraftModel(DRAFT, 1), calls=12) < CAUGHT


def test_draft_noise_reused_for_acceptance_is_caught(monkeypatch):
    real = sampling.fresh_noise

    def tied(seeds, lengths, k):
        uniforms = real(seeds, lengths, k).uniforms
        return Noise(uniforms.at[:, Noise.ACCEPT].set(uniforms[:, Noise.DRAFT]))

    monkeypatch.setattr(sampling, "fresh_noise", tied)
    assert law_p_value(DraftModel(DRAFT, 2), calls=12) < CAUGHT


def test_a_draft_cache_without_the_last_accepted_token_is_caught_by_acceptance():
    @dataclasses.dataclass(frozen=True)
    class Forgetful(DraftModel):
        """Feeds only the newest token, so after a full acceptance x_K is missing."""

        def draft(self, params, state, context):
            slot, laws = (context.lengths - 1)[:, None], []
            tokens = jnp.zeros((len(slot), self.k), jnp.int32)
            newest = jnp.take_along_axis(context.tokens, slot, axis=1)
            for offset in range(self.k):
                out = self.model(params, newest, slot + offset, slot + offset, state)
                tokens, logits = self._propose(out, context, tokens, offset)
                newest, state = tokens[:, offset : offset + 1], out.cache
                laws.append(logits)
            logits = None if context.noise is None else jnp.stack(laws, axis=1)
            return Draft(tokens, jnp.ones(tokens.shape, bool), logits), state

    assert not all_accepted(Forgetful(TARGET, 3), 1.0)
    # The law cannot see it: the verifier repairs whatever the drafter proposes.
    assert law_p_value(Forgetful(DRAFT, 3), calls=12) > LEVEL


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_block_fed_at_the_wrong_position_is_caught_by_greedy_identity(monkeypatch, shift):
    prompts = [[1, 2, 3], [2] * 9]
    want = Decoder(TARGET).generate(prompts, max_new_tokens=30).tokens
    engine_lib.chunk.cache_clear()

    def feed(target, params, state, draft):
        root = jnp.take_along_axis(state.tokens, (state.lengths - 1)[:, None], axis=1)
        fed = jnp.concatenate([root, draft.tokens], axis=1)
        slots = (state.lengths - 1)[:, None] + jnp.arange(fed.shape[1])[None]
        return target(params, fed, slots + shift, slots, state.cache)

    monkeypatch.setattr(engine_lib, "feed_block", feed)
    assert Decoder(TARGET, DraftModel(DRAFT, 3)).generate(prompts, max_new_tokens=30).tokens != want


def test_advancing_the_cache_over_rejected_drafts_is_caught_by_greedy_identity(monkeypatch):
    prompts = [[1, 2, 3], [2] * 9]
    want = Decoder(TARGET).generate(prompts, max_new_tokens=30).tokens
    engine_lib.chunk.cache_clear()

    def feed(target, params, state, draft):
        """The right tokens at the right positions, but one slot late after the first block: a rejected draft stays."""
        root = jnp.take_along_axis(state.tokens, (state.lengths - 1)[:, None], axis=1)
        fed = jnp.concatenate([root, draft.tokens], axis=1)
        positions = (state.lengths - 1)[:, None] + jnp.arange(fed.shape[1])[None]
        return target(params, fed, positions, positions + jnp.minimum(state.counters.blocks, 1)[:, None], state.cache)

    monkeypatch.setattr(engine_lib, "feed_block", feed)
    assert Decoder(TARGET, DraftModel(DRAFT, 3)).generate(prompts, max_new_tokens=30).tokens != want
