"""The programs of decoding: a prefill, and chunks of blocks in a `while_loop` over one donated state. Shapes are fixed,
every row has its own length, and the host syncs between chunks, never inside one.

Slots never run out inside a chunk: ``S >= longest + K + 1``, because `dynamic_update_slice` would clamp and overwrite.
Shapes depend on the buckets of B, P and S (`specjax.decode.request`), and on K; L = S + K + 1 grows with S.

Dims: B rows, P prompt, K draft length, L token buffer, S cache slots, T tokens fed, E stop ids.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax import backend, sampling
from specjax.backend import run_if
from specjax.decode.engine import (
    Engine,
    EngineParams,
    chosen,
    context_of,
    drafted_block,
    plain_block,
    step,
)
from specjax.interfaces import BoundDrafter, Controller, Counters, DecodeState, Model, SamplingParams, TokenCounts
from specjax.models import cache as cache_lib
from specjax.models.sharding import ROWS, constrained

NO_LIMIT = 2**31 - 1


@flax.struct.dataclass
class Request:
    """A padded batch as the host sends it."""

    prompt: Int[Array, "B P"]
    lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    """Number of new tokens that a row may add; 0 marks a padding row."""
    sampling: SamplingParams
    seeds: Any
    stop_ids: Int[Array, "B E"]


@functools.lru_cache(maxsize=256)
def compiled_prefill(
    target: Model,
    drafter: BoundDrafter,
    num_slots: int,
    logprobs: bool = False,
    controller: Controller | None = None,
    piece: int | None = None,
):
    """Jitted ``(params, request) -> DecodeState``, which feeds the prompts and emits nothing. One pass feeds at most
    ``piece`` tokens of each prompt (None: as many as `backend.prefill_tokens` allows). The last prompt token is fed
    with them and once more as the root, which is harmless: its slot is past those that the invariant counts."""

    def prefill(params: EngineParams, request: Request) -> DecodeState:
        batch, width = request.prompt.shape
        size = prefill_piece(target, batch, width, piece)
        state = unread(target, drafter, num_slots, logprobs, controller, request, size)
        asked = None
        if controller is not None and drafter.reads_late:
            asked = controller.choose(state.controller, context_of(params, state, controller))
        more: dict[str, Any] = {"reads": drafter.reads} if drafter.reads else {}

        def fed(state: DecodeState, tokens: Int[Array, "B T"], start: Int[Array, ""] | None = None) -> DecodeState:
            """The state after the next tokens of the prompts."""
            at = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
            at = at if start is None else at + start
            cache = state.cache if start is None else cache_lib.slide(state.cache, jnp.minimum(start, request.lengths))
            out = target(params.target, tokens, at, None if start is None else at, cache, **more)
            lengths = request.lengths - 1
            where = () if start is None else (at[:, 0],)
            lengths = lengths if start is None else jnp.clip(lengths - start, 0, tokens.shape[1])

            def extended(drafter_state: Any) -> Any:
                return drafter.extend(params.drafter, drafter_state, tokens, lengths, out, *where)

            # A draft that is not asked at first may never be asked; when it is, it reads the prompt.
            has_read = extended(state.drafter) if asked is None else run_if(jnp.any(asked > 0), extended, state.drafter)
            return dataclasses.replace(state, cache=out.cache, drafter=has_read)

        def finished(state: DecodeState) -> DecodeState:
            cache = cache_lib.narrowed(state.cache, request.lengths, cache_room(drafter))
            return _readable(target, dataclasses.replace(state, cache=cache))

        if size == width:
            return finished(fed(state, request.prompt))

        def next_piece(i: Int[Array, ""], state: DecodeState) -> DecodeState:
            return fed(state, jax.lax.dynamic_slice_in_dim(request.prompt, i * size, size, axis=1), i * size)

        whole, rest = divmod(width, size)
        longest = jnp.max(request.lengths)  # padding may double the width of the prompts
        count = jnp.minimum(-(-longest // size), whole)
        state = jax.lax.fori_loop(0, count, next_piece, cache_lib.fold(state))
        if rest:
            state = fed(state, request.prompt[:, whole * size :], jnp.int32(whole * size))
        return finished(cache_lib.unfold(state, batch))

    return jax.jit(prefill, compiler_options=backend.compiler_options(decoding=True))


def prefill_piece(target: Model, batch: int, width: int, most: int | None) -> int:
    """Number of tokens of each prompt that one pass feeds: ``most``, if that is given, or fewer if prompts are
    shorter."""
    if most is None:
        most = backend.prefill_tokens(target.widest() * jnp.dtype(target.dtype).itemsize, batch)
    return min(width, most)


_ROOM = 256
"""Least number of tokens that a row may add before layers with a sliding window must slide."""


def cache_room(drafter: BoundDrafter) -> int:
    """Number of tokens for which layers with a sliding window have room, apart from those that they see."""
    return max(_ROOM, 2 * (drafter.num_nodes + 1))


def empty_cache(target: Model, drafter: BoundDrafter, batch: int, num_slots: int, piece: int) -> Any:
    """The target's empty cache, for prompts that are fed ``piece`` tokens at a time. A layer with a sliding window
    holds no more than it sees, unless the drafter reads it."""
    if not any(target.windows):
        return target.init_cache(batch, num_slots)
    room: dict[str, Any] = {"room": max(piece, cache_room(drafter)), "whole": drafter.reads.kv_layers}
    return target.init_cache(batch, num_slots, **room)


def unread(
    target: Model,
    drafter: BoundDrafter,
    num_slots: int,
    logprobs: bool,
    controller: Controller | None,
    request: Request,
    piece: int,
) -> DecodeState:
    """The state of a request before its prompts are fed, ``piece`` tokens at a time."""
    batch, width = request.prompt.shape
    depth, ends = drafter.max_depth, request.lengths + request.budget
    zeros, zeros_k = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, depth), jnp.int32)
    none = jnp.zeros(request.sampling.bias.shape, jnp.int32)
    in_prompt = jnp.arange(width, dtype=jnp.int32)[None] < request.lengths[:, None]
    return DecodeState(
        tokens=jnp.pad(request.prompt, ((0, 0), (0, num_slots + depth + 1 - width))),
        origin=jnp.zeros((batch, num_slots + depth + 1), jnp.int32),
        lengths=request.lengths,
        prompt_lengths=request.lengths,
        budget=ends,
        done=request.budget <= 0,
        sampling=request.sampling,
        seeds=request.seeds,
        stop_ids=request.stop_ids,
        counters=Counters(zeros, zeros, zeros_k, zeros_k, zeros_k, zeros),
        finish=zeros,
        logprobs=jnp.zeros((batch, num_slots + depth + 1), jnp.float32) if logprobs else None,
        cache=cache_lib.with_total(empty_cache(target, drafter, batch, num_slots, piece), ends),
        drafter=cache_lib.with_total(drafter.init(batch, num_slots), ends),
        controller=None if controller is None else controller.init(batch),
        counts=TokenCounts(sampling.count(request.prompt, in_prompt, none), none),
    )


def _by_row(target: Model, state: DecodeState) -> DecodeState:
    """The state with each row on the device that holds its part of the cache, for a loop in which each device handles
    its own rows."""
    mesh, rest = target.mesh, dataclasses.replace(state, cache=None, drafter=None, controller=None)
    rest = jax.tree.map(lambda x: constrained(x, mesh, ROWS), rest)
    return dataclasses.replace(rest, cache=state.cache, drafter=state.drafter, controller=state.controller)


def _readable(target: Model, state: DecodeState) -> DecodeState:
    """The state with all that the host reads replicated on every device, so that each process sees all rows."""
    mesh = target.mesh
    seen = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in ("cache", "drafter")}
    return dataclasses.replace(state, **jax.tree.map(lambda x: constrained(x, mesh), seen))


def prefilled(engine: Engine, params: EngineParams, request: Request, num_slots: int) -> DecodeState:
    """The state of a request, with the prompts fed and no token emitted."""
    logprobs = engine.logprobs is not None
    how = (logprobs, engine.controller, engine.prefill_chunk)
    prefill = compiled_prefill(engine.target, engine.drafter, num_slots, *how)
    for leaf in jax.tree.leaves((params.target, params.drafter)):
        # Weights that are committed to a device commit all outputs of a chunk. A first state that is not committed has
        # another signature, for which the chunk would be compiled once more.
        if getattr(leaf, "committed", False) and isinstance(leaf.sharding, jax.sharding.SingleDeviceSharding):
            request = jax.device_put(request, leaf.sharding)
            break
    return prefill(params, request)


@functools.lru_cache(maxsize=256)
def compiled_chunk(engine: Engine):
    """Jitted ``(params, state, max_steps, stop_after) -> state``. It runs blocks until all rows are done, until the
    next block of an unfinished row might not fit the cache, after ``max_steps`` blocks, or when ``stop_after`` rows
    have finished (both traced). The state is donated."""

    def chunk(params: EngineParams, state: DecodeState, max_steps, stop_after=NO_LIMIT) -> DecodeState:
        was_done = state.done

        def unfinished(carry):
            count, state = carry
            lengths = jnp.where(state.done, 0, state.lengths)
            fits = cache_lib.first(state.cache).has_room(lengths, engine.num_nodes + 1)
            finished = jnp.sum(state.done & ~was_done, dtype=jnp.int32)
            return (count < max_steps) & fits & ~jnp.all(state.done) & (finished < stop_after)

        def body(carry):
            count, state = carry
            return count + 1, step(engine, params, state)

        def body_of_runs(carry):
            """Runs of plain blocks and runs of drafted blocks, in separate loops, so that plain blocks pay nothing for
            drafting."""

            def going(plain):
                return lambda carry: unfinished(carry[0]) & (jnp.all(carry[1] == 0) == plain)

            def going_on(block):
                def more(carry):
                    (count, state), limit = carry
                    state = block(engine, params, state, limit)
                    return (count + 1, state), limit_of(state)

                return more

            carry = carry, limit_of(carry[1])
            carry = jax.lax.while_loop(going(True), going_on(plain_block), carry)
            return jax.lax.while_loop(going(False), going_on(drafted_block), carry)[0]

        def limit_of(state):
            return chosen(engine, params, state)

        lengths = engine.compiled_lengths
        loop = body if len(lengths) == 1 or lengths[0] or engine.drafter.previews else body_of_runs
        start = _by_row(engine.target, cache_lib.fold(state))
        final = jax.lax.while_loop(unfinished, loop, (jnp.int32(0), start))[1]
        return _readable(engine.target, cache_lib.unfold(final, len(state.lengths)))

    return jax.jit(chunk, donate_argnames="state", compiler_options=backend.compiler_options(decoding=True))


def slide(state: DecodeState) -> DecodeState:
    """The state with room for more tokens in layers with a sliding window. The argument's caches are consumed."""
    return dataclasses.replace(state, cache=cache_lib.slide(state.cache, state.lengths))


def grow(state: DecodeState, num_slots: int) -> DecodeState:
    """The state with room for more tokens: in every KV cache, the drafter's too, and in the arrays with an entry a
    token. The argument's caches are consumed, one layer after the other, so that no layer exists twice."""
    kept = _padded((state.tokens, state.origin, state.logprobs), num_slots - cache_lib.num_slots(state.cache))
    tokens, origin, logprobs = kept
    return dataclasses.replace(cache_lib.grow(state, num_slots), tokens=tokens, origin=origin, logprobs=logprobs)


@functools.partial(jax.jit, static_argnames="more")
def _padded(of_tokens: Any, more: int) -> Any:
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more))), of_tokens)


def free_programs() -> None:
    """Release every compiled prefill and chunk; a program that is needed again is compiled again."""
    compiled_prefill.cache_clear()
    compiled_chunk.cache_clear()
    _padded.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    cache_lib.free_programs()
