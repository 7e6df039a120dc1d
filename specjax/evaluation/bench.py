"""The decoding benchmark: drafters x k x batch size x temperature on the same prompts, against the autoregressive loop
of the same engine. It excludes warm-up and compilation, takes medians of repeats, and chooses k on other prompts. All
points of one batch size take turns at every batch of prompts, so that a slow spell of the machine affects them all.

Metrics have the names of specjax.metrics. A speedup is the wall time of the autoregressive loop over the wall time of
speculation, a token each: at equal emitted tokens, with end-of-sequence off, unless the config has it on.
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

import numpy as np

from specjax import config as config_lib
from specjax import metrics
from specjax.costs import timer as costs_lib
from specjax.decode import programs
from specjax.decode.calibration import typical
from specjax.decode.decoder import Decoder
from specjax.decode.result import check_finite
from specjax.evaluation.target_distribution import TargetDistribution
from specjax.interfaces import Drafter, Target, Verifier
from specjax.models.kernels import counted
from specjax.models.vocabulary import unused_ids
from specjax.runtime.compile_cache import count_compiles

AUTOREGRESSIVE = "autoregressive"
HYBRID, ADAPTIVE = "hybrid", "adaptive"
"""Name of the points that decode the primary draft again, with lengths chosen by costs measured on tuning prompts."""
_SHOWN_ROWS = 8
"""Number of rows whose draft lengths are reported, block by block."""
_CLOSE = 1.1
"""Largest ratio of a k's seconds to the fastest k's at which it is tuned further."""
_TURNS = 2
"""Number of short turns of the step timers after each repeat."""
_AGAIN = 1.0
"""Seconds for which block costs are measured again."""
_COMPILE_TICKS = 8
"""Number of decoded batches that take about as long as compiling a point. Compiling ticks as often, or a progress bar's
time left would mean nothing."""
DrafterFactory = Callable[[int], Drafter]
Tick = Callable[[], None]


def _silent() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the grid; ``k`` 0 is the autoregressive loop."""

    drafter: str
    k: int
    batch_size: int
    temperature: float


@dataclasses.dataclass
class Run:
    """Result of decoding some prompts: summed wall seconds, new tokens row by row, counts. ``by_row``: each row's share
    of the seconds of its batch, and its counts."""

    seconds: float
    tokens: list[list[int]]
    stats: metrics.DecodeStats
    by_row: list[tuple[float, metrics.DecodeStats]] = dataclasses.field(default_factory=list)
    proposals: list[list[int]] = dataclasses.field(default_factory=list)
    """Number of proposed tokens of each block, row by row."""

    def __add__(self, other: Run) -> Run:
        sums = (self.seconds + other.seconds, self.tokens + other.tokens, self.stats + other.stats)
        return Run(*sums, self.by_row + other.by_row, self.proposals + other.proposals)


