"""A block of decoding: propose -> feed -> verify -> commit (2211.17192), a function of the state alone.
`specjax.decode.programs` compiles it.

Invariant: the target's cache holds ``tokens[b, :lengths[b] - 1]``; the newest token is the root of the next block, so
a block of K proposed tokens feeds K + 1. Rollback means that the length does not advance: stale slots are masked, then
overwritten.

No size depends on a row that is done. It goes on writing behind its end, into cache slots that nobody reads any more
and into a token buffer that holds one block more than the cache has slots.

Dims: B rows, K draft length, K1 = K + 1, L token buffer, S cache slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.backend import run_if
from specjax.drafters.base import StatelessDrafter
from specjax.errors import ConfigError
from specjax.interfaces import (
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
)
from specjax.models import cache as cache_lib
from specjax.models.attention.stored import write_rows
from specjax.models.vocabulary import TokenRows
from specjax.proposal import Followed, Proposal

Logprobs = Literal["raw", "processed"]


@dataclasses.dataclass(frozen=True)
class NoDraft(StatelessDrafter):
    """Plain decoding: a block without proposed tokens, through the same engine."""

    k: int = 0
    kind: str = "autoregressive"

    def draft(self, params: Params, target: TargetView, state: dict, context: Context) -> tuple[Draft, dict]:
        """An empty block."""
        batch = context.lengths.shape[0]
        return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state


@dataclasses.dataclass(frozen=True)
class Idle(StatelessDrafter):
    """A drafter that proposes nothing in this block. It keeps its state, and learns the outcome of the block."""

    drafter: BoundDrafter
    k: int = 0

    @property
    def reads(self) -> Reads:
        """The parts of the target that the drafter reads."""
        return self.drafter.reads

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """An empty block."""
        return NoDraft().draft(params, target, state, context)

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The drafter's state after verification."""
        return self.drafter.commit(params, state, outcome)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static half of a decoder: models, verifier and whatever else a program is compiled for."""

    target: Model
    drafter: BoundDrafter
    verifier: Verifier
    greedy: bool
    """True if the whole batch is at temperature 0: there is no noise and no softmax."""
    processor: LogitsProcessor | None = None
    logprobs: Logprobs | None = None
    """Log-probabilities to record: 'raw' under the target's own distribution, 'processed' after the sampling
    parameters. None: none."""
    tokens: TokenRows | None = None
    """Rows of the target's head that its own distribution covers; None: all."""
    controller: Controller | None = None
    extras: tuple[str, ...] | None = None
    """Sampling steps that rows ask for in addition to temperature, see `Context.extras`."""
    prefill_chunk: int | None = None
    """Most tokens of each prompt that are fed at a time; None: by the rows of the batch."""

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        """Numbers of proposed tokens that a block is compiled for, ascending: those that the controller asks for, or
        the whole block alone. A tree is fed whole or not at all."""
        lengths = (() if self.controller is None else self.controller.compiled_lengths) or (self.max_depth,)
        chain = self.num_nodes == self.max_depth
        return lengths if chain else tuple(sorted({min(length, 1) * self.num_nodes for length in lengths}))

    @property
    def num_nodes(self) -> int:
        """Number of proposed tokens in a block, all branches of a tree together."""
        return self.drafter.num_nodes

    @property
    def max_depth(self) -> int:
        """Most proposed tokens that a block can accept."""
        return self.drafter.max_depth

    @property
    def reads(self) -> Reads:
        """The parts of the target's forward pass that the drafter reads."""
        return self.drafter.reads


@flax.struct.dataclass
class EngineParams:
    """The weights and block costs of a decoder, traced arguments of every program."""

    target: Params
    drafter: Params
    calibration: Calibration | None = None


@flax.struct.dataclass
class Finite:
    """Check of a block's distributions: the nodes with a finite one, and the rows whose drafter failed."""

    target: Bool[Array, "B N1"]
    """True if the target has a finite distribution after node i."""
    drafter_failed: Bool[Array, " B"]
    """True for rows whose drafter had no finite distribution for a token that it proposed."""


