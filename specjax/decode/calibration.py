"""What a controller weighs with: measured, with the very program that decodes, or, before anything is, a guess from the
bytes that a draft's pass and a target's read. The guess is the same in every run, so what it leads to can be repeated
anywhere.

Dims: K places, K1 = K + 1.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax import backend
from specjax.decode.engine import Engine, EngineParams
from specjax.decode.programs import NO_LIMIT, compiled_chunk
from specjax.models.kernels import counted
from specjax.types import Calibration, DecodeState

_LEAST_TURNS = 3
_ALIKE = 16
"""Blocks that all places together count for at each of them: they differ little, and a place that looks bad by a few
blocks of one text would never be tried again."""
_HANDED_IN = 64
"""Blocks that costs which nobody here has measured are believed."""
_BLOCKS = 3
"""The longest ones of a turn that corrects."""
_RARELY = 100
"""Times as long as measuring took, it is decoded before the next time: it costs a percent."""
_CHUNK = 512
"""Blocks between two looks whether costs are to be measured again."""
_AGREES = 1.3
"""Times: two measurements of which all lengths' costs changed alike, to within this, agree. A shared machine goes back
and forth by as much as 1.25 within a minute, and what is right on average is right for either."""
_ACCEPTANCE = 0.7
"""Of a proposal, before there is evidence: about what an untuned draft reaches."""


def guessed(target_params: Any, drafter_params: Any, depth: int) -> Calibration:
    """Of blocks of up to ``depth`` proposals: in passes of the target over one token, what the drafts' passes read, and
    what every token more is worth on this kind of device."""
    draft = _read(drafter_params) / max(_read(target_params), 1)
    seconds: Any = 1.0 + np.arange(depth + 1, dtype=np.float32) * np.float32(draft + backend.token_share())
    acceptance: Any = np.full((depth,), _ACCEPTANCE, np.float32)
    return Calibration(seconds, acceptance)


def _read(params: Any) -> int:
    """Bytes of all that a pass multiplies with: an embedding that is no head too is only looked up."""
    looked_up = params["embedding"].nbytes if isinstance(params, dict) and {"embedding", "head"} <= params.keys() else 0
    return counted(params)[1] - looked_up


class BlockTimer:
    """Times a program's blocks, held to one length after the other, each time from the same state. Nothing is compiled
    for it: a calibration in which all lengths but one cost infinitely much makes the program keep to that one.

    The state's cache of the target is lent: what blocks write behind the end of a row is masked, so it comes back as
    good as it was. The rest of the state is copied for each run. ``controller``: the controller's state before the
    first block, when it does what the calibration says; None: that of ``state``, which is there.
    """

    def __init__(self, engine: Engine, params: EngineParams, state: DecodeState, controller: Any = None):
        self._engine, self._params, self._chunk = engine, params, compiled_chunk(engine)
        self._rest, self._cache = dataclasses.replace(state, cache=None), state.cache
        self._controller = state.controller if controller is None else controller
        self.seconds = 0.0
        """Of all turns, with what they copied."""

    @property
    def state(self) -> DecodeState:
        """As it was given."""
        return dataclasses.replace(self._rest, cache=self._cache)

    @property
    def start(self) -> DecodeState:
        """The state without the target's cache, such that no row ends, neither at a stop token nor at its budget, and
        with a controller that has seen nothing."""
        since = self._rest
        stop_ids, budget, done = (
            _like(x, value) for x, value in ((since.stop_ids, -1), (since.budget, NO_LIMIT), (since.done, False))
        )
        return dataclasses.replace(since, stop_ids=stop_ids, budget=budget, done=done, controller=self._controller)

    def run(self, rung: int, blocks: int, since: DecodeState) -> tuple[float, DecodeState]:
        """Seconds of so many blocks of a length, and the state after them; both states without the target's cache."""
        only = dataclasses.replace(self._params, calibration=held_to(rung, self._engine.max_depth))
        copied = jax.block_until_ready(jax.device_put(since, may_alias=False))  # which the chunk takes over
        state = dataclasses.replace(copied, cache=self._cache)
        begun = time.perf_counter()
        state = jax.block_until_ready(self._chunk(only, state, np.int32(blocks), np.int32(NO_LIMIT)))
        seconds = time.perf_counter() - begun
        self._cache = state.cache
        return seconds, dataclasses.replace(state, cache=None)

    def turn(self, blocks: int) -> np.ndarray | None:
        """Seconds of a block at each of the engine's lengths, of ``blocks`` of the longest and of more of the others;
        None if the cache has no room for one."""
        begun, since, found = time.perf_counter(), self.start, []
        before = int(jax.device_get(since.counters.blocks).max())
        call = min(self.run(self._engine.rungs[0], 0, since)[0] for _ in range(2))
        for rung in self._engine.rungs:
            # The first blocks of a run are slower, so short ones are given more.
            wanted = blocks * (self._engine.max_depth + 1) // (min(rung, self._engine.max_depth) + 1)
            seconds, state = self.run(rung, wanted, since)
            count = int(jax.device_get(state.counters.blocks).max()) - before
            if not count:
                return None
            found.append(max(seconds - call, seconds / 2) / count)
        if self._engine.decides_after:  # every other block was one without a draft
            found[1:] = [max(2 * seconds - found[0], found[0] / 100) for seconds in found[1:]]
        self.seconds += time.perf_counter() - begun
        return np.asarray(found)


