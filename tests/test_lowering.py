"""Programs for machines that are not here, see `tests.lowering`."""

from __future__ import annotations

import json
import sys

import pytest

from tests import processes

PLATFORMS = ("tpu", "cuda")
DRAFTS = ("plain", "ngram", "draft", "glide")
PROGRAMS = {
    *("prefill plain", "grow", "insert", "teacher's pass", "teacher's best"),
    *("prefill small caches", "chunk small caches", "slide"),
    *(f"prefill {name} 512" for name in DRAFTS),
    *(f"chunk {name}" for name in DRAFTS),
    *(f"{what} {name}" for what in ("training step", "evaluation") for name in DRAFTS[2:]),
}
"""Whole prompts and in pieces, loops of blocks with their rules and sampling, steps of training, what they are measured
by."""
WHOLE_ROWS = {"prefill plain", "training step draft", "training step glide", "teacher's pass", "teacher's best"}


@pytest.fixture(scope="module")
def lowered():
    command = [sys.executable, "-m", "tests.lowering", *PLATFORMS]
    process = processes.run(command, cwd=processes.ROOT)
    assert process.returncode == 0, process.output[-4000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_entry_point_lowers_for_an_accelerator_from_here(lowered, platform):
    """On one device and on eight; on a TPU, whole rows go through its kernel, and nothing calls the host."""
    found = [entry for entry in lowered if entry["platform"] == platform]
    for devices in (1, 8):
        assert {entry["name"] for entry in found if entry["devices"] == devices} == PROGRAMS
    for entry in found:
        kernel = ["tpu_custom_call"] if platform == "tpu" and entry["name"] in WHOLE_ROWS else []
        assert entry["custom_calls"] == kernel, entry
