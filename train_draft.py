"""Distill a draft for a target: python train_draft.py configs/demo.yaml distill.steps=200

The same as `specjax train`. Resumable: the same command goes on after an interruption. Leaves the draft as a Hugging
Face directory in `out`/draft. Exit status: 2 for what the user can mend, 130 after Ctrl-C, 143 after SIGTERM, which
saves the step under way first.
"""

from __future__ import annotations

from specjax.cli import run_main
from specjax.jobs.train import train as main

if __name__ == "__main__":
    run_main(main, __doc__)
