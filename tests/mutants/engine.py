"""Errors in greedy decoding and in the engine at temperature 0, found token by token by a simulation without caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.decode import engine, programs
from specjax.drafters.draft_model import BoundDraftModel
from specjax.interfaces import Verdict
from specjax.models import cache, decode_layout, kernels, layers, products
from specjax.models.attention import blocks, stored
from specjax.models.kernels.quantised import Quantised
from specjax.proposal import Proposal
from specjax.verifiers import greedy, matching
from specjax.verifiers.chain import row
from tests import test_sampling
from tests.decode import test_blocks, test_decoder, test_extras, test_invalid, test_options, test_prefill
from tests.models import test_decode_layout, test_kernels, test_looped, test_quantised
from tests.models.attention import test_blocks as test_blocks_of_attention
from tests.mutants.table import Patch, mutant, wrap

greedy_blocks = mutant("greedy", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4")
engine_blocks = mutant("engine", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4")


@greedy_blocks
def greedy_counts_matches_instead_of_the_run(patch):
    patch.setattr(matching, "leading_run", lambda accepted: jnp.sum(accepted.astype(jnp.int32), axis=1))


@greedy_blocks
def greedy_correction_from_the_bonus_row(patch):
    patch.setattr(matching, "row", lambda values, index: values[:, -1])


@greedy_blocks
def greedy_correction_is_the_rejected_draft(patch):
    def make(real):
        def mutated(self, draft, p_logits, noise):
            verdict, last = real(self, draft, p_logits, noise), draft.tokens.shape[1] - 1
            return Verdict(verdict.num_accepted, row(draft.tokens, jnp.minimum(verdict.num_accepted, last)))

        return mutated

    wrap(patch, greedy.Greedy, "__call__", make)


@mutant("greedy", test_sampling.test_argmax_ties_go_to_the_lowest_index)
def ties_go_to_the_highest_index(patch):
    def mutated(logits):
        return logits.shape[-1] - 1 - jnp.argmax(logits[..., ::-1], axis=-1)

    patch.setattr(sampling, "argmax", mutated)


@mutant("greedy", test_decoder.test_a_greedy_row_inside_a_sampling_batch_is_greedy)
def temperature_zero_is_taken_for_one(patch):
    """Of a row among others, because the division by 0 is guarded."""

    def make(real):
        def mutated(logits, parameters, *rest):
            warm = jnp.where(parameters.temperature > 0, parameters.temperature, 1.0)
            return real(logits, dataclasses.replace(parameters, temperature=warm), *rest)

        return mutated

    wrap(patch, sampling, "warp", make)


def fed(patch: Patch, positions: int = 0, slots: Callable[[Any], Any] | None = None, root: int = 0) -> None:
    """The block fed at other positions or slots, or from another root."""

    def make(real):
        def mutated(static, params, state):
            def feed(target, params, cache, proposal, reads):
                last = jnp.take_along_axis(state.tokens, (state.lengths - 1 + root)[:, None], axis=1)
                tokens = jnp.concatenate([last, proposal.drafted], axis=1)
                late = 0 if slots is None else slots(state)[:, None]
                return target(params, tokens, proposal.positions + positions, proposal.slots + late, cache)

            patch.setattr(engine, "feed", feed)
            return real(static, params, state)

        return mutated

    wrap(patch, programs, "step", make)


@engine_blocks
def root_one_position_early(patch):
    fed(patch, positions=-1)


@engine_blocks
def root_one_position_late(patch):
    fed(patch, positions=1)


@engine_blocks
def root_is_the_token_before(patch):
    fed(patch, root=-1)


@engine_blocks
def cache_advanced_over_a_rejected_draft(patch):
    """The right tokens at the right positions, one slot late after the first block."""
    fed(patch, slots=lambda state: jnp.minimum(state.counters.blocks, 1))


@engine_blocks
def target_rows_off_by_one(patch):
    def make(real):
        def mutated(*args):
            out = real(*args)
            return dataclasses.replace(out, logits=jnp.roll(out.logits, 1, axis=1))

        return mutated

    wrap(patch, engine, "feed", make)


@engine_blocks
def own_token_written_behind_the_whole_draft(patch):
    def make(real):
        def mutated(self, verdict, valid):
            tokens = jnp.concatenate([self.drafted, verdict.next_token[:, None]], axis=1)
            return dataclasses.replace(real(self, verdict, valid), tokens=tokens)

        return mutated

    wrap(patch, Proposal, "follow", make)


def committed(patch: Patch, before: Callable[..., tuple], after: Callable[..., Any]) -> None:
    """``commit`` of another state and draft; ``after(real outcome, mutated outcome, state)`` is what results."""

    def make(real):
        def mutated(state, proposal, judged, cache):
            changed, draft = before(state, judged.draft)
            right, emitted = real(state, proposal, judged, cache)
            wrong, _ = real(changed, proposal, dataclasses.replace(judged, draft=draft), cache)
            return after(right, wrong, state), emitted

        return mutated

    wrap(patch, engine, "commit", make)


def awake(state, draft):
    return dataclasses.replace(state, done=jnp.zeros_like(state.done)), draft


@mutant("engine", test_decoder.test_a_stop_token_ends_the_row_where_plain_decoding_would_end_it)
def stop_token_inside_a_block_ignored(patch):
    """Only the last token of a block is looked at."""

    def after(real, mutated, state):
        last = jnp.take_along_axis(mutated.tokens, (mutated.lengths - 1)[:, None], axis=1)
        ends = jnp.any(last == state.stop_ids, axis=1) & (mutated.lengths > state.lengths)
        return dataclasses.replace(mutated, stop_ids=state.stop_ids, done=mutated.done | ends)

    committed(patch, lambda state, draft: (dataclasses.replace(state, stop_ids=0 * state.stop_ids - 1), draft), after)


@mutant("engine", test_decoder.test_a_budget_smaller_than_a_block_cuts_it, budget=7)
def budget_ignored_inside_a_block(patch):
    def before(state, draft):
        return dataclasses.replace(state, budget=state.budget + draft.tokens.shape[1]), draft

    def after(real, mutated, state):
        return dataclasses.replace(mutated, budget=state.budget, done=mutated.done | (mutated.lengths >= state.budget))

    committed(patch, before, after)


@engine_blocks
def finished_rows_still_counted(patch):
    committed(patch, awake, lambda real, mutated, state: dataclasses.replace(real, counters=mutated.counters))


@mutant("engine", test_decoder.test_a_stop_token_ends_the_row_where_plain_decoding_would_end_it)
def finished_rows_still_advance(patch):
    def after(real, mutated, state):
        return dataclasses.replace(mutated, done=mutated.lengths >= state.budget)

    committed(patch, awake, after)


@mutant("engine", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="ngram")
def invalid_proposals_counted_as_drafted(patch):
    def before(state, draft):
        return state, dataclasses.replace(draft, valid=jnp.ones_like(draft.valid))

    committed(patch, before, lambda real, mutated, state: dataclasses.replace(real, counters=mutated.counters))


@engine_blocks
def bonus_called_a_correction(patch):
    patch.setattr(engine, "BONUS", engine.CORRECTED)


@mutant("engine", test_decoder.test_generation_crosses_cache_buckets_without_a_difference)
def grown_cache_loses_what_it_held(patch):
    def emptied(x):
        return jax.tree.map(jnp.zeros_like, x) if cache.is_cache(x) else x

    def make(real):
        return lambda tree, slots: jax.tree.map(emptied, real(tree, slots), is_leaf=cache.is_cache)

    wrap(patch, cache, "grow", make)


@mutant("weights", test_decode_layout.test_a_layout_keeps_the_logits, tokens=1, tie=True)
def weights_rounded_to_bfloat16(patch):
    wrap(patch, decode_layout, "is_bfloat16", lambda real: lambda x: jnp.bool_(True))


@mutant("logprobs", test_options.test_logprobs_are_those_of_the_emitted_tokens, kind="raw")
def logprobs_shifted_by_one(patch):
    def make(real):
        return lambda state, start, followed, distributions: real(
            state, start, followed, jnp.roll(distributions, 1, axis=1)
        )

    wrap(patch, engine, "keep_logprobs", make)


PLAIN_INVALID = {"drafter": None, "temperature": 0.0}


@mutant("not finite", test_invalid.test_a_target_that_is_not_finite_ends_its_row_and_no_other, **PLAIN_INVALID)
def a_target_of_nan_goes_on(patch):
    def make(real):
        def mutated(proposal, draft, p_logits):
            cut, finite = real(proposal, draft, p_logits)
            return cut, dataclasses.replace(finite, target=jnp.ones_like(finite.target))

        return mutated

    wrap(patch, engine, "cut_invalid", make)


@mutant("not finite", test_invalid.test_a_cut_does_not_hide_a_nan, cut={"top_p": 0.5})
def top_p_hides_a_nan(patch):
    wrap(
        patch,
        sampling,
        "_cut",
        lambda real: lambda logits, *rest: real(jnp.where(jnp.isnan(logits), -jnp.inf, logits), *rest),
    )


@mutant(
    "not finite",
    test_invalid.test_one_logit_that_is_not_finite_is_found_at_every_size,
    shape=(1, 5, 2000),
    decoding=True,
)
def a_maximum_is_to_find_a_nan(patch):
    patch.setattr(sampling, "has_distribution", lambda logits: jnp.isfinite(jnp.max(logits, axis=-1)))


@mutant("not finite", test_invalid.test_a_token_that_overflows_ends_only_rows_that_hold_it, drafter="ngram")
def values_that_overflowed_stay_in_the_cache(patch):
    patch.setattr(layers, "isolate_nonfinite_kv", lambda k, v: (k, v))


@mutant("not finite", test_invalid.test_a_token_that_overflows_ends_only_rows_that_hold_it, drafter="ngram")
def who_sees_values_that_overflowed_reads_zeros(patch):
    wrap(patch, layers, "isolate_nonfinite_kv", lambda real: lambda k, v: (jnp.nan_to_num(k), real(k, v)[1]))


@mutant("not finite", test_invalid.test_a_draft_that_the_parameters_leave_nothing_of_is_cut_and_not_called_broken)
def a_draft_of_banned_tokens_is_called_broken(patch):
    wrap(
        patch,
        engine,
        "cut_invalid",
        lambda real: lambda block, draft, p: real(block, dataclasses.replace(draft, finite=None), p),
    )


@mutant("penalties", test_extras.test_counts_follow_what_is_committed)
def counts_hold_what_was_rejected(patch):
    wrap(patch, engine, "counted", lambda real: lambda counts, tokens, new: real(counts, tokens, jnp.ones_like(new)))


@mutant("prefill", test_prefill.test_a_drafter_that_equals_its_target_has_every_token_accepted_after_pieces,
        name="model", piece=8, lossless=True)  # fmt: skip
def a_draft_reads_every_piece_as_the_first(patch):
    def make(real):
        return lambda self, params, state, tokens, lengths, out, start=None: real(
            self, params, state, tokens, lengths, out
        )

    wrap(patch, BoundDraftModel, "extend", make)


@mutant("prefill", test_prefill.test_a_prompt_is_fed_as_far_as_it_goes)
def pieces_of_padding_are_fed(patch):
    def make(real):
        return lambda lower, upper, body, state: real(lower, 4, body, state)

    wrap(patch, engine.jax.lax, "fori_loop", make)


@mutant("attention", test_blocks_of_attention.test_block_by_block_is_all_at_once, which="whole rows", soft_cap=None)
def keys_of_two_blocks_count_twice(patch):
    wrap(patch, blocks, "Block", lambda real: lambda walk, sight, start, new: real(walk, sight, start, start))


@mutant("attention", test_blocks_of_attention.test_block_by_block_is_all_at_once, which="one token", soft_cap=5.0)
def the_gradient_forgets_the_cap(patch):
    def make(real):
        return lambda self, q, k: (real(self, q, k)[0], jnp.float32(1.0))

    wrap(patch, blocks.Block, "scores", make)


@mutant("weights", test_quantised.test_it_multiplies_as_the_matrix_that_it_is, name="int8", turned=False, tokens=2)
def a_product_has_the_scale_of_another_output(patch):
    def make(real):
        def mutated(self, *args, **options):
            return real(dataclasses.replace(self, scale=jnp.roll(self.scale, 1, axis=1)), *args, **options)

        return mutated

    wrap(patch, Quantised, "__call__", make)


@mutant("layout", test_kernels.test_a_product_in_parts_of_bfloat16_is_as_exact_as_one_in_float32, layer=None)
def the_last_digits_of_a_product_in_parts_are_lost(patch):
    wrap(patch, products, "_in_parts", lambda real: lambda x: real(x).at[2 * len(x) :].set(0))


@mutant(
    "layout",
    test_kernels.test_a_rounded_product_and_its_gradients_are_those_of_rounded_operands,
    by_row=False,
    features=24,
    matrix_units=True,
)
def the_halves_of_a_rounded_gradient_change_places(patch):
    wrap(patch, products, "_product_over_rows", lambda real: lambda x, y: jnp.roll(real(x, y), x.shape[1] // 2, axis=0))


@mutant("layout", test_looped.test_the_layers_of_a_loop_keep_their_order)
def the_last_two_layers_of_a_loop_change_places(patch):
    wrap(patch, kernels, "together", lambda real: lambda layers: real([*layers[:-2], layers[-1], layers[-2]]))


@mutant("cache", test_looped.test_rows_that_come_and_go_get_the_same)
def all_layers_of_a_loop_write_the_cache_of_the_first(patch):
    def make(real):
        def mutated(buffer, start, new, axis, together=False, layer=None):
            return real(buffer, start, new, axis, together, None if layer is None else 0)

        return mutated

    wrap(patch, stored, "_write", make)
