"""Errors in the rules that sample: by token, by block, coupled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from specjax import sampling
from specjax.interfaces import CoupledNoise, Noise, Verdict
from specjax.verifiers import chain, speculative
from specjax.verifiers.block import Block
from specjax.verifiers.chain import Acceptance, ChainVerifier, row
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative
from tests import test_sampling
from tests.decode import test_invalid, test_lossless, test_options
from tests.mutants.table import Patch, mutant, wrap
from tests.verifiers import test_distributions

# The token rule. Its exact distribution is read off the shipped class, in float64.

JOINT_LAW = test_distributions.test_the_output_has_the_targets_joint_distribution
CALL_LAW = test_distributions.test_a_call_samples_from_the_distribution
TOKEN, BLOCK, COUPLED = test_distributions.LOSSLESS
token_distribution = mutant("token rule", JOINT_LAW, verifier=TOKEN, size=3, k=2)
token_call = mutant("token rule", CALL_LAW, verifier=Speculative())


def next_distribution(patch: Patch, change: Callable[..., tuple]) -> None:
    """Changes ``(draft, p, q, n)`` on their way into the distribution of the next token."""

    def make(real):
        def mutated(self, draft, p, q, acceptance, n):
            draft, p, q, n = change(draft, p, q, n)
            return real(self, draft, p, q, acceptance, n)

        return mutated

    wrap(patch, ChainVerifier, "_next", make)


def acceptance(patch: Patch, rule: type, change: Callable[..., Acceptance]) -> None:
    """Replaces the acceptance by ``change(real acceptance, draft, p, q)``."""

    def make(real):
        return lambda self, draft, p, q: change(real(self, draft, p, q), draft, p, q)

    wrap(patch, rule, "acceptance", make)


@token_distribution
def residual_is_the_target(patch):
    patch.setattr(ChainVerifier, "residual", lambda self, p, q, weight: p)


@token_distribution
def residual_is_the_absolute_difference(patch):
    patch.setattr(ChainVerifier, "residual", lambda self, p, q, weight: jnp.abs(p - q))


@token_distribution
def residual_only_drops_the_rejected_token(patch):
    """Right for a point mass, wrong for a draft that was sampled and accepted by p/q."""
    next_distribution(patch, lambda draft, p, q, n: (draft, p, None, n))


@token_distribution
def residual_of_the_first_position(patch):
    next_distribution(patch, lambda draft, p, q, n: (draft, p, jnp.broadcast_to(q[:, :1], q.shape), n))


@token_distribution
def residual_of_the_position_before(patch):
    next_distribution(patch, lambda draft, p, q, n: (draft, p, jnp.concatenate([q[:, :1], q[:, :-1]], axis=1), n))


@token_distribution
def bonus_from_the_last_drafts_row(patch):
    next_distribution(patch, lambda draft, p, q, n: (draft, jnp.concatenate([p[:, :-1], p[:, -2:-1]], axis=1), q, n))


@token_distribution
def draft_subtracted_from_the_bonus(patch):
    def mutated(self, draft, p, q, acceptance, n):
        return self.residual(row(p, n), row(q, jnp.minimum(n, q.shape[1] - 1)), None)

    patch.setattr(ChainVerifier, "_next", mutated)


@token_distribution
def accepts_by_the_targets_probability(patch):
    acceptance(patch, Speculative, lambda c, draft, p, q: Acceptance(chain.at(p[:, :-1], draft.tokens)))


@token_distribution
def accepts_the_argmax_while_sampling(patch):
    def change(c, draft, p, q):
        return Acceptance((draft.tokens == sampling.argmax(p[:, :-1])).astype(p.dtype))

    acceptance(patch, Speculative, change)


@token_distribution
def last_draft_never_accepted(patch):
    """Treated as a rejection it subtracts q without having tested it."""
    acceptance(patch, Speculative, lambda c, draft, p, q: Acceptance(c.accept_prob.at[:, -1].set(0.0)))


@mutant("dtype", JOINT_LAW, verifier=TOKEN, size=3, k=2)
def draft_probabilities_in_bfloat16(patch):
    """Only in the ratio, as rounded tokens and exact probabilities would make them."""

    def make(real):
        return lambda self, draft, p, q: real(self, draft, p, q.astype(jnp.bfloat16).astype(p.dtype))

    wrap(patch, Speculative, "acceptance", make)


@token_call
def counts_accepts_instead_of_the_run(patch):
    patch.setattr(chain, "leading_run", lambda accepted: jnp.sum(accepted.astype(jnp.int32), axis=1))


@token_call
def argmax_of_the_residual(patch):
    patch.setattr(chain, "sampling", SimpleNamespace(inverse_cdf=lambda weights, words: sampling.argmax(weights)))


@token_call
def rejecting_uniform_draws_the_residual(patch):
    def make(real):
        def mutated(self, draft, p_logits, noise):
            n = real(self, draft, p_logits, noise).num_accepted
            rejecting = row(noise.accept, jnp.minimum(n, noise.accept.shape[1] - 1))
            words = (rejecting * 2.0**32).astype(jnp.uint32)[:, None]
            return real(self, draft, p_logits, dataclasses.replace(noise, next_words=jnp.tile(words, (1, 2))))

        return mutated

    wrap(patch, ChainVerifier, "__call__", make)


def accepting(patch: Patch, change: Callable[[Noise], Any]) -> None:
    """Replaces the uniforms of the acceptance test."""

    def make(real):
        def mutated(self, draft, p_logits, noise):
            return real(self, draft, p_logits, dataclasses.replace(noise, accept=change(noise)))

        return mutated

    wrap(patch, ChainVerifier, "__call__", make)


@token_call
def one_uniform_for_all_positions(patch):
    accepting(patch, lambda noise: jnp.broadcast_to(noise.accept[:, :1], noise.accept.shape))


@token_call
def drafts_uniforms_accept_them(patch):
    accepting(patch, lambda noise: noise.draft_words[..., 1].astype(noise.accept.dtype) * 2.0**-32)


@mutant("token rule", test_distributions.test_a_draft_that_stops_early_keeps_the_distribution, verifier=TOKEN)
def short_proposal_ends_as_a_rejection(patch):
    """After all of k_r < K proposals were accepted there is nothing to subtract."""

    def change(draft, p, q, n):
        return dataclasses.replace(draft, valid=jnp.ones_like(draft.valid)), p, q, n

    next_distribution(patch, change)


@mutant("token rule", test_lossless.test_draft_equal_to_target_is_always_accepted, k=2, lossless=True)
def sampled_draft_taken_as_certain(patch):
    """Given any x the point-mass rule gives p, so a mixture over x does too."""

    def make(real):
        def mutated(self, draft, p_logits, noise):
            return real(self, dataclasses.replace(draft, logits=None), p_logits, noise)

        return mutated

    wrap(patch, ChainVerifier, "__call__", make)


# The block rule.

block_distribution = mutant("block rule", JOINT_LAW, verifier=BLOCK, size=3, k=3)


@block_distribution
def block_weight_without_its_clamp(patch):
    """Clamped as a product at the end, not factor by factor."""

    def change(c, draft, p, q):
        weight = jnp.cumprod(chain.ratios(draft, p, q), axis=1).clip(max=1.0)
        inner = weight[:, :-1]
        left = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q[:, 1:], 0.0), axis=-1)
        whole = left + 1.0 - inner
        h = jnp.where(whole > 0, left / jnp.where(whole > 0, whole, 1.0), 1.0)
        return Acceptance(
            jnp.concatenate([h, weight[:, -1:]], axis=1), jnp.pad(weight, ((0, 0), (1, 0)), constant_values=1)
        )

    acceptance(patch, Block, change)


@block_distribution
def block_succeeds_by_its_weight(patch):
    """h = b at every position, not at the last alone."""
    acceptance(patch, Block, lambda c, draft, p, q: Acceptance(c.weight[:, 1:], c.weight))


@block_distribution
def block_stops_at_the_first_failure(patch):
    patch.setattr(Block, "last_success", False)


@block_distribution
def block_residual_without_its_weight(patch):
    acceptance(patch, Block, lambda c, draft, p, q: Acceptance(c.accept_prob, None))


@mutant("block rule", test_distributions.test_a_draft_that_stops_early_keeps_the_distribution, verifier=BLOCK)
def block_ends_at_k_where_the_proposal_is_shorter(patch):
    """The last valid position must succeed with b."""

    def make(real):
        def mutated(self, draft, p, q):
            return real(self, dataclasses.replace(draft, valid=jnp.ones_like(draft.valid)), p, q)

        return mutated

    wrap(patch, Block, "acceptance", make)


# Coupling.

POSITION_NOISE = test_sampling.test_coupled_noise_is_a_function_of_seed_and_position
coupled_output = mutant(
    "coupled", test_options.test_coupled_output_is_plain_samplings_token_for_token, kind="draft", k=3
)
coupled_noise = mutant("coupled", POSITION_NOISE)


def gumbel(patch: Patch, change: Callable[..., Any]) -> None:
    """Replaces the noise by ``change(real, seeds, lengths, k, size)``."""

    def make(real):
        def mutated(seeds, lengths, k, size):
            return CoupledNoise(change(lambda *args: real(*args).gumbel, seeds, lengths, k, size))

        return mutated

    wrap(patch, sampling, "coupled_noise", make)


@coupled_output
def coupled_key_folded_by_the_blocks_start(patch):
    """A position that is drawn again sees other noise."""

    def change(real, seeds, lengths, k, size):
        return real(seeds, lengths * 1000, k, size)

    gumbel(patch, change)


@coupled_output
def coupled_noise_reused_across_positions(patch):
    def change(real, seeds, lengths, k, size):
        noise = real(seeds, lengths, k, size)
        return jnp.broadcast_to(noise[:, :1], noise.shape)

    gumbel(patch, change)


@coupled_output
def coupled_bonus_without_its_own_noise(patch):
    def change(real, seeds, lengths, k, size):
        return real(seeds, lengths, k, size).at[:, -1].set(0.0)

    gumbel(patch, change)


@coupled_noise
def coupled_noise_reused_across_rows(patch):
    def change(real, seeds, lengths, k, size):
        return real(jnp.broadcast_to(seeds[:1], seeds.shape), lengths, k, size)

    gumbel(patch, change)


@mutant(
    "coupled", test_options.test_a_draft_equal_to_its_target_is_always_accepted_with_every_parameter, verifier="coupled"
)
def coupled_draft_by_the_noise_of_the_next_position(patch):
    """The output keeps its distribution, but draft and target no longer race in the same noise."""
    patch.setattr(CoupledNoise, "draft", lambda self, offset: self.gumbel[:, offset + 1])


@coupled_output
def coupled_target_draws_without_the_noise(patch):
    def mutated(self, draft, p_logits, noise):
        chosen = sampling.argmax(p_logits)
        n = chain.leading_run((draft.tokens == chosen[:, :-1]) & draft.valid)
        return Verdict(n, row(sampling.argmax(p_logits + noise.gumbel), n))

    patch.setattr(Coupled, "__call__", mutated)


# What is not finite.


@mutant(
    "not finite",
    test_invalid.test_no_rule_keeps_a_token_of_a_distribution_that_is_not_finite,
    rule=TOKEN,
    where="draft",
)
def a_ratio_of_nan_is_one(patch):
    """As where q is 0, which is never drawn: what is not above 0 is NaN as well."""

    def mutated(draft, p, q):
        p_drafted = chain.at(p[:, :-1], draft.tokens)
        q_drafted = p_drafted if q is None else chain.at(q, draft.tokens)
        return jnp.where(q_drafted > 0, p_drafted / jnp.where(q_drafted > 0, q_drafted, 1.0), 1.0)

    patch.setattr(speculative, "ratios", mutated)


@mutant(
    "not finite",
    test_invalid.test_no_rule_keeps_a_token_of_a_distribution_that_is_not_finite,
    rule=BLOCK,
    where="draft",
)
def a_block_of_nan_is_sure(patch):
    acceptance(
        patch,
        Block,
        lambda c, draft, p, q: Acceptance(jnp.where(jnp.isnan(c.accept_prob), 1.0, c.accept_prob), c.weight),
    )
