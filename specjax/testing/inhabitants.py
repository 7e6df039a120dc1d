"""Toy users of interfaces that no shipped part uses yet: drafters of trees, drafters that read the target's hidden
states or its keys and values, and a controller of changing lengths, all over `specjax.testing.toys.PrefixModel`. Each
drafter can equal its target. Then every token must be accepted, and an error in an interface shows as a rejection.

Dims: B rows, T tokens fed, L token buffer, N proposed tokens, K length of a chain, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.drafters.base import StatelessDrafter
from specjax.interfaces import (
    Bound,
    BoundDrafter,
    Context,
    Controller,
    CoupledNoise,
    Draft,
    Drafter,
    Model,
    Outcome,
    Output,
    Params,
    Reads,
    Target,
    TargetView,
)
from specjax.proposal import Proposal
from specjax.testing.toys import ToyModel


@dataclasses.dataclass(frozen=True)
class Tree(Drafter):
    """Drafter of a tree: the ``width`` best continuations of every node, ``depth`` times. The best one comes last, so
    that the accepted tokens are not in adjacent slots."""

    model: ToyModel
    width: int = 2
    depth: int = 2
    kind: Literal["toy_tree"] = "toy_tree"

    @property
    def k(self) -> int:
        return self.depth

    def bind(self, target: Target) -> Bound:
        return Bound(BoundTree(self.model.spec, self.width, self.depth), self.model.params)


@dataclasses.dataclass(frozen=True)
class BoundTree(StatelessDrafter):
    spec: Model
    width: int
    depth: int

    @property
    def k(self) -> int:
        return self.depth

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def num_nodes(self) -> int:
        return sum(self.width**level for level in range(1, self.depth + 1))

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        batch, count = len(context.lengths), self.num_nodes
        parents = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None] // self.width, (batch, count))
        draft = Draft(
            jnp.zeros((batch, count), jnp.int32), jnp.ones((batch, count), bool), None, parents, max_depth=self.depth
        )
        for node in range((count - 1) // self.width + 1):
            children = self.best(params, context, Proposal.of(context, draft), node)
            at = slice(node * self.width, (node + 1) * self.width)
            draft = dataclasses.replace(draft, tokens=draft.tokens.at[:, at].set(children))
        return draft, state

    def best(self, params: Params, context: Context, proposal: Proposal, node: int) -> Int[Array, "B W"]:
        """The most likely tokens after a node, or those that its noise favours. Every call reads the whole prefix."""
        path, count = proposal.prefix(node)
        count = jnp.broadcast_to(count, context.lengths.shape)
        row = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
        before = row - context.lengths[:, None]
        drafted = jnp.take_along_axis(path, jnp.clip(before, 0, path.shape[1] - 1), axis=1)
        tokens = jnp.where(before < 0, context.tokens, drafted)
        logits = self.spec(params, tokens, jnp.broadcast_to(row, tokens.shape)).logits
        newest = (context.lengths - 1 + count)[:, None]
        logits = jnp.take_along_axis(logits, newest[..., None], axis=1)
        if context.noise is None:
            logits = sampling.process(logits, context, proposal, node)[:, 0]
        else:
            logits = sampling.transform(logits, context, proposal, node)[:, 0]
            if isinstance(context.noise, CoupledNoise):
                logits += jnp.take_along_axis(context.noise.gumbel, count[:, None, None], axis=1)[:, 0]
        return jax.lax.top_k(logits, self.width)[1][:, ::-1].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Chain(StatelessDrafter):
    """Drafter of a chain of zeros."""

    k: int = 3
    kind: Literal["toy_chain"] = "toy_chain"

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        shape = len(context.lengths), self.k
        return Draft(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)), state


class _Chain:
    """Base of the two readers: a chain of proposed tokens from the sum of the table's rows over all tokens before."""

    spec: Model
    k: int

    def chain(self, params: Params, before: Float[Array, "B V"], context: Context) -> Draft:
        """Chain of proposed tokens. ``before``: the sum over the tokens before the root."""
        batch = len(context.lengths)
        tokens, logits = jnp.zeros((batch, self.k), jnp.int32), []
        position = context.lengths - 1
        newest = jnp.take_along_axis(context.tokens, position[:, None], axis=1)[:, 0]
        for offset in range(self.k):
            before = before + params["table"][position % self.spec.config.period, newest]
            scale = jnp.sqrt(position.astype(jnp.float32) + 1.0)[:, None]
            raw = (params["bias"][None] + before / scale)[:, None]
            transform = sampling.process if context.noise is None else sampling.transform
            logits.append(transform(raw, context, tokens, offset)[:, 0])
            newest = sampling.draw(logits[-1], None if context.noise is None else context.noise.draft(offset))
            tokens, position = tokens.at[:, offset].set(newest), position + 1
        drawn_from = None if context.noise is None else jnp.stack(logits, axis=1)
        return Draft(tokens, jnp.ones(tokens.shape, bool), drawn_from)


