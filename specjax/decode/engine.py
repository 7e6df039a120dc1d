"""A block of decoding: propose -> feed -> verify -> commit (2211.17192), a function of the state alone. What is
compiled of it is in `specjax.decode.programs`.

Invariant: the target's cache holds ``tokens[b, :lengths[b] - 1]``; the newest token is the root of the next block, so
a block of K drafts feeds K + 1 tokens. Rollback is not advancing: stale slots are masked, then overwritten.

A row that is done sizes nothing: it goes on writing behind its end, into cache slots that nobody reads any more and
into a buffer of tokens that holds a block more than the cache has slots.

Dims: B rows, K draft length, K1 = K + 1, L token buffer, S cache slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.drafters.base import StatelessDrafter
from specjax.errors import ConfigError
from specjax.models import cache as cache_lib
from specjax.models.attention.stored import write_rows
from specjax.models.vocabulary import TokenRows
from specjax.proposal import Followed, Proposal
from specjax.types import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    INVALID_LOGITS,
    LENGTH,
    NOTHING,
    ORIGINS,
    STOP,
    UNFINISHED,
    BoundDrafter,
    Calibration,
    Context,
    Controller,
    Counters,
    CoupledNoise,
    DecodeState,
    Draft,
    LogitsProcessor,
    Model,
    Noise,
    Outcome,
    Output,
    Params,
    Reads,
    TargetView,
    TokenCounts,
    Verdict,
    Verifier,
    reads_of,
)

Logprobs = Literal["raw", "processed"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class NoDraft(StatelessDrafter):
    """Plain autoregressive decoding: a block without proposals, through the same engine."""

    k: int = 0
    kind: str = "autoregressive"

    def draft(self, params: Params, target: TargetView, state: dict, context: Context) -> tuple[Draft, dict]:
        """An empty block."""
        batch = context.lengths.shape[0]
        return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state


@dataclasses.dataclass(frozen=True)
class Idle(StatelessDrafter):
    """A drafter that is not asked in this block: its state stays, and it sees what the block became."""

    drafter: BoundDrafter
    k: int = 0

    @property
    def reads(self) -> Reads:
        """The parts of the target that the drafter reads."""
        return reads_of(self.drafter)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """An empty block."""
        return NoDraft().draft(params, target, state, context)

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The drafter's state after verification."""
        return self.drafter.commit(params, state, outcome)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static half of a decoder: models, verifier and what else is compiled for."""

    target: Model
    drafter: BoundDrafter
    verifier: Verifier
    greedy: bool
    """The whole batch is at temperature 0, so there is no noise and no softmax."""
    processor: LogitsProcessor | None = None
    logprobs: Logprobs | None = None
    """Log-probabilities to keep: under the target's own distribution, or after the sampling parameters. None: none."""
    tokens: TokenRows | None = None
    """The rows of the target's head that its own distribution is over; None: all."""
    controller: Controller | None = None
    extras: tuple[str, ...] | None = None
    """What rows ask for beside their temperature, see `Context.extras`."""
    prefill_chunk: int | None = None
    """Most tokens of each prompt that are fed at a time; None: by the rows of the batch."""

    @property
    def rungs(self) -> tuple[int, ...]:
        """The numbers of drafted tokens that a block is compiled for, ascending: what the controller asks for, or the
        whole block alone. A tree is fed whole or not at all."""
        rungs = getattr(self.controller, "rungs", ()) or (self.max_depth,)
        chain = self.num_nodes == self.max_depth
        return rungs if chain else tuple(sorted({min(rung, 1) * self.num_nodes for rung in rungs}))

    @property
    def decides_after(self) -> bool:
        """Whether the controller is asked once the draft is there: a chain that is no chance and cost nothing."""
        chain = self.num_nodes == self.max_depth
        return chain and hasattr(self.controller, "decide") and getattr(self.drafter, "free", False)

    @property
    def num_nodes(self) -> int:
        """Drafted tokens in a block, all branches of a tree together."""
        return num_nodes(self.drafter)

    @property
    def max_depth(self) -> int:
        """Most drafted tokens that a block can keep."""
        return max_depth(self.drafter)

    @property
    def reads(self) -> Reads:
        """The parts of the target's forward pass that the drafter reads."""
        return reads_of(self.drafter)


