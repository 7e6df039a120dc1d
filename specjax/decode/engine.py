"""The jitted half of decoding: prefill, then blocks of draft -> target -> verify -> commit in a `while_loop` over one
donated carry (2211.17192). Fixed shapes, no host transfer inside a chunk, every row with its own length.

Invariant: the target's cache holds ``tokens[b, :lengths[b] - 1]``; the newest token is the root of the next block, so
a block of K drafts feeds K + 1 tokens. Rollback is not advancing: stale slots are masked, then overwritten. Slots
never run out inside a chunk: ``S >= longest + K + 1``, because `dynamic_update_slice` would clamp and overwrite.

Shapes depend on the buckets of B, P and S (`specjax.decode.request`), and on K: the buffer of tokens has as many
entries as the cache has slots (L = S), and grows with it.

Dims: B rows, P prompt, K draft length, K1 = K + 1, L token buffer, S cache slots, V vocabulary, E stop ids.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import backend, sampling
from specjax.models import cache as cache_lib
from specjax.models.cache import write_rows
from specjax.models.vocabulary import TokenRows
from specjax.types import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    INVALID_LOGITS,
    LENGTH,
    STOP,
    UNFINISHED,
    Context,
    Counters,
    CoupledNoise,
    DecodeState,
    Draft,
    Drafter,
    LogitsProcessor,
    Model,
    Noise,
    Output,
    Params,
    SamplingParams,
    Verdict,
    Verifier,
)
from specjax.verifiers.chain import leading_run

Logprobs = Literal["raw", "processed"]


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain autoregressive decoding: a block without proposals, through the same engine."""

    k: int = 0
    kind: str = "autoregressive"

    def bind(self, target: Any) -> tuple[NoDraft, Params]:
        return self, {}

    def init(self, params, prompt, lengths, num_slots, target_out) -> dict:
        return {}

    def draft(self, params, state, context: Context) -> tuple[Draft, dict]:
        batch = context.lengths.shape[0]
        return Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state

    def commit(self, params, state, draft, verdict, target_out) -> dict:
        return state


@dataclasses.dataclass(frozen=True)
class Engine:
    """The static half of a decoder: who proposes, who checks. ``greedy``: the whole batch is at temperature 0, so
    there is no noise and no softmax. ``logprobs``: of the target's own distribution, or after the sampling
    parameters. ``tokens``: which of the target's rows its own distribution is over; None: all."""

    target: Model
    drafter: Drafter
    verifier: Verifier
    greedy: bool
    processor: LogitsProcessor | None = None
    logprobs: Logprobs | None = None
    tokens: TokenRows | None = None


@flax.struct.dataclass
class EngineParams:
    target: Any
    drafter: Any


@flax.struct.dataclass
class Request:
    """A padded batch as it comes from the host. ``budget``: new tokens a row may add; 0 marks a padding row."""

    prompt: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    sampling: SamplingParams
    seeds: Any
    stop_ids: Int[Array, "B E"]


@flax.struct.dataclass
class Finite:
    """Whether the target has a distribution, ``target[b, i]`` after node i, and the rows whose drafter had none."""

    target: Bool[Array, "B K1"]
    drafter_failed: Bool[Array, " B"]


def step(engine: Engine, params: EngineParams, state: DecodeState) -> DecodeState:
    """One block for every row: draft, target, verify, commit."""
    context = Context(
        state.tokens,
        state.lengths,
        state.prompt_lengths,
        state.stop_ids,
        state.sampling,
        None if engine.greedy else block_noise(engine, state),
        engine.processor,
    )
    draft, drafter_state = engine.drafter.draft(params.drafter, state.drafter, context)
    out = feed_block(engine.target, params.target, state, draft)
    transform = sampling.process if engine.greedy else sampling.transform
    p_logits = transform(out.logits, context, draft.tokens)
    draft, finite = cut_invalid(draft, p_logits)
    verdict = engine.verifier(draft, p_logits, context.noise)
    drafter_state = engine.drafter.commit(params.drafter, drafter_state, draft, verdict, out)
    state = dataclasses.replace(state, cache=out.cache, drafter=drafter_state)
    if engine.logprobs is not None:
        processed = sampling.warp(p_logits, state.sampling) if engine.greedy else p_logits
        raw = out.logits if engine.tokens is None else engine.tokens.over(out.logits)
        distributions = raw.astype(jnp.float32) if engine.logprobs == "raw" else processed
        state = keep_logprobs(state, draft, verdict, distributions)
    return commit(state, draft, verdict, finite)


