"""Tokens a target call that the training forward gives for texts, beside those that decoding took to write them.

    python experiments/simulated_efficiency.py configs/demo.yaml [a.b=v]... [--prompts 80] [--new-tokens 384]

Of the distilled draft of a finished run, by rule, temperature and k, on the same held-out texts. Exact up to chance:
greedy the two are the same number wherever rounding breaks no tie, at temperature 1 the simulated one is the decoded
one's expectation given the texts. Exit status 1 if a case has too few blocks or the two are too far apart.
"""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from pathlib import Path
from typing import Any

import record
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax.config import load_config
from specjax.decode.decoder import Decoder
from specjax.evaluation.simulated import simulated_block_efficiency
from specjax.jobs import distill as job
from specjax.jobs.bench import held_out_prompts
from specjax.metrics import block_efficiency_interval
from specjax.runtime import lock

CASES = ((0.0, "speculative", 5), (1.0, "speculative", 3), (1.0, "block", 3), (1.0, "block", 5))
_BATCH = 16


def measure(found: job.Distilled, prompts: list[list[int]], new_tokens: int, case: tuple[float, str, int]) -> dict:
    temperature, rule, k = case
    draft, target = found.draft_after, found.target
    decoder = Decoder(target, draft.of(k), rule)
    stats, blocks, emitted = [], 0.0, 0
    for first in track(range(0, len(prompts), _BATCH), f"{rule}, T={temperature:g}", console=Console(stderr=True)):
        part = prompts[first : first + _BATCH]
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos": True}
        result = decoder.generate(part, seed=first, **options)
        stats += result.stats
        texts = [[*prompt, *row] for prompt, row in zip(part, result.tokens, strict=True)]
        how = (texts, list(map(len, part)), k, temperature, rule)
        simulated = simulated_block_efficiency(draft.drafter, draft.params, target, *how)
        if simulated is None:
            raise SystemExit(f"{rule}: cannot be simulated for this draft")
        written = sum(map(len, result.tokens))
        emitted, blocks = emitted + written, blocks + written / simulated
    total = functools.reduce(operator.add, stats)
    interval = block_efficiency_interval(stats)
    decoded, simulated = total.block_efficiency, emitted / blocks
    return {
        "temperature": temperature,
        "rule": rule,
        "k": k,
        "blocks": total.blocks,
        "decoded": decoded,
        "low": interval.low,
        "high": interval.high,
        "simulated": simulated,
        "ratio": simulated / decoded,
    }


BLOCKS, WITHIN = 5_000, 0.03
"""Required of each case: at least so many blocks, and the two as close as that."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    with lock.exclusive(Path(config.out)):
        found = job.distill(config)
    held_out = found.prepared.corpus.held_out
    prompts = held_out_prompts(held_out, found.target, config.bench.prompt_tokens, args.prompts)
    rows = [measure(found, prompts, args.new_tokens, case) for case in CASES]
    table = Table("T", "rule", "k", "blocks", "decoded", "95%", "simulated", "simulated / decoded", header_style="bold")
    for row in rows:
        figures = (f"{row['blocks']:,}", f"{row['decoded']:.3f}", f"{row['low']:.2f} to {row['high']:.2f}")
        ends = (f"{row['simulated']:.3f}", f"{row['ratio']:.4f}")
        table.add_row(f"{row['temperature']:g}", row["rule"], str(row["k"]), *figures, *ends)
    Console().print(table)
    if args.results is not None:
        record.write(args.results, {"prompts": len(prompts), "rows": rows})
    missed = [row for row in rows if row["blocks"] < BLOCKS or abs(row["ratio"] - 1) > WITHIN]
    print(f"asked: {BLOCKS:,} blocks a case, within {WITHIN:.0%}: {'MISSED' if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
