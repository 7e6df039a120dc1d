"""Drafting of a block one token after the other, for every drafter whose next token depends on the one before. The loop
makes as many passes as some row still wants a token of, and no more.

A depth counts a block's tokens from 0 here.

Dims: B rows, K draft length, V vocabulary, W logits of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.interfaces import Context, Draft

Feed = Callable[[Any, Int[Array, "B 1"], Int[Array, ""]], tuple[Float[Array, "B 1 W"], Any]]
"""Signature of the draft's pass: ``(state, newest, depth) -> (logits, state)``. It reads the newest token of each row,
which is the root or the token of depth ``depth - 1``; its logits are those of the token of depth ``depth``."""


class Proposed(NamedTuple):
    """Facts about a proposed token. ``finite``: True if the draft's own logits form a distribution; ``logits``: those
    that the token was drawn from (None: without noise); ``stops``: True for rows that stop before it (None: no row)."""

    finite: Bool[Array, " B"]
    logits: Float[Array, "B V"] | None
    stops: Bool[Array, " B"] | None


def propose(
    raw: Float[Array, "B 1 W"],
    context: Context,
    tokens: Int[Array, "B K"],
    depth: int | Int[Array, ""],
    confidence: Float[Array, " B"] | None = None,
) -> tuple[Int[Array, "B K"], Proposed]:
    """``tokens`` with the token of depth ``depth`` drawn from the draft's own logits ``raw``. ``confidence``: see
    `Context.stop`."""
    transform = sampling.process if context.noise is None else sampling.transform
    logits = transform(_over(raw, context.sampling.bias.shape[1]), context, tokens, depth)[:, 0]
    noise = None if context.noise is None else context.noise.draft(depth)
    drawn = sampling.draw(logits, noise)[:, None]
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, drawn, depth, axis=1)
    finite = sampling.has_distribution(raw)[:, 0]
    return tokens, Proposed(finite, None if noise is None else logits, context.stop(logits, depth, confidence))


class Block(NamedTuple):
    """A block in the making. ``depth``: depth of the next token; ``newest``: the token to feed; ``going``: True for
    rows that may still propose; ``found``: facts about each token, ``[K, ...]``."""

    depth: Int[Array, ""]
    newest: Int[Array, "B 1"]
    tokens: Int[Array, "B K"]
    valid: Bool[Array, "K B"]
    going: Bool[Array, " B"]
    found: Proposed


def one_by_one(
    feed: Feed,
    state: Any,
    root: Int[Array, "B 1"],
    context: Context,
    k: int,
    first: Any = None,
    confidence: Callable[[Any], Float[Array, " B"] | None] = lambda state: None,
) -> tuple[Draft, Any, Int[Array, ""]]:
    """A proposal of ``k`` tokens after ``root``. Each row goes as deep as `Context.limit` and `Context.stop` allow.
    ``first``: logits of the root's pass, if the caller has made that pass because it differs from the others.
    ``confidence``: gives, for the state after a pass, the chance that the next token is accepted, see `Context.stop`.

    Returns the proposal, the state after the last pass, and the number of passes. The token drawn from the last pass
    was not fed.
    """
    batch = len(context.lengths)
    tokens = jnp.zeros((batch, k), jnp.int32)
    raw = jax.eval_shape(feed, state, root, jnp.int32(0))[0] if first is None else first
    kinds = jax.eval_shape(lambda raw: propose(raw, context, tokens, 0, confidence(state))[1], raw)
    bounded = context.limit is not None or kinds.stops is not None
    limit = jnp.full((batch,), k, jnp.int32) if context.limit is None else context.limit

    def drawn(block: Block, raw: Float[Array, "B 1 W"], state: Any) -> Block:
        depth = block.depth
        tokens, proposed = propose(raw, context, block.tokens, depth, confidence(state))
        going = block.going if proposed.stops is None else block.going & ~proposed.stops
        valid = block.valid.at[depth].set(going) if bounded else block.valid
        found = jax.tree.map(lambda old, new: old.at[depth].set(new), block.found, proposed._replace(stops=None))
        newest = jax.lax.dynamic_slice_in_dim(tokens, depth, 1, axis=1)
        return Block(depth + 1, newest, tokens, valid, going & (depth + 1 < limit) if bounded else going, found)

    def unfinished(carry: tuple[Block, Any]) -> Bool[Array, ""]:
        block, _ = carry
        return (block.depth < k) & jnp.any(block.going) if bounded else block.depth < k

    def step(carry: tuple[Block, Any]) -> tuple[Block, Any]:
        block, state = carry
        raw, state = feed(state, block.newest, block.depth)
        return drawn(block, raw, state), state

    found = jax.tree.map(lambda x: jnp.zeros((k, *x.shape), x.dtype), kinds._replace(stops=None))
    valid = jnp.full((k, batch), not bounded)
    # The loop carries the depth. When it was read from an array of depths, its slice shared a fusion with one made of
    # a gather, and XLA on CPU (jax 0.10) gave both the same name when their numbers happened to be equal.
    block = Block(jnp.int32(0), root, tokens, valid, limit > 0, found)
    if first is not None:
        block = drawn(block, first, state)
    block, state = jax.lax.while_loop(unfinished, step, (block, state))
    found, valid = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), (block.found, block.valid))
    # Depths without a proposal count as finite.
    finite = found.finite | ~valid if bounded else found.finite
    return Draft(block.tokens, valid, logits=found.logits, finite=finite), state, block.depth


def root_of(context: Context) -> Int[Array, "B 1"]:
    """The newest token of each row, which its block follows."""
    return jnp.take_along_axis(context.tokens, (context.lengths - 1)[:, None], axis=1)


def all_at_once(raw: Float[Array, "B K W"], root: Int[Array, "B 1"], context: Context) -> Draft:
    """A proposal whose tokens are drawn independently, the token of each depth from its own logits in ``raw``."""

    def feed(state: Any, newest: Int[Array, "B 1"], depth: Int[Array, ""]) -> tuple[Array, Any]:
        return jax.lax.dynamic_slice_in_dim(raw, depth, 1, axis=1), state

    return one_by_one(feed, (), root, context, raw.shape[1])[0]


def _over(logits: Float[Array, "B R W"], size: int) -> Float[Array, "B R V"]:
    """Logits over the target's ``size`` ids. An id that only one of the two models has is padding, and is never
    drafted."""
    missing = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