class Bench:
    """All measurements of one target on one set of prompts. ``drafters``: name -> (k -> drafter). ``tuning_prompts``
    choose k, and the acceptance on them predicts the speedup."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, DrafterFactory],
        settings: config_lib.Bench,
        prompts: Sequence[Sequence[int]],
        tuning_prompts: Sequence[Sequence[int]],
        verifier: Verifier,
        sampling: Mapping[str, Any],
        seed: int,
    ):
        self._target, self._drafters, self._settings = target, drafters, settings
        self._prompts, self._tuning_prompts = prompts, tuning_prompts
        self._verifier, self._seed = verifier, seed
        # Where every row uses its whole budget, other ends of a generation are off too.
        self._sampling = {**sampling, **({"stop_token_ids": ()} if settings.ignore_eos else {})}
        self._distribution = TargetDistribution(target, self._sampling, settings.new_tokens)
        self.compile_seconds = 0.0
        self._primary = ""
        # Made or measured once, and freed with the bench.
        self.decoder = functools.cache(self._decoder)
        self._timers: dict[tuple[str, int], costs_lib.StepTimer] = {}
        self._moments: dict[tuple[str, bool, int], list[np.ndarray]] = {}
        self._prefill_seconds = functools.cache(self._measure_prefill)

    def _decoder(self, drafter: str, k: int) -> Decoder:
        if drafter == AUTOREGRESSIVE:  # it takes the cheapest noise, whatever the verifier
            return Decoder(self._target)
        if drafter == ADAPTIVE:
            return self.adaptive(self._primary, k)
        return Decoder(self._target, self._drafters[drafter](k), self._verifier, self._settings.controller)

    def adaptive(self, drafter: str, k: int) -> Decoder:
        """Decoder of a drafter with the default controller."""
        return Decoder(self._target, self._drafters[drafter](k), self._verifier)

    def cells(self, primary: str) -> list[Cell]:
        """Points of the grid. It has no draft but ``primary``; `measure` decodes others at that draft's best k."""
        settings = self._settings
        return [
            cell
            for temperature in settings.temperatures
            for batch_size in settings.batch_sizes
            for cell in (
                *self.cells_of((primary, *settings.drafters), batch_size, temperature),
                *[Cell(ADAPTIVE, max(settings.ks_of(batch_size)), batch_size, temperature)] * settings.adaptive,
            )
        ]

    def cells_of(self, names: Sequence[str], batch_size: int, temperature: float) -> list[Cell]:
        """Points of the autoregressive loop, and of the drafters of those names at every k."""
        kinds = [(AUTOREGRESSIVE, 0), *((name, k) for name in names for k in self._settings.ks_of(batch_size))]
        return [Cell(name, k, batch_size, temperature) for name, k in kinds]

    def _compile(self, cells: Sequence[Cell], tick: Tick) -> None:
        for cell in cells:
            options = {"temperature": cell.temperature, **self._sampling}
            batch, new = [self._prompts[0]] * cell.batch_size, self._settings.new_tokens
            decoder = self.decoder(cell.drafter, cell.k)
            with count_compiles() as count:
                if decoder.weighs:  # which program decodes follows from the costs
                    self._calibrate(cell, record=False)
                decoder.compile(batch, max_new_tokens=new, **options)
            self.compile_seconds += count.seconds
            for _ in range(_COMPILE_TICKS):
                tick()

    def _calibrate(self, cell: Cell, record: bool = True) -> None:
        """Measure block costs. If they were measured before, the median over all moments of the machine counts.
        ``record``: False leaves this moment out. Right after compiling, a machine may not have its usual pace."""
        decoder, options = self.decoder(cell.drafter, cell.k), {"temperature": cell.temperature, **self._sampling}
        moments = self._moments.setdefault((cell.drafter, cell.temperature == 0, cell.batch_size), [])
        tuning = list(itertools.islice(itertools.cycle(self._tuning_prompts), cell.batch_size))
        measure = functools.partial(decoder.calibrate, tuning, **options)
        found = measure(seconds=_AGAIN) if moments or not record else measure()
        if found is None or not record:
            return
        moments.append(np.asarray(found.seconds))
        if len(moments) > 1:
            costs: Any = typical(moments).astype(np.float32)
            measure(costs=dataclasses.replace(found, seconds=costs))

    def run(self, cells: Sequence[Cell], prompts: Sequence[Sequence[int]], tick: Tick = _silent) -> dict[Cell, Run]:
        """Run cells of one batch size over all prompts: batch by batch, with the cells in turns. All batches are whole:
        the first prompts fill up the last one, and count as rows like any other."""
        [size] = {cell.batch_size for cell in cells}
        prompts = [*prompts, *itertools.islice(itertools.cycle(prompts), -len(prompts) % size)]
        runs: dict[Cell, list[Run]] = {cell: [] for cell in cells}
        for first in range(0, len(prompts), size):
            for cell, done in runs.items():
                done.append(self._decode(cell, prompts[first : first + size], self._seed + first))
                tick()
        return {cell: functools.reduce(operator.add, done) for cell, done in runs.items()}

    def _decode(self, cell: Cell, batch: Sequence[Sequence[int]], seed: int) -> Run:
        decoder, new = self.decoder(cell.drafter, cell.k), self._settings.new_tokens
        start = time.perf_counter()
        options = {"temperature": cell.temperature, **self._sampling}
        result = decoder.generate(batch, max_new_tokens=new, seed=seed, ignore_eos=self._settings.ignore_eos, **options)
        seconds = time.perf_counter() - start
        check_finite(result, f"drafter {cell.drafter!r}", f"target {self._target.name!r}")
        by_row = [(seconds / len(batch), stats) for stats in result.stats]
        return Run(seconds, result.tokens, functools.reduce(operator.add, result.stats), by_row, result.proposals)

    @property
    def num_ticks(self) -> int:
        """Number of times that `measure` reports progress: `_COMPILE_TICKS` a compiled cell, once a decoded batch."""
        return num_ticks(self._settings, len(self._drafters), len(self._prompts), len(self._tuning_prompts))

    def measure(self, primary: str, tick: Tick = _silent) -> dict:
        """Measure the whole grid once, and every draft at ``primary``'s best k and batch 1. At batch 1 the
        autoregressive loop, ``primary`` and its hybrid, at each k and with chosen lengths, run ``repeats`` times, and
        their seconds are medians; in larger batches the autoregressive loop and chosen lengths do. Steps are timed
        between the repeats. The larger batches come first, and their programs are freed: the programs of a whole grid
        would take most of this process's memory."""
        self._primary = primary
        settings, cells = self._settings, self.cells(primary)
        runs: dict[Cell, list[Run]] = {cell: [] for cell in cells}
        for size in set(settings.batch_sizes) - {1}:
            of_size = [cell for cell in cells if cell.batch_size == size]
            self._compile(of_size, tick)
            compared = [cell for cell in of_size if settings.adaptive and cell.drafter in (AUTOREGRESSIVE, ADAPTIVE)]
            self._run_into(runs, of_size, tick)
            for _ in range(settings.repeats - 1 if compared else 0):
                self._run_into(runs, compared, tick)
            programs.free_programs()
        # Batch 1 is always measured, even if it is no part of the grid.
        single = [cell for cell in cells if cell.batch_size == 1]
        self._compile(single or [c for t in settings.temperatures for c in self.cells_of([primary], 1, t)], tick)
        best, tunings = self.tune(primary, tick)
        pairs = [cell for t, k in best.items() for cell in (_plain(t), Cell(primary, k, 1, t))]
        repeated = [cell for cell in single if cell.drafter in (AUTOREGRESSIVE, primary, HYBRID, ADAPTIVE)] or pairs
        beside = [Cell(name, k, 1, t) for t, k in best.items() for name in self._drafters if name != primary]
        beside = [cell for cell in beside if cell not in runs]
        self._compile(beside, tick)
        runs |= {cell: [] for cell in (*pairs, *beside) if cell not in runs}
        timers = [self.timer(AUTOREGRESSIVE, 0), *(self.timer(primary, k, k in best.values()) for k in settings.ks)]
        for repeat in range(settings.repeats):
            all_cells = [cell for cell in runs if cell.batch_size == 1]
            self._run_into(runs, repeated if repeat else all_cells, tick)
            for timer in _TURNS * timers:
                timer.turn()
        entries = {cell: self._entry(cell, runs) for cell in runs}
        for cell, run in tunings.items():
            if cell in entries:
                entries[cell]["predicted_speedup"] = self._predict(cell, run.stats, runs)
        headline = {
            t: self._headline(Cell(primary, k, 1, t), runs, tunings[Cell(primary, k, 1, t)]) for t, k in best.items()
        }
        by_prompt = {cell: self._by_prompt(found) for cell, found in runs.items()}
        passes = {k + 1: self._pass_over_one(primary, k) for k in settings.ks}
        return {
            "decoding": list(entries.values()),
            "best_k": best,
            "headline": headline,
            "by_prompt": by_prompt,
            "passes": passes,
        }

    def _pass_over_one(self, primary: str, k: int) -> float:
        """Cost of a pass of the target over a block of ``k``, over that of a pass over one token."""
        t = self._settings.temperatures[0]
        pairs = zip(self.costs(Cell(primary, k, 1, t)), self.costs(_plain(t)), strict=True)
        return float(np.median([block.target / one.target for block, one in pairs]))

    def _run_into(self, runs: dict[Cell, list[Run]], cells: Sequence[Cell], tick: Tick) -> None:
        """Decode the cells once more. Block costs were measured at another moment of the machine, and are measured
        again first. `Decoder` does so by itself when it decodes for longer."""
        for cell in cells:
            if self.decoder(cell.drafter, cell.k).weighs:
                self._calibrate(cell)
        for cell, run in self.run(cells, self._prompts, tick).items():
            runs[cell].append(run)

    def tune(self, primary: str, tick: Tick = _silent) -> tuple[dict[float, int], dict[Cell, Run]]:
        """(fastest k by temperature, runs that found it). All k take turns over the tuning prompts, in parts of as many
        as there are timed prompts. After each part only those within a tenth of the fastest go on. A few prompts decide
        nothing: the number of accepted tokens varies by a quarter from one prompt to the next."""
        settings, count = self._settings, len(self._prompts)
        parts = [self._tuning_prompts[first : first + count] for first in range(0, len(self._tuning_prompts), count)]
        best, runs = {}, {}
        for t in settings.temperatures:
            found: dict[Cell, Run] = {}
            left = [Cell(primary, k, 1, t) for k in settings.ks]
            for part in parts:
                for cell, run in self.run(left, part, tick).items():
                    found[cell] = found[cell] + run if cell in found else run
                for _ in range((len(settings.ks) - len(left)) * len(part)):
                    tick()  # for the lengths that are out
                fastest = min(left, key=lambda cell: found[cell].seconds)
                left = [cell for cell in left if found[cell].seconds <= _CLOSE * found[fastest].seconds]
            best[t] = fastest.k
            runs |= found
        return best, runs

    def _by_prompt(self, repeats: Sequence[Run]) -> list[tuple[list[float], metrics.DecodeStats]]:
        """Seconds of each prompt in each of ``repeats``, and its counts. A prompt that filled up a batch has more than
        one row."""
        count, found = len(self._prompts), []
        for i in range(count):
            seconds = [sum(s for s, _ in run.by_row[i::count]) for run in repeats]
            stats = functools.reduce(operator.add, (n for _, n in repeats[0].by_row[i::count]))
            found.append((seconds, stats))
        return found

    def _entry(self, cell: Cell, runs: Mapping[Cell, list[Run]]) -> dict:
        run, speculative = runs[cell][0], cell.k > 0
        differences = self.differences(run, runs[_plain(cell.temperature)][0]) if cell.temperature == 0 else []
        seconds, tokens = _seconds(runs[cell]), sum(map(len, run.tokens))
        price = self._settings.price_per_hour
        return {
            **dataclasses.asdict(cell),
            "k": cell.k if speculative else None,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": metrics.tokens_per_s(tokens, seconds),
            "cost_per_1k_tokens": None if price is None else metrics.cost_per_1k_tokens(price, tokens / seconds),
            "speedup": _speedup(cell, runs),
            "predicted_speedup": None,
            "block_efficiency": run.stats.block_efficiency if speculative else None,
            "block_efficiency_interval": self._interval(run) if speculative else None,
            "acceptance_rate": run.stats.acceptance_rate if speculative else None,
            "acceptance_at": list(run.stats.acceptance_at) if speculative else None,
            "conditional_acceptance_at": list(run.stats.conditional_acceptance_at) if speculative else None,
            "k_used": list(run.stats.k_used) if speculative else None,
            "probes": run.stats.probes if speculative else None,
            "proposals": run.proposals[:_SHOWN_ROWS] if cell.drafter == ADAPTIVE else None,
            "repeats": len(runs[cell]),
            "identical": not differences if cell.temperature == 0 else None,
            "differences": differences,
        }

    def _interval(self, run: Run) -> list[float]:
        """95% interval of the block efficiency, over prompts."""
        found = metrics.block_efficiency_interval([stats for _, stats in self._by_prompt([run])])
        return [found.low, found.high]

    def differences(self, run: Run, reference: Run) -> list[dict]:
        """First position of each row at which greedy output departs from the autoregressive ``reference``, with the
        target's top-2 margin there."""
        found = []
        for i, got in enumerate(run.tokens):
            prompt = i % len(self._prompts)
            want = reference.tokens[prompt]
            # Of two answers, one of which ends first, this one's last token is another.
            at = next((j for j, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
            if at is not None:
                margin = self._distribution.greedy_margin(self._prompts[prompt], want, at)
                found.append({"prompt": prompt, "position": at, "margin": margin})
        return found

    def _headline(self, fast: Cell, runs: Mapping[Cell, list[Run]], tuning: Run) -> dict:
        plain = _plain(fast.temperature)
        grid = [cell for cell in runs if (cell.drafter, cell.batch_size) == (fast.drafter, 1) and cell.k > 0]
        same = [cell for cell in grid if cell.temperature == fast.temperature]
        top = max(same, key=lambda cell: _speedup(cell, runs))
        return {
            "k": fast.k,
            "speedup": _speedup(fast, runs),
            "top_k": top.k,
            "top_speedup": _speedup(top, runs),
            "ar_tokens_per_s": _tokens(runs[plain]) / _seconds(runs[plain]),
            "spec_tokens_per_s": _tokens(runs[fast]) / _seconds(runs[fast]),
            "costs": dataclasses.asdict(costs_lib.median(self.costs(fast))),
            "ar_costs": dataclasses.asdict(costs_lib.median(self.costs(plain))),
            "step_overhead": float(np.median([cost.overhead for cost in self.costs(fast)])),
            "step_overhead_apart": float(np.median([cost.overhead_apart for cost in self.costs(fast)])),
            "ar_overhead": float(np.median([cost.overhead for cost in self.costs(plain)])),
            "speedup_predicted": self._predict(fast, tuning.stats, runs),
            "speedup_predicted_in_sample": self._predict(fast, runs[fast][0].stats, runs),
        }

    def _predict(self, cell: Cell, stats: metrics.DecodeStats, runs: Mapping[Cell, list[Run]]) -> float:
        """Predicted speedup of answers as long as those of plain decoding are on average."""
        plain = _plain(cell.temperature)
        prefill = self._prefill_seconds(plain), self._prefill_seconds(cell)
        costs = self.costs(plain), self.costs(cell)
        return predicted_speedup(prefill, costs, stats.acceptance_at, round(_tokens(runs[plain]) / len(self._prompts)))

    def costs(self, cell: Cell) -> list[costs_lib.StepCosts]:
        """Costs of the cell's step at batch 1, one entry for each turn of its `timer` so far."""
        which = self._settings.temperatures.index(cell.temperature)
        return self.timer(cell.drafter, cell.k).costs()[which]

    def timer(self, name: str, k: int, draft: bool = True) -> costs_lib.StepTimer:
        """Step timer for all temperatures, which change the step but none of its passes, in the largest cache of a
        generation. ``draft``: True to make a timer that times the draft's passes too, alone and in turn with the
        target's."""
        if (name, k) not in self._timers:
            decoder, options = self.decoder(name, k), {"max_new_tokens": self._settings.new_tokens, **self._sampling}
            temperatures = self._settings.temperatures
            engines, params = zip(*(decoder.engine(t == 0) for t in temperatures), strict=True)
            states = [decoder.prefilled(self._prompts[:1], temperature=t, **options) for t in temperatures]
            self._timers[name, k] = costs_lib.StepTimer(engines, params[0], states, draft)
        return self._timers[name, k]

    def _measure_prefill(self, cell: Cell) -> float:
        """Seconds of a request before its first block: prefill, and the host's share of a generation."""
        decoder, new = self.decoder(cell.drafter, cell.k), self._settings.new_tokens
        options = {"max_new_tokens": new, "temperature": cell.temperature, **self._sampling}
        return costs_lib.median_seconds(lambda: decoder.started(self._prompts[:1], **options), 9)


def predicted_speedup(
    prefill: tuple[float, float],
    costs: tuple[Sequence[costs_lib.StepCosts], Sequence[costs_lib.StepCosts]],
    acceptance_at: Sequence[float],
    new_tokens: int,
) -> float:
    """Predicted speedup: seconds of plain decoding over those of speculation. Either side is the prefill and the steps
    or blocks that emit ``new_tokens`` tokens, each timed alone.

    ``prefill``, in seconds, and ``costs``, turn by turn, are those of plain decoding, then of speculation. The number
    of blocks follows from the acceptance by depth (2211.17192, section 3.3, with a block's own cost in place of k draft
    passes and one target pass, and with the last block cut at the budget). The result is the median over the turns.
    """
    blocks, turns = metrics.expected_blocks(acceptance_at, new_tokens), zip(*costs, strict=True)
    ratios = [(prefill[0] + new_tokens * p.step) / (prefill[1] + blocks * c.step) for p, c in turns]
    return float(np.median(ratios))


def num_ticks(settings: config_lib.Bench, drafters: int, prompts: int, tuning_prompts: int) -> int:
    """`Bench.num_ticks`, known before there is a draft. ``drafters``: number of drafters of all kinds."""
    temperatures, ks, sizes = len(settings.temperatures), len(settings.ks), settings.batch_sizes
    points = {
        size: 1 + settings.adaptive + (1 + len(settings.drafters)) * len(settings.ks_of(size)) for size in sizes
    }  # at each temperature
    if 1 in sizes:
        beside = drafters - 1 - len(settings.drafters)
        compiled, once = beside, beside * prompts
    else:
        compiled, once = ks + drafters, (1 + drafters) * prompts
    compiled += sum(points.values())
    once += sum(count * -(-prompts // size) for size, count in points.items())
    timed = 1 + ks * (1 + (HYBRID in settings.drafters)) + settings.adaptive if 1 in sizes else 2
    batches = sum(2 * -(-prompts // size) for size in sizes if size > 1 and settings.adaptive)
    tuned, repeated = ks * tuning_prompts, (timed * prompts + batches) * (settings.repeats - 1)
    return temperatures * (_COMPILE_TICKS * compiled + once + tuned + repeated)


def count_recompiles(target: Target, drafter: Drafter | None, verifier: Verifier, prompts: int = 50) -> int:
    """Number of programs compiled while decoding ``prompts`` prompts of different lengths, temperatures, seeds and
    budgets, after each bucket was seen once. It must be 0."""
    decoder = Decoder(target, drafter, verifier)
    rng, ids = np.random.default_rng(0), np.setdiff1d(np.arange(target.config.vocab_size), unused_ids(target))
    temperatures = (0.0,) if verifier.noise == "none" else (0.0, 0.3, 0.7, 1.0, 1.3)

    def request(i: int) -> None:
        length = 1 + (i * 7) % 32
        decoder.generate(
            [rng.choice(ids, length).tolist()],
            max_new_tokens=1 + (i * 5) % 16,
            temperature=temperatures[i % len(temperatures)],
            seed=i,
        )

    for length in (16, 32):
        for temperature in temperatures[:1] + temperatures[-1:]:
            decoder.compile([[0] * length], max_new_tokens=16, temperature=temperature)
    with count_compiles() as count:
        for i in range(prompts):
            request(i)
    return count.programs


def peak_rss_gb() -> float:
    """Largest resident memory of this process so far, in GB (10^9 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def memory_floor_share(target: Target, tokens_per_s: float) -> tuple[float, float]:
    """(share of the memory floor that the autoregressive loop reaches, stream bandwidth in GB/s). The floor of one
    token is one read of every weight as it is laid out. Embedding rows are only looked up and do not count."""
    params = target.layout().params
    read = counted(params)[1] - params["embedding"].nbytes
    bandwidth = costs_lib.stream_bandwidth(read)
    return tokens_per_s * read / bandwidth, bandwidth / 1e9


def _plain(temperature: float) -> Cell:
    return Cell(AUTOREGRESSIVE, 0, 1, temperature)


def _seconds(runs: Sequence[Run]) -> float:
    """Seconds of all rows together: for each the median over the repeats, so that one interruption does not count."""
    return float(np.median([[seconds for seconds, _ in run.by_row] for run in runs], axis=0).sum())


def _speedup(cell: Cell, runs: Mapping[Cell, Sequence[Run]]) -> float:
    """Speedup of a cell: ratio of the median seconds a token of plain decoding to its own, over the turns in which both
    took part."""
    plain = runs[Cell(AUTOREGRESSIVE, 0, cell.batch_size, cell.temperature)]
    seconds = _seconds(plain[: len(runs[cell])]) / _seconds(runs[cell])
    return seconds * (_tokens(runs[cell]) / _tokens(plain))


def _tokens(runs: Sequence[Run]) -> int:
    """Number of new tokens of a run; its repeats have the same."""
    return sum(map(len, runs[0].tokens))
