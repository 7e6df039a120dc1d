"""The output of whole generations under each controller, enumerated: every draft, every verdict, every choice of a
length by what the blocks before became, in float64. A choice that looks at what it drops is found here."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry
from specjax.controllers.budgeted import Budgeted
from specjax.controllers.confidence import Confidence
from specjax.controllers.fixed import Fixed
from specjax.controllers.ladder import Ladder
from specjax.controllers.survival import Survival
from specjax.testing.toys import context, neutral_sampling
from specjax.types import Calibration, Draft, Outcome, Output, Verdict
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative

SIZE, K, LENGTH = 3, 2, 4
QUICK = {"decay": 0.5, "trust": 0.5, "margin": 0.0, "probe": 1}
"""Changes its mind after every block."""
CONTROLLERS: dict[str, Any] = {
    "fixed": Fixed(1),
    "ladder": Ladder(**QUICK),
    "survival": Survival(**QUICK),
    "budgeted": Budgeted(**QUICK),
    "budgeted to one": Budgeted(tokens=1, **QUICK),
    "confidence": Confidence(0.6),
    "confidence by entropy": Confidence(0.8, "entropy"),
}
RULES = {"speculative": Speculative(), "block": Block(), "coupled": Coupled()}


def distributions(seed: int) -> dict[tuple[int, ...], np.ndarray]:
    """One after every prefix of at most so many tokens as a block can reach."""
    rng = np.random.default_rng(seed)
    found = {}
    for length in range(LENGTH + K + 1):
        for prefix in itertools.product(range(SIZE), repeat=length):
            weights = rng.exponential(size=SIZE) ** 2
            found[prefix] = weights / weights.sum()
    return found


P, Q = distributions(0), distributions(1)
DRAFTS = list(itertools.product(range(SIZE), repeat=K))


@dataclasses.dataclass
class Process:
    """All generations of a controller and a rule. ``lengths``: those that it chose."""

    controller: Any
    rule: Any
    change: Any = None
    """What is done to the valid tokens of a block: ``(prefix, draft, valid) -> valid``."""

    def __post_init__(self):
        self.lengths: set[int] = set()
        self.output = dict.fromkeys(itertools.product(range(SIZE), repeat=LENGTH), 0.0)
        self.controller = self.controller.bind(K)
        self._distribution = jax.jit(self.rule.distribution)
        self._choose, self._adapt, self._stop = (
            jax.jit(getattr(self.controller, name)) for name in ("choose", "adapt", "stop")
        )
        calibration = Calibration(jnp.asarray([1.0, 1.25, 1.6], jnp.float32), jnp.asarray([0.6, 0.5], jnp.float32))
        empty = context(jnp.zeros((1, 32), jnp.int32), [1], neutral_sampling(1, SIZE))
        self._context = dataclasses.replace(empty, calibration=calibration, active=jnp.ones((1,), bool))

    def run(self) -> dict[tuple[int, ...], float]:
        self._block((), 1.0, self.controller.init(1))
        return self.output

    def _block(self, prefix: tuple[int, ...], chance: float, state: Any) -> None:
        if len(prefix) >= LENGTH:
            self.output[prefix[:LENGTH]] += chance
            return
        limit = self._choose(state, self._context)
        seen = dataclasses.replace(self._context, limit=limit, controller=self.controller, controller_state=state)
        drafts, valid = self._drafts(prefix, int(limit[0]), state)
        depth = drafts.shape[1]
        self.lengths |= set(valid.sum(1).tolist())
        p = np.asarray([[P[(*prefix, *draft[:i])] for i in range(depth + 1)] for draft in drafts.tolist()])
        q = np.asarray([[Q[(*prefix, *draft[:i])] for i in range(depth)] for draft in drafts.tolist()])
        q = q.reshape(len(drafts), depth, SIZE)
        drawn = np.prod(np.take_along_axis(q, drafts[..., None], 2)[..., 0], axis=1)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            draft = Draft(jnp.asarray(drafts), jnp.asarray(valid))
            told = jax.tree.map(
                np.asarray, self._distribution(draft, jnp.asarray(p), jnp.asarray(q) if depth else None)
            )
        for row, tokens in enumerate(drafts.tolist()):
            for n in range(depth + 1):
                weight = chance * drawn[row] * told.num_accepted[row, n]
                if weight > 0:
                    after = self._after(seen, drafts[row], valid[row], n, state)
                    for token, share in enumerate(told.next_token[row, n]):
                        if share > 0:
                            self._block((*prefix, *tokens[:n], token), weight * share, after)

    def _drafts(self, prefix, limit: int, state) -> tuple[np.ndarray, np.ndarray]:
        """All blocks that may be drawn, and what of them is proposed. None at all where nobody wants one."""
        if not limit:
            return np.zeros((1, 0), np.int32), np.zeros((1, 0), bool)
        drafts = np.asarray(DRAFTS, np.int32)
        valid = np.broadcast_to(np.arange(K) < limit, drafts.shape).copy()
        for i, draft in enumerate(DRAFTS):
            for place in range(K):
                logits = jnp.log(jnp.asarray(Q[(*prefix, *draft[:place])], jnp.float32))[None]
                stops = self._stop(state, logits, place)
                valid[i, place] &= stops is None or not bool(stops[0])
            valid[i] = np.cumprod(valid[i])
            if self.change is not None:
                valid[i] = self.change(prefix, draft, valid[i])
        return drafts, valid

    def _after(self, seen, draft: np.ndarray, valid: np.ndarray, n: int, state: Any) -> Any:
        verdict = Verdict(jnp.asarray([n], jnp.int32), jnp.zeros((1,), jnp.int32))
        proposed = Draft(jnp.asarray(draft[None]), jnp.asarray(valid[None]))
        emitted = jnp.asarray([n + 1], jnp.int32)
        out = Output(jnp.zeros((1, 1, SIZE)))
        tokens = jnp.zeros((1, len(draft) + 1), jnp.int32)
        return self._adapt(state, Outcome(seen, proposed, out, verdict, emitted, tokens))


@functools.cache
def target() -> dict[tuple[int, ...], float]:
    return {
        y: float(np.prod([P[y[:i]][y[i]] for i in range(LENGTH)]))
        for y in itertools.product(range(SIZE), repeat=LENGTH)
    }


def off(process: Process) -> float:
    """Total variation from the target's."""
    output = process.run()
    assert sum(output.values()) == pytest.approx(1.0, abs=1e-12)
    return sum(abs(output[y] - p) for y, p in target().items()) / 2