def num_nodes(drafter: BoundDrafter) -> int:
    """Number of drafted tokens in a block, all branches of a tree together."""
    return getattr(drafter, "num_nodes", drafter.k)


def max_depth(drafter: BoundDrafter) -> int:
    """Most drafted tokens that a block can keep."""
    return getattr(drafter, "max_depth", drafter.k)


@flax.struct.dataclass
class EngineParams:
    """The weights of a decoder, traced arguments of every program."""

    target: Any
    drafter: Any
    calibration: Calibration | None = None


@flax.struct.dataclass
class Finite:
    """Finite distributions in a block: the nodes that have one, and the rows whose drafter failed."""

    target: Bool[Array, "B N1"]
    """Whether the target has one after node i."""
    drafter_failed: Bool[Array, " B"]
    """Rows whose drafter had none for a token that it proposed."""


@flax.struct.dataclass
class Judged:
    """A block after verification. ``draft``: without what was cut before. ``p_logits``: the target's at each node,
    after the sampling transform."""

    draft: Draft
    """The proposal without what was cut before verification."""
    p_logits: Float[Array, "B N1 V"]
    """The target's logits after each node, after the sampling transform."""
    finite: Finite
    verdict: Verdict
    followed: Followed


def step(engine: Engine, params: EngineParams, state: DecodeState) -> DecodeState:
    """One block for every row: propose, feed, verify, commit (2211.17192, algorithm 1)."""
    block = plain_block if engine.rungs[-1] == 0 else drafted_block
    return block(engine, params, state, chosen(engine, params, state))


def drafted_block(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None
) -> DecodeState:
    """A block with proposals, as long as the longest of them is: at the lowest of the engine's rungs that holds it."""
    context = looked_at(engine, params, state, limit)
    draft, state = propose(engine, params, state, context)
    if engine.decides_after:
        context, draft = decided(engine, state, context, draft)
    rungs = engine.rungs

    def judged(state: DecodeState, rung: int) -> DecodeState:
        return judged_block(engine, params, state, *shortened(context, draft, rung))

    if len(rungs) == 1:
        return judged(state, rungs[0])
    wanted = jnp.max(jnp.where(draft.valid & ~state.done[:, None], jnp.arange(1, engine.num_nodes + 1), 0))
    if params.calibration is not None:
        least = params.calibration.least
        if engine.decides_after:  # such blocks come one by one, and cost more than in a row
            rest = (least > 0) & (jnp.max(state.counters.blocks) % 2 == 0)
            draft = dataclasses.replace(draft, valid=draft.valid & ~rest)
            wanted, least = jnp.where(rest, 0, wanted), jnp.where(rest, 0, least)
        wanted = jnp.maximum(wanted, least)
    for below, rung in zip((-1, *rungs), rungs, strict=False):
        state = only_if((below < wanted) & (wanted <= rung), functools.partial(judged, rung=rung), state)
    return state


def only_if(condition: Bool[Array, ""], change: Callable[[_T], _T], state: _T) -> _T:
    """``change(state)`` where the condition holds: a loop of one round or none, since a `cond` copies the caches."""

    def once(carry):
        return jnp.bool_(False), change(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (condition, state))[1]


def plain_block(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None
) -> DecodeState:
    """A block without proposals, which is a step of plain decoding."""
    plain = dataclasses.replace(engine, drafter=Idle(engine.drafter))
    context = looked_at(plain, params, state, limit)
    draft, state = propose(plain, params, state, context)
    return judged_block(plain, params, state, context, draft)


def judged_block(
    engine: Engine, params: EngineParams, state: DecodeState, context: Context, draft: Draft
) -> DecodeState:
    """The state after the target has seen what was drafted."""
    proposal = Proposal.of(context, draft)
    out = feed(engine.target, params.target, state.cache, proposal, engine.reads)
    judged = verify(engine, context, proposal, draft, out)
    state, emitted = commit(state, proposal, judged, out.cache)
    return observe(engine, params, state, context, out, judged, emitted)


