"""Errors in who proposes, and in what is reported of the proposal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.controllers.weighing import Weighing
from specjax.drafters import draft_model, one_by_one
from specjax.drafters.draft_model import BoundDraftModel
from specjax.drafters.hybrid import BoundHybrid
from specjax.drafters.ngram import NGram
from specjax.interfaces import Draft
from specjax.models import decode_layout
from specjax.models.attention.stored import LayerKV
from specjax.models.transformer import Model
from specjax.verifiers import chain
from tests.controllers import test_anticipation, test_regimes
from tests.controllers.choices import of_batch
from tests.decode import test_blocks, test_decoder, test_lossless, test_options
from tests.drafters import test_draft_vocabulary, test_hybrid
from tests.mutants.table import Patch, mutant, replaced, wrap

SELF = test_lossless.test_draft_equal_to_target_is_always_accepted
SELF_WITH_ALL = test_options.test_a_draft_equal_to_its_target_is_always_accepted_with_every_parameter
short_distribution = mutant("drafter", test_lossless.test_the_distribution_of_three_tokens_in_short)
CUT_BEFORE_DRAWN = test_anticipation.test_whether_a_token_is_proposed_is_known_before_it_is_drawn
PARAMETER_LAW = test_lossless.test_every_sampling_parameter_has_the_distribution_of_its_definition


def proposed(patch: Patch, change: Callable[..., tuple]) -> None:
    """Replaces a proposal by ``change(real, raw, context, tokens, offset)``, of drafts without a confidence head."""
    real = one_by_one.propose

    def mutated(raw, context, tokens, depth, confidence=None):
        assert confidence is None
        return change(real, raw, context, tokens, depth)

    patch.setattr(one_by_one, "propose", mutated)


def reported(proposed, logits):
    return proposed._replace(logits=None if proposed.logits is None else logits[:, 0])


@mutant("drafter", SELF, k=2, lossless=True)
def draft_cache_misses_the_last_accepted_token(patch):
    """Feeds only the newest token, so after a full acceptance x_K is missing."""

    def mutated(self, params, target, state, context):
        slot, distributions = (context.lengths - 1)[:, None], []
        tokens = jnp.zeros((len(slot), self.k), jnp.int32)
        newest, cache = jnp.take_along_axis(context.tokens, slot, axis=1), state.cache
        for offset in range(self.k):
            out = self.model(params, newest, slot + offset, slot + offset, cache)
            tokens, proposed = one_by_one.propose(out.logits, context, tokens, offset)
            newest, cache = tokens[:, offset : offset + 1], out.cache
            distributions.append(proposed.logits)
        logits = None if context.noise is None else jnp.stack(distributions, axis=1)
        return Draft(tokens, jnp.ones(tokens.shape, bool), logits), state._replace(cache=cache)

    patch.setattr(BoundDraftModel, "draft", mutated)


@mutant("drafter", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4", lossless=True)
def draft_cache_keeps_rejected_drafts(patch):
    """What was written once stays, also where the target corrected it."""

    def make(real):
        def mutated(self, params, target, state, context):
            draft, new = real(self, params, target, state, context)
            (keys, positions), (new_keys, new_positions) = state.cache.layers[0], new.cache.layers[0]
            written = positions < 1e5
            kept = jnp.where(written[..., 0, :, None], keys, new_keys), jnp.where(written, positions, new_positions)
            return draft, new._replace(cache=dataclasses.replace(new.cache, layers=(LayerKV(*kept),)))

        return mutated

    wrap(patch, BoundDraftModel, "draft", make)


@short_distribution
def unlikely_draws_are_dropped(patch):
    """By their own value: what is left is no sample of q."""

    def make(real):
        def mutated(self, params, target, state, context):
            draft, new = real(self, params, target, state, context)
            if draft.logits is None:
                return draft, new
            likely = chain.at(jax.nn.softmax(draft.logits, axis=-1), draft.tokens) > 0.3
            return dataclasses.replace(draft, valid=jnp.cumprod(likely.astype(jnp.int32), axis=1) > 0), new

        return mutated

    wrap(patch, BoundDraftModel, "draft", make)


@mutant("drafter", CUT_BEFORE_DRAWN, controller="confidence")
def a_draw_is_dropped_for_its_own_probability(patch):
    """The threshold is asked for the token that was drawn, not for what it is about to be drawn from."""

    def change(real, raw, context, tokens, offset):
        tokens, proposed = real(raw, context, tokens, offset)
        if proposed.logits is None or proposed.stops is None:
            return tokens, proposed
        drawn = jax.lax.dynamic_slice_in_dim(tokens, offset, 1, axis=1)
        own = jnp.take_along_axis(jax.nn.softmax(proposed.logits, axis=-1), drawn, axis=1)[:, 0]
        return tokens, proposed._replace(stops=own < context.controller.threshold)

    proposed(patch, change)


@mutant("drafter", CUT_BEFORE_DRAWN, controller="confidence")
def a_draw_is_dropped_for_what_would_follow_it(patch):
    """Asked a pass too late, with the distribution after a token, whether that token is proposed."""

    def make(real):
        def mutated(*args):
            draft, *rest = real(*args)
            after = jnp.pad(draft.valid[:, 1:], ((0, 0), (0, 1)))
            last = jnp.all(draft.valid, axis=1, keepdims=True)
            return dataclasses.replace(draft, valid=after | last), *rest

        return mutated

    wrap(patch, draft_model, "one_by_one", make)


@short_distribution
def draft_takes_its_argmax_and_reports_its_distribution(patch):
    patch.setattr(sampling, "draw", lambda logits, noise: sampling.argmax(logits))


@mutant("drafter", PARAMETER_LAW, verifier="speculative", setting="temperature")
def draft_reports_its_distribution_without_the_temperature(patch):
    def change(real, raw, context, tokens, offset):
        tokens, proposed = real(raw, context, tokens, offset)
        warm = replaced(context, temperature=jnp.ones_like(context.sampling.temperature))
        return tokens, reported(proposed, sampling.transform(raw, warm, tokens, offset))

    proposed(patch, change)


@mutant("drafter", PARAMETER_LAW, verifier="speculative", setting="top_p")
def draft_reports_its_distribution_before_the_cuts(patch):
    def change(real, raw, context, tokens, offset):
        tokens, proposed = real(raw, context, tokens, offset)
        s = context.sampling
        uncut = replaced(context, top_k=0 * s.top_k, top_p=jnp.ones_like(s.top_p), min_p=0 * s.min_p)
        return tokens, reported(proposed, sampling.transform(raw, uncut, tokens, offset))

    proposed(patch, change)


@mutant("drafter", SELF, k=2, lossless=True)
def temperature_on_the_target_only(patch):
    def change(real, raw, context, tokens, offset):
        warm = replaced(context, temperature=jnp.ones_like(context.sampling.temperature))
        return real(raw, warm, tokens, offset)

    proposed(patch, change)


@mutant("drafter", SELF_WITH_ALL, verifier="speculative", lossless=True)
def bias_on_the_target_only(patch):
    def change(real, raw, context, tokens, offset):
        return real(raw, replaced(context, bias=jnp.zeros_like(context.sampling.bias)), tokens, offset)

    proposed(patch, change)


@mutant("drafter", SELF_WITH_ALL, verifier="speculative", lossless=True)
def penalties_of_the_draft_do_not_see_its_own_tokens(patch):
    def change(real, raw, context, tokens, offset):
        new, proposed = real(raw, context, 0 * tokens - 1, offset)
        drawn = jax.lax.dynamic_slice_in_dim(new, offset, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(tokens, drawn, offset, axis=1), proposed

    proposed(patch, change)


@mutant("drafter", test_decoder.test_ngram_proposes_what_followed_the_longest_then_latest_match)
def ngram_skips_the_first_token_that_followed(patch):
    def make(real):
        def mutated(self, context):
            draft = real(self, context)
            return dataclasses.replace(draft, tokens=jnp.roll(draft.tokens, -1, axis=1))

        return mutated

    wrap(patch, NGram, "preview", make)


@mutant(
    "drafter",
    test_hybrid.test_a_model_that_is_its_target_is_right_wherever_the_text_has_nothing,
    model="draft_model",
    temperature=1.0,
    controller="fixed",
    lossless=True,
)
def a_hybrids_model_takes_the_texts_tokens_for_read(patch):
    """After a block of the text, its cache holds what it would have proposed itself."""
    patch.setattr(BoundHybrid, "reads_late", False)


@mutant(
    "drafter",
    test_regimes.test_a_text_that_is_right_does_not_keep_a_model_that_was_wrong_waiting,
    controller=of_batch(),
)
def a_block_of_the_text_ends_the_waiting_of_the_model(patch):
    patch.setattr(
        Weighing,
        "_with_pause",
        lambda self, state, pause, of: dataclasses.replace(
            state, pauses=jax.tree.map(lambda old, new: jnp.broadcast_to(new[:, None], old.shape), state.pauses, pause)
        ),
    )


@mutant("drafter", test_regimes.test_each_match_class_begins_with_its_own_expected_acceptance)
def the_calibration_tells_no_match_classes_apart(patch):
    patch.setattr(Weighing, "expected", lambda self, context, of: context.calibration.acceptance[None])


@mutant("drafter", test_hybrid.test_rows_of_both_kinds_have_exactly_the_targets_joint_distribution)
def a_hybrid_reports_the_models_distribution_for_tokens_of_the_text(patch):
    def make(real):
        def mutated(self, text, found, draft):
            return dataclasses.replace(real(self, text, found, draft), logits=draft.logits)

        return mutated

    wrap(patch, BoundHybrid, "_merged", make)


@mutant(
    "drafter",
    test_draft_vocabulary.test_a_narrow_head_gives_the_logits_of_the_whole_one,
    lossless=True,
    tied=True,
    quantize=None,
)
def a_narrow_head_has_the_first_rows(patch):
    """As many rows of the head as the draft vocabulary has ids, from the first on."""
    wrap(patch, Model, "narrowed", lambda real: lambda self, params, ids: real(self, params, np.arange(len(ids))))


@mutant("drafter", test_draft_vocabulary.test_the_whole_weights_come_back_from_the_layout, lossless=True, tied=True)
def a_narrow_head_is_not_laid_out(patch):
    """Its rows are gathered in every pass."""
    wrap(patch, decode_layout, "_with_narrow_head", lambda real: lambda spec, params, few: (spec, params))