@flax.struct.dataclass
class VerifiedBlock:
    """A block after verification."""

    draft: Draft
    """The proposal, up to the first distribution that is not finite."""
    p_logits: Float[Array, "B N1 V"]
    """The target's logits after each node, after the sampling transform."""
    finite: Finite
    verdict: Verdict
    followed: Followed


def step(engine: Engine, params: EngineParams, state: DecodeState) -> DecodeState:
    """One block for every row: propose, feed, verify, commit (2211.17192, algorithm 1)."""
    block = plain_block if engine.compiled_lengths[-1] == 0 else drafted_block
    return block(engine, params, state, chosen(engine, params, state))


def drafted_block(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None
) -> DecodeState:
    """A block with proposed tokens, at the smallest of the engine's compiled lengths that holds the longest
    proposal."""
    context = block_context(engine, params, state, limit)
    context = reviewed(engine, params, state, context)
    draft, state = propose(engine, params, state, context)
    lengths = engine.compiled_lengths

    def verified(state: DecodeState, length: int) -> DecodeState:
        return verify_block(engine, params, state, *truncate_block(context, draft, length))

    if len(lengths) == 1:
        return verified(state, lengths[0])
    wanted = jnp.max(jnp.where(draft.valid & ~state.done[:, None], jnp.arange(1, engine.num_nodes + 1), 0))
    for below, length in zip((-1, *lengths), lengths, strict=False):
        state = run_if((below < wanted) & (wanted <= length), functools.partial(verified, length=length), state)
    return state


def plain_block(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None
) -> DecodeState:
    """A block without proposed tokens, which is a step of plain decoding."""
    plain = dataclasses.replace(engine, drafter=Idle(engine.drafter))
    context = block_context(plain, params, state, limit)
    draft, state = propose(plain, params, state, context)
    return verify_block(plain, params, state, context, draft)


def verify_block(
    engine: Engine, params: EngineParams, state: DecodeState, context: Context, draft: Draft
) -> DecodeState:
    """The state after the rest of a block: feed, verify, commit."""
    proposal = Proposal.of(context, draft)
    out = feed(engine.target, params.target, state.cache, proposal, engine.reads)
    judged = verify(engine, context, proposal, draft, out)
    state, emitted = commit(state, proposal, judged, out.cache)
    return observe(engine, params, state, context, out, judged, emitted)


def truncate_block(context: Context, draft: Draft, nodes: int) -> tuple[Context, Draft]:
    """The first ``nodes`` tokens of a chain, with their noise; a tree stays whole."""
    if nodes == draft.tokens.shape[1] or draft.parents is not None:
        return context, draft
    if context.noise is not None:
        context = dataclasses.replace(context, noise=context.noise.first(nodes))
    # The match class belongs to the row. In a block without tokens, a verifier has no distributions to look at.
    parts = {name: getattr(draft, name) for name in ("tokens", "valid", "logits", "finite")}
    parts |= {} if nodes else {"logits": None, "finite": None}
    return context, dataclasses.replace(draft, **{name: x if x is None else x[:, :nodes] for name, x in parts.items()})


def chosen(engine: Engine, params: EngineParams, state: DecodeState) -> Int[Array, " B"] | None:
    """Most tokens that the controller lets each row's next block propose, 0 in rows that are done; None: no limit."""
    if engine.controller is None:
        return None
    context = block_context(engine, params, state, None, noise=False)
    deepest = min(engine.max_depth, engine.compiled_lengths[-1])  # those of a tree count nodes, more than its depth
    limit = engine.controller.choose(state.controller, context)
    if limit is None:
        return None
    # The last token of a row's budget is the target's own.
    most = jnp.minimum(deepest, state.budget - state.lengths - 1) if len(engine.compiled_lengths) > 1 else deepest
    return jnp.where(state.done, 0, jnp.minimum(limit, most))


def reviewed(engine: Engine, params: EngineParams, state: DecodeState, context: Context) -> Context:
    """The context with the lengths that the controller sets with what it may see of the proposals before they are
    made."""
    controller, preview = engine.controller, engine.drafter.preview(context)
    limit = None if controller is None or preview is None else controller.review(state.controller, context, preview)
    if limit is None:
        return context
    limit = jnp.where(state.done, 0, jnp.minimum(limit, state.budget - state.lengths - 1))
    return dataclasses.replace(context, limit=limit)