def shortened(context: Context, draft: Draft, nodes: int) -> tuple[Context, Draft]:
    """The first ``nodes`` tokens of a chain, with their noise; a tree is as it is."""
    if nodes == draft.tokens.shape[1] or draft.parents is not None:
        return context, draft
    if context.noise is not None:
        context = dataclasses.replace(context, noise=context.noise.first(nodes))
    # A rule that looks at the draft's distributions has nothing to look at in a block without tokens.
    parts = {
        name: getattr(draft, name) for name in ("tokens", "valid", "logits", "finite")
    }  # and the grade is the row's
    parts |= {} if nodes else {"logits": None, "finite": None}
    return context, dataclasses.replace(draft, **{name: x if x is None else x[:, :nodes] for name, x in parts.items()})


def chosen(engine: Engine, params: EngineParams, state: DecodeState) -> Int[Array, " B"] | None:
    """The most tokens that the controller lets each row's next block propose, 0 in rows that are done."""
    if engine.controller is None:
        return None
    context = looked_at(engine, params, state, None, noise=False)
    deepest = min(engine.max_depth, engine.rungs[-1])  # a tree's rungs count nodes, of which there are more
    limit = deepest if engine.decides_after else engine.controller.choose(state.controller, context)
    if limit is None:
        return None
    # The last token of a row's budget is the target's own.
    most = jnp.minimum(deepest, state.budget - state.lengths - 1) if len(engine.rungs) > 1 else deepest
    return jnp.where(state.done, 0, jnp.minimum(limit, most))


def decided(engine: Engine, state: DecodeState, context: Context, draft: Draft) -> tuple[Context, Draft]:
    """The rest of a draft that cost nothing, once the controller has seen it."""
    assert engine.controller is not None
    limit = engine.controller.decide(state.controller, context, draft)  # type: ignore[attr-defined]
    limit = jnp.where(state.done, 0, jnp.minimum(limit, state.budget - state.lengths - 1))
    place = jnp.arange(1, draft.valid.shape[1] + 1, dtype=jnp.int32)[None]
    draft = dataclasses.replace(draft, valid=draft.valid & (place <= limit[:, None]))
    return dataclasses.replace(context, limit=limit), draft


def looked_at(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None = None, noise: bool = True
) -> Context:
    """The context of this block for draft, controller and transform."""
    found = block_noise(engine, state) if noise and not engine.greedy else None
    return context_of(params, state, engine.controller, engine.processor, limit, found, engine.extras)


def context_of(
    params: EngineParams,
    state: DecodeState,
    controller: Controller | None,
    processor: LogitsProcessor | None = None,
    limit: Int[Array, " B"] | None = None,
    noise: Noise | CoupledNoise | None = None,
    extras: tuple[str, ...] | None = None,
) -> Context:
    """Gather everything a block begins with, which is also all a choice of length may look at."""
    return Context(
        state.tokens,
        state.lengths,
        state.prompt_lengths,
        state.stop_ids,
        state.sampling,
        noise,
        processor,
        controller,
        state.controller,
        limit,
        params.calibration,
        ~state.done,
        state.budget - state.lengths,
        state.counts,
        extras,
    )


def block_noise(engine: Engine, state: DecodeState) -> Noise | CoupledNoise:
    """Noise of the kind that the verifier declares, for the largest block."""
    if engine.verifier.noise == "coupled":
        return sampling.coupled_noise(state.seeds, state.lengths, engine.max_depth, state.sampling.bias.shape[1])
    return sampling.fresh_noise(state.seeds, state.lengths, engine.num_nodes)


def propose(engine: Engine, params: EngineParams, state: DecodeState, context: Context) -> tuple[Draft, DecodeState]:
    """The drafter's proposal, as deep as the controller lets it. Raises `ConfigError` for a tree that the verifier does
    not take: as a chain, it would be judged wrongly."""
    drafter, limit = engine.drafter, context.limit
    keys_values = state.cache.view(engine.reads.kv_layers) if engine.reads.kv_layers else ()
    view = TargetView(params.target, keys_values, context.lengths - 1)
    draft, drafter_state = drafter.draft(params.drafter, view, state.drafter, context)
    if draft.parents is not None:
        check_takes_trees(engine.verifier)
    if limit is not None:
        depth = Proposal.of(context, draft).depth[:, 1:]
        draft = dataclasses.replace(draft, valid=draft.valid & (depth <= limit[:, None]))
    return draft, dataclasses.replace(state, drafter=drafter_state)


