"""Programs compiled for an H100 and a TPU v5e from here: what their text says, beside the committed figures. `make
compiled` installs the compilers; `make compiled-figures` writes the figures anew, and the commit says why they changed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import processes

FIGURES = Path(__file__).parents[2] / "experiments" / "results" / "compiled.json"
MACHINES = (("v5e", 1), ("h100", 1), ("v5e", 8), ("h100", 8))
DRAFTED = 5
"""Passes of the draft in a block."""


def readings(machine: str, devices: int) -> dict[str, dict[str, Any]]:
    """What `tests.accelerators.compiling` says of each program."""
    command = [sys.executable, "-m", "tests.accelerators.compiling", machine, str(devices)]
    process = processes.run(command, cwd=processes.ROOT)
    assert process.returncode == 0, process.output[-4000:]
    entries = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {entry.pop("name"): entry for entry in entries}


def figures_of(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures that are kept of `readings`: numbers, but no seconds."""
    return {
        name: {key: value for key, value in entry.items() if key not in ("seconds", "written", "read badly")}
        for name, entry in found.items()
    }


def versions() -> dict[str, str]:
    """Versions that the figures hold for."""
    packages = ("jax-cuda13-pjrt", "nvidia-cuda-nvcc", "libtpu")
    return {"jax": jax.__version__, **{name: importlib.metadata.version(name) for name in packages}}


@pytest.mark.compiled
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the compilers are not installed: make compiled")
@pytest.mark.parametrize(("machine", "devices"), MACHINES, ids=lambda x: str(x))
def test_what_the_compilers_make_of_the_programs(machine, devices):
    found = readings(machine, devices)
    for name, entry in found.items():
        assert not entry.get("written"), (name, "weights or caches are written out", entry["written"])
        assert not entry.get("read badly"), (name, "weights are read outside of products", entry["read badly"])
        assert entry.get("host syncs", 1) == 1, name
    if (machine, devices) == ("h100", 1):
        layer = found["plain"]["instructions"] - found["plain, 1 layer"]["instructions"]
        assert layer <= 19
        passes = found["draft model"]["instructions"] - found["draft model, 1 layer"]["instructions"]
        assert passes <= 17 * DRAFTED
        assert found["plain, int4"]["temporaries"] < 40
        assert found["plain, 16 rows, int8 cache"]["temporaries"] < 40
    kept = json.loads(FIGURES.read_text())
    if kept["versions"] != versions():
        pytest.skip(f"the figures are those of {kept['versions']}, and here are {versions()}")
    assert figures_of(found) == kept[f"{machine} x {devices}"], "make compiled-figures, and say why they changed"


if __name__ == "__main__":
    everything: dict[str, Any] = {"versions": versions()}
    for machine, devices in MACHINES:
        everything[f"{machine} x {devices}"] = figures_of(readings(machine, devices))
    FIGURES.write_text(json.dumps(everything, indent=1) + "\n")
