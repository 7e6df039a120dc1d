"""Errors in the distillation: losses, data, saving, the step, initial drafts and the selection among drafts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import metrics
from specjax.data import rows
from specjax.models.vocabulary import TokenRows
from specjax.runtime import artifact, checkpoint, fingerprint, progress
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import Log
from specjax.training import chunked_loss as matching
from specjax.training import distributions, losses, optimizer, selection, step, teacher_cache
from specjax.training.init import first_weights as init
from specjax.training.layout import Layout
from specjax.training.sources import on_policy
from tests import test_metrics
from tests.data import test_rows
from tests.models import test_vocabulary
from tests.mutants.table import Patch, mutant, wrap
from tests.runtime import test_artifact, test_checkpoint, test_fingerprint, test_log, test_progress
from tests.training import test_chunked_loss as test_matching
from tests.training import (
    test_init,
    test_losses,
    test_on_policy,
    test_optimizer,
    test_padding,
    test_scale,
    test_selection,
    test_step,
    test_teacher_cache,
    test_trainer,
    toys,
)

# The losses, against their float64 references.

LOSSES = {loss.kind: loss for loss in test_losses.DIVERGENCES}
VALUE = test_losses.test_value_and_gradient_match_float64
LARGE = test_losses.test_lk_alpha_pulls_in_a_large_vocabulary_where_hardly_anything_overlaps
CACHED = test_losses.test_cached_logits_give_the_loss_over_their_tokens_and_one_bucket


@mutant("loss", VALUE, loss=LOSSES["forward_kl"], case="generic")
def kl_the_other_way_round(patch):
    wrap(patch, losses, "kl", lambda real: lambda log_p, log_q: real(log_q, log_p))


@mutant("loss", VALUE, loss=LOSSES["reverse_kl"], case="excluded")
def reverse_kl_infinite_where_the_target_excludes_a_token(patch):
    patch.setattr(losses, "LOG_TINY", -jnp.inf)


@mutant("loss", VALUE, loss=LOSSES["jensen_shannon"], case="generic")
def jensen_shannon_with_its_weights_swapped(patch):
    def make(real):
        return lambda self, *distributions: real(dataclasses.replace(self, beta=1 - self.beta), *distributions)

    wrap(patch, losses.JensenShannon, "between", make)


@mutant("loss", VALUE, loss=LOSSES["lk_alpha"], case="generic")
def log_of_the_mean_alpha_for_the_mean_of_the_logs(patch):
    def make(real):
        def mean(log_p, log_q):
            alpha = jnp.exp(real(log_p, log_q))
            return jnp.broadcast_to(jnp.log(jnp.mean(alpha)), alpha.shape)

        return mean

    wrap(patch, losses, "log_overlap", make)


@mutant("loss", LARGE, cached=None)
def lk_alpha_with_a_floor(patch):
    wrap(
        patch,
        losses,
        "log_overlap",
        lambda real: lambda *distributions: jnp.log(jnp.maximum(jnp.exp(real(*distributions)), 1e-5)),
    )


@mutant("loss", VALUE, loss=LOSSES["lk_lambda"], case="generic")
def blend_of_lk_lambda_swapped(patch):
    def between(self, log_p, log_q, context):
        blend = jnp.exp(-self.eta * context.alpha)
        return (1 - blend) * losses.kl(log_p, log_q) + blend * (1 - losses.overlap(log_p, log_q))

    patch.setattr(losses.LKLambda, "between", between)


@mutant("loss", test_losses.test_temperatures_divide_each_side_s_own_logits, loss=LOSSES["forward_kl"])
def temperature_of_the_draft_on_both_sides(patch):
    def make(real):
        return lambda draft, teacher, of_target=1.0, of_draft=1.0: real(draft, teacher, of_draft, of_draft)

    wrap(patch, losses, "log_distributions", make)


@mutant("loss", test_losses.test_no_gradient_reaches_the_target, loss=LOSSES["total_variation"])
def gradient_into_the_target(patch):
    patch.setattr(distributions.jax.lax, "stop_gradient", lambda x: x)


@mutant("loss", CACHED, loss=LOSSES["total_variation"], k=3)
def tail_of_cached_logits_dropped(patch):
    def make(real):
        return lambda *args: tuple(distribution[..., :3] for distribution in real(*args))

    wrap(patch, losses, "log_distributions", make)


@mutant("loss", CACHED, loss=LOSSES["forward_kl"], k=3)
def cached_logits_made_a_distribution_of_their_own(patch):
    """Renormalised over the tokens that were kept: the tail is forgotten."""

    def make(real):
        def renormalised(*args):
            return tuple(jax.nn.log_softmax(distribution[..., :3], axis=-1) for distribution in real(*args))

        return renormalised

    wrap(patch, losses, "log_distributions", make)


@mutant(
    "loss",
    test_losses.test_tokens_drawn_from_the_tail_give_the_whole_loss_and_gradient_on_average,
    loss=test_losses.ForwardKL(),
)
def token_of_the_tail_without_its_own_probability(patch):
    """All of them count alike for the draft: how likely it finds each is forgotten."""

    def make(real):
        def alike(*args):
            log_p, log_q = real(*args)
            return log_p, log_q.at[..., 2:].set(jnp.mean(log_q[..., 2:], axis=-1, keepdims=True))

        return alike

    wrap(patch, losses, "log_distributions", make)


@mutant("loss", test_losses.test_adaspec_chooses_in_each_row_alone)
def adaspec_chooses_in_the_whole_microbatch(patch):
    def make(real):
        def flat(scores, weight, share):
            return real(scores.reshape(1, -1), weight.reshape(1, -1), share).reshape(scores.shape)

        return flat

    wrap(patch, losses, "first_of_each_row", make)


@mutant("loss", test_step.test_lk_lambda_takes_the_running_alpha_from_before_the_step_and_leaves_it_moved)
def running_alpha_never_moves(patch):
    patch.setattr(step, "_running", lambda alpha, metrics, weight: alpha)


@mutant("loss", test_step.test_uneven_weights_give_the_weighted_mean_and_its_gradient)
def predictions_weigh_alike(patch):
    def make(real):
        def mutated(*args):
            found = real(*args)
            alike = (found.positions.weight > 0).astype(jnp.float32)
            return dataclasses.replace(found, positions=found.positions.replace(weight=alike))

        return mutated

    wrap(patch, matching.Matching, "of", make)


@mutant("teacher cache", test_teacher_cache.test_what_is_stored_comes_back, vocab_size=70_000)
def ids_cut_to_two_bytes(patch):
    wrap(patch, teacher_cache, "record_dtype", lambda real: lambda k, vocab_size: real(k, 2048))
    wrap(patch, teacher_cache, "to_records", lambda real: lambda teacher, vocab_size: real(teacher, 2048))
    patch.setattr(test_teacher_cache, "to_records", teacher_cache.to_records)


@mutant("teacher cache", test_teacher_cache.test_what_is_stored_comes_back, vocab_size=500)
def tail_lost_to_rounding(patch):
    """From the rounded values in place of the one that was stored."""

    def make(real):
        return lambda records: real(records).replace(logsumexp=np.zeros(records.shape, np.float32))

    wrap(patch, test_teacher_cache, "from_records", make)


# Rows that are no tokens.


def keep_padding(patch: Patch) -> None:
    wrap(patch, TokenRows, "over", lambda real: lambda self, x: real(dataclasses.replace(self, unused=()), x))


@mutant("padding", test_padding.test_a_step_compares_over_tokens_alone, online=True)
def losses_over_all_rows(patch):
    keep_padding(patch)


@mutant("padding", test_padding.test_measured_figures_are_over_tokens_alone, draft_rows=17)
def figures_over_all_rows(patch):
    keep_padding(patch)


@mutant("padding", test_vocabulary.test_raw_logprobs_are_over_tokens_alone)
def logprobs_over_all_rows(patch):
    keep_padding(patch)


# The data.


def row_of(patch: Patch, change: Callable[..., tuple]) -> None:
    """Changes ``(tokens, document, positions, weight)`` on their way into a row."""
    wrap(patch, rows, "row_of", lambda real: lambda *arrays: real(*change(*arrays)))


@mutant("data", test_rows.test_a_prediction_counts_as_the_token_that_it_predicts, prompt_weight=0.25)
def a_prediction_counts_as_the_token_it_is_made_from(patch):
    row_of(patch, lambda tokens, document, places, weight: (tokens, document, places, np.roll(weight, 1)))


@mutant("data", test_rows.test_sequences_are_never_cut_and_rows_are_filled)
def a_sequence_predicts_the_start_of_the_next(patch):
    wrap(
        patch,
        rows,
        "row_of",
        lambda real: (
            lambda tokens, document, places, weight: real(tokens, document, places, weight).replace(weight=weight[1:])
        ),
    )


@mutant("data", test_rows.test_a_model_sees_a_packed_document_as_it_sees_it_alone)
def attention_reaches_into_the_document_before(patch):
    row_of(patch, lambda tokens, document, places, weight: (tokens, 0 * document, places, weight))


@mutant("data", test_rows.test_sequences_are_never_cut_and_rows_are_filled)
def positions_go_on_from_the_sequence_before(patch):
    row_of(patch, lambda tokens, document, places, weight: (tokens, document, np.arange(len(places)), weight))


@mutant("data", test_on_policy.test_every_period_trains_on_sequences_of_the_weights_it_began_with)
def the_pool_is_never_refreshed(patch):
    def make(real):
        def mutated(self, step, params, oldest):
            if self._mixed.pool is None:
                real(self, step, params, oldest)
            elif step % self._settings.every == 0:  # the old sequences under the new numbers
                self._mixed.begin, self._mixed.first = step, int(self._sampled_before(np.asarray(step * 4)))

        return mutated

    wrap(patch, on_policy.OnPolicyBatches, "refresh", make)


@mutant("data", test_on_policy.test_every_period_trains_on_sequences_of_the_weights_it_began_with)
def the_pool_is_of_the_first_weights(patch):
    def make(real):
        first = []

        def mutated(self, step, params, oldest):
            first.append(params)
            real(self, step, first[0], oldest)

        return mutated

    wrap(patch, on_policy.OnPolicyBatches, "refresh", make)


# Saving and resuming.


@mutant("checkpoint", test_checkpoint.test_a_step_without_its_manifest_is_not_restored)
def manifest_not_checked(patch):
    patch.setattr(Checkpoints, "_damage", lambda self, step: None)


KEPT = test_checkpoint.test_every_damaged_step_is_kept_though_one_of_its_name_was_set_aside_before


@mutant("checkpoint", KEPT)
def damaged_checkpoint_deleted(patch):
    patch.setattr(Checkpoints, "_set_aside", lambda self, step, damage: self._manager.delete(step))


@mutant("checkpoint", test_fingerprint.test_arrays_that_cannot_change_are_read_once_and_others_every_time)
def digest_known_by_the_arrays_without_their_places(patch):
    known = {}

    def make(real):
        return lambda tree: known.setdefault(frozenset(map(id, jax.tree.leaves(tree))), real(tree))

    wrap(patch, fingerprint, "digest", make)


@mutant("progress", test_progress.test_a_quick_stage_tells_every_twentieth_of_it)
def progress_told_by_the_clock_alone(patch):
    patch.setattr(progress, "SHARE", 1.0)


@mutant("checkpoint", test_checkpoint.test_a_step_counts_as_whole_from_its_manifest_on)
def step_counts_before_its_manifest(patch):
    def make(real):
        def mutated(self, step, state, pending=()):
            real(self, step, state, pending)
            self._latest = step

        return mutated

    wrap(patch, Checkpoints, "save", make)


@mutant("checkpoint", test_checkpoint.test_what_is_not_logged_yet_comes_back_too)
def unlogged_metrics_forgotten(patch):
    wrap(patch, checkpoint, "Restored", lambda real: lambda step, state, pending: real(step, state))


@mutant("checkpoint", test_artifact.test_a_file_counts_while_it_is_what_its_record_says)
def hash_of_a_made_file_not_checked(patch):
    patch.setattr(artifact, "sha256", lambda file: json.loads(file.with_suffix(".json").read_text())["sha256"])


@mutant("step", test_trainer.test_a_skipped_step_leaves_the_state_as_it_was_and_another_is_not_touched, poison=True)
def skipped_step_still_updates(patch):
    wrap(patch, test_trainer, "Update", lambda real: lambda *args, skip: real(*args, skip=False))


@mutant("log", test_log.test_records_past_the_checkpoint_are_dropped_and_nothing_is_there_twice)
def log_not_truncated(patch):
    patch.setattr(Log, "__init__", lambda self, file, step: setattr(self, "_file", file))


# The step, its optimizer and its layout over devices.

ONE_MEAN = test_scale.test_the_loss_of_a_step_is_one_mean_over_all_predictions_that_count
AVERAGE = test_optimizer.test_the_average_is_that_of_all_weights_after_a_step_weighted_by_age


def summed(patch: Patch, change: Callable[..., tuple]) -> None:
    """Replaces the sums of a microbatch by ``change(weight, gradient, metrics)``."""
    wrap(patch, step, "_Sums", lambda real: lambda weight, grads, metrics: real(*change(weight, grads, metrics)))


@mutant("step", ONE_MEAN, axes=(1, 1))
def mean_of_the_means_of_microbatches(patch):
    def change(weight, grads, metrics):
        return jnp.ones_like(weight), *jax.tree.map(lambda x: x / weight, (grads, metrics))

    summed(patch, change)


@mutant("step", ONE_MEAN, axes=(2, 2))
def sums_divided_by_positions_that_do_not_count_too(patch):
    summed(patch, lambda weight, grads, metrics: (jnp.full_like(weight, 4 * toys.LENGTH), grads, metrics))


@mutant("layout", test_scale.test_a_batch_lies_row_by_row_over_data_and_fsdp)
def rows_of_a_batch_in_another_order(patch):
    wrap(patch, Layout, "_own", lambda real: lambda self, size: real(self, size)[::-1])


@mutant("average", AVERAGE)
def average_that_is_a_step_ahead(patch):
    wrap(patch, optimizer, "_share", lambda real: lambda steps, decay: real(steps + 1, decay))


@mutant("average", test_optimizer.test_the_average_counts_the_weights_after_the_step_not_before)
def stage_that_results_in_its_last_weights(patch):
    patch.setattr(step.TrainState, "result", property(lambda self: self.params))


@mutant(
    "optimizer",
    test_optimizer.test_matrices_decay_vectors_do_not_and_embeddings_if_asked_for,
    kind="adamw",
    embeddings=False,
)
def embeddings_decay_in_any_case(patch):
    wrap(patch, optimizer, "_decaying", lambda real: lambda params, embeddings: real(params, True))


@mutant(
    "training forward",
    test_scale.test_rematerialised_and_scanned_layers_give_the_loss_the_gradient_and_the_reads_of_plain_ones,
    remat=True,
    scan=True,
)
def layers_scanned_from_the_last(patch):
    wrap(patch, jax.lax, "scan", lambda real: lambda f, init, xs: real(f, init, xs, reverse=True))


# Initial drafts and selection.


@mutant("initial draft", test_init.test_every_kept_layer_is_the_targets_of_that_number)
def kept_layers_off_by_one(patch):
    def make(real):
        def mutated(self, config, target, rows):
            layers, count = target.params["layers"], target.config.num_layers
            shifted = {i: layers[(i + 1) % count] for i in range(count)}
            return real(self, config, dataclasses.replace(target, params={**target.params, "layers": shifted}), rows)

        return mutated

    wrap(patch, init.Layers, "draft", make)


@mutant("initial draft", test_init.test_a_shared_embedding_and_head_are_no_parameters_and_stay_the_targets)
def shared_head_is_trained(patch):
    patch.setattr(init, "EMBEDDING_AND_HEAD", ("embedding",))


BEST_STEP = test_selection.test_the_result_is_the_step_of_the_most_tokens_a_call_the_latest_of_equals
STOPS = test_selection.test_a_stage_stops_after_so_many_evaluations_without_a_better_one


@mutant("selection", BEST_STEP, scores=(2.0, 3.0, 2.5, 2.9), best=2)
def selection_takes_the_worst(patch):
    patch.setattr(selection.Selector, "best", property(lambda self: min(self._scores, key=self._scores.__getitem__)))


@mutant("selection", BEST_STEP, scores=(1.5, 2.0), best=2)
def selection_takes_the_first(patch):
    patch.setattr(selection.Selector, "best", property(lambda self: min(self._scores)))


@mutant("selection", BEST_STEP, scores=(2.0, 3.0, 3.0, 1.0), best=3)
def selection_takes_the_earliest_of_equals(patch):
    patch.setattr(selection.Selector, "best", property(lambda self: max(self._scores, key=self._scores.__getitem__)))


@mutant("selection", STOPS, scores=(2.0, 2.0, 2.0, 9.0), patience=2, last=3)
def an_equal_score_is_an_improvement(patch):
    def stops(self):
        late = [step for step in self._scores if step > self.best]
        return self._decoding.rule.patience is not None and len(late) >= self._decoding.rule.patience

    patch.setattr(selection.Selector, "stops", property(stops))


@mutant("selection", test_selection.test_the_score_is_the_mean_over_temperatures_and_the_log_has_each_position)
def score_of_the_first_temperature(patch):
    wrap(patch, selection, "score", lambda real: lambda decoded: real(decoded[:1]))


@mutant("metrics", test_metrics.test_the_interval_is_the_percentile_bootstrap_over_prompts)
def bootstrap_resamples_blocks(patch):
    def make(real):
        def mutated(by_prompt, **options):
            one = [metrics.DecodeStats(1, s.emitted / s.blocks, (), (), ()) for s in by_prompt for _ in range(s.blocks)]
            return real(one, **options)

        return mutated

    wrap(patch, metrics, "block_efficiency_interval", make)


CHUNKS = test_matching.test_a_step_of_chunks_is_the_step_of_the_whole


@mutant("chunks", CHUNKS, draft="separate", loss="kl")
def what_fills_up_a_chunk_counts(patch):
    patch.setattr(matching, "_counting_once", lambda weight, length: weight)


@mutant("chunks", CHUNKS, draft="separate", loss="of whole rows")
def a_loss_chooses_among_the_positions_of_a_chunk(patch):
    patch.setattr(losses.Sum, "choose", lambda self, scores, weight: None)


@mutant("chunks", CHUNKS, draft="glide", loss="kl")
def weights_learn_half_of_what_chunks_say(patch):
    def make(real):
        def scan(body, start, chunks):
            (sums, of_trained), of_hidden = real(body, start, chunks)
            return (sums, jax.tree.map(lambda x: 0.5 * x, of_trained)), of_hidden

        return lambda body, start, chunks: (scan if isinstance(start[1], list) else real)(body, start, chunks)

    wrap(patch, matching.jax.lax, "scan", make)


DEPTHS = test_step.test_predictions_at_several_depths_are_told_apart_and_weighed_by_their_share


@mutant("loss", DEPTHS, rows=4)
def a_depth_is_compared_with_the_rows_of_the_first_one(patch):
    def make(real):
        return lambda prediction, *rest: real(dataclasses.replace(prediction, rows=None), *rest)

    wrap(patch, matching.Matching, "of", make)


@mutant("loss", DEPTHS, rows=4)
def all_rows_of_a_batch_are_aligned_as_its_first_one(patch):
    def make(real):
        def mutated(prediction, *rest):
            rows = prediction.rows
            same = None if rows is None else jnp.broadcast_to(rows[:1], rows.shape)
            return real(dataclasses.replace(prediction, rows=same), *rest)

        return mutated

    wrap(patch, matching.Matching, "of", make)


@mutant("loss", DEPTHS, rows=4)
def the_share_of_a_depth_is_ignored(patch):
    def make(real):
        def mutated(self, params, batch, target_out):
            for prediction in real(self, params, batch, target_out):
                yield dataclasses.replace(prediction, share=1.0)

        return mutated

    wrap(patch, toys.TwoDepths, "predictions", make)
