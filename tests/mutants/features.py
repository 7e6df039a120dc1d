"""Errors in drafts that read their target's features. None changes what is decoded, only what is accepted."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from specjax.drafters import token_rows
from specjax.drafters.block_kv import TargetAndBlockKV
from specjax.drafters.dflash.convolution import Convolution
from specjax.drafters.dflash.drafting import BoundDFlash
from specjax.drafters.dflash.heads import Markov, Selector
from specjax.drafters.dflash.model import Blocks, DFlashModel
from specjax.drafters.eagle3 import FirstBlock
from specjax.drafters.glide import GlideModel
from specjax.drafters.medusa import TrainedMedusa
from specjax.drafters.p_eagle import PEagleModel
from specjax.drafters.token_rows import BoundRows, TrainedRows
from specjax.formats import form
from specjax.models.attention.kv_source import CacheKV
from specjax.models.families.settings import Settings
from specjax.models.vocabulary import DraftVocabulary
from specjax.training import step
from specjax.training.chunked_loss import Matched, Matching
from specjax.training.init import least_squares
from tests.drafters import test_features, test_formats
from tests.mutants.table import mutant, wrap

decoding = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="published", piece=None, lossless=True
)
pieces = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="published", piece=5, lossless=True
)
kept = mutant(
    "features",
    test_features.test_a_cache_is_what_a_prompt_of_the_same_tokens_leaves,
    name="published",
    controller="fixed",
    lossless=True,
)
documents = mutant(
    "features", test_features.test_documents_of_a_row_know_nothing_of_each_other, name="published", lossless=True
)
stored = mutant(
    "features",
    test_features.test_one_begins_with_what_its_target_has_and_comes_back_from_disk,
    name="eagle3",
    lossless=True,
)


@decoding
def features_are_those_of_the_token_before_the_one_before(patch):
    wrap(patch, token_rows, "at", lambda real: lambda x, index: real(x, index - 1))


@pieces
def a_piece_forgets_what_the_last_one_ended_with(patch):
    def make(real):
        def mutated(self, params, state, *args):
            return real(self, params, state._replace(features=jnp.zeros_like(state.features)), *args)

        return mutated

    wrap(patch, BoundRows, "extend", make)


@kept
def guessed_features_are_kept(patch):
    """Rows of drafted tokens stay as they were drafted."""

    def make(real):
        def mutated(self, params, state, outcome):
            return real(self, params, state, outcome)._replace(cache=state.cache)

        return mutated

    wrap(patch, BoundRows, "commit", make)


@kept
def the_root_has_the_features_of_the_last_drafted_token(patch):
    def make(real):
        def mutated(self, params, state, outcome):
            made = self.model.features(params, outcome.target_out)
            return real(self, params, state, outcome)._replace(features=made[:, -1])

        return mutated

    wrap(patch, BoundRows, "commit", make)


@decoding
def a_block_sees_the_true_row_behind_its_root(patch):
    """In training, whose features decoding has not."""

    def make(real):
        def mutated(memory, *args, **options):
            sight = dataclasses.replace(memory.sight, last=memory.sight.last + 1)
            return real(dataclasses.replace(memory, sight=sight), *args, **options)

        return mutated

    wrap(patch, TargetAndBlockKV, "attend", make)


@decoding
def a_block_does_not_see_what_it_drafted(patch):
    def make(real):
        def mutated(memory, *args, **options):
            hidden = dataclasses.replace(memory, depth=0)
            return real(hidden, *args, **options)

        return mutated

    wrap(patch, TargetAndBlockKV, "attend", make)


@documents
def a_documents_first_token_is_seen_with_features_of_another(patch):
    def make(real):
        def mutated(memory, *args, **options):
            of_queries, _ = memory.sight.segments or (None, None)
            if of_queries is None:
                return real(memory, *args, **options)
            sight = dataclasses.replace(memory.sight, segments=(of_queries, of_queries))
            return real(dataclasses.replace(memory, sight=sight), *args, **options)

        return mutated

    wrap(patch, CacheKV, "attend", make)


@decoding
def token_and_features_are_read_the_other_way_round(patch):
    """By the attention, in decoding alone."""
    running: list[bool] = []

    def make(real):
        def mutated(self, *args):
            running.append(True)
            try:
                return real(self, *args)
            finally:
                running.pop()

        return mutated

    def make_block(real):
        def mutated(self, token, features, rotary, memory):
            if not running:
                return real(self, token, features, rotary, memory)
            normed = self.hidden_norm(features)
            read = jnp.concatenate([normed, self.attention_norm(token)], axis=-1)
            attended, layer, _ = self.attention(read, rotary, memory)
            x = (normed if self.normed_residual else features) + attended
            return x + self.mlp(self.mlp_norm(x)), layer

        return mutated

    wrap(patch, BoundRows, "_pass", make)
    wrap(patch, FirstBlock, "__call__", make_block)


numbered = mutant(
    "features",
    test_formats.test_what_is_written_is_read_again_and_written_the_same,
    form="z-lab",
    kind="dflash",
    lossless=True,
)


@numbered
def layers_of_the_other_convention_are_read_as_ours(patch):
    """Layer i is what leaves it, not what enters it."""
    wrap(patch, Settings, "ids", lambda real: lambda self, name, beyond=0, absent=None: real(self, name, 0, absent))


@mutant(
    "features",
    test_formats.test_layers_are_numbered_from_the_first_ones_output_elsewhere,
    form="sglang",
    kind="eagle3",
    lossless=True,
)
def layers_are_written_by_our_convention_elsewhere(patch):
    def make(real):
        return lambda table, spec: real([dataclasses.replace(field, beyond=0) for field in table], spec)

    wrap(patch, form, "write_fields", make)


blocks = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="dflash", piece=None, lossless=True
)
windows = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="dflash_windows", piece=None, lossless=True
)
in_sequence = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="dspark_rnn", piece=None, lossless=True
)
kept_blocks = mutant(
    "features",
    test_features.test_a_cache_is_what_a_prompt_of_the_same_tokens_leaves,
    name="dflash",
    controller="adaptive",
    lossless=True,
)
exits = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="early_exit", piece=None, lossless=True
)
heads = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="medusa", piece=None, lossless=True
)
masked = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="p_eagle", piece=None, lossless=True
)
fewer = mutant(
    "features",
    test_features.test_one_begins_with_what_its_target_has_and_comes_back_from_disk,
    name="eagle3_fewer_ids",
    lossless=True,
)
restricted = mutant(
    "features", test_features.test_a_loss_compares_with_the_ids_that_can_be_proposed_and_alpha_with_all, lossless=True
)
weighed = mutant(
    "features", test_features.test_a_depth_weighs_less_than_the_one_before, name="published", lossless=True
)

chosen = mutant(
    "features", test_features.test_decoding_is_the_training_forward, name="dflash2", piece=None, lossless=True
)
sure = mutant(
    "features",
    test_features.test_a_row_stops_before_a_token_that_its_head_is_not_sure_of,
    name="dspark_confident_gated",
    lossless=True,
)
loss_logits = mutant("features", test_features.test_confidence_is_taught_what_the_distributions_share, lossless=True)


def of_training(real, changed):
    """``changed`` where several blocks are made of a row, else ``real``."""
    return lambda self, roots, *args: (changed if roots.shape[1] > 1 else real)(self, roots, *args)


@blocks
def features_of_the_root_are_read_before_they_exist(patch):
    wrap(
        patch, DFlashModel, "sights", lambda real: of_training(real, lambda self, roots, *a: real(self, roots + 1, *a))
    )


@windows
def a_window_is_counted_from_the_slot_in_training(patch):
    def make(real):
        def mutated(self, *args):
            return real(dataclasses.replace(self, window_at_root=False), *args)

        return of_training(real, mutated)

    wrap(patch, DFlashModel, "sights", make)


@blocks
def a_block_sees_the_next_one(patch):
    def make(real):
        def mutated(memory, q, k, v, *args, **options):
            return real(memory, q, *(jnp.roll(x, -memory.slots, axis=1) for x in (k, v)), *args, **options)

        return mutated

    wrap(patch, Blocks, "attend", make)


@in_sequence
def the_token_drawn_before_is_forgotten(patch):
    def make(real):
        def mutated(self, state, before, hidden):
            return real(self, state, jnp.zeros_like(before) if before.shape[1] == 1 else before, hidden)

        return mutated

    wrap(patch, Markov, "__call__", make)


@chosen
def a_slot_blends_into_the_next_block(patch):
    """In training, where several lie side by side."""

    def make(real):
        def mutated(self, x, shifts, end):
            return real(self, jnp.roll(x, 1, axis=1) if x.shape[1] > self.slots else x, shifts, end)

        return mutated

    wrap(patch, Convolution, "_blended", make)


@chosen
def candidates_follow_the_root_all_along(patch):
    """In decoding, and not the token chosen before."""

    def make(real):
        def mutated(self, state, before, hidden):
            return real(self, state, jnp.zeros_like(before) if before.shape[1] == 1 else before, hidden)

        return mutated

    wrap(patch, Selector, "__call__", make)


@sure
def confidence_is_that_of_the_slot_before(patch):
    def make(real):
        def mutated(self, module, hidden, read):
            return real(self, module, jnp.roll(hidden, 1, axis=1), read)

        return mutated

    wrap(patch, DFlashModel, "confidence", make)


@loss_logits
def candidates_are_all_that_is_taught(patch):
    wrap(patch, Selector, "loss_logits", lambda real: Selector.proposed)


@kept_blocks
def what_is_injected_lies_a_slot_late(patch):
    def make(real):
        def mutated(self, params, state, outcome):
            return self._kept(params, state, outcome.target_out, outcome.context.lengths)

        return mutated

    wrap(patch, BoundDFlash, "commit", make)


@exits
def an_exit_reads_half_of_the_stream(patch):
    def make(real):
        def mutated(glide, *args):
            x, own = real(glide, *args)
            return x * 0.5, own

        return mutated

    wrap(patch, GlideModel, "through", make)


@heads
def a_head_reads_what_the_target_makes_of_the_root(patch):
    """In training, whose features decoding has not."""

    def make(real):
        def mutated(self, params, batch, target_out):
            later = dataclasses.replace(target_out, final=jnp.roll(target_out.final, -1, axis=1))
            yield from real(self, params, batch, later)

        return mutated

    wrap(patch, TrainedMedusa, "predictions", make)


@masked
def mask_rows_read_the_features_of_the_root(patch):
    def make(real):
        def mutated(self, params, tokens, features):
            return real(self, params, tokens, features)[0], jnp.roll(features, 1, axis=1)

        return mutated

    wrap(patch, PEagleModel, "behind", make)


@fewer
def offsets_are_taken_for_ids(patch):
    """Of a draft vocabulary: d2t as ids, of equals the next one; t2d, which says otherwise, is not looked at."""
    wrap(patch, form, "_read_tables", lambda real: lambda stored: {"d2t": real(stored)["d2t"]})

    def mutated(ids, size):
        found = []
        for offset in ids - np.arange(len(ids)):
            found.append(max(offset, found[-1] + 1 if found else 0))
        return DraftVocabulary(found, size)

    patch.setattr(form, "DraftVocabulary", mutated)


@restricted
def a_draft_of_fewer_ids_is_taught_all_of_them(patch):
    wrap(patch, Matched, "over_draft_vocabulary", lambda real: lambda self, labels: self)


narrow = functools.partial(
    mutant, "features", test_features.test_a_loss_over_the_draft_vocabulary_alone_is_that_over_all_ids, lossless=True
)


@narrow(loss="lk_lambda")
def alpha_is_counted_among_the_ids_of_the_draft_vocabulary(patch):
    wrap(patch, step, "acceptance_of", lambda real: lambda m: step.acceptance(m.draft_logits, m.teacher))


@narrow(loss="cross_entropy")
def a_token_outside_the_draft_vocabulary_counts_as_the_next_one_in_it(patch):
    def make(real):
        def mutated(self, *args):
            m = real(self, *args)
            everywhere = dataclasses.replace(m.narrow, has_label=jnp.ones_like(m.narrow.has_label))
            return dataclasses.replace(m, narrow=everywhere)

        return mutated

    wrap(patch, Matching, "_narrow_at", make)


@weighed
def the_decay_of_depths_is_ignored(patch):
    def make(real):
        def mutated(self, *args):
            yield from real(dataclasses.replace(self, decay=1.0), *args)

        return mutated

    wrap(patch, TrainedRows, "predictions", make)


@mutant("features", test_features.test_a_low_rank_kernel_errs_least_over_the_inputs_that_come, lossless=True)
def low_rank_as_if_all_inputs_were_as_frequent(patch):
    real = least_squares.low_rank
    patch.setattr(least_squares, "low_rank", lambda kernel, products: real(kernel, np.eye(len(products))))
