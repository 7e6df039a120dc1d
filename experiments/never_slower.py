"""Lengths chosen by measured costs, beside plain decoding and beside every fixed length, in turns.

    python experiments/never_slower.py configs/demo.yaml [a.b=v]... [--drafters glide separate ngram] [--batches 1 4 16]
        [--temperatures 0 1] [--pairs 15] [--new-tokens 128] [--varied] [--results FILE]

Costs and acceptance are measured on tuning prompts (`Decoder.calibrate`), the rest on others. A ratio is the time of
plain decoding over that of the same tokens decoded adaptively, pair by pair, of which the median is told with its 95%
interval (bootstrap over pairs); `over_best_fixed` is against the fixed length that turned out to be the fastest, plain
decoding among them. --varied: batch 1, one pair is code, then prose, then repetition. Pairs are added to those that the
file has of the same cell: where a process happens to place things is worth a few percent, so a few of 5 pairs say more
than one of 15.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax.config import load_config
from specjax.decode import programs
from specjax.decode.decoder import Decoder
from specjax.drafters.ngram import NGram
from specjax.formats.loading import load_drafter
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.report import record
from specjax.runtime.compile_cache import count_compiles, keep_programs

KS, BATCH_KS = (1, 2, 3, 5, 7), (1, 3)
PLAIN, ADAPTIVE = "plain", "adaptive"
_CONSOLE = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured together. ``drafter`` by its name."""

    drafter: str
    batch_size: int
    temperature: float
    text: str = "held-out"


