"""What the host takes of a generation: the time of `Decoder.generate` outside of the programs on the device.

    python experiments/host_share.py configs/demo.yaml [a.b=v]... [--new-tokens 192] [--repeats 15] [--results FILE]

Batch 1, prompts of `bench.prompt_tokens` tokens, plain decoding and every draft of `bench` with lengths chosen by
measured costs. Time inside of prefill and chunks is taken around the very calls, each waited for; the rest is the
host's: encoding and padding, noise, what is read back, text and counts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import record
from rich.console import Console
from rich.table import Table

from specjax.config import load_config
from specjax.decode import scheduler
from specjax.decode.decoder import Decoder
from specjax.drafters.loading import load_drafter
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.runtime.compile_cache import keep_programs


class Inside:
    """Seconds in the programs, as the scheduler calls them."""

    def __init__(self):
        self.seconds = 0.0
        chunk_of, prefilled = scheduler.compiled_chunk, scheduler.prefilled
        scheduler.compiled_chunk = lambda engine: self.timed(chunk_of(engine))  # type: ignore[assignment]
        scheduler.prefilled = self.timed(prefilled)

    def timed(self, call: Callable) -> Callable:
        def waited_for(*args: Any) -> Any:
            start = time.perf_counter()
            found = jax.block_until_ready(call(*args))
            self.seconds += time.perf_counter() - start
            return found

        return waited_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path)
    args = parser.parse_intermixed_args()
    keep_programs()
    config = load_config(args.config, args.overrides)
    prepared = inputs.prepare(config)
    target, inside, rows = prepared.target, Inside(), []
    prompts = held_out_prompts(prepared.corpus.held_out, target, config.bench.prompt_tokens, 1 + args.repeats)
    drafters: dict[str, Any] = {"plain": None}
    drafters |= {name: load_drafter(at, target, max(config.bench.ks)) for name, at in config.bench.drafts.items()}
    drafters |= {name: {"kind": name, "k": max(config.bench.ks)} for name in config.bench.drafters}
    for (name, drafter), temperature in itertools.product(drafters.items(), (0.0, 1.0)):
        decoder = Decoder(target, drafter, config.verifier)
        decoder.calibrate(prompts[:1], temperature=temperature)
        decoder.compile(prompts[:1], max_new_tokens=args.new_tokens, temperature=temperature)
        shares, whole = [], []
        for repeat, prompt in enumerate(prompts):
            inside.seconds, start = 0.0, time.perf_counter()
            decoder.generate(
                [prompt], max_new_tokens=args.new_tokens, temperature=temperature, seed=repeat, ignore_eos=True
            )
            seconds = time.perf_counter() - start
            if repeat:  # the first one is not like the others
                shares.append(1 - inside.seconds / seconds)
                whole.append(seconds)
        low, median, high = np.quantile(shares, [0.25, 0.5, 0.75])
        found = {"drafter": name, "temperature": temperature, "host_share": median, "quartiles": [low, high]}
        rows.append({**found, "seconds": float(np.median(whole)), "repeats": args.repeats})
    table = Table("drafter", "T", "host share", "quartiles", "seconds")
    for row in rows:
        quartiles = f"{row['quartiles'][0]:.2%} to {row['quartiles'][1]:.2%}"
        share = f"{row['host_share']:.2%}"
        table.add_row(row["drafter"], f"{row['temperature']:g}", share, quartiles, f"{row['seconds']:.3f}")
    Console().print(table)
    if args.results is not None:
        record.write(args.results, {"new_tokens": args.new_tokens, "rows": rows})


if __name__ == "__main__":
    main()
