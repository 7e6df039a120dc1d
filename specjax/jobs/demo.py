"""`specjax demo`: the run of configs/demo.yaml, in a clone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from specjax.config.shipped import DEMO_TARGET, REPOSITORY, load
from specjax.errors import SpecjaxError
from specjax.jobs.sweep import run_one

CONFIG = Path("configs/demo.yaml")


def clone() -> Path:
    """The clone that the working directory or this package is in. Raises `SpecjaxError` outside of one: the demo's
    target, of 49 MB, is no part of the package."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / DEMO_TARGET / "config.json").is_file() and (folder / CONFIG).is_file():
            return folder
    raise SpecjaxError(
        f"demo: no clone of specjax here ({here}), and its target of 49 MB is no part of the package; "
        f"`git clone {REPOSITORY}` and run `specjax demo` in it, or train a small target from nothing with "
        "`specjax train demo_from_scratch`"
    )


def run_demo(overrides: Sequence[str]) -> None:
    """Run the demo in its clone, which becomes the working directory."""
    os.chdir(clone())
    run_one(load(CONFIG, overrides))
