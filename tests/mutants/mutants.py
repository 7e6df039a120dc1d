"""Errors planted in the shipped code, each with the test of the suite that finds it. A patch keeps all of the real
function but its one mistake, as far as that can be done from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import metrics, sampling
from specjax.decode import engine
from specjax.distill import checkpoint, init, laws, losses, on_policy, optimizer, rows, selection, step, teacher_cache
from specjax.distill.checkpoint import Checkpoints
from specjax.distill.layout import Layout
from specjax.distill.log import Log
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.models import cache, layers
from specjax.types import CoupledNoise, Draft, Noise, Verdict
from specjax.verifiers import chain, greedy
from specjax.verifiers.block import Block
from specjax.verifiers.chain import ChainVerifier, Chances, row
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative
from tests import test_backend, test_metrics, test_sampling
from tests.decode import test_blocks, test_decoder, test_lossless, test_options
from tests.distill import (
    test_checkpoint,
    test_init,
    test_log,
    test_losses,
    test_on_policy,
    test_optimizer,
    test_rows,
    test_scale,
    test_selection,
    test_step,
    test_teacher_cache,
    test_trainer,
    toys,
)
from tests.verifiers import test_laws

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``killer``: a test function, called with ``parameters`` (or fixtures), which the suite runs it with too, and with
    ``tmp_path`` and ``monkeypatch`` if it takes them.
    ``lossless``: the output keeps its law, so that only a test of the acceptance can find it."""

    name: str
    part: str
    plant: Callable[[Patch], None]
    killer: Callable[..., None]
    parameters: dict[str, Any]
    lossless: bool

    @property
    def killed_by(self) -> str:
        named = (value for value in self.parameters.values() if not isinstance(value, tuple))
        values = "-".join(str(getattr(value, "kind", value)) for value in named)
        return self.killer.__name__ + (f"[{values}]" if values else "")


MUTANTS: list[Mutant] = []


def mutant(part: str, killer: Callable[..., None], *, lossless: bool = False, **parameters: Any):
    """Enters the decorated patch into the table, under the name of its function."""

    def enter(plant: Callable[[Patch], None]):
        MUTANTS.append(Mutant(plant.__name__.replace("_", " "), part, plant, killer, parameters, lossless))
        return plant

    return enter


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def replaced(context, **fields):
    """A context with other sampling parameters."""
    return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **fields))


# The token rule. Its exact law is read off the shipped class, in float64.

JOINT_LAW = test_laws.test_the_output_has_the_targets_joint_law
CALL_LAW = test_laws.test_a_call_samples_from_the_law
TOKEN, BLOCK, COUPLED = test_laws.LOSSLESS
token_law = mutant("token rule", JOINT_LAW, verifier=TOKEN, size=3, k=2)
token_call = mutant("token rule", CALL_LAW, verifier=Speculative())


def next_law(patch: Patch, change: Callable[..., tuple]) -> None:
    """Changes ``(draft, p, q, n)`` on their way into the law of the next token."""

    def make(real):
        def mutated(self, draft, p, q, chances, n):
            draft, p, q, n = change(draft, p, q, n)
            return real(self, draft, p, q, chances, n)

        return mutated

    wrap(patch, ChainVerifier, "_next", make)


def chances(patch: Patch, rule: type, change: Callable[..., Chances]) -> None:
    """Replaces the chances by ``change(real chances, draft, p, q)``."""

    def make(real):
        return lambda self, draft, p, q: change(real(self, draft, p, q), draft, p, q)

    wrap(patch, rule, "chances", make)


@token_law
def residual_is_the_target(patch):
    patch.setattr(ChainVerifier, "residual", lambda self, p, q, weight: p)


@token_law
def residual_is_the_absolute_difference(patch):
    patch.setattr(ChainVerifier, "residual", lambda self, p, q, weight: jnp.abs(p - q))


@token_law
def residual_only_drops_the_rejected_token(patch):
    """Right for a point mass, wrong for a draft that was sampled and accepted by p/q."""
    next_law(patch, lambda draft, p, q, n: (draft, p, None, n))


@token_law
def residual_of_the_first_position(patch):
    next_law(patch, lambda draft, p, q, n: (draft, p, jnp.broadcast_to(q[:, :1], q.shape), n))


