"""Which norms a head for multi-token prediction was trained with, by the acceptance of each: its state before or after
the target's last norm, what it reads of itself before or after its own.

    python experiments/head_norms.py configs/drafters/mtp.yaml target.path=DIR            # the head in the target's
    python experiments/head_norms.py configs/drafters/mtp.yaml --draft runs/drafters/mtp/draft  # own directory, or one
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import specjax
from specjax.config import RunConfig, load_config
from specjax.data.rows import Rows
from specjax.drafters.features import ENDS, LoadedDraft
from specjax.drafters.mtp import Options, TrainedMTP
from specjax.evaluation.evaluate import evaluate
from specjax.jobs import inputs
from specjax.models.hf import LoadedModel

DEPTHS = 3


def measured(draft: LoadedDraft, target: LoadedModel, rows: Rows, positions: int) -> dict[Options, Sequence[float]]:
    """Alpha by place of a block, of each way to read the head."""
    found = {}
    shared = tuple(name for name in ENDS if name not in draft.params)
    for state, recycled in itertools.product(("pre", "post"), repeat=2):
        options = Options(state, recycled)
        trained = TrainedMTP(dataclasses.replace(draft.spec, options=options), shared, depths=DEPTHS)
        found[options] = evaluate(trained, draft.params, target, rows, positions, batch_size=4).alpha_at[:DEPTHS]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--draft", help="directory, hub id or run; left out: the target's own directory")
    args = parser.parse_intermixed_args()
    config: RunConfig = load_config(args.config, args.overrides)
    prepared = inputs.prepare(config)
    drafter: Any = specjax.load_drafter(args.draft or str(config.target.path), prepared.target, k=1, kind="mtp")
    found = measured(drafter.model, prepared.target, prepared.held_out_rows, config.eval.positions)
    table = Table("state", "recycled", *(f"alpha at place {place}" for place in range(1, DEPTHS + 1)))
    for options, alphas in sorted(found.items(), key=lambda item: -sum(item[1])):
        table.add_row(*dataclasses.astuple(options), *(f"{alpha:.4f}" for alpha in alphas))
    Console().print(table)


if __name__ == "__main__":
    main()
