"""Drafts with a *token row* for each token x_t: the embedding of x_t beside features of the token before, x_{t-1}. From
it the draft predicts x_{t+1} (EAGLE-3, multi-token prediction). The target has computed the features of the token
before the root (the newest token), but not those of the root. After the root, the draft's own output for the token
before stands in for its features. Training unrolls several depths alike, so that the draft learns to read its own
output.

In decoding, the cached keys and values of a committed token's row come from true features: after verification, the
token rows of a block are computed again from the target's features, and overwrite the guesses. The first token of a row
has no features before it, and so no token row. Token row t lies in slot t - 1.

Training does the same with every position as a root: at depth d, position t ends a block whose root is at t - d. It
sees the token rows of true features up to the root's, t - d, and its own of depths 1 .. d after it.

Dims: B rows, T positions, K tokens of a block, N token rows written at a time, H hidden, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.block_kv import BlockKV, TargetAndBlockKV, by_depth
from specjax.drafters.features import BoundFeatures, FeatureModel, TrainedFeatureDraft
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.interfaces import (
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
from specjax.models.attention.kv_source import CacheKV, KVSource, kv_sources
from specjax.models.attention.sight import AttentionMask
from specjax.models.cache import KVCache


@dataclasses.dataclass(frozen=True)
class RowModel(FeatureModel, abc.ABC):
    """Forward pass of token rows."""

    def decoding(self, k: int) -> BoundRows:
        return BoundRows(self, k)

    @abc.abstractmethod
    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        """Features that token rows read, made of the target's forward pass."""

    @abc.abstractmethod
    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        features: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        kv: Sequence[KVSource],
        form: TrainingForm = PLAIN,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"], tuple[Any, ...]]:
        """Token rows of ``tokens`` with the ``features`` of the tokens before: (input of the head, stand-in for the
        features of these tokens, each layer's keys and values)."""

    def behind(
        self, params: Params, tokens: Int[Array, "B T"], features: Float[Array, "B T H"]
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T H"]]:
        """Tokens and features of the next depth's token rows in training, after token rows that left ``features``."""
        return tokens, jnp.roll(features, 1, axis=1)


# --- decoding -------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """Keys and values of committed token rows, and the features of the token before the root."""

    cache: KVCache
    features: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class BoundRows(BoundFeatures):
    """The bound form, which the engine runs."""

    model: RowModel

    def init(self, batch: int, num_slots: int) -> State:
        config, dtype = self.model.config, self.model.dtype
        cache = KVCache.zeros(config.num_layers, batch, num_slots, config.num_kv_heads, config.head_dim, dtype)
        return State(cache, jnp.zeros((batch, config.hidden_size), dtype))

    def extend(self, params, state: State, tokens, lengths, target_out, start=None) -> State:
        """The state after the token rows of the prompt. The last layer makes keys and values alone, since nothing reads
        its output."""
        made = self.model.features(params, target_out)
        before = jnp.concatenate([state.features[:, None], made[:, :-1]], axis=1)
        start = jnp.zeros(len(tokens), jnp.int32) if start is None else start
        cache = self._kept(params, state.cache, tokens, before, start)
        return State(cache, jnp.where((lengths > 0)[:, None], at(made, lengths - 1), state.features))

    def draft(self, params: Params, target: TargetView, state: State, context: Context) -> tuple[Draft, State]:
        """A proposal made with one pass a token, the root's first. A root without a token before it gets none."""
        root, slot = self._root(context)

        def feed(carry: tuple[KVCache, Array], newest: Int[Array, "B 1"], depth: Int[Array, ""]) -> tuple[Any, Any]:
            cache, features = carry
            final, features, cache = self._pass(params, cache, newest, features, slot + depth)
            return self.model.head(params, final), (cache, features)

        draft, (cache, _), _ = one_by_one(feed, (state.cache, state.features[:, None]), root, context, self.k)
        return with_a_token_before(draft, context), state._replace(cache=cache)

    def commit(self, params: Params, state: State, outcome: Outcome) -> State:
        """The state with the block's token rows made of the target's features, from the root's to that of the target's
        own token."""
        root, _ = self._root(outcome.context)
        made = self.model.features(params, outcome.target_out)
        tokens = jnp.concatenate([root, outcome.tokens], axis=1)
        before = jnp.concatenate([state.features[:, None], made], axis=1)
        cache = self._kept(params, state.cache, tokens, before, outcome.context.lengths - 1)
        return State(cache, at(made, outcome.verdict.num_accepted))

    @staticmethod
    def _root(context: Context) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
        """The newest token of each row, and the slot of its token row."""
        return root_of(context), jnp.maximum(context.lengths - 2, 0)[:, None]

    def _kept(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B N"],
        before: Float[Array, "B N H"],
        start: Int[Array, " B"],
    ) -> KVCache:
        """The cache with the token rows of ``tokens``, whose first is at position ``start[b]``. A row's first token has
        none and is skipped; the surplus slot written at the end instead is overwritten later."""
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        skipped = (start == 0).astype(jnp.int32)
        chosen = jnp.minimum(index + skipped[:, None], tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(tokens, chosen, axis=1)
        before = jnp.take_along_axis(before, chosen[..., None], axis=1)
        return self._pass(params, cache, tokens, before, jnp.maximum(start - 1, 0)[:, None] + index)[2]

    def _pass(
        self, params: Params, cache: KVCache, tokens: Array, features: Array, slots: Int[Array, "B N"]
    ) -> tuple[Array, Array, KVCache]:
        """A pass over token rows at ``slots``: (input of the head, stand-in for features, the cache)."""
        windows = [self.model.config.layer(i).window for i in range(self.model.config.num_layers)]
        attended = kv_sources(cache, slots, slots, None, windows)
        kv = [attended[window].over(layer) for window, layer in zip(windows, cache.fold().layers, strict=True)]
        final, features, layers = self.model(params, tokens, features, slots + 1, kv)
        return final, features, cache.written(layers)


def with_a_token_before(draft: Draft, context: Context) -> Draft:
    """``draft`` without proposals where the root is a row's first token."""
    return dataclasses.replace(draft, valid=draft.valid & (context.lengths > 1)[:, None])


def at(x: Float[Array, "B T H"], index: Int[Array, " B"]) -> Float[Array, "B H"]:
    """The vector at ``index`` in each row."""
    return jnp.take_along_axis(x, jnp.maximum(index, 0)[:, None, None], axis=1)[:, 0]


# --- training -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedRows(TrainedFeatureDraft):
    """A draft with token rows, in training. ``depths``: number of depths of a block that are unrolled; ``decay``:
    weight of a depth relative to the one before."""

    depths: int = 3
    decay: float = 0.8

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction a depth, at all positions, see the module's docstring. A position counts only if all that its
        block reads lies in the same document."""
        assert target_out is not None
        model: Any = self.model
        tokens, positions, config = jnp.asarray(batch.tokens), batch.token_positions, self.config
        features = jnp.roll(model.features(params, target_out), 1, axis=1)  # of the token before
        rows, fed = tokens.shape
        own = [BlockKV.empty(config, rows, fed, max(1, self.depths - 1), self.model.dtype)] * config.num_layers
        true: Any = None
        head, narrow = functools.partial(model.head, params), model.narrow(params)
        for depth, weight, share in by_depth(batch, self.depths, self.decay, before=1):
            kv = self._seen(batch, depth, true, own)
            final, features, layers = model(params, tokens, features, positions, kv, self.form)
            tokens, features = model.behind(params, tokens, features)
            yield Prediction(final, head, weight, None, share, model.in_vocabulary, narrow=narrow)
            if true is None:
                true = layers
            else:  # the block that ends at t continues the one that ends at t - 1
                own = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), list(layers))

    def _seen(self, batch: Batch, depth: int, true: Any, own: Sequence[BlockKV]) -> list[Any]:
        """Keys and values that the token rows of a depth attend to, one for each layer."""
        positions, documents = batch.token_positions, batch.documents
        place = jnp.arange(positions.shape[1], dtype=jnp.int32)
        of_queries = jnp.zeros(positions.shape, jnp.int32) if documents is None else documents.segments
        # A document's first token has no token row.
        everything = AttentionMask(
            (place - depth)[None], segments=(of_queries, jnp.where(positions == 0, -1, of_queries))
        )
        kv: list[Any] = []
        starts = jnp.zeros(len(positions), jnp.int32)
        for i, block in enumerate(own):
            # A window ends at the token row itself, which is `depth` positions after its root.
            window = self.config.layer(i).window
            at = jnp.broadcast_to(place[None], positions.shape)
            sight = everything if window is None else everything.within(window, at, at)
            kv.append(CacheKV(sight, starts) if true is None else TargetAndBlockKV(true[i], sight, block, depth - 1))
        return kv

    def unrolled(self, depths: int) -> Any:
        return dataclasses.replace(self, depths=depths)

    def passes(self, length: int) -> int:
        return self.depths