@token_law
def residual_of_the_position_before(patch):
    next_law(patch, lambda draft, p, q, n: (draft, p, jnp.concatenate([q[:, :1], q[:, :-1]], axis=1), n))


@token_law
def bonus_from_the_last_drafts_row(patch):
    next_law(patch, lambda draft, p, q, n: (draft, jnp.concatenate([p[:, :-1], p[:, -2:-1]], axis=1), q, n))


@token_law
def draft_subtracted_from_the_bonus(patch):
    def mutated(self, draft, p, q, chances, n):
        return self.residual(row(p, n), row(q, jnp.minimum(n, q.shape[1] - 1)), None)

    patch.setattr(ChainVerifier, "_next", mutated)


@token_law
def accepts_by_the_targets_probability(patch):
    chances(patch, Speculative, lambda c, draft, p, q: Chances(chain.at(p[:, :-1], draft.tokens)))


@token_law
def accepts_the_argmax_while_sampling(patch):
    def change(c, draft, p, q):
        return Chances((draft.tokens == sampling.argmax(p[:, :-1])).astype(p.dtype))

    chances(patch, Speculative, change)


@token_law
def last_draft_never_accepted(patch):
    """Treated as a rejection it subtracts q without having tested it."""
    chances(patch, Speculative, lambda c, draft, p, q: Chances(c.keep.at[:, -1].set(0.0)))


@mutant("dtype", JOINT_LAW, verifier=TOKEN, size=3, k=2)
def draft_probabilities_in_bfloat16(patch):
    """Only in the ratio, as rounded tokens and exact probabilities would make them."""

    def make(real):
        return lambda self, draft, p, q: real(self, draft, p, q.astype(jnp.bfloat16).astype(p.dtype))

    wrap(patch, Speculative, "chances", make)


@token_call
def counts_accepts_instead_of_the_run(patch):
    patch.setattr(chain, "leading_run", lambda accepted: jnp.sum(accepted.astype(jnp.int32), axis=1))


@token_call
def argmax_of_the_residual(patch):
    patch.setattr(chain, "sampling", SimpleNamespace(inverse_cdf=lambda weights, uniform: sampling.argmax(weights)))


@token_call
def rejecting_uniform_draws_the_residual(patch):
    def make(real):
        def mutated(self, draft, p_logits, noise):
            n = real(self, draft, p_logits, noise).num_accepted
            rejecting = row(noise.accept, jnp.minimum(n, noise.accept.shape[1] - 1))
            return real(self, draft, p_logits, Noise(noise.uniforms.at[:, Noise.NEXT, -1].set(rejecting)))

        return mutated

    wrap(patch, ChainVerifier, "__call__", make)


@token_call
def one_uniform_for_all_positions(patch):
    def accept(self):
        uniforms = self.uniforms[:, self.ACCEPT, :-1]
        return jnp.broadcast_to(uniforms[:, :1], uniforms.shape)

    patch.setattr(Noise, "accept", property(accept))


@token_call
def drafts_uniforms_accept_them(patch):
    patch.setattr(Noise, "accept", property(lambda self: self.uniforms[:, self.DRAFT, :-1]))


@mutant("token rule", test_laws.test_a_draft_that_stops_early_keeps_the_law, verifier=TOKEN)
def short_proposal_ends_as_a_rejection(patch):
    """After all of k_r < K proposals were accepted there is nothing to subtract."""

    def change(draft, p, q, n):
        return dataclasses.replace(draft, valid=jnp.ones_like(draft.valid)), p, q, n

    next_law(patch, change)


@mutant("token rule", test_lossless.test_draft_equal_to_target_is_always_accepted, k=2, lossless=True)
def sampled_draft_taken_as_certain(patch):
    """Given any x the point-mass rule gives p, so a mixture over x does too."""

    def make(real):
        def mutated(self, draft, p_logits, noise):
            return real(self, dataclasses.replace(draft, logits=None), p_logits, noise)

        return mutated

    wrap(patch, ChainVerifier, "__call__", make)


# The block rule.

block_law = mutant("block rule", JOINT_LAW, verifier=BLOCK, size=3, k=3)


