"""Block costs that a controller weighs with: seconds per block at each length, and the chance of each acceptance. They
are measured with the very program that decodes. Before any measurement they are a guess from the bytes that a pass of
the draft and of the target reads. The guess is the same in every run, so runs that use it can be repeated anywhere.

Dims: K depths, K1 = K + 1.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode.engine import Engine, EngineParams
from specjax.decode.programs import NO_LIMIT, compiled_chunk
from specjax.interfaces import BoundDrafter, Calibration, DecodeState

LEAST_TURNS = 3
_LEAST_BLOCKS, _LEAST_SECONDS = 2, 0.05
"""Fewest blocks of the longest length in a turn, and fewest seconds, unless fewer blocks are asked for. Short turns
follow the pace of a machine that others use: of SmolLM2-135M on 2 cores, turns of 2 blocks for 12 s gave costs within
3% of each other, turns of 12 blocks for 22 s within 6%."""
_LEAST_SEEN, _SECONDS_KNOWN = 32, 1.0
"""Fewest blocks that tell how often proposed tokens are accepted, and most seconds of them beside known costs."""
_ALIKE = 16
"""Number of blocks that the acceptance over all depths counts for at each depth. Depths differ little, and a depth that
looks bad by a few blocks of one text would never be tried again."""
_CLASSES_ALIKE = 4
"""Number of proposed tokens that the acceptance over all match classes counts for in each of them."""
_AGREES = 1.3
"""Factor within which the costs of all lengths must have changed alike for two measurements to agree. A shared machine
goes back and forth by as much as 1.25 within a minute, and costs that are right on average suit both of its states."""


class BlockTimer:
    """Timer of blocks in the very program that decodes, each time from the same state. It compiles nothing to time one
    length after the other: a calibration in which all other lengths cost infinitely much holds the program to one.

    The timer borrows the state's cache of the target. Blocks write behind the end of a row, where slots are masked, so
    the cache comes back as good as it was. Each run copies the rest of the state. ``controller``: the controller's
    state before the first block, in which it follows the calibration alone; None: that of ``state``, which is taken
    before the first block.
    """

    def __init__(self, engine: Engine, params: EngineParams, state: DecodeState, controller: Any = None):
        self._engine, self._params, self._chunk = engine, params, compiled_chunk(engine)
        self._rest, self._cache = dataclasses.replace(state, cache=None), state.cache
        self._controller = state.controller if controller is None else controller
        self.seconds = 0.0
        """Seconds that all turns took, copies included."""

    @property
    def state(self) -> DecodeState:
        """The state as it was handed in."""
        return dataclasses.replace(self._rest, cache=self._cache)

    @property
    def start(self) -> DecodeState:
        """The state without the target's cache, in which no row ends, neither at a stop token nor at its budget, and
        whose controller has no evidence."""
        since = self._rest
        stop_ids, budget, done = (
            _like(x, value) for x, value in ((since.stop_ids, -1), (since.budget, NO_LIMIT), (since.done, False))
        )
        return dataclasses.replace(since, stop_ids=stop_ids, budget=budget, done=done, controller=self._controller)

    @property
    def certain(self) -> DecodeState:
        """The state `start` with a single token that text and target repeat for ever: whatever a drafter reads, it
        finds its longest proposal, so that every block has the length that it is held to."""
        since, sampling = self.start, self._rest.sampling
        only = np.where(np.arange(sampling.bias.shape[1]) == 0, 0.0, -np.inf)
        bias = _like(sampling.bias, np.broadcast_to(only, sampling.bias.shape))
        return dataclasses.replace(
            since, tokens=_like(since.tokens, 0), sampling=dataclasses.replace(sampling, bias=bias)
        )

    def run(self, length: int | None, blocks: int, since: DecodeState, found: bool = True) -> tuple[float, DecodeState]:
        """Seconds of ``blocks`` blocks of one length, and the state after them; both states lack the target's cache.
        ``length`` None: the lengths are those that the program chooses. ``found``: False if proposals are not to be
        found without the draft's model."""
        params = self._params
        if length is not None:
            params = dataclasses.replace(params, calibration=forced_length(length, self._engine.drafter, found))
        copied = jax.block_until_ready(jax.device_put(since, may_alias=False))  # the chunk consumes it
        state = dataclasses.replace(copied, cache=self._cache)
        begun = time.perf_counter()
        state = jax.block_until_ready(self._chunk(params, state, np.int32(blocks), np.int32(NO_LIMIT)))
        seconds = time.perf_counter() - begun
        self._cache = state.cache
        return seconds, dataclasses.replace(state, cache=None)

    def block(self, blocks: int) -> float:
        """Seconds of a block of the lengths that the program chooses, the mean of ``blocks`` from the state `start`."""
        since = self.start
        return self._mean(None, blocks, since, self._call(None, since))

    def turn(self, blocks: int) -> np.ndarray | None:
        """Seconds of a block at each of the engine's lengths, from ``blocks`` blocks of the longest length and more of
        the others; behind them those of blocks whose proposals were found without the draft's model, if there are such
        blocks. None if the cache has no room for a block."""
        begun, since, lengths = time.perf_counter(), self.certain, self._engine.compiled_lengths
        call, most = self._call(lengths[0], since), self._engine.max_depth
        # The first blocks of a run are slower, so short lengths run more blocks.
        wanted = [blocks * (most + 1) // (min(length, most) + 1) for length in lengths]
        seconds = np.asarray(
            [
                self._mean(length, count, since, call, found)
                for found in ((False, True) if finds(self._engine.drafter) else (True,))
                for length, count in zip(lengths, wanted, strict=True)
            ]
        )
        if np.isnan(seconds).any():
            return None
        self.seconds += time.perf_counter() - begun
        return seconds

    def _call(self, length: int | None, since: DecodeState) -> float:
        """Seconds of a call without a block. The smaller of two counts, since noise only adds."""
        return min(self.run(length, 0, since)[0] for _ in range(2))

    def _mean(self, length: int | None, blocks: int, since: DecodeState, call: float, found: bool = True) -> float:
        """Seconds of one of ``blocks`` blocks, without those of the call; NaN if the cache has no room for any."""
        seconds, state = self.run(length, blocks, since, found)
        before, after = map(_blocks_of, (since, state))
        return max(seconds - call, seconds / 2) / (after - before) if after > before else np.nan


def _blocks_of(state: DecodeState) -> int:
    """Number of blocks that the state has seen."""
    return int(jax.device_get(state.counters.blocks).max())


def _like(x: Any, value: Any) -> Any:
    """An array of ``value`` with the shape, type and device of ``x``; nothing is compiled for it."""
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
    """Costs of the engine's lengths, and the acceptance of the draft. The lengths take turns for ``budget`` seconds,
    from ``start``, a state with room for ``blocks`` of the longest blocks, which a turn has at most; costs between two
    lengths are interpolated. ``costs``: earlier measurements, which a few turns may confirm."""
    timer, depth, lengths = BlockTimer(engine, params, start), engine.max_depth, engine.compiled_lengths
    for length in lengths[:-1]:  # warm-up: the first run compiles, and reads cold memory
        timer.run(length, 2, timer.start)
    # As many blocks as the time and the cache have room for, since few say little about acceptance.
    took, ended = timer.run(lengths[-1], _LEAST_SEEN, timer.start)
    of_block = took / max(1, _blocks_of(ended))
    left = (budget if costs is None else min(budget, _SECONDS_KNOWN)) - took
    if left > of_block:
        ended = timer.run(lengths[-1], math.ceil(left / of_block), ended)[1]
    chances = chances_of(engine, ended)
    blocks = min(blocks, max(_LEAST_BLOCKS, math.ceil(_LEAST_SECONDS / of_block)))
    checks: list[np.ndarray] = []
    while costs is not None and len(checks) < LEAST_TURNS and (turn := timer.turn(blocks)) is not None:
        checks.append(turn)
        if agree(at_each(typical(checks), engine), side_by_side(costs)):
            return dataclasses.replace(costs, **chances)
    paused, missed = None, blocks * depth
    if lengths[0] == 0 and engine.drafter.reads_late:
        # The controller is reset, so that it chooses by the length that the next run is held to.
        after = timer.run(0, missed, timer.start)[1]
        paused = dataclasses.replace(after, controller=timer.start.controller)
    turns: list[np.ndarray] = []
    late: list[float] = []
    begun = time.perf_counter()
    while len(turns) < LEAST_TURNS or time.perf_counter() - begun < budget:
        found = timer.turn(blocks)
        assert found is not None  # `start` has room
        turns.append(found)
        if paused is not None:
            late.append(timer.run(lengths[1], 1, paused)[0] - timer.run(lengths[1], 1, timer.start)[0])
    catch_up: Any = np.float32(max(np.median(late), 0) / missed if late else 0)
    known = Calibration(np.ones(depth + 1, np.float32), catch_up=catch_up, **chances)  # type: ignore[arg-type]
    return with_costs(known, at_each(typical(turns), engine))


def chances_of(engine: Engine, state: DecodeState) -> dict[str, Any]:
    """The fields of `Calibration` that tell how often proposed tokens were accepted in the blocks of ``state``."""
    assert engine.controller is not None
    counters, controller = jax.device_get((state.counters, state.controller))
    reached, accepted = counters.reached_at.sum(0), counters.accepted_at.sum(0)
    overall = (accepted.sum() + 1) / (reached.sum() + 2)
    chances = {"acceptance": _smoothed(reached, accepted, overall)}
    if (classes := engine.drafter.match_classes) == 1:
        return chances
    counts = engine.controller.counted(controller)
    if counts is None:
        return chances | {"by_class": np.broadcast_to(chances["acceptance"], (classes, len(reached)))}
    # The controller knows the depths of its lengths alone.
    pairs = list(zip(*(np.pad(x.sum(0), ((0, 0), (0, len(reached) - x.shape[2]))) for x in counts), strict=True))
    of_class = [(kept.sum() + _CLASSES_ALIKE * overall) / (had.sum() + _CLASSES_ALIKE) for had, kept in pairs]
    by_class = [_smoothed(had, kept, share) for (had, kept), share in zip(pairs, of_class, strict=True)]
    return chances | {"by_class": np.stack(by_class)}


def _smoothed(reached: np.ndarray, accepted: np.ndarray, overall: float) -> np.ndarray:
    return ((accepted + _ALIKE * overall) / (reached + _ALIKE)).astype(np.float32)


def typical(turns: Sequence[np.ndarray]) -> np.ndarray:
    """Seconds of a block at each length, from several turns. A machine is slow for longer than a turn takes, so all
    lengths of a turn share its pace: the medians are taken of each length's time relative to its turn."""
    logs = np.log(np.asarray(turns))
    pace = logs.mean(axis=1, keepdims=True)
    return np.exp(np.median(logs - pace, axis=0) + np.median(pace))


def finds(drafter: BoundDrafter) -> bool:
    """True if some of its proposals are found without its model, and cost less than the others."""
    return drafter.model_class is not None


def side_by_side(known: Calibration) -> Any:
    """The costs of a calibration as `BlockTimer.turn` has them."""
    return known.seconds if known.found is None else np.concatenate([known.seconds, known.found])


def with_costs(known: Calibration, seconds: Any) -> Calibration:
    """The calibration with other costs, which are side by side."""
    count = len(known.acceptance) + 1
    found = seconds[count:] if len(seconds) > count else None
    return dataclasses.replace(known, seconds=seconds[:count], found=found)


def agree(found: np.ndarray, known: Any) -> bool:
    """True if two measurements give the same ratios between lengths. Costs with a length that is never to be chosen
    (infinite) agree with all."""
    costs = np.asarray(known)
    return not np.isfinite(costs).all() or bool(np.ptp(np.log(found / costs)) < np.log(_AGREES))


def between(known: Any, found: np.ndarray) -> Any:
    """Costs half way from ``known`` to the ratios between lengths in ``found``, at the mean level of ``known``: of two
    measurements that agree, both are a little wrong."""
    known = np.asarray(known)
    change = np.log(found / known) if np.isfinite(known).all() else np.zeros(len(known))
    return (known * np.exp((change - change.mean()) / 2)).astype(np.float32)


def at_each(seconds: np.ndarray, engine: Engine) -> Any:
    """Seconds of a block of 0 .. K proposed tokens, interpolated from those of a turn at the engine's lengths; see
    `BlockTimer.turn`. A tree costs the same at every depth above 0."""
    depths, depth = np.arange(engine.max_depth + 1), engine.max_depth
    if engine.num_nodes != depth:
        depths = np.where(depths > 0, engine.num_nodes, 0)
    lengths = engine.compiled_lengths
    parts = [np.interp(depths, lengths, part) for part in np.split(np.asarray(seconds), len(seconds) // len(lengths))]
    return np.concatenate(parts).astype(np.float32)


def forced_length(length: int, drafter: BoundDrafter, found: bool = True) -> Calibration:
    """A calibration that holds a program to one length; ``length``: of a tree, all of its nodes or none. ``found``:
    False if proposals are not to be found without the draft's model."""
    depth = drafter.max_depth
    seconds: Any = np.where(np.arange(depth + 1) == min(length, depth), 1.0, np.inf).astype(np.float32)
    acceptance: Any = np.full((depth,), 0.5, np.float32)
    of_found = seconds if found else np.full_like(seconds, np.inf)
    by_class: Any = None if drafter.match_classes == 1 else np.full((drafter.match_classes, depth), 0.5, np.float32)
    return Calibration(seconds, acceptance, found=of_found if finds(drafter) else None, by_class=by_class)
