"""Errors in what is computed another way on an accelerator, found by the same arrays computed as on a CPU."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax import sampling
from specjax.models import cache, kernels
from specjax.models.attention import blocks
from tests.accelerators import test_as_on_a_device as tests
from tests.mutants.table import mutant, wrap

REDUCTION = tests.test_the_best_token_and_whether_there_is_one_come_of_one_reduction
GROUPS = tests.test_rows_attend_in_groups_as_they_do_together
SCALES = tests.test_scales_of_a_cache_in_8_bits_may_multiply_scores_and_weights


@mutant("device", REDUCTION)
def one_reduction_gives_ties_to_the_highest(patch):
    def make(real):
        def mutated(logits):
            top, index = real(logits[..., ::-1])
            return top, logits.shape[-1] - 1 - index

        return mutated

    wrap(patch, sampling, "_top", make)


@mutant("device", REDUCTION)
def one_reduction_loses_a_nan(patch):
    wrap(patch, sampling, "_top", lambda real: lambda logits: real(jnp.where(jnp.isnan(logits), -jnp.inf, logits)))


@mutant("device", tests.test_a_single_row_is_multiplied_as_two, platform="cuda")
def a_single_row_is_multiplied_alone(patch):
    patch.setattr(kernels.backend, "doubles_single_rows", lambda: False)


@mutant("device", GROUPS, dtype="float32", rows=2)
def every_group_of_rows_reads_the_first_rows(patch):
    def make(real):
        def mutated(rows, q, k, v, *rest):
            heads = len(k) // len(q)
            k, v = (jnp.tile(x[: rows * heads], (len(q) // rows, 1, 1)) for x in (k, v))
            return real(rows, q, k, v, *rest)

        return mutated

    wrap(patch, blocks, "_in_groups", make)


@mutant("device", SCALES)
def values_of_8_bits_are_read_without_their_scales(patch):
    def make(real):
        def mutated(*args, scales=None, **rest):
            if scales is not None:
                scales = scales._replace(values=jnp.ones_like(scales.values))
            return real(*args, scales=scales, **rest)

        return mutated

    wrap(patch, blocks, "attend", make)


@mutant("device", tests.test_the_accepted_path_of_a_tree_is_the_same_from_the_pass_as_from_the_slots, dtype="float32")
def the_accepted_path_is_taken_from_the_nodes_before(patch):
    def make(real):
        def mutated(self, start, path):
            if self.block is None:
                return real(self, start, path)
            rolled = [tuple(jnp.roll(x, 1, axis=1) for x in layer) for layer in self.block]
            return real(dataclasses.replace(self, block=tuple(rolled)), start, path)

        return mutated

    wrap(patch, cache.KVCache, "keep", make)
