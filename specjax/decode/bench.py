"""The decoding benchmark: drafters x k x batch size x temperature on the same prompts, against the autoregressive loop
of the same engine. Interleaved, warm-up and compilation excluded, medians of repeats, k chosen on other prompts.

Metric names are those of specjax.metrics. A speedup is wall time of the autoregressive loop over wall time of
speculation, at equal emitted tokens, end-of-sequence off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import config as config_lib
from specjax import metrics
from specjax.decode import costs as costs_lib
from specjax.decode.decoder import Decoder
from specjax.types import Drafter

AUTOREGRESSIVE = "autoregressive"
DrafterFactory = Callable[[int], Drafter]
Tick = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the grid; ``k`` 0 is the autoregressive loop."""

    drafter: str
    k: int
    batch_size: int
    temperature: float


@dataclasses.dataclass
class Run:
    """One pass over all prompts: summed wall seconds, new tokens row by row, counts."""

    seconds: float
    tokens: list[list[int]]
    stats: metrics.DecodeStats


class Bench:
    """Everything measured on one target with one set of prompts. ``drafters``: name -> (k -> drafter)."""

    def __init__(
        self,
        target: Any,
        drafters: Mapping[str, DrafterFactory],
        settings: config_lib.Bench,
        prompts: Sequence[Sequence[int]],
        tuning_prompts: Sequence[Sequence[int]],
        verifier: str,
        seed: int,
        tick: Tick = lambda: None,
    ):
        self._target, self._drafters, self._settings = target, drafters, settings
        self._prompts, self._tuning_prompts = prompts, tuning_prompts
        self._verifier, self._seed, self._tick = verifier, seed, tick
        self.compile_seconds = 0.0
        # Made or measured once, and freed with the bench.
        self.decoder = functools.cache(self._decoder)
        self._all_costs = functools.cache(self._measure_costs)
        self._prefill_seconds = functools.cache(self._measure_prefill)

    def _decoder(self, drafter: str, k: int) -> Decoder:
        chosen = None if drafter == AUTOREGRESSIVE else self._drafters[drafter](k)
        return Decoder(self._target, chosen, self._verifier)

    def cells(self) -> list[Cell]:
        kinds = [(AUTOREGRESSIVE, 0), *((name, k) for name in self._drafters for k in self._settings.ks)]
        return [
            Cell(name, k, batch_size, temperature)
            for temperature in self._settings.temperatures
            for batch_size in self._settings.batch_sizes
            for name, k in kinds
        ]

    def run(self, cell: Cell, prompts: Sequence[Sequence[int]]) -> Run:
        """Whole batches only: the last one is filled up with the first prompts again, which are rows as any other."""
        decoder = self.decoder(cell.drafter, cell.k)
        seconds, tokens, stats = 0.0, [], []
        prompts = [*prompts, *itertools.islice(itertools.cycle(prompts), -len(prompts) % cell.batch_size)]
        for first in range(0, len(prompts), cell.batch_size):
            batch = prompts[first : first + cell.batch_size]
            start = time.perf_counter()
            result = decoder.generate(
                batch,
                max_new_tokens=self._settings.new_tokens,
                temperature=cell.temperature,
                seed=self._seed + first,
                ignore_eos=True,
            )
            seconds += time.perf_counter() - start
            tokens += result.tokens
            stats += result.stats
        return Run(seconds, tokens, functools.reduce(operator.add, stats))

    def compile(self, cell: Cell) -> None:
        batch = [self._prompts[0]] * cell.batch_size
        with costs_lib.count_compiles() as count:
            self.decoder(cell.drafter, cell.k).compile(
                batch, max_new_tokens=self._settings.new_tokens, temperature=cell.temperature
            )
        self.compile_seconds += count.seconds

    def measure(self, favourite: str) -> dict:
        """The whole grid once; but the autoregressive loop and ``favourite`` at its best k, batch 1, in turns and
        repeated: their seconds are medians."""
        for cell in self.cells():
            self.compile(cell)
            self._tick()
        grid: dict[Cell, Run] = {}
        best, tunings = {}, {}
        for temperature in self._settings.temperatures:
            k, tunings[temperature] = self._choose_k(favourite, temperature)
            best[temperature] = k
            grid |= self._in_turns(_plain(temperature), Cell(favourite, k, 1, temperature))
            self._tick()
        repeated = set(grid)
        for cell in self.cells():
            if cell not in grid:
                grid[cell] = self.run(cell, self._prompts)
            self._tick()
        # Batch 1 is always measured, also where it is no part of the grid.
        order = dict.fromkeys((*self.cells(), *grid))
        rows = {cell: self._row(cell, grid, self._settings.repeats if cell in repeated else 1) for cell in order}
        headline = {}
        for temperature, k in best.items():
            fast = Cell(favourite, k, 1, temperature)
            headline[temperature] = self._headline(_plain(temperature), fast, grid, tunings[temperature])
            for tried, run in tunings[temperature].items():
                if (cell := Cell(favourite, tried, 1, temperature)) in rows:
                    rows[cell]["predicted_speedup"] = self._predict(favourite, tried, temperature, run.stats)
        return {"decoding": list(rows.values()), "best_k": best, "headline": headline}

    def _in_turns(self, *cells: Cell) -> dict[Cell, Run]:
        runs: dict[Cell, list[Run]] = {cell: [] for cell in cells}
        for _ in range(self._settings.repeats):
            for cell in cells:
                runs[cell].append(self.run(cell, self._prompts))
        return {
            cell: dataclasses.replace(done[0], seconds=float(np.median([run.seconds for run in done])))
            for cell, done in runs.items()
        }

    def _row(self, cell: Cell, grid: Mapping[Cell, Run], repeats: int) -> dict:
        run = grid[cell]
        plain = grid[Cell(AUTOREGRESSIVE, 0, cell.batch_size, cell.temperature)]
        reference = grid[_plain(cell.temperature)]
        speculative = cell.k > 0
        differences = self._differences(run, reference) if cell.temperature == 0 else []
        return {
            **dataclasses.asdict(cell),
            "k": cell.k if speculative else None,
            "seconds": run.seconds,
            "tokens": sum(map(len, run.tokens)),
            "tokens_per_s": sum(map(len, run.tokens)) / run.seconds,
            "speedup": plain.seconds / run.seconds,
            "predicted_speedup": None,
            "block_efficiency": run.stats.block_efficiency if speculative else None,
            "acceptance_rate": run.stats.acceptance_rate if speculative else None,
            "acceptance_at": list(run.stats.acceptance_at) if speculative else None,
            "conditional_acceptance_at": list(run.stats.conditional_acceptance_at) if speculative else None,
            "repeats": repeats,
            "identical": not differences if cell.temperature == 0 else None,
            "differences": differences,
        }

    def _differences(self, run: Run, reference: Run) -> list[dict]:
        """Where greedy output departs from the autoregressive one, with the target's top-2 margin there."""
        found = []
        for i, got in enumerate(run.tokens):
            prompt = i % len(self._prompts)
            want = reference.tokens[prompt]
            at = next((j for j, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
            if at is not None:
                logits = self._target.logits(np.asarray([[*self._prompts[prompt], *want[:at]]], np.int32))[0, -1]
                top = np.sort(np.asarray(logits))[-2:]
                found.append({"prompt": prompt, "position": at, "margin": float(top[1] - top[0])})
        return found

    def _choose_k(self, name: str, temperature: float) -> tuple[int, dict[int, Run]]:
        runs = {k: self.run(Cell(name, k, 1, temperature), self._tuning_prompts) for k in self._settings.ks}
        return min(runs, key=lambda k: runs[k].seconds), runs

    def _headline(self, plain: Cell, fast: Cell, grid: Mapping[Cell, Run], tuning: Mapping[int, Run]) -> dict:
        tokens = len(self._prompts) * self._settings.new_tokens
        return {
            "k": fast.k,
            "speedup": grid[plain].seconds / grid[fast].seconds,
            "ar_tokens_per_s": tokens / grid[plain].seconds,
            "spec_tokens_per_s": tokens / grid[fast].seconds,
            "costs": dataclasses.asdict(self._costs(fast.drafter, fast.k, fast.temperature)),
            "ar_costs": dataclasses.asdict(self._costs(AUTOREGRESSIVE, 0, plain.temperature)),
            "step_overhead": self._costs(fast.drafter, fast.k, fast.temperature).overhead,
            "ar_overhead": self._costs(AUTOREGRESSIVE, 0, plain.temperature).overhead,
            "speedup_predicted": self._predict(fast.drafter, fast.k, fast.temperature, tuning[fast.k].stats),
        }

    def _predict(self, name: str, k: int, temperature: float, stats: metrics.DecodeStats) -> float:
        """Seconds of plain decoding over those of speculation: n steps over n / tau blocks, each timed alone, and on
        both sides the prefill. tau is from acceptance by position on the tuning prompts (2211.17192, section 3.3,
        with a block's own cost in place of k draft passes and one target pass)."""
        plain, fast = self._costs(AUTOREGRESSIVE, 0, temperature), self._costs(name, k, temperature)
        new = self._settings.new_tokens
        tau = metrics.expected_block_efficiency(stats.acceptance_at)
        blocks = new / tau
        plain_seconds = self._prefill_seconds(AUTOREGRESSIVE, 0, temperature) + new * plain.step
        return plain_seconds / (self._prefill_seconds(name, k, temperature) + blocks * fast.step)

    def _costs(self, name: str, k: int, temperature: float) -> costs_lib.StepCosts:
        return self._all_costs(name, k)[temperature]

    def _measure_costs(self, name: str, k: int) -> dict[float, costs_lib.StepCosts]:
        """By temperature, which changes the step but none of its passes; in the largest cache of a generation."""
        decoder, temperatures = self.decoder(name, k), self._settings.temperatures
        new = self._settings.new_tokens
        engines = [decoder.engine(t == 0, rows=1) for t in temperatures]
        states = [decoder.prefilled(self._prompts[:1], max_new_tokens=new, temperature=t) for t in temperatures]
        costs = costs_lib.step_costs([engine for engine, _ in engines], engines[0][1], states)
        return dict(zip(temperatures, costs, strict=True))

    def _measure_prefill(self, name: str, k: int, temperature: float) -> float:
        """Prefill with the host's share of a generation: what a request costs before its first block."""
        decoder, new = self.decoder(name, k), self._settings.new_tokens

        def start():
            return decoder.started(self._prompts[:1], max_new_tokens=new, temperature=temperature)

        return costs_lib.median_seconds(start, 9)


def count_recompiles(target: Any, drafter: Drafter | None, verifier: str, prompts: int = 50) -> int:
    """Programs compiled while decoding ``prompts`` prompts of different lengths, temperatures, seeds and budgets, after
    each bucket was seen once. Must be 0."""
    decoder = Decoder(target, drafter, verifier)
    rng = np.random.default_rng(0)

    def request(i: int) -> None:
        length = 1 + (i * 7) % 32
        decoder.generate(
            [rng.integers(0, target.config.vocab_size, length).tolist()],
            max_new_tokens=1 + (i * 5) % 16,
            temperature=(0.0, 0.3, 0.7, 1.0, 1.3)[i % 5],
            seed=i,
        )

    for length in (16, 32):
        for temperature in (0.0, 1.0):
            decoder.compile([[0] * length], max_new_tokens=16, temperature=temperature)
    with costs_lib.count_compiles() as count:
        for i in range(prompts):
            request(i)
    return count.programs


def peak_rss_gb() -> float:
    """Largest resident memory of this process so far, in GB (10^9 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def memory_floor_share(target: Any, tokens_per_s: float) -> tuple[float, float]:
    """(share of the memory floor that the autoregressive loop reaches, stream bandwidth in GB/s). The floor of one
    token is reading every parameter once (embedding rows that are only looked up do not count)."""
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target.params))
    if not target.config.tie_embeddings:
        read -= target.params["embedding"].size * target.params["embedding"].dtype.itemsize
    bandwidth = costs_lib.stream_bandwidth(read)
    return tokens_per_s * read / bandwidth, bandwidth / 1e9


def _plain(temperature: float) -> Cell:
    return Cell(AUTOREGRESSIVE, 0, 1, temperature)
