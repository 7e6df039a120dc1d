"""Errors in the seams, found by those who live in them (`specjax.testing.inhabitants`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode import engine, scheduler
from specjax.models.attention.kv_source import CacheKV
from specjax.models.attention.stored import Int8Layer, Sliding
from specjax.models.cache import KVCache
from specjax.proposal import Proposal
from specjax.testing.inhabitants import BoundHiddenReader, Changing
from specjax.verifiers import chain
from tests.controllers import test_anticipation
from tests.decode import test_cache_sizes, test_scheduler, test_seams
from tests.mutants.table import mutant, wrap

SELF = test_seams.test_a_drafter_that_equals_its_target_has_every_token_accepted
CHANGING = test_seams.test_a_length_that_changes_with_every_block_changes_no_token
ALONE = test_scheduler.test_twenty_requests_through_four_rows_are_bit_for_bit_those_that_run_alone
CUT_BEFORE_DRAWN = test_anticipation.test_whether_a_token_is_proposed_is_known_before_it_is_drawn
in_a_tree = mutant("tree", SELF, name="tree", mode="greedy")
WHOLE = test_cache_sizes.test_what_is_decoded_is_what_a_whole_cache_gives
IN_8_BITS = test_cache_sizes.test_in_8_bits_what_is_decoded_depends_on_no_block_and_no_piece
sliding = mutant("cache", WHOLE, windows=(24, None), kind="plain", piece=None)
hidden = mutant("reads", SELF, name="hidden", mode="greedy", lossless=True)


@in_a_tree
def a_sibling_sees_its_sibling(patch):
    """Every node sees all that was drafted before it, as in a chain."""
    patch.setattr(Proposal, "mask", None)


@in_a_tree
def the_position_of_a_node_is_its_slot(patch):
    patch.setattr(Proposal, "positions", Proposal.slots)


@in_a_tree
def the_accepted_path_stays_where_it_was_written(patch):
    patch.setattr(KVCache, "keep", lambda cache, start, path: dataclasses.replace(cache, block=None))


@in_a_tree
def the_path_is_kept_one_slot_late(patch):
    wrap(patch, KVCache, "keep", lambda real: lambda cache, start, path: real(cache, start + 1, path - 1))


@sliding
def a_layer_slides_one_token_too_far(patch):
    """The oldest token that its window holds is gone."""
    wrap(patch, Sliding, "slid", lambda real: lambda layer, lengths, window: real(layer, lengths, window - 1))


@sliding
def a_layer_that_slid_is_seen_as_one_that_did_not(patch):
    """What is written goes where it should, and the mask counts from the row's first token."""

    def make(real):
        def mutated(memory, cached):
            return dataclasses.replace(real(memory, cached), sight=memory.sight)

        return mutated

    wrap(patch, CacheKV, "over", make)


@mutant("cache", IN_8_BITS, kind="ngram", piece=16)
def a_prompt_fed_at_once_reads_what_8_bits_do_not_hold(patch):
    patch.setattr(Int8Layer, "as_read", staticmethod(lambda keys, values: (keys, values)))


@mutant("tree", test_seams.test_a_tree_of_another_model_gives_what_plain_decoding_gives, mode="parameters")
def a_node_is_penalised_for_other_branches(patch):
    """As in a chain: for all that was drafted before it."""

    def make(real):
        def mutated(self):
            return real.fget(dataclasses.replace(self, parents=None))

        return property(mutated)

    wrap(patch, Proposal, "path", make)


@hidden
def hidden_states_are_those_of_one_token_later(patch):
    def make(real):
        def mutated(self, params, state, outcome):
            (sums,) = outcome.target_out.hidden
            late = dataclasses.replace(outcome.target_out, hidden=(jnp.roll(sums, -1, axis=1),))
            return real(self, params, state, dataclasses.replace(outcome, target_out=late))

        return mutated

    wrap(patch, BoundHiddenReader, "commit", make)


@hidden
def nobody_tells_the_drafter_what_became_of_its_block(patch):
    patch.setattr(BoundHiddenReader, "commit", lambda self, params, state, outcome: state)


@mutant("reads", SELF, name="cache", mode="greedy", lossless=True)
def the_view_of_the_cache_shows_the_root_too(patch):
    """Whose slot holds what an earlier block left there."""

    def make(real):
        def mutated(params, keys_values, lengths):
            return real(params, keys_values, lengths + 1)

        return mutated

    wrap(patch, engine, "TargetView", make)


@mutant("length", test_seams.test_a_fixed_length_is_that_of_a_shorter_drafter, lossless=True)
def the_chosen_length_is_ignored(patch):
    patch.setattr("specjax.controllers.fixed.Fixed.choose", lambda self, state, context: None)
    patch.setattr("specjax.controllers.fixed.Fixed.compiled_lengths", ())


@mutant("length", CHANGING, drafter="tree", mode="greedy", lossless=True)
def the_controller_learns_nothing_of_a_block(patch):
    patch.setattr(Changing, "adapt", lambda self, state, outcome: state)


@mutant("length", CUT_BEFORE_DRAWN, controller="rows")
def the_length_is_chosen_by_what_was_drawn(patch):
    """The best for its time, by the probabilities of the block's own tokens."""

    def make(real):
        def mutated(*args):
            draft, state = real(*args)
            if draft.logits is None:
                return draft, state
            kept = jnp.cumprod(chain.at(jax.nn.softmax(draft.logits, axis=-1), draft.tokens), axis=1)
            place = jnp.arange(kept.shape[1], dtype=jnp.int32)[None]
            rates = (1 + jnp.cumsum(kept, axis=1)) / (6 + place).astype(jnp.float32)
            best = jnp.argmax(rates, axis=1).astype(jnp.int32)[:, None]
            return dataclasses.replace(draft, valid=draft.valid & (place <= best)), state

        return mutated

    wrap(patch, engine, "propose", make)


@mutant("length", CUT_BEFORE_DRAWN, controller="rows")
def a_block_is_cut_behind_its_last_likely_token(patch):
    """So that nothing is fed that is hardly kept."""

    def make(real):
        def mutated(context, draft, nodes):
            if draft.logits is not None:
                likely = draft.valid & (draft.tokens == jnp.argmax(draft.logits, axis=-1).astype(jnp.int32))
                later = jnp.cumsum(likely[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1] > 0
                draft = dataclasses.replace(draft, valid=draft.valid & later)
            return real(context, draft, nodes)

        return mutated

    wrap(patch, engine, "truncate_block", make)


@mutant("rows", test_scheduler.test_no_finished_row_sizes_a_bucket, lossless=True)
def a_finished_row_sizes_the_cache(patch):
    def make(real):
        def mutated(self, *args, **options):
            self.done = self.done & False
            return real(self, *args, **options)

        return mutated

    wrap(patch, scheduler.Scheduler, "chunk", make)


@mutant("rows", ALONE, kind="draft", temperature=None)
def a_request_is_put_into_a_row_without_its_seed(patch):
    def make(real):
        def mutated(state, new, rows):
            seeds = jnp.copy(state.seeds)  # the state is donated
            return dataclasses.replace(real(state, new, rows), seeds=seeds)

        return mutated

    wrap(patch, scheduler, "_inserted", make)