@block_law
def block_weight_without_its_clamp(patch):
    """Clamped as a product at the end, not factor by factor."""

    def change(c, draft, p, q):
        weight = jnp.cumprod(chain.ratios(draft, p, q), axis=1).clip(max=1.0)
        inner = weight[:, :-1]
        left = jnp.sum(jnp.maximum(inner[..., None] * p[:, 1:-1] - q[:, 1:], 0.0), axis=-1)
        whole = left + 1.0 - inner
        h = jnp.where(whole > 0, left / jnp.where(whole > 0, whole, 1.0), 1.0)
        return Chances(
            jnp.concatenate([h, weight[:, -1:]], axis=1), jnp.pad(weight, ((0, 0), (1, 0)), constant_values=1)
        )

    chances(patch, Block, change)


@block_law
def block_succeeds_by_its_weight(patch):
    """h = b at every position, not at the last alone."""
    chances(patch, Block, lambda c, draft, p, q: Chances(c.weight[:, 1:], c.weight))


@block_law
def block_stops_at_the_first_failure(patch):
    patch.setattr(Block, "last_success", False)


@block_law
def block_residual_without_its_weight(patch):
    chances(patch, Block, lambda c, draft, p, q: Chances(c.keep, None))


@mutant("block rule", test_laws.test_a_draft_that_stops_early_keeps_the_law, verifier=BLOCK)
def block_ends_at_k_where_the_proposal_is_shorter(patch):
    """The last valid position must succeed with b."""

    def make(real):
        def mutated(self, draft, p, q):
            return real(self, dataclasses.replace(draft, valid=jnp.ones_like(draft.valid)), p, q)

        return mutated

    wrap(patch, Block, "chances", make)


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
    """The output keeps its law, but draft and target no longer race in the same noise."""
    patch.setattr(CoupledNoise, "draft", lambda self, offset: self.gumbel[:, offset + 1])


@coupled_output
def coupled_target_draws_without_the_noise(patch):
    def mutated(self, draft, p_logits, noise):
        chosen = sampling.argmax(p_logits)
        n = chain.leading_run((draft.tokens == chosen[:, :-1]) & draft.valid)
        return Verdict(n, row(sampling.argmax(p_logits + noise.gumbel), n))

    patch.setattr(Coupled, "__call__", mutated)


# Greedy decoding, and the engine at temperature 0: token by token what a simulation without caches does.