class Study:
    """All cells, on one target. ``pairs``: of plain and adaptive, each after the other."""

    def __init__(self, args: argparse.Namespace):
        config = load_config(args.config, args.overrides)
        prepared = inputs.prepare(config)
        self.target, self.rule = prepared.target, config.verifier
        self.pairs, self.new_tokens, self.ks, self.batch_ks = args.pairs, args.new_tokens, args.ks, args.batch_ks
        length = config.bench.prompt_tokens
        found = held_out_prompts(prepared.corpus.held_out, self.target, length, 96)
        self.tuning, self.timed = found[:16], found[16:]
        self.length = length
        self._drafts = {name.removeprefix("shipped_"): path for name, path in config.bench.drafts.items()}

    def drafter(self, name: str, k: int) -> Any:
        return NGram(k) if name == "ngram" else load_drafter(self._drafts[name], self.target, k)

    def requests(self, cell: Cell, pair: int) -> list[list[list[int]]]:
        """The batches of one pair."""
        if cell.text == "varied":
            return [[self.code(pair)], [self.prose(pair)], [self.repetition(pair)]]
        first = pair * cell.batch_size
        return [[self.timed[(first + row) % len(self.timed)] for row in range(cell.batch_size)]]

    def code(self, pair: int) -> list[int]:
        return self.timed[pair % len(self.timed)]

    def prose(self, pair: int) -> list[int]:
        text = Path("docs/drafters.md").read_text() + Path("docs/performance.md").read_text()
        tokens = self.target.tokenizer.encode(text, add_special_tokens=False)
        first = (pair * self.length) % (len(tokens) - self.length)
        return list(tokens[first : first + self.length])

    def repetition(self, pair: int) -> list[int]:
        unit = self.code(pair + 1)[:24]
        return list(itertools.islice(itertools.cycle(unit), self.length))

    def measure(self, cell: Cell, first: int) -> dict[str, Any]:
        """Pairs from number ``first`` on."""
        how: dict[str, Any] = {"temperature": cell.temperature}
        ks = self.ks if cell.batch_size == 1 else self.batch_ks
        tuning = self.tuning[: cell.batch_size]
        adaptive = Decoder(self.target, self.drafter(cell.drafter, max(ks)), self.rule)
        fixed = {k: Decoder(self.target, self.drafter(cell.drafter, k), self.rule, "fixed") for k in ks}
        adaptive.calibrate(tuning, blocks=4, seconds=0, **how)  # so that the program that chooses is the one compiled
        decoders: dict[Any, Decoder] = {PLAIN: Decoder(self.target), ADAPTIVE: adaptive, **fixed}
        for decoder in decoders.values():
            decoder.compile(tuning, max_new_tokens=self.new_tokens, **how)
        began = time.perf_counter()
        calibration = adaptive.calibrate(tuning, **how)
        took = time.perf_counter() - began
        assert calibration is not None
        for decoder in decoders.values():
            self.decode(decoder, [tuning], 0, how)
        seconds: dict[Any, list[float]] = {name: [] for name in decoders}
        counts = np.zeros(4)
        with count_compiles() as compiled:
            for pair in track(range(first, first + self.pairs), str(dataclasses.astuple(cell)), console=_CONSOLE):
                names = list(decoders)
                for name in names[pair % len(names) :] + names[: pair % len(names)]:
                    spent, found = self.decode(decoders[name], self.requests(cell, pair), pair, how)
                    seconds[name].append(spent)
                    counts += found * (name == ADAPTIVE)
        programs.free_programs()  # a process may hold only so many at once
        return {
            **dataclasses.asdict(cell),
            "seconds": {str(name): [round(x, 5) for x in times] for name, times in seconds.items()},
            "processes": 1,
            "tokens_per_call": counts[1] / counts[0],
            "drafted_per_block": counts[2] / counts[0],
            "blocks_without_draft": counts[3] / counts[0],
            "programs_after_warm_up": compiled.programs,
            "calibration_seconds": took,
            "block_ms": [1000 * float(x) for x in calibration.seconds],
            "acceptance": np.asarray(calibration.acceptance, float).tolist(),
        }

    def decode(self, decoder: Decoder, batches: Sequence[Any], seed: int, how: Any) -> tuple[float, np.ndarray]:
        spent, counts = 0.0, np.zeros(4)
        for prompts in batches:
            began = time.perf_counter()
            result = decoder.generate(prompts, max_new_tokens=self.new_tokens, ignore_eos=True, seed=seed, **how)
            spent += time.perf_counter() - began
            for stats in result.stats:
                counts += (stats.blocks, stats.emitted, stats.drafted, stats.blocks_without_draft)
        return spent, counts


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Medians of pairs, and intervals."""
    seconds = {name: np.asarray(times) for name, times in row["seconds"].items()}
    plain, adaptive = seconds[PLAIN], seconds[ADAPTIVE]
    ratio, low, high = told(plain / adaptive)
    fixed = {name: np.median(plain / times) for name, times in seconds.items() if name not in (PLAIN, ADAPTIVE)}
    best = max(fixed, key=lambda k: fixed[k])
    rival = best if fixed[best] > 1 else PLAIN
    over, over_low, over_high = told(seconds[rival] / adaptive)
    return {
        "ratio": ratio,
        "low": low,
        "high": high,
        "half_width": (high - low) / 2,
        "pairs": len(plain),
        "fixed": {k: float(x) for k, x in fixed.items()},
        "best_fixed_k": 0 if rival is PLAIN else int(rival),
        "over_best_fixed": over,
        "over_best_fixed_low": over_low,
        "over_best_fixed_high": over_high,
        "plain_seconds": float(np.median(plain)),
    }


def told(ratios: np.ndarray, resamples: int = 4000) -> tuple[float, float, float]:
    """Median and its 95% interval, by bootstrap (Efron 1979)."""
    drawn = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        *("drafter", "batch", "T", "text", "over plain", "95%", "over best fixed", "best k", "fixed", "tokens")
    )
    for row in rows:
        table.add_row(
            row["drafter"],
            str(row["batch_size"]),
            f"{row['temperature']:g}",
            row["text"],
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f}-{row['high']:.3f}",
            f"{row['over_best_fixed']:.3f}",
            str(row["best_fixed_k"]),
            " ".join(f"{k}:{x:.2f}" for k, x in row["fixed"].items()),
            f"{row['tokens_per_call']:.2f}",
        )
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--drafters", nargs="+", default=["glide", "separate", "ngram"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--ks", nargs="+", type=int, default=list(KS))
    parser.add_argument("--batch-ks", nargs="+", type=int, default=list(BATCH_KS))
    parser.add_argument("--pairs", type=int, default=15, help="of this process")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--results", type=Path)
    args = parser.parse_intermixed_args()
    keep_programs()
    study = Study(args)
    batches, text = ([1], "varied") if args.varied else (args.batches, "held-out")
    grid = itertools.product(args.drafters, batches, args.temperatures)
    earlier = [] if args.results is None or not args.results.exists() else json.loads(args.results.read_text())["rows"]
    found = []
    for drafter, batch_size, temperature in grid:
        cell = Cell(drafter, batch_size, temperature, text)
        same = [old for old in earlier if is_of(old, cell)]
        earlier = [old for old in earlier if not is_of(old, cell)]
        row = study.measure(cell, sum(len(old["seconds"][PLAIN]) for old in same))
        for old in same:
            row = added(old, row)
        found.append(row | figures(row))
        if args.results is not None:
            record.write(args.results, {"rows": [*earlier, *found]})
    show(found)
    sys.exit(int(any(row["programs_after_warm_up"] for row in found)))


def is_of(row: dict[str, Any], cell: Cell) -> bool:
    return all(row[name] == value for name, value in dataclasses.asdict(cell).items())


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """With the pairs of both; what was counted is that of the new ones, programs compiled are summed."""
    return new | {
        "seconds": {name: old["seconds"][name] + times for name, times in new["seconds"].items()},
        "processes": old["processes"] + new["processes"],
        "programs_after_warm_up": old["programs_after_warm_up"] + new["programs_after_warm_up"],
    }


if __name__ == "__main__":
    main()
