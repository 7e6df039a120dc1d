"""`specjax demo`: what `make demo` runs, in a clone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from specjax.config.shipped import DEMO_TARGET, REPOSITORY
from specjax.errors import SpecjaxError

_FILES = (f"{DEMO_TARGET}/config.json", "configs/demo.yaml", "experiments/run.py")


def demo_command(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """(folder, command) of the demo: what `make demo` runs, in the clone that this package or the working directory is
    in. Raises `SpecjaxError` without a clone, whose target of 49 MB is no part of the package."""
    root = next((folder for folder in _folders() if all((folder / file).is_file() for file in _FILES)), None)
    if root is None:
        raise SpecjaxError(
            f"demo: no clone of specjax here ({Path.cwd()}), and its target of 49 MB is no part of the package; "
            f"`git clone {REPOSITORY}` and run `specjax demo` in it, or train a small target from nothing with "
            "`specjax train demo_from_scratch`"
        )
    return root, [sys.executable, "experiments/run.py", "configs/demo.yaml", *overrides]


def run_demo(overrides: Sequence[str]) -> None:
    """Becomes the demo's process, so that signals and the exit status are its own."""
    root, command = demo_command(overrides)
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    os.execv(command[0], command)


def _folders() -> list[Path]:
    return [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