def check_takes_trees(verifier: Verifier) -> None:
    """Raises `ConfigError` for a verifier that takes chains only."""
    if "tree" not in getattr(verifier, "proposals", ()):
        raise ConfigError(
            f"verifier {verifier.kind!r} takes chains, and the drafter proposes trees; use 'coupled', or temperature 0"
        )


def feed(target: Model, params: Params, cache: Any, proposal: Proposal, reads: Reads = NOTHING) -> Output:
    """The target's forward pass over the block, at the slots that follow what its cache holds."""
    more: dict[str, Any] = {"reads": reads} if reads else {}
    if proposal.parents is not None:
        more["mask"] = proposal.mask
    return target(params, proposal.tokens, proposal.positions, proposal.slots, cache, **more)


def verify(engine: Engine, context: Context, proposal: Proposal, draft: Draft, out: Output) -> Judged:
    """The block after verification, cut where draft or target has no finite distribution."""
    transform = sampling.process if engine.greedy else sampling.transform
    p_logits = transform(out.logits, context, proposal)
    draft, finite = cut_invalid(proposal, draft, p_logits)
    verdict = engine.verifier(draft, p_logits, context.noise)
    return Judged(draft, p_logits, finite, verdict, proposal.follow(verdict, draft.valid))


def cut_invalid(proposal: Proposal, draft: Draft, p_logits: Float[Array, "B N1 V"]) -> tuple[Draft, Finite]:
    """The draft up to where draft or target has no finite distribution: a model that overflowed, a processor that left
    NaN or no token. What is cut depends on earlier tokens alone, so the output keeps its distribution."""
    target = sampling.has_distribution(p_logits)
    drawn_from = jnp.ones_like(draft.valid) if draft.logits is None else sampling.has_distribution(draft.logits)
    # What the sampling parameters leave nothing of is no failure of a draft that says that its own logits are finite.
    sound = drawn_from if draft.finite is None else draft.finite
    proposed = draft.valid & proposal.of_parents(target)
    kept = proposal.closed(proposed & drawn_from & sound)
    reached = proposal.of_parents(jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True))
    failed = jnp.any(proposal.closed(proposed) & reached & ~sound, axis=1)
    return dataclasses.replace(draft, valid=kept), Finite(target, drafter_failed=failed)


