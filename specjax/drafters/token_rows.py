"""Drafts with a row for each token x_t: its embedding beside features of the token before, x_{t-1}, from which the row
predicts x_{t+1} (EAGLE-3, multi-token prediction). At the root the features of the token before are known, those of the
root are not: behind it, what the draft itself made of the token before stands in for them, and training unrolls as much
so that it learns to read its own.

In decoding, keys and values of a committed token's row are those of true features: after verification the rows of a
block are made again from what the target computed, and what was guessed is overwritten. The first token of a row has no
features before it, and no row. So row t lies in slot t - 1.

In training the same, with every position as a root: at depth d position t ends a block whose root is at t - d. It sees
the rows of true features up to the root's, t - d, and its own of depths 1 .. d behind it.

Dims: B rows, T positions, K tokens of a block, N rows written at a time, H hidden, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.features import BoundFeatures, FeatureModel, TrainedFeatureDraft
from specjax.drafters.glide import Own, Reading, inside_document
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.models.attention.blocks import attend
from specjax.models.attention.memory import Attended, memories
from specjax.models.attention.sight import Sight
from specjax.models.attention.stored import Layer
from specjax.models.cache import KVCache
from specjax.types import (
    PLAIN,
    Batch,
    Context,
    Draft,
    Outcome,
    Output,
    Params,
    Prediction,
    TargetView,
    TrainingForm,
)


@dataclasses.dataclass(frozen=True)
class RowModel(FeatureModel, abc.ABC):
    """The forward pass of such rows."""

    @abc.abstractmethod
    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        """What the rows read of the target's forward pass."""

    @abc.abstractmethod
    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        features: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        memory: Sequence[Attended],
        form: TrainingForm = PLAIN,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"], tuple[Any, ...]]:
        """Rows of ``tokens``, with the ``features`` of those before: (what the head reads, what stands in for features
        of these tokens, each layer's keys and values)."""

    def behind(
        self, params: Params, tokens: Int[Array, "B T"], features: Float[Array, "B T H"]
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T H"]]:
        """In training, (tokens, features of those before) of the rows behind rows that left ``features``."""
        return tokens, jnp.roll(features, 1, axis=1)


# --- decoding -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Keys and values of committed rows, and the features of the token before the root."""

    cache: KVCache
    features: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class BoundRows(BoundFeatures):
    """What the engine runs."""

    model: RowModel

    def init(self, batch: int, num_slots: int) -> State:
        config, dtype = self.model.config, self.model.dtype
        cache = KVCache.zeros(config.num_layers, batch, num_slots, config.num_kv_heads, config.head_dim, dtype)
        return State(cache, jnp.zeros((batch, config.hidden_size), dtype))

    def extend(
        self,
        params: Params,
        state: State,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> State:
        """The rows of prompt tokens: of the last layer their keys and values alone, since nothing else is read."""
        made = self.model.features(params, target_out)
        before = jnp.concatenate([state.features[:, None], made[:, :-1]], axis=1)
        start = jnp.zeros(len(tokens), jnp.int32) if start is None else start
        cache = self._kept(params, state.cache, tokens, before, start)
        return State(cache, jnp.where((lengths > 0)[:, None], at(made, lengths - 1), state.features))

    def draft(self, params: Params, target: TargetView, state: State, context: Context) -> tuple[Draft, State]:
        """One pass a token, the root's first. Without a token before the root there is nothing to read, nor a draft."""
        root, slot = self._root(context)

        def feed(carry: tuple[KVCache, Array], newest: Int[Array, "B 1"], offset: Int[Array, ""]) -> tuple[Any, Any]:
            cache, features = carry
            final, features, cache = self._pass(params, cache, newest, features, slot + offset)
            return self.model.head(params, final), (cache, features)

        draft, (cache, _), _ = one_by_one(feed, (state.cache, state.features[:, None]), root, context, self.k)
        return with_a_token_before(draft, context), state._replace(cache=cache)

    def commit(self, params: Params, state: State, outcome: Outcome) -> State:
        """The block's rows as the target's features make them, from the root's to that of the target's own token."""
        root, _ = self._root(outcome.context)
        made = self.model.features(params, outcome.target_out)
        tokens = jnp.concatenate([root, outcome.tokens], axis=1)
        before = jnp.concatenate([state.features[:, None], made], axis=1)
        cache = self._kept(params, state.cache, tokens, before, outcome.context.lengths - 1)
        return State(cache, at(made, outcome.verdict.num_accepted))

    @staticmethod
    def _root(context: Context) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
        """The newest token, and the slot of its row."""
        return root_of(context), jnp.maximum(context.lengths - 2, 0)[:, None]

    def _kept(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        before: Float[Array, "B N H"],
        start: Int[Array, " B"],
    ) -> KVCache:
        """With the rows of ``tokens``, of which the first is at position ``start[b]``; a row's first has none, and what
        is then written behind the last is overwritten."""
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        skipped = (start == 0).astype(jnp.int32)
        chosen = jnp.minimum(index + skipped[:, None], tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(tokens, chosen, axis=1)
        before = jnp.take_along_axis(before, chosen[..., None], axis=1)
        return self._pass(params, cache, tokens, before, jnp.maximum(start - 1, 0)[:, None] + index)[2]

    def _pass(
        self, params: Params, cache: KVCache, tokens: Array, features: Array, slots: Int[Array, "B N"]
    ) -> tuple[Array, Array, KVCache]:
        """Rows at these slots: (what the head reads, what stands in for features, the cache)."""
        windows = [self.model.config.layer(i).window for i in range(self.model.config.num_layers)]
        attended = memories(cache, slots, slots, None, windows)
        memory = [attended[window].over(layer) for window, layer in zip(windows, cache.fold().layers, strict=True)]
        final, features, layers = self.model(params, tokens, features, slots + 1, memory)
        return final, features, cache.written(layers)


def with_a_token_before(draft: Draft, context: Context) -> Draft:
    """Nothing where the root is a row's first token."""
    return dataclasses.replace(draft, valid=draft.valid & (context.lengths > 1)[:, None])


def at(x: Float[Array, "B T H"], index: Int[Array, " B"]) -> Float[Array, "B H"]:
    """The one at ``index`` of each row."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]


# --- training -------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Rows:
    """The rows of true features see each other."""

    sight: Sight

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, Layer]:
        """See `specjax.models.attention.memory.Attended`."""
        layer = Layer.of(k, v)
        return attend(q, *layer, self.sight, scale, soft_cap), layer


@dataclasses.dataclass(frozen=True)
class TrainedRows(TrainedFeatureDraft):
    """In training. ``depths``: rows of a block that are unrolled; ``decay``: what a depth weighs beside the one
    before."""

    depths: int = 3
    decay: float = 0.8

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One of all positions by depth, see the head of this file. What a block reads lies in its own document, or it
        does not count."""
        assert target_out is not None
        model: Any = self.model
        tokens, positions, config = jnp.asarray(batch.tokens), batch.token_positions, self.config
        shares = [self.decay**depth for depth in range(self.depths)]
        features = jnp.roll(model.features(params, target_out), 1, axis=1)  # of the token before
        own = [self._empty_block(tokens.shape)] * config.num_layers
        true: Any = None
        for depth, share in enumerate(shares):
            memory = self._seen(batch, depth, true, own)
            final, features, layers = model(params, tokens, features, positions, memory, self.form)
            inside = inside_document(batch.documents, jnp.arange(tokens.shape[1], dtype=jnp.int32) - 1 - depth)
            weight = jnp.where(inside, jnp.asarray(batch.weight), 0.0)
            tokens, features = model.behind(params, tokens, features)
            yield Prediction(
                final, functools.partial(model.head, params), weight, None, share / sum(shares), model.proposable
            )
            if true is None:
                true = layers
            else:  # the block that ends at t continues the one that ends at t - 1
                own = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), list(layers))

    def _empty_block(self, fed: tuple[int, ...]) -> Own:
        config = self.config
        zeros = jnp.zeros((*fed, max(1, self.depths - 1), config.num_kv_heads, config.head_dim), self.model.dtype)
        return Own(zeros, zeros)

    def _seen(self, batch: Batch, depth: int, true: Any, own: Sequence[Own]) -> list[Any]:
        """What the rows of a depth attend to, by layer."""
        positions, documents = batch.token_positions, batch.documents
        place = jnp.arange(positions.shape[1], dtype=jnp.int32)
        of_queries = jnp.zeros(positions.shape, jnp.int32) if documents is None else documents.segments
        # A document's first token has no row.
        everything = Sight((place - depth)[None], segments=(of_queries, jnp.where(positions == 0, -1, of_queries)))
        memory: list[Any] = []
        for i, block in enumerate(own):
            # A window ends at the row itself, whose own place is `depth` behind its root's.
            window = self.config.layer(i).window
            at = jnp.broadcast_to(place[None], positions.shape)
            sight = everything if window is None else everything.within(window, at, at)
            memory.append(Rows(sight) if true is None else Reading(true[i], sight, block, depth - 1))
        return memory

    def at_depths(self, depths: int) -> Any:
        return dataclasses.replace(self, depths=depths)
