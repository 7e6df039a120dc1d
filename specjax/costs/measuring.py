"""Timing of the points that a cost model is fitted to, for one bucket of rows.

Passes run alone, many in one program, as `specjax.costs.timer` times them. Blocks run in the very program that
decodes, from the state after prefill. All points take turns and medians count, so that a slow spell of the machine
affects them all.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, Points
from specjax.costs.timer import depending, looped
from specjax.decode.decoder import Decoder
from specjax.decode.engine import block_context, propose
from specjax.decode.programs import NO_LIMIT, compiled_chunk
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
    def rows(self) -> int:
        return len(self.prompts)

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


class CostTimer:
    """Timer of all points: compiles everything when made, `turn` times each point once, `points` gives the medians."""

    def __init__(self, decoders: Decoders, wanted: Wanted):
        self._decoders, self._wanted = decoders, wanted
        self._context = cache_lib.num_slots(self._prefilled(PLAIN, 0).cache)
        self._wide = min(2 * self._context, cache_lib.num_slots(self._prefilled(PLAIN, 0, self._most_new()).cache))
        self._timed: dict[tuple, Callable[[], float]] = {}
        for add in (self._add_passes, self._add_blocks, self._add_starts):
            add()
        self._seconds: dict[tuple, list[float]] = {key: [] for key in self._timed}
        for run in self._timed.values():
            run()  # warm-up: the first run takes longer

    def turn(self) -> None:
        """Time every point once."""
        for key, run in self._timed.items():
            self._seconds[key].append(run())

    def points(self) -> Points:
        """Medians over all turns."""
        found = {key: float(np.median(seconds)) for key, seconds in self._seconds.items()}

        def of(part: str) -> dict[Any, float]:
            chosen = {key[1:]: seconds for key, seconds in found.items() if key[0] == part}
            return {key[0] if len(key) == 1 else key: seconds for key, seconds in chosen.items()}

        parts = {name: of(name) for name in ("target", "wide_target", "draft", "wide_draft", "block", "prefill")}
        return Points(self._context, self._wide, **parts, shortest=found[("shortest",)])

    def _most_new(self) -> int:
        """New tokens of a generation that needs twice the slots, as far as the target has positions."""
        prompt = len(self._wanted.prompts[0])
        most = self._decoders(PLAIN, 0).target.config.max_positions - prompt
        return min(max(2 * self._context - prompt - 1, self._wanted.new_tokens), most)

    def _prefilled(self, name: str, k: int, new: int | None = None, mode: str = GREEDY):
        wanted = self._wanted
        options = {**wanted.sampling, "temperature": wanted.temperatures[mode]}
        decoder = self._decoders(name, k)
        return decoder.prefilled(wanted.prompts, max_new_tokens=new or wanted.new_tokens, **options)

    # --- passes

    def _add_passes(self) -> None:
        wanted = self._wanted
        caches = {"target": None, "wide_target": self._most_new() if self._wide > self._context else None}
        for part, new in caches.items():
            if part == "wide_target" and new is None:
                continue
            ends = {1, wanted.fed[-1]}
            for m in (*wanted.fed, *wanted.left_out) if part == "target" else sorted(ends):
                self._timed[part, m] = self._of_target(m, new)
        for name, ks in wanted.lengths.items():
            for k in sorted({min(ks), max(ks)}):
                self._timed["draft", name, k] = self._of_draft(name, k, None)
            if caches["wide_target"] is not None:
                self._timed["wide_draft", name, max(ks)] = self._of_draft(name, max(ks), caches["wide_target"])

    def _of_target(self, m: int, new: int | None) -> Callable[[], float]:
        engine, params = self._decoders(PLAIN, 0).engine(True, self._wanted.rows)
        state = cache_lib.fold(self._prefilled(PLAIN, 0, new))

        def body(params, lengths, cache, tokens):
            slots = (lengths - 1)[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
            out = engine.target(params.target, tokens, slots, slots, cache)
            return out.cache, depending(tokens, out.logits)

        carry = state.cache, jnp.zeros((self._wanted.rows, m), jnp.int32)
        return _repeated(body, m, params, state, carry)

    def _of_draft(self, name: str, k: int, new: int | None) -> Callable[[], float]:
        engine, params = self._decoders(name, k).engine(True, self._wanted.rows)
        state = cache_lib.fold(self._prefilled(name, k, new))

        def body(params, lengths, state):
            state = dataclasses.replace(state, lengths=lengths)
            draft, state = propose(engine, params, state, block_context(engine, params, state))
            drawn = draft.tokens.astype(jnp.float32) if draft.logits is None else draft.logits
            return (dataclasses.replace(state, tokens=depending(state.tokens, drawn)),)

        return _repeated(body, engine.num_nodes + 1, params, state, (state,))

    # --- blocks of the program that decodes

    def _add_blocks(self) -> None:
        wanted = self._wanted
        for mode in wanted.temperatures:
            self._timed["block", PLAIN, 0, mode] = self._of_blocks(PLAIN, 0, mode)
            for name, ks in wanted.lengths.items():
                for k in ks:
                    self._timed["block", name, k, mode] = self._of_blocks(name, k, mode)

    def _of_blocks(self, name: str, k: int, mode: str) -> Callable[[], float]:
        engine, params = self._decoders(name, k).engine(mode == GREEDY, self._wanted.rows)
        chunk = compiled_chunk(engine)
        most = max(1, min(_MOST, self._wanted.new_tokens // (engine.max_depth + 1)))  # no row ends within them

        def seconds(calls: int, blocks: int = most) -> float:
            taken: dict[int, list[float]] = {0: [], blocks: []}
            for _ in range(calls):
                state = jax.block_until_ready(self._prefilled(name, k, mode=mode))
                for n, found in taken.items():
                    start = time.perf_counter()
                    state = chunk(params, state, np.int32(n), np.int32(NO_LIMIT))
                    jax.device_get((state.lengths, state.done))
                    found.append(time.perf_counter() - start)
            # A call without a block takes the host's time alone. Its minimum counts, since noise only adds.
            return (float(np.mean(taken[blocks])) - min(taken[0])) / blocks

        seconds(1, 1)
        one = seconds(1)
        blocks = _as_many(one, most)
        return functools.partial(seconds, _as_many(blocks * one, _MOST), blocks)

    # --- prefill and host

    def _add_starts(self) -> None:
        prompts, lengths = self._wanted.prompts, self._wanted.lengths
        longest = len(prompts[0])
        for size in sorted({longest, max(1, longest // 4)}):
            cut = [prompt[:size] for prompt in prompts]
            self._timed["prefill", PLAIN, _padded(size)] = self._of_prefill(PLAIN, 0, cut)
        for name, ks in lengths.items():
            self._timed["prefill", name, _padded(longest)] = self._of_prefill(name, max(ks), prompts)
        plain = self._decoders(PLAIN, 0)

        def shortest() -> float:
            start = time.perf_counter()
            plain.generate(prompts, max_new_tokens=2, ignore_eos=True, **self._wanted.sampling)
            return time.perf_counter() - start

        self._timed[("shortest",)] = shortest

    def _of_prefill(self, name: str, k: int, prompts: Sequence[Sequence[int]]) -> Callable[[], float]:
        decoder, wanted = self._decoders(name, k), self._wanted

        def seconds() -> float:
            start = time.perf_counter()
            jax.block_until_ready(decoder.prefilled(prompts, max_new_tokens=wanted.new_tokens, **wanted.sampling))
            return time.perf_counter() - start

        return seconds


def _repeated(body, stride: int, params: Any, state: Any, carry: tuple) -> Callable[[], float]:
    """Timer of one iteration of ``body``, in seconds. ``stride``: tokens by which an iteration grows the context."""
    room = cache_lib.first(state.cache).room(state.lengths) - stride
    loop = functools.partial(looped(body, stride), params=params, lengths=state.lengths, room=room, carry=carry)

    def seconds(iterations: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(0, iterations))
        return (time.perf_counter() - start) / iterations

    seconds(1)
    return functools.partial(seconds, _as_many(seconds(2), 400))


def _as_many(seconds: float, most: int) -> int:
    """Number of repetitions in one timing of something that takes ``seconds``: at least 1, at most ``most``."""
    return max(1, min(most, round(_SECONDS / max(seconds, 1e-9))))


def _padded(size: int) -> int:
    """Padded length of a prompt of ``size`` tokens, as in `specjax.decode.request`."""
    return max(16, 1 << (size - 1).bit_length())


def temperatures_of(temperatures: Sequence[float]) -> dict[str, float]:
    """One temperature for each kind of program that ``temperatures`` need, always including greedy."""
    sampled = [t for t in temperatures if t > 0]
    return {GREEDY: 0.0, **({SAMPLED: sampled[0]} if sampled else {})}