@dataclasses.dataclass(frozen=True)
class HiddenReader(Drafter):
    """Drafter that continues from the target's hidden state of the last token that the target has consumed."""

    k: int = 3
    kind: Literal["toy_hidden_reader"] = "toy_hidden_reader"

    def bind(self, target: Target) -> Bound:
        return Bound(BoundHiddenReader(target.spec, self.k), target.params)


@dataclasses.dataclass(frozen=True)
class BoundHiddenReader(_Chain, BoundDrafter):
    """`HiddenReader` in decoding. State: the sum over the tokens before the root, ``[B, V]``."""

    spec: Model
    k: int
    reads = Reads(hidden_layers=(1,))

    def init(self, batch: int, num_slots: int) -> Float[Array, "B V"]:
        return jnp.zeros((batch, self.spec.config.vocab_size), jnp.float32)

    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        (sums,) = target_out.hidden
        last = jnp.take_along_axis(sums, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return jnp.where((lengths > 0)[:, None], last, state)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        return self.chain(params, state, context), state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        (sums,) = outcome.target_out.hidden
        return jnp.take_along_axis(sums, outcome.verdict.num_accepted[:, None, None], axis=1)[:, 0]


@dataclasses.dataclass(frozen=True)
class CacheReader(Drafter):
    """Drafter that continues from the target's own keys. It has no state, since all that it reads is verified."""

    k: int = 3
    kind: Literal["toy_cache_reader"] = "toy_cache_reader"

    def bind(self, target: Target) -> Bound:
        return Bound(BoundCacheReader(target.spec, self.k), target.params)


@dataclasses.dataclass(frozen=True)
class BoundCacheReader(_Chain, StatelessDrafter):
    spec: Model
    k: int
    reads = Reads(kv_layers=(0,))

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        ((keys, positions),) = target.keys_values
        assert target.lengths is not None
        keys, positions = (x.reshape(len(context.lengths), *x.shape[-2:]) for x in (keys, positions))
        slot = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        counts = slot < target.lengths[:, None]
        misplaced = jnp.sum(jnp.where(counts, jnp.abs(positions[:, 0] - slot.astype(jnp.float32)), 0.0), axis=1)
        before = jnp.sum(jnp.where(counts[..., None], keys, 0.0), axis=1)
        before += misplaced[:, None] * jnp.arange(before.shape[1], dtype=jnp.float32)[None]
        return self.chain(params, before, context), state


@dataclasses.dataclass(frozen=True)
class Changing(Controller):
    """Controller with another draft length in every block of a row: 0, 1, ... ``k``, 0, ... A row stops before a token
    whose largest probability is above ``sure``."""

    k: int = 3
    sure: float = 1.0
    kind: Literal["toy_changing"] = "toy_changing"

    def init(self, batch: int) -> Int[Array, " B"]:
        return jnp.zeros((batch,), jnp.int32)

    def choose(self, state: Any, context: Context) -> Int[Array, " B"]:
        return state % (self.k + 1)

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"]:
        return jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1) > self.sure

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        return state + (outcome.emitted > 0).astype(jnp.int32)
