"""Errors in the sampling transform and in the noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax import sampling
from specjax.interfaces import Noise
from tests import test_sampling
from tests.decode import test_decoder, test_lossless, test_options
from tests.mutants.table import Patch, mutant, replaced, wrap

# The sampling transform, against its definition written out in float64.

definition = mutant("sampling", test_sampling.test_every_parameter_at_every_draft_position_is_its_definition)


def penalised(patch: Patch, change: Callable[..., tuple]) -> None:
    """Changes ``(context, drafted, first)`` on their way into penalties and `min_new_tokens`."""

    def make(real):
        return lambda logits, context, drafted, first: real(logits, *change(context, drafted, first))

    wrap(patch, sampling, "_penalised", make)


def cut(patch: Patch, change: Callable[[Any], dict[str, Any]]) -> None:
    """Changes parameters on their way into temperature, top-k, top-p and min-p."""

    def make(real):
        return lambda logits, s, *rest: real(logits, dataclasses.replace(s, **change(s)), *rest)

    wrap(patch, sampling, "warp", make)


@definition
def top_p_ignored(patch):
    cut(patch, lambda s: {"top_p": jnp.ones_like(s.top_p)})


@definition
def top_k_keeps_one_more(patch):
    cut(patch, lambda s: {"top_k": jnp.where(s.top_k > 0, s.top_k + 1, 0)})


@definition
def top_p_before_top_k(patch):
    def make(real):
        def mutated(logits, s, *rest):
            first = real(logits, dataclasses.replace(s, top_k=0 * s.top_k, min_p=0 * s.min_p), *rest)
            return real(first, dataclasses.replace(s, top_p=jnp.ones_like(s.top_p)), *rest)

        return mutated

    wrap(patch, sampling, "_cut", make)


@definition
def drafts_not_counted_by_penalties(patch):
    penalised(
        patch, lambda context, block, first: (context, dataclasses.replace(block, drafted=0 * block.drafted - 1), first)
    )


@definition
def penalties_count_the_draft_they_judge(patch):
    """One draft too many: that which the row is to accept or reject."""

    def make(real):
        def mutated(logits, context, drafted, first):
            least = context.sampling.min_new_tokens
            shifted = replaced(context, min_new_tokens=jnp.where(least > 0, least + 1, 0))
            return real(logits, shifted, drafted, first + 1)

        return mutated

    wrap(patch, sampling, "_penalised", make)


@definition
def generated_penalties_count_the_prompt(patch):
    def change(context, drafted, first):
        shifted = replaced(context, min_new_tokens=context.sampling.min_new_tokens + context.prompt_lengths)
        return dataclasses.replace(shifted, prompt_lengths=0 * context.prompt_lengths), drafted, first

    penalised(patch, change)


@definition
def repetition_penalty_forgets_the_sign(patch):
    """Dividing a negative logit makes the token more likely."""

    def make(real):
        def mutated(logits, context, drafted, first):
            shift = jnp.min(jnp.where(jnp.isfinite(logits), logits, 0.0), axis=-1, keepdims=True) - 1.0
            return real(logits - shift, context, drafted, first) + shift

        return mutated

    wrap(patch, sampling, "_penalised", make)


@definition
def min_new_tokens_off_by_one(patch):
    def change(context, drafted, first):
        least = context.sampling.min_new_tokens
        return replaced(context, min_new_tokens=jnp.maximum(least - 1, 0)), drafted, first

    penalised(patch, change)


@definition
def bias_not_applied(patch):
    def make(real):
        def mutated(logits, context, drafted, first=0):
            return real(logits, replaced(context, bias=jnp.zeros_like(context.sampling.bias)), drafted, first)

        return mutated

    wrap(patch, sampling, "process", make)


@definition
def transform_rounds_to_bfloat16(patch):
    def make(real):
        def mutated(logits, context, drafted, first=0):
            return real(logits.astype(jnp.bfloat16), context, drafted, first)

        return mutated

    wrap(patch, sampling, "process", make)


@mutant("sampling", test_options.test_a_processor_sees_the_prefix_of_every_draft_position)
def processor_does_not_see_the_drafts(patch):
    patch.setattr(sampling, "write_rows", lambda tokens, start, new: tokens)


# Noise.

NOISE = test_sampling.test_noise_depends_on_seed_and_length_alone_and_no_number_is_used_twice
fresh = mutant("noise", NOISE)


def noise(patch: Patch, change: Callable[..., Noise]) -> None:
    """Replaces the noise by ``change(real, seeds, lengths, k)``."""

    def make(real):
        return lambda seeds, lengths, k: change(real, seeds, lengths, k)

    wrap(patch, sampling, "fresh_noise", make)


@fresh
def one_key_for_all_rows(patch):
    noise(patch, lambda real, seeds, lengths, k: real(jnp.broadcast_to(seeds[:1], seeds.shape), lengths, k))


@fresh
def key_ignores_the_length(patch):
    noise(patch, lambda real, seeds, lengths, k: real(seeds, 0 * lengths, k))


@fresh
def acceptance_reuses_the_drafts_words(patch):
    def change(real, seeds, lengths, k):
        values = real(seeds, lengths, k)
        accept = (values.draft_words[..., 0] >> 8).astype(jnp.float32) * 2.0**-24
        return dataclasses.replace(values, accept=accept)

    noise(patch, change)


@mutant("noise", test_sampling.test_another_k_moves_nobodys_noise)
def noise_drawn_for_the_whole_block_at_once(patch):
    """Another k moves everybody's noise."""

    def change(real, seeds, lengths, k):
        return real(seeds + jnp.uint32(k), lengths, k)

    noise(patch, change)


@mutant("noise", test_decoder.test_a_row_replays_alone_in_another_slot_from_its_own_seed, drafter=None)
def key_folded_by_the_slot(patch):
    def change(real, seeds, lengths, k):
        return real(seeds + jnp.arange(len(seeds), dtype=jnp.uint32)[:, None], lengths, k)

    noise(patch, change)


@mutant("noise", test_lossless.test_three_coins_show_noise_that_decides_twice)
def uniforms_keyed_by_position_under_block_verification(patch):
    """A rejected position is drawn again with the noise that the rejection looked at. The token rule survives it."""

    def change(real, seeds, lengths, k):
        at = [real(seeds, lengths + i, 1) for i in range(k)]
        drafts, accepts = (jnp.concatenate([getattr(n, f) for n in at], axis=1) for f in ("draft_words", "accept"))
        return Noise(drafts, accepts, real(seeds, lengths + k, 0).next_words)

    noise(patch, change)


@mutant("noise", test_lossless.test_the_distribution_of_three_tokens_in_short)
def one_uniform_for_all_drafts(patch):
    patch.setattr(Noise, "draft", lambda self, offset: self.draft_words[:, 0])


# The draw at large vocabularies.


@mutant("sampling", test_sampling.test_the_distribution_over_all_words_is_that_of_the_logits, name="zipf 1.2")
def shares_of_24_bits(patch):
    """As many as a float32 uniform has."""

    def make(real):
        return lambda weights: real(weights) >> 8 << 8

    wrap(patch, sampling, "shares", make)


@mutant("sampling", test_sampling.test_the_distribution_over_all_words_is_that_of_the_logits, name="normal")
def a_group_and_what_is_in_it_by_one_word(patch):
    """The second level must not see the first one's."""

    def make(real):
        return lambda weights, words: real(weights, words & jnp.uint32(0xFFFF0000))

    wrap(patch, sampling, "_choose", make)