def _like(x: Any, value: int) -> Any:
    """An array of one value in the place of ``x``; nothing is compiled for it."""
    full = np.full(x.shape, value, x.dtype)
    return jax.device_put(full, x.sharding) if x.committed else jax.device_put(full)


def measured(
    engine: Engine,
    params: EngineParams,
    start: DecodeState,
    blocks: int,
    budget: float,
    costs: Calibration | None = None,
) -> Calibration:
    """Of the engine's lengths, which take turns for ``budget`` seconds, from ``start``, a state with room for
    ``blocks`` of the longest blocks; between the lengths, on straight lines. ``costs``: as they were measured before,
    which one turn may confirm."""
    timer, depth, rungs = BlockTimer(engine, params, start), engine.max_depth, engine.rungs
    for rung in rungs[:-1]:  # the first one also compiles, and reads what is cold
        timer.run(rung, 2, timer.start)
    # As many as the cache has room for: few blocks say little about acceptance.
    counters = jax.device_get(timer.run(rungs[-1], NO_LIMIT, timer.start)[1].counters)
    reached, accepted = counters.reached_at.sum(0), counters.accepted_at.sum(0)
    overall = (accepted.sum() + 1) / (reached.sum() + 2)
    chances: Any = ((accepted + _ALIKE * overall) / (reached + _ALIKE)).astype(np.float32)
    turn = None if costs is None else timer.turn(blocks)
    if costs is not None and turn is not None and agree(at_each(turn, engine), costs.seconds):
        return dataclasses.replace(costs, acceptance=chances)
    paused, missed = None, blocks * depth
    if rungs[0] == 0 and not engine.decides_after:
        # Its controller is to choose anew, by the length that it is held to then.
        after = timer.run(0, missed, timer.start)[1]
        paused = dataclasses.replace(after, controller=timer.start.controller)
    turns: list[np.ndarray] = []
    late: list[float] = []
    begun = time.perf_counter()
    while len(turns) < _LEAST_TURNS or time.perf_counter() - begun < budget:
        found = timer.turn(blocks)
        assert found is not None  # `start` has room
        turns.append(found)
        if paused is not None:
            late.append(timer.run(rungs[1], 1, paused)[0] - timer.run(rungs[1], 1, timer.start)[0])
    catch_up: Any = np.float32(max(np.median(late), 0) / missed if late else 0)
    return Calibration(at_each(typical(turns), engine), chances, catch_up)


def typical(turns: Sequence[np.ndarray]) -> np.ndarray:
    """Seconds of a block at each length, by several turns. A machine is slow for longer than a turn takes, which all
    lengths share: so the medians are of what each takes beside the others of its turn."""
    logs = np.log(np.asarray(turns))
    pace = logs.mean(axis=1, keepdims=True)
    return np.exp(np.median(logs - pace, axis=0) + np.median(pace))