def commit(state: DecodeState, proposal: Proposal, judged: Judged, cache: Any) -> tuple[DecodeState, Int[Array, " B"]]:
    """Append the accepted tokens and the target's own, cut at the first stop id and at the budget exactly as plain
    decoding would cut. The cut is after verification, so the stream keeps the target's distribution. A row whose own
    token would come from no distribution ends before it. Also returns how many tokens each row grew by."""
    followed, finite, n = judged.followed, judged.finite, judged.followed.num_accepted
    depth = followed.tokens.shape[1] - 1
    index = jnp.arange(depth + 1, dtype=jnp.int32)[None]
    offered = proposal.offered(judged.draft.valid)
    own_origin = jnp.where(followed.rejected, jnp.int32(CORRECTED), BONUS)
    origin = jnp.where(index == n[:, None], own_origin[:, None], ACCEPTED) + len(ORIGINS) * offered[:, None]

    stops = jnp.any(followed.tokens[:, :, None] == state.stop_ids[:, None, :], axis=2) & (index <= n[:, None])
    first_stop = jnp.min(jnp.where(stops, index, depth + 1), axis=1)
    active = ~state.done
    own_finite = followed.at_end(finite.target)
    # Accepted tokens come from finite distributions; without an own token they are all there is.
    available = jnp.where(own_finite, n + 1, n)
    uncut = jnp.minimum(available, state.budget - state.lengths)
    emitted = jnp.where(active, jnp.minimum(first_stop + 1, uncut), 0)
    lengths = state.lengths + emitted
    finish = jnp.where(own_finite, jnp.int32(UNFINISHED), INVALID_LOGITS)
    finish = jnp.where(lengths >= state.budget, LENGTH, finish)
    finish = jnp.where(first_stop < emitted, STOP, finish)

    position = jnp.arange(1, depth + 1, dtype=jnp.int32)[None]
    was_proposed = active[:, None] & (offered[:, None] >= position)
    deepest = state.counters.drafted_at.shape[1]

    def padded(counts: Bool[Array, "B D"]) -> Bool[Array, "B K"]:
        return jnp.pad(counts, ((0, 0), (0, deepest - depth)))

    seen = Counters(
        blocks=active,
        emitted=emitted,
        drafted_at=padded(was_proposed),
        reached_at=padded(was_proposed & (n[:, None] >= position - 1)),
        accepted_at=padded(active[:, None] & (n[:, None] >= position)),
        invalid_drafts=active & finite.drafter_failed,
    )
    if judged.verdict.path is not None:
        cache = cache.keep(proposal.start, judged.verdict.path)
    # Entries past a row's new length are stale and overwritten by its next block; a finished row writes past its end.
    spread = cache_lib.first(state.cache).spread
    state = dataclasses.replace(
        state,
        tokens=write_rows(state.tokens, state.lengths, followed.tokens, spread),
        origin=write_rows(state.origin, state.lengths, origin, spread),
        lengths=lengths,
        done=state.done | (finish != UNFINISHED),
        finish=jnp.where(active, finish, state.finish),
        counters=jax.tree.map(lambda total, x: total + x.astype(jnp.int32), state.counters, seen),
        cache=cache,
        counts=None if state.counts is None else counted(state.counts, followed.tokens, index < emitted[:, None]),
    )
    return state, emitted


def counted(counts: TokenCounts, tokens: Int[Array, "B D1"], emitted: Bool[Array, "B D1"]) -> TokenCounts:
    """The counts with the tokens that a block added."""
    return dataclasses.replace(counts, generated=sampling.count(tokens, emitted, counts.generated))


def observe(
    engine: Engine,
    params: EngineParams,
    state: DecodeState,
    context: Context,
    out: Output,
    judged: Judged,
    emitted: Int[Array, " B"],
) -> DecodeState:
    """The state after drafter and controller have seen what became of the block, with log-probabilities where asked
    for."""
    followed = judged.followed
    outcome = Outcome(context, judged.draft, out, judged.verdict, emitted, followed.tokens, followed.nodes)
    state = dataclasses.replace(state, drafter=engine.drafter.commit(params.drafter, state.drafter, outcome))
    if engine.controller is not None:
        state = dataclasses.replace(state, controller=engine.controller.adapt(state.controller, outcome))
    if engine.logprobs is None:
        return state
    p_logits = judged.p_logits
    processed = sampling.warp(p_logits, state.sampling, engine.extras) if engine.greedy else p_logits
    raw = out.logits if engine.tokens is None else engine.tokens.over(out.logits)
    distributions = raw.astype(jnp.float32) if engine.logprobs == "raw" else processed
    return keep_logprobs(state, context.lengths, followed, distributions)


def keep_logprobs(
    state: DecodeState, start: Int[Array, " B"], followed: Followed, distributions: Float[Array, "B N1 V"]
) -> DecodeState:
    """The state with the log-probability of every token that `commit` may have appended from ``start`` on, under
    ``distributions``, those after each node."""
    distributions = followed.along(distributions)
    of_token = jnp.take_along_axis(distributions, followed.tokens[..., None], axis=-1)[..., 0]
    assert state.logprobs is not None  # prefill made room where they are asked for
    logprobs = of_token - jax.scipy.special.logsumexp(distributions, axis=-1)
    spread = cache_lib.first(state.cache).spread
    return dataclasses.replace(state, logprobs=write_rows(state.logprobs, start, logprobs, spread))


def controller_state(controller: Controller, drafter: BoundDrafter, batch: int) -> Any:
    """The controller's state before the first block; one that decides after the draft tells its grades apart."""
    grades = (getattr(drafter, "grades", 1),) if hasattr(controller, "decide") else ()
    return controller.init(batch, *grades)