greedy_blocks = mutant("greedy", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4")
engine_blocks = mutant("engine", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4")


@greedy_blocks
def greedy_counts_matches_instead_of_the_run(patch):
    patch.setattr(greedy, "leading_run", lambda accepted: jnp.sum(accepted.astype(jnp.int32), axis=1))


@greedy_blocks
def greedy_correction_from_the_bonus_row(patch):
    patch.setattr(greedy, "row", lambda values, index: values[:, -1])


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
        def mutated(logits, parameters):
            warm = jnp.where(parameters.temperature > 0, parameters.temperature, 1.0)
            return real(logits, dataclasses.replace(parameters, temperature=warm))

        return mutated

    wrap(patch, sampling, "warp", make)


def fed(patch: Patch, positions: int = 0, slots: Callable[[Any], Any] | None = None, root: int = 0) -> None:
    """The block fed at other positions or slots, or from another root."""

    def mutated(target, params, state, draft):
        last = jnp.take_along_axis(state.tokens, (state.lengths - 1 + root)[:, None], axis=1)
        tokens = jnp.concatenate([last, draft.tokens], axis=1)
        at = (state.lengths - 1)[:, None] + jnp.arange(tokens.shape[1])[None]
        late = 0 if slots is None else slots(state)[:, None]
        return target(params, tokens, at + positions, at + late, state.cache)

    patch.setattr(engine, "feed_block", mutated)


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

    wrap(patch, engine, "feed_block", make)


@engine_blocks
def own_token_written_behind_the_whole_draft(patch):
    def mutated(draft, verdict):
        return jnp.concatenate([draft.tokens, verdict.next_token[:, None]], axis=1)

    patch.setattr(engine, "block_tokens", mutated)


def committed(patch: Patch, before: Callable[..., tuple], after: Callable[..., Any]) -> None:
    """``commit`` of another state and draft; ``after(real outcome, mutated outcome, state)`` is what results."""

    def make(real):
        def mutated(state, draft, verdict):
            return after(real(state, draft, verdict), real(*before(state, draft), verdict), state)

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


@mutant("attention", test_backend.test_attention_over_few_rows_is_attention, fed=1, slots=12)
def parts_of_a_kernel_joined_in_another_order(patch):
    def make(real):
        return lambda x, kernel: jnp.concatenate(jnp.split(real(x, kernel), 2, axis=-1)[::-1], axis=-1)

    wrap(patch, layers, "few_rows_product", make)


@mutant("logprobs", test_options.test_logprobs_are_those_of_the_emitted_tokens, kind="raw")
def logprobs_shifted_by_one(patch):
    def make(real):
        return lambda state, draft, verdict, laws: real(state, draft, verdict, jnp.roll(laws, 1, axis=1))

    wrap(patch, engine, "keep_logprobs", make)


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
        return lambda logits, parameters: real(logits, dataclasses.replace(parameters, **change(parameters)))

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
        def mutated(logits, s):
            first = real(logits, dataclasses.replace(s, top_k=0 * s.top_k, min_p=0 * s.min_p))
            return real(first, dataclasses.replace(s, top_p=jnp.ones_like(s.top_p)))

        return mutated

    wrap(patch, sampling, "_cut", make)


@definition
def drafts_not_counted_by_penalties(patch):
    penalised(patch, lambda context, drafted, first: (context, 0 * drafted - 1, first))


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

NOISE = test_sampling.test_noise_depends_on_seed_and_length_alone_and_no_uniform_is_used_twice
fresh = mutant("noise", NOISE)


def uniforms(patch: Patch, change: Callable[..., Any]) -> None:
    """Replaces the uniforms by ``change(real, seeds, lengths, k)``."""

    def make(real):
        return lambda seeds, lengths, k: Noise(change(lambda *args: real(*args).uniforms, seeds, lengths, k))

    wrap(patch, sampling, "fresh_noise", make)


@fresh
def one_key_for_all_rows(patch):
    uniforms(patch, lambda real, seeds, lengths, k: real(jnp.broadcast_to(seeds[:1], seeds.shape), lengths, k))


@fresh
def key_ignores_the_length(patch):
    uniforms(patch, lambda real, seeds, lengths, k: real(seeds, 0 * lengths, k))


@fresh
def acceptance_reuses_the_drafts_uniforms(patch):
    def change(real, seeds, lengths, k):
        values = real(seeds, lengths, k)
        return values.at[:, Noise.ACCEPT].set(values[:, Noise.DRAFT])

    uniforms(patch, change)


@mutant("noise", test_decoder.test_a_row_replays_alone_in_another_slot_from_its_own_seed, drafter=None)
def key_folded_by_the_slot(patch):
    def change(real, seeds, lengths, k):
        return real(seeds + jnp.arange(len(seeds), dtype=jnp.uint32)[:, None], lengths, k)

    uniforms(patch, change)


@mutant("noise", test_lossless.test_three_coins_show_noise_that_decides_twice)
def uniforms_keyed_by_position_under_block_verification(patch):
    """A rejected position is drawn again with the noise that the rejection looked at. The token rule survives it."""

    def change(real, seeds, lengths, k):
        return jnp.concatenate([real(seeds, lengths + i, 0) for i in range(k + 1)], axis=2)

    uniforms(patch, change)


@mutant("noise", test_lossless.test_the_law_of_three_tokens_in_short)
def one_uniform_for_all_drafts(patch):
    patch.setattr(Noise, "draft", lambda self, offset: self.uniforms[:, self.DRAFT, 0])


# The drafter.

SELF = test_lossless.test_draft_equal_to_target_is_always_accepted
SELF_WITH_ALL = test_options.test_a_draft_equal_to_its_target_is_always_accepted_with_every_parameter
short_law = mutant("drafter", test_lossless.test_the_law_of_three_tokens_in_short)
PARAMETER_LAW = test_lossless.test_every_sampling_parameter_has_the_law_of_its_definition


def proposed(patch: Patch, change: Callable[..., tuple]) -> None:
    """Replaces a proposal by ``change(real, out, context, tokens, offset)``."""

    def make(real):
        def mutated(self, out, context, tokens, offset):
            return change(lambda *args: real(self, *args), out, context, tokens, offset)

        return mutated

    wrap(patch, DraftModel, "_propose", make)


@mutant("drafter", SELF, k=2, lossless=True)
def draft_cache_misses_the_last_accepted_token(patch):
    """Feeds only the newest token, so after a full acceptance x_K is missing."""

    def mutated(self, params, state, context):
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

    patch.setattr(DraftModel, "draft", mutated)


@mutant("drafter", test_blocks.test_greedy_blocks_are_those_of_a_simulation_without_caches, name="k4", lossless=True)
def draft_cache_keeps_rejected_drafts(patch):
    """What was written once stays, also where the target corrected it."""

    def make(real):
        def mutated(self, params, state, context):
            draft, new = real(self, params, state, context)
            (keys, positions), (new_keys, new_positions) = state.layers[0], new.layers[0]
            written = positions < 1e5
            kept = jnp.where(written.swapaxes(-1, -2), keys, new_keys), jnp.where(written, positions, new_positions)
            return draft, dataclasses.replace(new, layers=(kept,))

        return mutated

    wrap(patch, DraftModel, "draft", make)


@short_law
def unlikely_draws_are_dropped(patch):
    """By their own value: what is left is no sample of q."""

    def make(real):
        def mutated(self, params, state, context):
            draft, new = real(self, params, state, context)
            if draft.logits is None:
                return draft, new
            likely = chain.at(jax.nn.softmax(draft.logits, axis=-1), draft.tokens) > 0.3
            return dataclasses.replace(draft, valid=jnp.cumprod(likely.astype(jnp.int32), axis=1) > 0), new

        return mutated

    wrap(patch, DraftModel, "draft", make)


@short_law
def draft_takes_its_argmax_and_reports_its_law(patch):
    patch.setattr(sampling, "draw", lambda logits, noise: sampling.argmax(logits))


@mutant("drafter", PARAMETER_LAW, verifier="speculative", setting="temperature")
def draft_reports_its_law_without_the_temperature(patch):
    def change(real, out, context, tokens, offset):
        tokens, logits = real(out, context, tokens, offset)
        warm = replaced(context, temperature=jnp.ones_like(context.sampling.temperature))
        raw = sampling.transform(out.logits, warm, tokens, offset)
        return tokens, None if logits is None else raw[:, 0]

    proposed(patch, change)


@mutant("drafter", PARAMETER_LAW, verifier="block", setting="top_p")
def draft_reports_its_law_before_the_cuts(patch):
    def change(real, out, context, tokens, offset):
        tokens, logits = real(out, context, tokens, offset)
        s = context.sampling
        uncut = replaced(context, top_k=0 * s.top_k, top_p=jnp.ones_like(s.top_p), min_p=0 * s.min_p)
        raw = sampling.transform(out.logits, uncut, tokens, offset)
        return tokens, None if logits is None else raw[:, 0]

    proposed(patch, change)


@mutant("drafter", SELF, k=2, lossless=True)
def temperature_on_the_target_only(patch):
    def change(real, out, context, tokens, offset):
        warm = replaced(context, temperature=jnp.ones_like(context.sampling.temperature))
        return real(out, warm, tokens, offset)

    proposed(patch, change)


@mutant("drafter", SELF_WITH_ALL, verifier="speculative", lossless=True)
def bias_on_the_target_only(patch):
    def change(real, out, context, tokens, offset):
        return real(out, replaced(context, bias=jnp.zeros_like(context.sampling.bias)), tokens, offset)

    proposed(patch, change)


@mutant("drafter", SELF_WITH_ALL, verifier="speculative", lossless=True)
def penalties_of_the_draft_do_not_see_its_own_tokens(patch):
    def change(real, out, context, tokens, offset):
        new, logits = real(out, context, 0 * tokens - 1, offset)
        drawn = jax.lax.dynamic_slice_in_dim(new, offset, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(tokens, drawn, offset, axis=1), logits

    proposed(patch, change)


@mutant("drafter", test_decoder.test_ngram_proposes_what_followed_the_longest_then_latest_match)
def ngram_proposes_past_the_end(patch):
    def make(real):
        def mutated(self, params, state, context):
            draft, state = real(self, params, state, context)
            return dataclasses.replace(draft, valid=jnp.broadcast_to(draft.valid[:, :1], draft.valid.shape)), state

        return mutated

    wrap(patch, NGram, "draft", make)


# The losses, against their float64 references.

LOSSES = {loss.kind: loss for loss in test_losses.DIVERGENCES}
VALUE = test_losses.test_value_and_gradient_match_float64
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
        return lambda self, *laws: real(dataclasses.replace(self, beta=1 - self.beta), *laws)

    wrap(patch, losses.JensenShannon, "between", make)


@mutant("loss", VALUE, loss=LOSSES["lk_alpha"], case="generic")
def log_of_the_mean_alpha_for_the_mean_of_the_logs(patch):
    def make(real):
        def mean(log_p, log_q):
            alpha = real(log_p, log_q)
            return jnp.broadcast_to(jnp.mean(alpha), alpha.shape)

        return mean

    wrap(patch, losses, "overlap", make)


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

    wrap(patch, losses, "log_laws", make)


@mutant("loss", test_losses.test_no_gradient_reaches_the_target, loss=LOSSES["total_variation"])
def gradient_into_the_target(patch):
    patch.setattr(laws.jax.lax, "stop_gradient", lambda x: x)


@mutant("loss", CACHED, loss=LOSSES["total_variation"], k=3)
def tail_of_cached_logits_dropped(patch):
    def make(real):
        return lambda *args: tuple(law[..., :3] for law in real(*args))

    wrap(patch, losses, "log_laws", make)


@mutant("loss", CACHED, loss=LOSSES["forward_kl"], k=3)
def cached_logits_made_a_law_of_their_own(patch):
    """Renormalised over the tokens that were kept: the tail is forgotten."""

    def make(real):
        def renormalised(*args):
            return tuple(jax.nn.log_softmax(law[..., :3], axis=-1) for law in real(*args))

        return renormalised

    wrap(patch, losses, "log_laws", make)


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

    wrap(patch, losses, "log_laws", make)


@mutant("loss", test_losses.test_adaspec_chooses_in_each_row_alone)
def adaspec_chooses_in_the_whole_microbatch(patch):
    def make(real):
        def flat(scores, counts, share):
            return real(scores.reshape(1, -1), counts.reshape(1, -1), share).reshape(scores.shape)

        return flat

    wrap(patch, losses, "first_of_each_row", make)


@mutant("loss", test_step.test_lk_lambda_takes_the_running_alpha_from_before_the_step_and_leaves_it_moved)
def running_alpha_never_moves(patch):
    patch.setattr(step, "_running", lambda alpha, metrics, weight: alpha)


@mutant("loss", test_step.test_uneven_weights_give_the_weighted_mean_and_its_gradient)
def predictions_weigh_alike(patch):
    def make(real):
        def alike(*args):
            found = real(*args)
            return found.replace(weight=(found.weight > 0).astype(jnp.float32))

        return alike

    wrap(patch, step, "matched", make)


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


@mutant("checkpoint", test_checkpoint.test_a_step_counts_as_whole_from_its_manifest_on)
def step_counts_before_its_manifest(patch):
    def make(real):
        def mutated(self, step, state, pending=()):
            real(self, step, state, pending)
            self._latest = step

        return mutated

    wrap(patch, Checkpoints, "save", make)


@mutant("checkpoint", test_checkpoint.test_random_keys_and_what_is_not_logged_yet_come_back_too)
def random_key_not_restored(patch):
    wrap(patch, checkpoint, "_as_key", lambda real: lambda leaf, like: real(0 * leaf, like))


@mutant("step", test_trainer.test_a_skipped_step_leaves_the_state_as_it_was_and_another_is_not_touched, poison=True)
def skipped_step_still_updates(patch):
    wrap(patch, test_trainer, "make_update", lambda real: lambda *args, skip: real(*args, skip=False))


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
    test_scale.test_rematerialised_and_scanned_layers_give_the_loss_and_gradient_of_plain_ones,
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
    patch.setattr(init, "ENDS", ("embedding",))


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