def agree(found: np.ndarray, known: Any) -> bool:
    """Whether two measurements say the same of how lengths compare; to what was never to be chosen none is compared."""
    told = np.asarray(known)
    return not np.isfinite(told).all() or bool(np.ptp(np.log(found / told)) < np.log(_AGREES))


def between(known: Any, found: np.ndarray) -> Any:
    """Costs half way from those that are ``known`` to how lengths compare in what was ``found``: two measurements that
    agree are both a little wrong."""
    known = np.asarray(known)
    change = np.log(found / known) if np.isfinite(known).all() else np.zeros(len(known))
    return (known * np.exp((change - change.mean()) / 2)).astype(np.float32)


def at_each(seconds: np.ndarray, engine: Engine) -> Any:
    """Seconds at each depth of a proposal, of those at the engine's lengths. A tree costs the same at every depth."""
    depths, depth = np.arange(engine.max_depth + 1), engine.max_depth
    if engine.num_nodes != depth:
        depths = np.where(depths > 0, engine.num_nodes, 0)
    return np.interp(depths, engine.rungs, seconds).astype(np.float32)


@dataclasses.dataclass
class Correction:
    """What blocks are said to cost, compared with what they take: `Decoder` asks it between two chunks. Nothing that it
    does changes a token or a row's state, but the lengths that are chosen afterwards.

    Costs that were handed in are measured after `_HANDED_IN` blocks. Those that were measured are measured again after
    `_RARELY` times as long as that took: a wrong cost does not outlive that time, whoever measured it.
    """

    known: Calibration
    """Which this is about."""
    measured: bool
    """By this process."""
    shapes: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Of the batches that it was measured in."""
    origin: Calibration = dataclasses.field(init=False)
    """What it was at first."""
    blocks: int = 0
    """Decoded since it is known."""
    seconds: float = 0.0
    """Decoded since it was measured."""
    took: float = 0.1
    """Seconds of measuring."""

    def __post_init__(self):
        self.origin = self.known

    def wants(self, shapes: tuple[int, ...]) -> bool:
        """Whether a batch of these shapes is to be decoded by the program that can be measured, although it proposes
        nothing. It is compiled where this has been done before."""
        return not self.measured or (self.due and shapes in self.shapes)

    @property
    def due(self) -> bool:
        """Whether to measure before the next block."""
        if not self.measured:
            return self.blocks >= _HANDED_IN
        return self.seconds > _RARELY * self.took

    @property
    def patience(self) -> int:
        """Blocks until this is to be asked again."""
        return _CHUNK if self.measured else max(_HANDED_IN - self.blocks, 1)

    def decoded(self, seconds: float, blocks: int) -> None:
        """Take in a chunk: its seconds, and the most blocks of a row."""
        self.blocks, self.seconds = self.blocks + blocks, self.seconds + seconds

    def corrected(self, timer: BlockTimer, engine: Engine, shapes: tuple[int, ...]) -> Calibration:
        """The calibration half way to a turn of now, if that agrees with it, else by the medians of as many as a
        measurement takes at least."""
        self.shapes.add(shapes)
        first = timer.turn(_BLOCKS)
        if first is not None:
            seconds = between(self.known.seconds, at_each(first, engine))
            if not agree(at_each(first, engine), self.known.seconds):
                turns = [first, *(turn for _ in range(_LEAST_TURNS - 1) if (turn := timer.turn(_BLOCKS)) is not None)]
                seconds = at_each(typical(turns), engine)
            self.known = dataclasses.replace(self.known, seconds=seconds)
        self.measured, self.took = True, max(timer.seconds, 1e-3)
        self.blocks, self.seconds = 0, 0.0
        return self.known


def held_to(rung: int, depth: int) -> Calibration:
    """That keeps to one length; of a tree, to all of its ``rung`` nodes or to none."""
    seconds: Any = np.where(np.arange(depth + 1) == min(rung, depth), 1.0, np.inf).astype(np.float32)
    acceptance: Any = np.full((depth,), 0.5, np.float32)
    least: Any = np.int32(rung)
    return Calibration(seconds, acceptance, least=least)