def block_noise(engine: Engine, state: DecodeState) -> Noise | CoupledNoise:
    """Noise of the kind that the verifier declares."""
    k = engine.drafter.k
    if engine.verifier.noise == "coupled":
        return sampling.coupled_noise(state.seeds, state.lengths, k, state.sampling.bias.shape[1])
    return sampling.fresh_noise(state.seeds, state.lengths, k)


def cut_invalid(draft: Draft, p_logits: Float[Array, "B K1 V"]) -> tuple[Draft, Finite]:
    """The draft up to where draft or target has no finite distribution: a model that overflowed, a processor that left
    NaN or no token. What is cut depends on earlier tokens alone, so the output keeps its distribution."""
    target = sampling.has_distribution(p_logits)
    drawn_from = jnp.ones_like(draft.valid) if draft.logits is None else sampling.has_distribution(draft.logits)
    # What the sampling parameters leave nothing of is no failure of a draft that says that its own logits are finite.
    sound = drawn_from if draft.finite is None else draft.finite
    position = jnp.arange(draft.valid.shape[1], dtype=jnp.int32)[None]
    proposed = draft.valid & target[:, :-1]
    kept = leading_run(proposed & drawn_from & sound)
    valid = draft.valid & (position < kept[:, None])
    failed = jnp.any((position == kept[:, None]) & (leading_run(proposed) > kept)[:, None] & ~sound, axis=1)
    return dataclasses.replace(draft, valid=valid), Finite(target, drafter_failed=failed)


def keep_logprobs(
    state: DecodeState, draft: Draft, verdict: Verdict, distributions: Float[Array, "B K1 V"]
) -> DecodeState:
    """Record the log-probability of every token that `commit` may append, under ``distributions``."""
    tokens = block_tokens(draft, verdict)
    of_token = jnp.take_along_axis(distributions, tokens[..., None], axis=-1)[..., 0]
    assert state.logprobs is not None  # prefill made room where they are asked for
    logprobs = of_token - jax.scipy.special.logsumexp(distributions, axis=-1)
    return dataclasses.replace(state, logprobs=write_rows(state.logprobs, state.lengths, logprobs))


def block_tokens(draft: Draft, verdict: Verdict) -> Int[Array, "B K1"]:
    """The accepted tokens, then the target's own; later entries mean nothing."""
    own = jnp.arange(draft.tokens.shape[1] + 1, dtype=jnp.int32)[None] == verdict.num_accepted[:, None]
    return jnp.where(own, verdict.next_token[:, None], jnp.pad(draft.tokens, ((0, 0), (0, 1))))


def feed_block(target: Model, params: Params, state: DecodeState, draft: Draft) -> Output:
    """The target over the root and the proposals, at the slots that follow what its cache holds."""
    root = jnp.take_along_axis(state.tokens, (state.lengths - 1)[:, None], axis=1)
    fed = jnp.concatenate([root, draft.tokens], axis=1)
    slots = (state.lengths - 1)[:, None] + jnp.arange(fed.shape[1], dtype=jnp.int32)[None]
    return target(params, fed, slots, slots, state.cache)


def commit(state: DecodeState, draft: Draft, verdict: Verdict, finite: Finite) -> DecodeState:
    """Append the accepted tokens and the target's own, cut at the first stop id and at the budget exactly as plain
    decoding would cut. The cut is after verification, so the stream keeps the target's distribution. A row whose own
    token would come from no distribution ends before it."""
    n, k = verdict.num_accepted, draft.tokens.shape[1]
    index = jnp.arange(k + 1, dtype=jnp.int32)[None]
    proposed = leading_run(draft.valid)
    block = block_tokens(draft, verdict)
    own_origin = jnp.where(n < proposed, jnp.int32(CORRECTED), BONUS)
    origin = jnp.where(index == n[:, None], own_origin[:, None], ACCEPTED)

    stops = jnp.any(block[:, :, None] == state.stop_ids[:, None, :], axis=2) & (index <= n[:, None])
    first_stop = jnp.min(jnp.where(stops, index, k + 1), axis=1)
    active = ~state.done
    own_finite = jnp.take_along_axis(finite.target, n[:, None], axis=1)[:, 0]
    # Accepted tokens come from finite distributions; without an own token they are all there is.
    available = jnp.where(own_finite, n + 1, n)
    uncut = jnp.minimum(available, state.budget - state.lengths)
    emitted = jnp.where(active, jnp.minimum(first_stop + 1, uncut), 0)
    lengths = state.lengths + emitted
    finish = jnp.where(own_finite, jnp.int32(UNFINISHED), INVALID_LOGITS)
    finish = jnp.where(lengths >= state.budget, LENGTH, finish)
    finish = jnp.where(first_stop < emitted, STOP, finish)

    position = jnp.arange(1, k + 1, dtype=jnp.int32)[None]
    was_proposed = active[:, None] & (proposed[:, None] >= position)
    seen = Counters(
        blocks=active,
        emitted=emitted,
        drafted_at=was_proposed,
        reached_at=was_proposed & (n[:, None] >= position - 1),
        accepted_at=active[:, None] & (n[:, None] >= position),
        invalid_drafts=active & finite.drafter_failed,
    )
    # Entries past a row's new length are stale and overwritten by its next block; a finished row writes past its end.
    return dataclasses.replace(
        state,
        tokens=write_rows(state.tokens, state.lengths, block),
        origin=write_rows(state.origin, state.lengths, origin),
        lengths=lengths,
        done=state.done | (finish != UNFINISHED),
        finish=jnp.where(active, finish, state.finish),
        counters=jax.tree.map(lambda total, x: total + x.astype(jnp.int32), state.counters, seen),
    )


