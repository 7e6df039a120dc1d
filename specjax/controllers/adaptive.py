"""What the controllers share that choose a length by what it is expected to give for what it costs: how often proposals
were kept lately, place by place, and when to look again after proposing nothing.

A block of k proposals gives 1 + S_k tokens, S_k = s_1 + ... + s_k, and takes t_k (`Calibration.seconds`): the best k is
that of the largest (1 + S_k) / t_k. s_j is the product of the chances a_1 .. a_j that a place is kept once those before
it are. a_j is the share of what was kept among what was reached, decayed block by block; until there is enough of it,
what the place before says, changed by as much as the calibration changes from place to place. Nothing here looks at a
drawn token's own probability or at a draft that was not verified, so every choice is one of the past.

Dims: B rows, R rows or 1 for all of them together, K places, K1 = K + 1.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from specjax.errors import ConfigError
from specjax.types import Calibration, Context, Outcome


@flax.struct.dataclass
class Adapted:
    """The state of an adaptive controller, row by row."""

    reached: Float[Array, "B K"]
    """Blocks whose verification got to place j, those long ago for less."""
    accepted: Float[Array, "B K"]
    """Those of them that kept it."""
    blocks: Int[Array, " B"]
    next: Int[Array, " B"]
    """Chosen for the next block; before the first one it means nothing."""
    waited: Int[Array, " B"]
    """Blocks without proposals, since the last one with."""
    interval: Int[Array, " B"]
    """After how many of them to look again."""
    probes: Int[Array, " B"]
    """Blocks that looked again."""


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A controller that chooses one of ``ks`` for each block, by what is expected of it."""

    needs_calibration: ClassVar[bool] = True
    ks: tuple[Annotated[int, Field(ge=0, le=64)], ...] | None = None
    """Lengths to choose from, ascending from 0; None: 0, 1, 2, 4, ... and the drafter's longest."""
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.93
    """What a block counts beside the one after it."""
    trust: Annotated[float, Field(gt=0)] = 4.0
    """Blocks that the calibration counts for."""
    margin: Annotated[float, Field(ge=0)] = 0.03
    """How much better another length has to be to be changed to, so that nothing flaps."""
    probe: Annotated[int, Field(ge=1)] = 16
    """Blocks without proposals before one of the shortest length looks whether they pay again; twice as many after each
    look in vain, up to ``longest_wait``."""
    longest_wait: Annotated[int, Field(ge=1)] = 256

    def __post_init__(self):
        if self.ks is not None and (len(self.ks) < 2 or self.ks[0] != 0 or list(self.ks) != sorted(set(self.ks))):
            raise ConfigError(f"controller: ks={list(self.ks)}; give lengths in ascending order, 0 the first of them")

    @property
    def rungs(self) -> tuple[int, ...]:
        """``ks``."""
        return self.ks or ()

    def bind(self, depth: int) -> Any:
        """With the lengths that a drafter of ``depth`` has."""
        return dataclasses.replace(self, ks=lengths(self.ks, depth))

    def init(self, batch: int) -> Adapted:
        """No evidence yet."""
        zeros, nothing = jnp.zeros((batch, self.rungs[-1]), jnp.float32), jnp.zeros((batch,), jnp.int32)
        return Adapted(zeros, zeros, nothing, nothing, nothing, nothing + self.probe, nothing)

    def choose(self, state: Adapted, context: Context) -> Int[Array, " B"]:
        """What was chosen after the block before; for the first one, what is best by the calibration alone."""
        first = self._lengths()[
            jnp.argmax(self._rates(calibration_of(context, self).acceptance[None], context), axis=1)
        ]
        return jnp.where(state.blocks == 0, first, state.next)

    def stop(self, state: Adapted, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Any:
        """No row stops early."""
        return None

    def pooled(self, counts: Float[Array, "B K"], active: Bool[Array, " B"]) -> Float[Array, "R K"]:
        """The evidence that a row's choice is made with: its own."""
        return counts

    def adapt(self, state: Adapted, outcome: Outcome) -> Adapted:
        """The state with one more block, and the choice for the next one."""
        active, limit = outcome.emitted > 0, outcome.context.limit
        assert limit is not None
        state = state.replace(blocks=state.blocks + active.astype(jnp.int32))
        waited = state.waited + active.astype(jnp.int32)
        due = (waited >= state.interval) & jnp.isfinite(self._seconds(outcome.context)[self.rungs[1]])
        waiting = state.replace(waited=waited, next=jnp.where(due, self.rungs[1], 0))
        # Where nothing was found to propose, nothing is learnt.
        found = state.replace(next=limit)
        if outcome.draft.tokens.shape[1]:
            proposed = self._after_proposing(self._with_evidence(state, outcome, active), outcome)
            found = _chosen(jnp.any(outcome.draft.valid, axis=1), proposed, found)
        return _chosen(limit == 0, waiting, found)

    def _after_proposing(self, state: Adapted, outcome: Outcome) -> Adapted:
        context, looked = outcome.context, state.waited > 0
        rates = self._rates(self._chances(state, context), context)
        rates = jnp.broadcast_to(rates, (len(looked), len(self.rungs)))
        best, before = jnp.argmax(rates, axis=1), self._rung_of(state, context)
        better = jnp.max(rates, axis=1) > (1 + self.margin) * jnp.take_along_axis(rates, before[:, None], axis=1)[:, 0]
        chosen = self._lengths()[jnp.where(better, best, before)]
        # A look that was worth it is taken again at once, until enough is known.
        again = (chosen == 0) & looked & (outcome.verdict.num_accepted >= self.rungs[1])
        interval = jnp.where(looked, jnp.minimum(2 * state.interval, self.longest_wait), self.probe)
        return state.replace(
            next=jnp.where(again, self.rungs[1], chosen),
            waited=again.astype(jnp.int32),
            interval=jnp.where(chosen > 0, self.probe, interval),
            probes=state.probes + (looked & (outcome.emitted > 0)).astype(jnp.int32),
        )

    def _with_evidence(self, state: Adapted, outcome: Outcome, active: Bool[Array, " B"]) -> Adapted:
        valid, n = outcome.draft.valid, outcome.verdict.num_accepted[:, None]
        place = jnp.arange(1, valid.shape[1] + 1, dtype=jnp.int32)[None]
        reached, kept = (active[:, None] & valid & (n >= least) for least in (place - 1, place))
        more = ((0, 0), (0, self.rungs[-1] - valid.shape[1]))
        # Only what was proposed makes what is known older.
        decay = jnp.where(jnp.any(reached, axis=1, keepdims=True), self.decay, 1.0)
        pairs = ((state.reached, reached), (state.accepted, kept))
        counts = [decay * old + jnp.pad(new, more).astype(jnp.float32) for old, new in pairs]
        return state.replace(reached=counts[0], accepted=counts[1])

    def _chances(self, state: Adapted, context: Context) -> Float[Array, "R K"]:
        active = jnp.ones_like(state.blocks, bool) if context.active is None else context.active
        reached, accepted = (self.pooled(x, active) for x in (state.reached, state.accepted))
        prior, found = calibration_of(context, self).acceptance, []
        for j in range(self.rungs[-1]):
            expected = prior[j] if not j else jnp.clip(found[-1] * prior[j] / jnp.maximum(prior[j - 1], 0.01), 0.0, 1.0)
            found.append((accepted[:, j] + self.trust * expected) / (reached[:, j] + self.trust))
        return jnp.stack(found, axis=1)

    def _rates(self, chances: Float[Array, "R K"], context: Context) -> Float[Array, "R N"]:
        """Tokens for the time of each of ``ks``."""
        emitted = 1.0 + jnp.pad(jnp.cumsum(jnp.cumprod(chances, axis=1), axis=1), ((0, 0), (1, 0)))
        at = self._lengths()
        return emitted[:, at] / self._seconds(context)[at][None]

    def _seconds(self, context: Context) -> Float[Array, " K1"]:
        return calibration_of(context, self).seconds

    def _rung_of(self, state: Adapted, context: Context) -> Int[Array, " B"]:
        """Which of ``ks`` the block had; of a look, nothing, since it is what would go on without."""
        assert context.limit is not None
        had = jnp.sum(self._lengths()[None] < context.limit[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(state.waited > 0, 0, had)

    def _lengths(self) -> Int[Array, " N"]:
        return jnp.asarray(self.rungs, jnp.int32)


def _chosen(rows: Bool[Array, " B"], those: Adapted, others: Adapted) -> Adapted:
    def of(a: Array, b: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(of, those, others)


def lengths(ks: tuple[int, ...] | None, depth: int) -> tuple[int, ...]:
    """``ks`` cut at ``depth``; None: 0, 1, 2, 4, ... and ``depth``."""
    found = (0, *(2**i for i in range(depth.bit_length())), depth) if ks is None else ks
    return tuple(sorted({min(k, depth) for k in found}))


def calibration_of(context: Context, controller: Any) -> Calibration:
    """What the controller weighs with. Raises `ConfigError` without."""
    if context.calibration is None:
        raise ConfigError(
            f"controller {controller.kind!r}: it needs a calibration; decode with a `Decoder`, or give one"
        )
    return context.calibration
