"""Costs of one step, timed alone on the device: passes of target and draft, whole blocks, memory bandwidth.

Every cost is a `fori_loop` of many iterations of the same shapes inside one program, so launch and host time vanish.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import backend
from specjax.decode.engine import Engine, EngineParams, block_context, propose, step
from specjax.interfaces import DecodeState
from specjax.models import cache as cache_lib


@dataclasses.dataclass(eq=False)
class CompileCount:
    """Number of programs handed to the backend compiler (from the persistent cache or not), and seconds spent there."""

    programs: int = 0
    seconds: float = 0.0


_open_counts: list[CompileCount] = []


def _on_duration(event: str, duration_secs: float, **_: str | int | float) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for count in _open_counts:
            count.programs += 1
            count.seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_on_duration)


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count every program compiled inside the ``with`` statement, stray eager operations included."""
    count = CompileCount()
    _open_counts.append(count)
    try:
        yield count
    finally:
        _open_counts.remove(count)


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``run`` until its result is ready; a first call is not counted."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


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


class StepTimer:
    """Timer of the parts of a block at the shapes of ``states``, which are copied and not consumed. ``engines`` differ
    only in how they sample, so they share their passes. Without ``draft`` only the target's passes and whole blocks are
    timed, and the rest is NaN. The timer compiles when made. Every `turn` runs each loop once, so turns can be spread
    over the measurement that the costs are to explain."""

    def __init__(
        self,
        engines: Sequence[Engine],
        params: EngineParams,
        states: Sequence[DecodeState],
        draft: bool = True,
        iterations: int = 40,
    ):
        self._iterations, self._count = iterations, len(engines)
        nodes, lengths = engines[0].num_nodes, states[0].lengths
        self._drafts = nodes > 0
        room = cache_lib.first(states[0].cache).room(lengths) - nodes
        self._loops = {
            name: functools.partial(looped(body, nodes + 1), params=params, lengths=lengths, room=room, carry=carry)
            for name, (body, carry) in _parts(engines, [cache_lib.fold(state) for state in states], draft).items()
        }
        self._turns: list[dict[str, float]] = []
        self._run(0, 1)

    def _run(self, first: int, iterations: int) -> dict[str, float]:
        seconds = {}
        for name, loop in self._loops.items():
            start = time.perf_counter()
            jax.block_until_ready(loop(first, iterations))
            seconds[name] = (time.perf_counter() - start) / iterations
        return seconds

    def turn(self) -> None:
        """Run each loop once, from the context where the last turn ended."""
        self._turns.append(self._run(len(self._turns) * self._iterations, self._iterations))

    def costs(self) -> list[list[StepCosts]]:
        """Costs of each engine, one entry a turn."""
        found = []
        for i in range(self._count):
            parts = [(t["target"], *self._of_draft(t), t[f"step {i}"]) for t in self._turns]
            found.append([StepCosts(*seconds) for seconds in parts])
        return found

    def _of_draft(self, turn: Mapping[str, float]) -> tuple[float, float]:
        if not self._drafts:
            return 0.0, turn["target"]
        return turn.get("draft", math.nan), turn.get("passes", math.nan)


def looped(body, stride: int):
    """Jitted loop ``(first, iterations, ...) -> carry``. Each iteration grows the context by a block, as in a
    generation, and it starts again when the cache is full. (At constant lengths a block is 1.05x faster than in a
    generation.)"""

    def run(first, iterations, params, lengths, room, carry):
        def iteration(i, carry):
            return body(params, lengths + i * stride % room, *carry)

        return jax.lax.fori_loop(first, first + iterations, iteration, carry)

    return jax.jit(run, compiler_options=backend.compiler_options(decoding=True))


def _parts(engines: Sequence[Engine], states: Sequence[DecodeState], draft: bool) -> dict[str, tuple[Callable, tuple]]:
    """Name -> (one iteration ``(params, lengths, *carry) -> carry``, the first carry)."""
    engine, state = engines[0], states[0]
    nodes, batch = engine.num_nodes, state.lengths.shape[0]

    def target_pass(params, lengths, cache, tokens):
        slots = (lengths - 1)[:, None] + jnp.arange(nodes + 1, dtype=jnp.int32)[None]
        out = engine.target(params.target, tokens, slots, slots, cache)
        return out.cache, depending(tokens, out.logits)

    def draft_itself(params, lengths, state):
        state = dataclasses.replace(state, lengths=lengths)
        draft, state = propose(engine, params, state, block_context(engine, params, state))
        drawn = draft.tokens.astype(jnp.float32) if draft.logits is None else draft.logits
        return (dataclasses.replace(state, tokens=depending(state.tokens, drawn)),)

    def both(params, lengths, target_carry, state):
        (state,) = draft_itself(params, lengths, state)
        cache, fed = target_carry
        cache, fed = target_pass(params, lengths, cache, depending(fed, state.tokens[:, :1].astype(jnp.float32)))
        return (cache, fed), dataclasses.replace(state, tokens=depending(state.tokens, fed[:, :1].astype(jnp.float32)))

    def whole_step(engine, params, lengths, state):
        state = dataclasses.replace(state, lengths=lengths)
        return (dataclasses.replace(step(engine, params, state), done=state.done),)

    tokens = jnp.zeros((batch, nodes + 1), jnp.int32)
    parts: dict[str, tuple[Callable, tuple]] = {"target": (target_pass, (state.cache, tokens))}
    if nodes and draft:
        parts["draft"] = draft_itself, (state,)
        parts["passes"] = both, ((state.cache, tokens), state)
    for i, carried in enumerate(states):
        parts[f"step {i}"] = functools.partial(whole_step, engines[i]), (carried,)
    return parts


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