def block_context(
    engine: Engine, params: EngineParams, state: DecodeState, limit: Int[Array, " B"] | None = None, noise: bool = True
) -> Context:
    """The context of this block for drafter, controller and sampling transform."""
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
    """Gather the inputs of a block. A choice of length may depend on nothing else."""
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
    """The drafter's proposal, cut at the controller's limit. Raises `ConfigError` for a tree if the verifier takes
    chains only, since it would judge the tree wrongly."""
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
    """Raise `ConfigError` for a verifier that takes chains only."""
    if "tree" not in verifier.proposals:
        raise ConfigError(
            f"verifier {verifier.kind!r} takes chains, and the drafter proposes trees; use 'coupled', or temperature 0"
        )


def feed(target: Model, params: Params, cache: Any, proposal: Proposal, reads: Reads = NOTHING) -> Output:
    """The target's forward pass over the block, at the slots behind its cached tokens."""
    more: dict[str, Any] = {"reads": reads} if reads else {}
    if proposal.parents is not None:
        more["mask"] = proposal.mask
    return target(params, proposal.tokens, proposal.positions, proposal.slots, cache, **more)


def verify(engine: Engine, context: Context, proposal: Proposal, draft: Draft, out: Output) -> VerifiedBlock:
    """The block after verification, cut at the first distribution of draft or target that is not finite."""
    transform = sampling.process if engine.greedy else sampling.transform
    p_logits = transform(out.logits, context, proposal)
    draft, finite = cut_invalid(proposal, draft, p_logits)
    verdict = engine.verifier(draft, p_logits, context.noise)
    return VerifiedBlock(draft, p_logits, finite, verdict, proposal.follow(verdict, draft.valid))


def cut_invalid(proposal: Proposal, draft: Draft, p_logits: Float[Array, "B N1 V"]) -> tuple[Draft, Finite]:
    """The draft, cut at the first distribution of draft or target that is not finite: after a model overflowed, or a
    processor left NaN or no token. The cut depends on earlier tokens alone, so the output keeps its distribution."""
    target = sampling.has_distribution(p_logits)
    drawn_from = jnp.ones_like(draft.valid) if draft.logits is None else sampling.has_distribution(draft.logits)
    # A draft that reports finite logits of its own has not failed if sampling parameters leave no token.
    sound = drawn_from if draft.finite is None else draft.finite
    proposed = draft.valid & proposal.of_parents(target)
    kept = proposal.closed(proposed & drawn_from & sound)
    reached = proposal.of_parents(jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True))
    failed = jnp.any(proposal.closed(proposed) & reached & ~sound, axis=1)
    return dataclasses.replace(draft, valid=kept), Finite(target, drafter_failed=failed)


def commit(
    state: DecodeState, proposal: Proposal, judged: VerifiedBlock, cache: Any
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Append the accepted tokens and the target's own, cut at the first stop id and at the budget exactly as plain
    decoding would cut. The cut comes after verification, so the output keeps the target's distribution. If the target's
    own token has no finite distribution, the row ends before it. Also returns the number of tokens that each row grew
    by."""
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
    # Accepted tokens come from finite distributions; only the target's own token may have none.
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
    """The token counts, with the tokens that a block emitted added."""
    return dataclasses.replace(counts, generated=sampling.count(tokens, emitted, counts.generated))


def observe(
    engine: Engine,
    params: EngineParams,
    state: DecodeState,
    context: Context,
    out: Output,
    judged: VerifiedBlock,
    emitted: Int[Array, " B"],
) -> DecodeState:
    """The state after drafter and controller have seen the outcome of the block, with log-probabilities where asked
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
    """The state with the log-probability of every token that `commit` may have appended from ``start`` on.
    ``distributions``: the logits after each node."""
    distributions = followed.along(distributions)
    of_token = jnp.take_along_axis(distributions, followed.tokens[..., None], axis=-1)[..., 0]
    assert state.logprobs is not None  # prefill allocates them if they are asked for
    logprobs = of_token - jax.scipy.special.logsumexp(distributions, axis=-1)
    spread = cache_lib.first(state.cache).spread
    return dataclasses.replace(state, logprobs=write_rows(state.logprobs, start, logprobs, spread))
