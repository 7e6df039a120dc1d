"""Controllers where the chance that a proposal is kept changes, and what blocks cost is given: no model, only choices.

Dims: R regimes, T blocks of a regime, B rows, K places, K1 = K + 1, S simulations.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.interfaces import Calibration, Draft, Outcome, Output, Verdict
from specjax.testing.toys import context, neutral_sampling
from tests.controllers.choices import bound

BLOCKS = 256
"""Of a regime."""
SETTLED = 64
"""Blocks after which a regime has to be known."""
DEPTH = 5


def costs(longest: float, first: float = 0.0) -> np.ndarray:
    """Seconds of a block of 0 .. `DEPTH` proposals, plain blocks taking 1: what the first proposal takes beside the
    others, and a straight line."""
    k = np.arange(DEPTH + 1)
    return (1 + first * (k > 0) + (longest - 1 - first) * k / DEPTH).astype(np.float32)


def rows_of(*chances: float) -> np.ndarray:
    """``[B, K]``, each row the same at every place."""
    return np.broadcast_to(np.asarray(chances, np.float32)[:, None], (len(chances), DEPTH))


@functools.partial(jax.jit, static_argnums=0)
def _lengths(controller: Any, chances, told: Calibration, keys) -> jax.Array:
    """The length of each block, ``[S, R, T]``."""
    regimes, rows, depth = chances.shape
    seen = context([[1]] * rows, [1] * rows, neutral_sampling(rows, 2))
    seen = dataclasses.replace(seen, controller=controller, calibration=told, active=jnp.ones((rows,), bool))
    rungs = jnp.asarray(controller.compiled_lengths, jnp.int32)

    def block(carry, regime):
        state, key = carry
        key, drawn = jax.random.split(key)
        limit = jnp.minimum(controller.choose(state, seen), depth)
        valid = jnp.arange(1, depth + 1, dtype=jnp.int32)[None] <= limit[:, None]
        kept = valid & (jax.random.uniform(drawn, (rows, depth)) < chances[regime])
        n = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        none = jnp.zeros((rows, depth + 1), jnp.int32)
        outcome = Outcome(
            dataclasses.replace(seen, limit=limit),
            Draft(none[:, 1:], valid),
            Output(jnp.zeros((rows, depth + 1, 2))),
            Verdict(n, none[:, 0]),
            n + 1,
            none,
        )
        longest = rungs[jnp.searchsorted(rungs, jnp.max(limit))]
        return (controller.adapt(state, outcome), key), longest

    def simulated(key):
        at = jnp.repeat(jnp.arange(regimes, dtype=jnp.int32), BLOCKS)
        return jax.lax.scan(block, (controller.init(rows), key), at)[1].reshape(regimes, BLOCKS)

    return jax.vmap(simulated)(keys)


def shares_of_the_best(
    controller: Any, chances: np.ndarray, seconds: np.ndarray, expected: float, settled: int = SETTLED, runs: int = 16
) -> np.ndarray:
    """How fast the slowest row is in each regime, once ``settled`` blocks have passed, beside the best fixed length.

    ``chances``: that a proposal is kept if those before it are, ``[R, B, K]``; ``expected``: what the calibration says
    of every place. The mean over so many runs, ``[R]``: counted are the tokens that the chosen lengths give on average,
    so that luck counts in choices alone.
    """
    controller = bound(controller, chances.shape[2])
    told: Any = Calibration(seconds, np.full(chances.shape[2], expected, np.float32))  # type: ignore[arg-type]
    with jax.numpy_dtype_promotion("standard"):
        lengths = np.asarray(_lengths(controller, chances, told, jax.random.split(jax.random.key(0), runs)))
    lengths = lengths[:, :, settled:]
    kept = np.cumprod(chances, axis=2).cumsum(axis=2)
    emitted = 1 + np.pad(kept, ((0, 0), (0, 0), (1, 0)))
    best = (emitted.min(1) / seconds)[:, list(controller.compiled_lengths)].max(1)
    tokens = np.stack([emitted[r][:, lengths[:, r]].sum(-1).min(0) for r in range(len(chances))], axis=1)
    return (tokens / seconds[lengths].sum(2)).mean(0) / best


def after_blocks(controller: Any, kept: list[int], seconds: np.ndarray, expected: float) -> list[int]:
    """The lengths of one row's blocks, of which each keeps so many proposals, and of the one that follows."""
    controller = bound(controller, DEPTH)
    seen = context([[1]], [1], neutral_sampling(1, 2))
    told: Any = Calibration(seconds, np.full(DEPTH, expected, np.float32))  # type: ignore[arg-type]
    seen = dataclasses.replace(seen, controller=controller, calibration=told, active=jnp.ones((1,), bool))
    state, found, none = controller.init(1), [], jnp.zeros((1, DEPTH + 1), jnp.int32)
    for count in [*kept, 0]:
        limit = jnp.minimum(controller.choose(state, seen), DEPTH)
        found.append(int(limit[0]))
        n = jnp.minimum(limit, count)
        outcome = Outcome(
            dataclasses.replace(seen, limit=limit),
            Draft(none[:, 1:], jnp.arange(1, DEPTH + 1, dtype=jnp.int32)[None] <= limit[:, None]),
            Output(jnp.zeros((1, DEPTH + 1, 2))),
            Verdict(n, none[:, 0]),
            n + 1,
            none,
        )
        state = controller.adapt(state, outcome)
    return found


def after_blocks_of(controller: Any, drafter: Any, kept: list[tuple[int, int]], told: Calibration) -> list[int]:
    """The lengths of one row's blocks with their proposals in view. Each has a proposal of a match class, of which so
    many tokens would be kept."""
    with jax.numpy_dtype_promotion("standard"):
        return _reviewed(controller.bind(drafter), jnp.asarray(kept, jnp.int32), told).tolist()


@functools.partial(jax.jit, static_argnums=0)
def _reviewed(controller: Any, kept: jax.Array, told: Calibration) -> jax.Array:
    seen = context([[1]], [1], neutral_sampling(1, 2))
    seen = dataclasses.replace(seen, controller=controller, calibration=told, active=jnp.ones((1,), bool))
    none = jnp.zeros((1, DEPTH + 1), jnp.int32)

    def block(state, of):
        draft = Draft(none[:, 1:], jnp.ones((1, DEPTH), bool), match_class=of[:1])
        limit = controller.review(state, seen, draft)
        valid = jnp.arange(1, DEPTH + 1, dtype=jnp.int32)[None] <= limit[:, None]
        n = jnp.minimum(limit, of[1:])
        outcome = Outcome(
            dataclasses.replace(seen, limit=limit),
            dataclasses.replace(draft, valid=valid),
            Output(jnp.zeros((1, DEPTH + 1, 2))),
            Verdict(n, none[:, 0]),
            n + 1,
            none,
        )
        return controller.adapt(state, outcome), limit[0]

    return jax.lax.scan(block, controller.init(1), kept)[1]