@functools.lru_cache(maxsize=256)
def prefill(target: Model, drafter: Drafter, num_slots: int, logprobs: bool = False):
    """Jitted ``(params, request) -> DecodeState``: feeds the prompts, emits nothing. (The last prompt token is fed
    with them and once more as the root: its slot is past what the invariant counts, so that is harmless.)"""

    def run(params: EngineParams, request: Request) -> DecodeState:
        batch, width = request.prompt.shape
        k = drafter.k
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
        cache = target.init_cache(batch, num_slots, cache_lib.dtype_for(params.target))
        cache = cache_lib.with_total(cache, request.lengths + request.budget)
        out = target(params.target, request.prompt, positions, positions, cache)
        drafter_state = drafter.init(params.drafter, request.prompt, request.lengths, num_slots, out)
        zeros, zeros_k = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, k), jnp.int32)
        return DecodeState(
            tokens=jnp.pad(request.prompt, ((0, 0), (0, num_slots - width))),
            origin=jnp.zeros((batch, num_slots), jnp.int32),
            lengths=request.lengths,
            prompt_lengths=request.lengths,
            budget=request.lengths + request.budget,
            done=request.budget <= 0,
            sampling=request.sampling,
            seeds=request.seeds,
            stop_ids=request.stop_ids,
            counters=Counters(zeros, zeros, zeros_k, zeros_k, zeros_k, zeros),
            finish=zeros,
            logprobs=jnp.zeros((batch, num_slots), jnp.float32) if logprobs else None,
            cache=out.cache,
            drafter=drafter_state,
        )

    return jax.jit(run, compiler_options=backend.compiler_options(decoding=True))


@functools.lru_cache(maxsize=256)
def chunk(engine: Engine):
    """Jitted ``(params, state, max_steps) -> state``: blocks until all rows are done, until the next block might not
    fit the cache, or after ``max_steps`` (traced). The state is donated."""

    def run(params: EngineParams, state: DecodeState, max_steps) -> DecodeState:
        slots = cache_lib.num_slots(state.cache)

        def unfinished(carry):
            count, state = carry
            fits = jnp.max(state.lengths) + engine.drafter.k + 1 <= slots
            return (count < max_steps) & fits & ~jnp.all(state.done)

        def body(carry):
            count, state = carry
            return count + 1, step(engine, params, state)

        final = jax.lax.while_loop(unfinished, body, (jnp.int32(0), cache_lib.fold(state)))[1]
        return cache_lib.unfold(final, len(state.lengths))

    return jax.jit(run, donate_argnames="state", compiler_options=backend.compiler_options(decoding=True))


@functools.partial(jax.jit, static_argnames="num_slots")
def grow(state: DecodeState, num_slots: int) -> DecodeState:
    """The state with room for more: every KV cache, the drafter's too, and what is kept of each token."""
    more = ((0, 0), (0, num_slots - state.tokens.shape[1]))
    tokens, origin, logprobs = jax.tree.map(lambda x: jnp.pad(x, more), (state.tokens, state.origin, state.logprobs))
    return dataclasses.replace(cache_lib.grow(state, num_slots), tokens=tokens, origin=origin, logprobs=logprobs)


def free_programs() -> None:
    """Let go of every compiled prefill and chunk; what is needed again is compiled again."""
    prefill.cache_clear()
    chunk.cache_clear()
    grow.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