def test_every_registered_controller_is_one_of_these():
    assert {c.kind for c in CONTROLLERS.values()} == set(registry.CONTROLLERS)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_the_output_has_the_targets_distribution(name, rule):
    process = Process(CONTROLLERS[name], RULES[rule])
    assert off(process) < 1e-12
    assert len(process.lengths) > 1 or name in ("fixed", "budgeted to one")


def unlikely_dropped(prefix, draft, valid):
    """What transformers' threshold would be if it did not verify the token that it stopped at."""
    own = [Q[(*prefix, *draft[:i])][x] > 0.4 for i, x in enumerate(draft)]
    return np.cumprod(own) * valid


def best_prefix(prefix, draft, valid):
    """The k of the most expected tokens for its time, by the chances of the tokens that were drawn."""
    kept = np.cumprod(
        [min(1.0, P[(*prefix, *draft[:i])][x] / Q[(*prefix, *draft[:i])][x]) for i, x in enumerate(draft)]
    )
    k = int(np.argmax((1 + np.append(0.0, np.cumsum(kept))) / np.asarray([1.0, 1.25, 1.6])))
    return (np.arange(K) < k) & valid


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("shortcut", [unlikely_dropped, best_prefix])
def test_a_choice_that_looks_at_what_it_drops_is_found(shortcut, rule):
    assert off(Process(Fixed(K), RULES[rule], shortcut)) > 0.005
