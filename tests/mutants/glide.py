"""Errors in the draft that reads its target's keys and values. None changes what is decoded, only what is accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decode import engine
from specjax.drafters import block_kv, glide
from specjax.drafters.block_kv import BlockKV, TargetAndBlockKV
from specjax.drafters.glide import BoundGlide, GlideModel, TrainedGlide
from specjax.models.attention.sight import AttentionMask
from tests.drafters import test_glide
from tests.mutants.table import Patch, mutant, wrap

in_place = mutant("glide", test_glide.test_no_copy_is_made_of_the_targets_cache, rows=3, lossless=True)
decoding = mutant("glide", test_glide.test_decoding_is_the_training_forward, kind="llama", lossless=True)
windows = mutant("glide", test_glide.test_decoding_is_the_training_forward, kind="windows", lossless=True)
training = mutant(
    "glide",
    test_glide.test_one_that_equals_its_target_predicts_what_it_predicts_at_every_depth,
    kind="llama",
    lossless=True,
)
accepted = mutant(
    "glide",
    test_glide.test_one_that_equals_its_target_is_always_accepted,
    kind="llama",
    verifier="greedy",
    temperature=0.0,
    lossless=True,
)


def _told(patch: Patch, more: int) -> None:
    def make(real):
        def mutated(self, params, target, state, context):
            return real(self, params, dataclasses.replace(target, lengths=target.lengths + more), state, context)

        return mutated

    wrap(patch, BoundGlide, "draft", make)


@in_place
def the_targets_cache_is_copied(patch):
    def make(real):
        def mutated(self, params, target, state, context):
            small = jnp.min(context.lengths).astype(jnp.float32) * 1e-30
            copied = jax.tree.map(lambda x: x + small, target.keys_values)
            return real(self, params, dataclasses.replace(target, keys_values=copied), state, context)

        return mutated

    wrap(patch, BoundGlide, "draft", make)


@decoding
def keys_and_values_are_read_a_slot_late(patch):
    _told(patch, -1)


@decoding
def the_roots_stale_keys_and_values_are_read(patch):
    """Those that the rejected draft left in the slot of the root."""
    _told(patch, 1)


@accepted
def the_view_reaches_past_the_verified_tokens(patch):
    wrap(patch, engine, "TargetView", lambda real: lambda params, kv, lengths: real(params, kv, lengths + 1))


@accepted
def guesses_of_the_last_block_are_read(patch):
    """What the target has in the slots of drafted tokens, whether they were kept or not."""
    _told(patch, 3)


@training
def training_reads_the_root_from_the_target(patch):
    """A slot early: the root's, and with it what the target knows of it."""

    def make(real):
        def mutated(q, k, v, sight, *rest):
            return real(q, k, v, sight.replace(last=sight.last + 1), *rest)

        return mutated

    wrap(patch, block_kv, "attend", make)


def _reached(patch: Patch, more: int) -> None:
    def make(real):
        def mutated(*args):
            own = args[-1]
            reached = jnp.arange(len(own.reached)) < jnp.sum(own.reached) + more
            return real(*args[:-1], own._replace(reached=reached))

        return mutated

    wrap(patch, block_kv, "attend", make)


@training
def a_token_of_the_block_does_not_see_itself(patch):
    _reached(patch, -1)


@training
def a_token_of_the_block_sees_one_that_is_not_there_yet(patch):
    _reached(patch, 1)


@training
def a_block_continues_itself(patch):
    """Not the one that ended at the token before."""
    wrap(patch, glide.jnp, "roll", lambda real: lambda x, shift, axis=None: x if x.ndim == 5 else real(x, shift, axis))


@training
def own_keys_and_values_are_of_the_newest_token_alone(patch):
    def make(real):
        def mutated(self, q, k, v, scale=None, soft_cap=None):
            out, own = real(self, q, k, v, scale, soft_cap)
            return out, BlockKV(*(jnp.zeros_like(x) for x in own)) if self.own.keys.shape[2] > 1 else own

        return mutated

    wrap(patch, TargetAndBlockKV, "attend", make)


@training
def a_block_begins_in_the_document_before(patch):
    """Its root counts wherever it lies."""

    def make(real):
        return lambda documents, root: real(None, root)

    wrap(patch, block_kv, "inside_document", make)


@training
def every_depth_weighs_the_same(patch):
    def make(real):
        return lambda self, *args: real(dataclasses.replace(self, decay=1.0), *args)

    wrap(patch, TrainedGlide, "predictions", make)


@decoding
def every_token_of_a_block_is_at_the_roots_position(patch):
    def make(real):
        def mutated(self, params, tokens, positions, readings, *rest):
            if tokens.shape[1] == 1:
                positions = positions - readings[0].depth
            return real(self, params, tokens, positions, readings, *rest)

        return mutated

    wrap(patch, GlideModel, "through", make)


@windows
def decoding_forgets_the_windows(patch):
    def make(real):
        def mutated(self, window, queries, keys=None):
            return self if queries.shape[1] == 1 else real(self, window, queries, keys)

        return mutated

    wrap(patch, AttentionMask, "within", make)
