"""Programs for machines that are not here, see `tests.accelerators.lowering`."""

from __future__ import annotations

import json
import sys

import pytest

from tests import processes

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
CUDNN = "__cudnn$fmha"
WHOLE_ROWS = {"prefill plain", "training step draft", "training step glide", "teacher's pass", "teacher's best"}


def check(*machines: tuple[str, int]) -> None:
    """What is lowered for each of them, a platform and a number of devices: whole rows go through the device's kernel,
    in training forward and backward, and nothing calls the host."""
    arguments = [str(part) for machine in machines for part in machine]
    process = processes.run([sys.executable, "-m", "tests.accelerators.lowering", *arguments], cwd=processes.ROOT)
    assert process.returncode == 0, process.output[-4000:]
    entries = [json.loads(line) for line in process.stdout.splitlines()]
    for platform, devices in machines:
        found = [entry for entry in entries if (entry["platform"], entry["devices"]) == (platform, devices)]
        assert {entry["name"] for entry in found} == PROGRAMS
        for entry in found:
            # A glide draft attends to its target and to its block; the kernel is its frozen target's alone.
            whole, trained = entry["name"] in WHOLE_ROWS, entry["name"] == "training step draft"
            if platform == "tpu":
                assert entry["custom_calls"] == ["tpu_custom_call"] * whole, entry
            else:
                assert all(name.startswith(CUDNN) for name in entry["custom_calls"]), entry
                assert len(entry["custom_calls"]) == whole * (1 + trained), entry


def test_every_entry_point_lowers_for_accelerators_from_here():
    check(("tpu", 8), ("cuda", 1))


@pytest.mark.more
def test_every_entry_point_lowers_for_the_others_as_well():
    check(("tpu", 1), ("cuda", 8))
