"""The suite for accelerators runs on a CPU, and its draft agrees as often as it says."""

from __future__ import annotations

import dataclasses

import gpu_suite
import jax
import pytest


@pytest.fixture(scope="module")
def suite():
    scale = gpu_suite.SCALES["tiny"]
    gpu_suite.SCALES["tiny"] = dataclasses.replace(scale, new=64, batches=(4,), contexts=((1, 256),))
    gpu_suite.TURNS = 1
    return gpu_suite.Suite("tiny", "float32")


@pytest.mark.more
def test_its_target_counts_and_its_draft_agrees_as_often_as_told(suite):
    suite.check()
    decoder = suite.decoders(agreement=0.8)["speculative"]
    found = decoder.generate(suite.prompts(8), max_new_tokens=192, ignore_eos=True)
    kept = sum(s.emitted for s in found.stats) / sum(s.blocks for s in found.stats)
    assert kept == pytest.approx((1 - 0.8**6) / (1 - 0.8), rel=0.15)
    assert len({s.blocks for s in found.stats}) > 1  # rows fail at places of their own
    none = suite.decoders(agreement=0.0)["speculative"].generate(suite.prompts(1), max_new_tokens=8, ignore_eos=True)
    assert none.stats[0].blocks == 8


@pytest.mark.parametrize("part", ["speculation", "kv_cache", "distillation"])
def test_a_part_gives_figures(suite, part):
    for name, value in gpu_suite.measured(getattr(suite, part)):
        figures = value.values() if isinstance(value, dict) else [value]
        assert all(figure > 0 for figure in figures), (name, value)


def test_what_does_not_fit_is_said_and_passed_over(suite):
    def part():
        yield "first", 1.0
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")

    assert list(gpu_suite.measured(part)) == [
        ("first", 1.0), ("not measured", "JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"),
    ]  # fmt: skip
