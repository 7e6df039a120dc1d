"""Errors in the draft that reads its target's features. None changes what is decoded, only what is accepted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.drafters import formats, token_rows
from specjax.drafters.token_rows import BoundRows, Rows, Unrolled
from tests.drafters import test_features
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
documents = mutant("features", test_features.test_documents_of_a_row_know_nothing_of_each_other, lossless=True)
stored = mutant(
    "features",
    test_features.test_one_begins_as_its_targets_last_layer_and_comes_back_from_disk,
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

    wrap(patch, Unrolled, "attend", make)


@decoding
def a_block_does_not_see_what_it_drafted(patch):
    def make(real):
        def mutated(memory, *args, **options):
            hidden = dataclasses.replace(memory, place=0)
            return real(hidden, *args, **options)

        return mutated

    wrap(patch, Unrolled, "attend", make)


@documents
def a_documents_first_token_is_seen_with_features_of_another(patch):
    def make(real):
        def mutated(memory, *args, **options):
            of_queries, _ = memory.sight.segments
            sight = dataclasses.replace(memory.sight, segments=(of_queries, of_queries))
            return real(dataclasses.replace(memory, sight=sight), *args, **options)

        return mutated

    wrap(patch, Rows, "attend", make)


@decoding
def token_and_features_are_read_the_other_way_round(patch):
    """As the first half of what the attention reads, in decoding alone."""

    def make(real):
        def mutated(self, params, cache, tokens, features, slots):
            return real(self, params, cache, tokens, jnp.roll(features, 1, axis=-1), slots)

        return mutated

    wrap(patch, BoundRows, "_pass", make)


@stored
def captured_layers_are_numbered_from_the_first(patch):
    """The other convention: layer i is what leaves it, not what enters it."""

    def make(load):
        def mutated(*args, **options):
            found = load(*args, **options)
            found.spec = dataclasses.replace(found.spec, reads=tuple(i + 1 for i in found.spec.reads))
            return found

        return mutated

    wrap(patch, formats, "load", make)
