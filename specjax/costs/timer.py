"""Timing on the device: passes of target and draft alone, a block and its parts, memory bandwidth.

Passes are a `fori_loop` of many iterations of the same shapes inside one program. On a GPU, which asks the host before
each iteration of a loop whose length it does not know, this hides launches but not the asking.
Blocks are timed by `specjax.decode.calibration`, in the very program that decodes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import backend
from specjax.decode.calibration import BlockTimer
from specjax.decode.engine import Engine, EngineParams, block_context, propose
from specjax.interfaces import DecodeState
from specjax.models import cache as cache_lib


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of ``run`` until its result is ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``run`` until its result is ready; a first call is not counted."""
    jax.block_until_ready(run())
    return float(np.median([seconds_of(run) for _ in range(repeats)]))


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of a block and its parts. ``target``: one pass over the block's tokens; ``draft``: the drafter's work for
    a block, each of these alone in its loop; ``passes``: both in turn, as a block makes them; ``step``: the whole
    block, with transform, draws, verification and commit."""

    target: float
    draft: float
    passes: float
    step: float

    @property
    def overhead(self) -> float:
        """Seconds of the step over those of its passes."""
        return self.step / self.passes

    @property
    def overhead_apart(self) -> float:
        """Seconds of the step over the sum of passes timed alone. A draft that fits into a processor's cache stays
        there in a loop of its own; in a block it is read from memory again after every pass of the target."""
        return self.step / (self.target + self.draft)


def median(turns: Sequence[StepCosts]) -> StepCosts:
    return StepCosts(*(float(np.median(times)) for times in zip(*map(dataclasses.astuple, turns), strict=True)))


class Turns:
    """Timings that take turns: each turn makes every one once, so that a slow spell of the machine affects them all."""

    def __init__(self, timed: Mapping[Any, Callable[[], float]]):
        self._timed = timed
        self.seconds: dict[Any, list[float]] = {}
        """Results of each timing, in seconds, one a turn."""

    def turn(self) -> None:
        """Make every timing once."""
        for key, run in self._timed.items():
            self.seconds.setdefault(key, []).append(run())

    def medians(self) -> dict[Any, float]:
        """Median of each timing over all turns, in seconds."""
        return {key: float(np.median(seconds)) for key, seconds in self.seconds.items()}


class StepTimer(Turns):
    """Timer of a block and its parts at the shapes of ``states``, which are consumed. ``engines`` differ only in how
    they sample, so they share their passes. Without ``draft`` only the target's passes and whole blocks are timed, and
    the rest is NaN. The timer compiles when made. Turns can be spread over the measurement that the costs are to
    explain."""

    def __init__(
        self,
        engines: Sequence[Engine],
        params: EngineParams,
        states: Sequence[DecodeState],
        draft: bool = True,
        iterations: int = 40,
    ):
        self._count, self._nodes = len(engines), engines[0].num_nodes
        # Blocks consume the cache of their state.
        parts = passes(engines[0], params, jax.device_put(states[0], may_alias=False))
        kept = parts if draft and self._nodes else ("target",)
        timed: dict[Any, Callable[[int], float]] = {name: parts[name] for name in kept}
        timed |= {i: BlockTimer(e, params, s).block for i, (e, s) in enumerate(zip(engines, states, strict=True))}
        for run in timed.values():
            run(1)
        super().__init__({name: functools.partial(run, iterations) for name, run in timed.items()})

    def costs(self) -> list[list[StepCosts]]:
        """Costs of each engine, one entry a turn."""
        found, target = self.seconds, self.seconds["target"]
        draft, both = ([math.nan] * len(target),) * 2 if self._nodes else ([0.0] * len(target), target)
        parts = target, found.get("draft", draft), found.get("passes", both)
        return [[StepCosts(*turn) for turn in zip(*parts, found[i], strict=True)] for i in range(self._count)]


def passes(
    engine: Engine, params: EngineParams, state: DecodeState, tokens: int | None = None
) -> dict[str, Callable[[int], float]]:
    """Timers of passes alone: ``target``, a pass over ``tokens`` tokens in each row (None: as many as in a block);
    ``draft``, all that the drafter does for a block; ``passes``, both in turn, as a block makes them. Each takes the
    number of iterations and gives the seconds of one. It compiles when called first, and goes on from the context where
    the last call ended."""
    state, stride = cache_lib.fold(state), tokens or engine.num_nodes + 1

    def target(params, lengths, cache, tokens):
        slots = (lengths - 1)[:, None] + jnp.arange(stride, dtype=jnp.int32)[None]
        out = engine.target(params.target, tokens, slots, slots, cache)
        return out.cache, depending(tokens, out.logits)

    def draft(params, lengths, state):
        state = dataclasses.replace(state, lengths=lengths)
        draft, state = propose(engine, params, state, block_context(engine, params, state))
        drawn = draft.tokens.astype(jnp.float32) if draft.logits is None else draft.logits
        return (dataclasses.replace(state, tokens=depending(state.tokens, drawn)),)

    def both(params, lengths, cache, fed, state):
        (state,) = draft(params, lengths, state)
        cache, fed = target(params, lengths, cache, depending(fed, state.tokens[:, :1].astype(jnp.float32)))
        after = depending(state.tokens, fed[:, :1].astype(jnp.float32))
        return cache, fed, dataclasses.replace(state, tokens=after)

    fed = state.cache, jnp.zeros((len(state.lengths), stride), jnp.int32)
    bodies = {"target": (target, fed), "draft": (draft, (state,)), "passes": (both, (*fed, state))}
    room = cache_lib.first(state.cache).room(state.lengths) - stride
    where = {"params": params, "lengths": state.lengths, "room": room}

    def timer(body: Callable, carry: tuple) -> Callable[[int], float]:
        loop, done = functools.partial(looped(body, stride), **where, carry=carry), 0

        def seconds(iterations: int) -> float:
            nonlocal done
            first, done = done, done + iterations
            return seconds_of(lambda: loop(first, iterations)) / iterations

        return seconds

    return {name: timer(*body) for name, body in bodies.items()}


def looped(body, stride: int):
    """Jitted loop ``(first, iterations, ...) -> carry``. Each iteration grows the context by a block, as in a
    generation, and it starts again when the cache is full. (At constant lengths a block is 1.05x faster than in a
    generation.)"""

    def run(first, iterations, params, lengths, room, carry):
        def iteration(i, carry):
            return body(params, lengths + i * stride % room, *carry)

        return jax.lax.fori_loop(first, first + iterations, iteration, carry)

    return jax.jit(run, compiler_options=backend.compiler_options(decoding=True))


def depending(tokens, values):
    """``tokens`` unchanged but tied to all of ``values``: XLA hoists no pass out of a loop, and cuts none down."""
    return jnp.where(jnp.max(values) == jnp.inf, 1, tokens)


def stream_bandwidth(num_bytes: int, repeats: int = 20) -> float:
    """Bytes a second at which this machine reads ``num_bytes`` of float32 over and over: the best of several ways on
    a CPU (one or all cores), a device-side sum elsewhere. A pass takes at least its parameter bytes over this."""
    size = max(num_bytes // 4, 1)
    if not backend.is_host(jax.devices()[0]):
        data = jnp.ones((size,), jnp.float32)
        return num_bytes / median_seconds(lambda: jnp.sum(data), repeats)
    data = np.ones(size, np.float32)
    cores = os.cpu_count() or 1
    parts = np.array_split(data, cores)

    def read(part):
        return float(np.dot(part, part))

    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        ways = (lambda: read(data), lambda: list(pool.map(read, parts)))
        best = float("inf")
        for _ in range(repeats):
            for way in ways:
                start = time.perf_counter()
                way()
                best = min(best, time.perf_counter() - start)
    return num_bytes / best
