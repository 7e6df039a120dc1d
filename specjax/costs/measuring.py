"""Timing of the points that a cost model is fitted to, for one bucket of rows.

Passes run alone, many in one program, as `specjax.costs.timer` times them. Blocks run in the very program that
decodes, from the state after prefill. All points take turns and medians count, so that a slow spell of the machine
affects them all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, BatchCosts, fit
from specjax.costs.timer import Turns, passes, seconds_of
from specjax.decode.calibration import BlockTimer
from specjax.decode.decoder import Decoder
from specjax.decode.request import LEAST_PROMPT, bucket
from specjax.interfaces import DecodeState
from specjax.models import cache as cache_lib

Decoders = Callable[[str, int], Decoder]
"""Decoder by the name of a drafter, `PLAIN` among them, and k."""
_SECONDS = 0.1
"""Seconds of one timing, approximately: it repeats passes or blocks for as long."""
_MOST = 24
"""Largest number of blocks in one timing."""
_PASSES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Measurements to make for a bucket of rows."""

    prompts: Sequence[Sequence[int]]
    """One prompt a row, all of one length; not among the prompts that a result is judged by."""
    new_tokens: int
    """New tokens of a generation; with the prompts they decide the number of cache slots."""
    lengths: Mapping[str, Sequence[int]]
    """Drafter -> draft lengths at which its blocks are timed."""
    temperatures: Mapping[str, float]
    """Temperatures of `GREEDY`, which is always there, and of `SAMPLED`."""
    sampling: Mapping[str, Any]

    @property
    def fed(self) -> list[int]:
        """Tokens fed to each row in the timed passes of the target: powers of two up to 8, and the longest block."""
        longest = 1 + max((k for ks in self.lengths.values() for k in ks), default=0)
        return sorted({m for m in (*_PASSES, longest) if m <= longest})

    @property
    def left_out(self) -> list[int]:
        """Tokens fed in a pass that is timed and not fitted: the middle of the widest gap in ``fed``, if it has one."""
        gaps = [(b - a, (a + b) // 2) for a, b in zip(self.fed, self.fed[1:], strict=False) if b - a > 1]
        return [max(gaps)[1]] if gaps else []


def spread_lengths(ks: Sequence[int]) -> list[int]:
    """The shortest and the longest of ``ks``, which are fitted, and one between them, which tells the error of the fit.
    It is one of ``ks`` if possible."""
    low, high = min(ks), max(ks)
    middle = (low + high) / 2
    between = [k for k in ks if low < k < high] or [k for k in [round(middle)] if low < k < high]
    return sorted({low, high, *([min(between, key=lambda k: abs(k - middle))] if between else [])})


class CostTimer(Turns):
    """Timer of all points: compiles everything when made, `turn` times each point once."""

    def __init__(self, decoders: Decoders, wanted: Wanted):
        self._decoders, self._wanted = decoders, wanted
        self._context = cache_lib.num_slots(self._prefilled(PLAIN, 0).cache)
        # New tokens of a generation that needs twice the slots, as far as the target has positions.
        prompt = len(wanted.prompts[0])
        most = decoders(PLAIN, 0).target.config.max_positions - prompt
        more = min(max(2 * self._context - prompt - 1, wanted.new_tokens), most)
        self._wide = min(2 * self._context, cache_lib.num_slots(self._prefilled(PLAIN, 0, more).cache))
        wider = [more] if self._wide > self._context else []
        super().__init__(dict(itertools.chain(self._passes(wider), self._blocks(), self._starts())))
        self.turn()  # warm-up: the first run takes longer
        self.seconds.clear()

    def costs(self) -> BatchCosts:
        """Costs fitted to the medians over all turns."""
        return fit(self.medians(), self._context, self._wide, self._wanted.left_out)

    def _prefilled(self, name: str, k: int, new: int | None = None, mode: str = GREEDY) -> DecodeState:
        wanted = self._wanted
        options = {**wanted.sampling, "temperature": wanted.temperatures[mode]}
        return self._decoders(name, k).prefilled(wanted.prompts, max_new_tokens=new or wanted.new_tokens, **options)

    def _passes(self, wider: Sequence[int]) -> Iterator[tuple[tuple, Callable[[], float]]]:
        """Passes of target and drafters. ``wider``: new tokens of a generation in a cache of twice the slots, if there
        is one."""
        wanted = self._wanted

        def timed(part: str, name: str, k: int, new: int | None = None, tokens: int | None = None):
            engine, params = self._decoders(name, k).engine(True, len(wanted.prompts))
            timer = passes(engine, params, self._prefilled(name, k, new), tokens)[part]
            timer(1)  # compiles
            return functools.partial(timer, _as_many(timer(2), 400))

        for m in (*wanted.fed, *wanted.left_out):
            yield ("target", m), timed("target", PLAIN, 0, None, m)
        for name, ks in wanted.lengths.items():
            for k in sorted({min(ks), max(ks)}):
                yield ("draft", name, k), timed("draft", name, k)
        for new in wider:
            for m in sorted({1, wanted.fed[-1]}):
                yield ("wide_target", m), timed("target", PLAIN, 0, new, m)
            for name, ks in wanted.lengths.items():
                yield ("wide_draft", name, max(ks)), timed("draft", name, max(ks), new)

    def _blocks(self) -> Iterator[tuple[tuple, Callable[[], float]]]:
        """Blocks of the program that decodes."""
        for mode in self._wanted.temperatures:
            for name, ks in {PLAIN: (0,), **self._wanted.lengths}.items():
                for k in ks:
                    yield ("block", name, k, mode), self._of_blocks(name, k, mode)

    def _of_blocks(self, name: str, k: int, mode: str) -> Callable[[], float]:
        engine, params = self._decoders(name, k).engine(mode == GREEDY, len(self._wanted.prompts))
        most = max(1, min(_MOST, self._wanted.new_tokens // (engine.max_depth + 1)))

        def seconds(calls: int, blocks: int) -> float:
            timer = BlockTimer(engine, params, self._prefilled(name, k, mode=mode))
            return float(np.mean([timer.block(blocks) for _ in range(calls)]))

        seconds(1, 1)
        one = seconds(1, most)
        blocks = _as_many(one, most)
        return functools.partial(seconds, _as_many(blocks * one, _MOST), blocks)

    def _starts(self) -> Iterator[tuple[tuple, Callable[[], float]]]:
        """Prefills, and a generation of two tokens."""
        wanted, plain, longest = self._wanted, self._decoders(PLAIN, 0), len(self._wanted.prompts[0])

        def prefill(name: str, k: int, size: int) -> Callable[[], float]:
            decoder, prompts = self._decoders(name, k), [prompt[:size] for prompt in wanted.prompts]
            options = {"max_new_tokens": wanted.new_tokens, **wanted.sampling}
            return functools.partial(seconds_of, lambda: decoder.prefilled(prompts, **options))

        for size in sorted({longest, max(1, longest // 4)}):
            yield ("prefill", PLAIN, bucket(size, LEAST_PROMPT)), prefill(PLAIN, 0, size)
        for name, ks in wanted.lengths.items():
            yield ("prefill", name, bucket(longest, LEAST_PROMPT)), prefill(name, max(ks), longest)
        options = {"max_new_tokens": 2, "ignore_eos": True, **wanted.sampling}
        yield ("shortest",), functools.partial(seconds_of, lambda: plain.generate(wanted.prompts, **options).seeds)


def _as_many(seconds: float, most: int) -> int:
    """Number of repetitions in one timing of something that takes ``seconds``: at least 1, at most ``most``."""
    return max(1, min(most, round(_SECONDS / max(seconds, 1e-9))))


def temperatures_of(temperatures: Sequence[float]) -> dict[str, float]:
    """One temperature for each kind of program that ``temperatures`` need, always including greedy."""
    sampled = [t for t in temperatures if t > 0]
    return {GREEDY: 0.0, **({SAMPLED: sampled[0]} if sampled else {})}
