"""What a controller weighs with: measured, with the very program that decodes, or, before anything is, a guess from the
bytes that a draft's pass and a target's read. The guess is the same in every run, so what it leads to can be repeated
anywhere.

Dims: K places, K1 = K + 1.
"""

from __future__ import annotations

import dataclasses
import time
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


def measured(engine: Engine, params: EngineParams, start: DecodeState, blocks: int, budget: float) -> Calibration:
    """Of the engine's lengths, which take turns for ``budget`` seconds: the fastest turn from ``start``, a state with
    room for ``blocks`` of the longest blocks, and for more of the others; between the lengths, on straight lines.
    Nothing is compiled for it: a calibration in which all lengths but one cost infinitely much makes the program keep
    to that one."""
    chunk, depth, rungs = compiled_chunk(engine), engine.max_depth, engine.rungs

    def run(rung: int, blocks: int, since: DecodeState) -> tuple[float, DecodeState]:
        """Seconds, and the state after so many blocks."""
        only = dataclasses.replace(params, calibration=held_to(rung, depth))
        state = jax.block_until_ready(jax.device_put(since, may_alias=False))  # which the chunk takes over
        begun = time.perf_counter()
        state = jax.block_until_ready(chunk(only, state, np.int32(blocks), np.int32(NO_LIMIT)))
        return time.perf_counter() - begun, state

    for rung in rungs[:-1]:  # the first one also compiles, and reads what is cold
        run(rung, 2, start)
    counters = jax.device_get(run(rungs[-1], NO_LIMIT, start)[1].counters)
    paused, missed = None, blocks * depth
    if rungs[0] == 0 and not engine.decides_after:
        # Its controller is to choose anew, by the length that it is held to then.
        paused = dataclasses.replace(run(0, missed, start)[1], controller=start.controller)
    seconds: dict[int, list[float]] = {rung: [] for rung in rungs}
    late: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(seconds[rungs[0]]) < _LEAST_TURNS or time.perf_counter() - begun < budget:
        for rung, found in seconds.items():
            # The first blocks of a run are slower, so short ones are given more.
            taken, state = run(rung, blocks * (depth + 1) // (min(rung, depth) + 1), start)
            found.append(taken / max(int(jax.device_get(state.counters.blocks).max()), 1))
        if paused is not None:
            late.append((run(rungs[1], 1, paused)[0], run(rungs[1], 1, start)[0]))
    # What disturbs a machine only ever adds time.
    least = [min(found) for found in seconds.values()]
    if engine.decides_after:  # every other block was one without a draft
        least[1:] = [2 * found - least[0] for found in least[1:]]
    at: Any = np.interp(np.arange(depth + 1), rungs, least).astype(np.float32)
    reached, accepted = counters.reached_at.sum(0), counters.accepted_at.sum(0)
    overall = (accepted.sum() + 1) / (reached.sum() + 2)
    chances: Any = ((accepted + _ALIKE * overall) / (reached + _ALIKE)).astype(np.float32)
    catch_up: Any = np.float32(max(np.min(late, axis=0) @ (1, -1), 0) / missed if late else 0)
    return Calibration(at, chances, catch_up)


def held_to(rung: int, depth: int) -> Calibration:
    """That keeps to one length."""
    seconds: Any = np.where(np.arange(depth + 1) == rung, 1.0, np.inf).astype(np.float32)
    acceptance: Any = np.full((depth,), 0.5, np.float32)
    least: Any = np.int32(rung)
    return Calibration(seconds, acceptance, least=least)
