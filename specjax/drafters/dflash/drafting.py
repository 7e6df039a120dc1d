"""Decoding of the blocks of DFlash, DSpark and DFlash2.

Dims: B rows, T tokens fed, N slots of a block, K proposed tokens of it, H hidden, R features of the token before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.drafters.features import BoundFeatures
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.drafters.token_rows import with_a_token_before
from specjax.interfaces import Context, Draft, Outcome, Output, Params, TargetView
from specjax.models.attention.kv_source import kv_sources
from specjax.models.cache import KVCache


@dataclasses.dataclass(frozen=True)
class BoundDFlash(BoundFeatures):
    """The bound form, which the engine runs. Its state is the cache of injected keys and values, token t in slot t.
    ``model``: a `specjax.drafters.dflash.model.DFlashModel`."""

    model: Any

    def init(self, batch: int, num_slots: int) -> KVCache:
        config, dtype = self.model.config, self.model.dtype
        return KVCache.zeros(config.num_layers, batch, num_slots, config.num_kv_heads, config.head_dim, dtype)

    def extend(self, params, state: KVCache, tokens, lengths, target_out, start=None) -> KVCache:
        """The state with the prompt's tokens injected; the padding written after them is overwritten later."""
        return self._kept(params, state, target_out, jnp.zeros(len(tokens), jnp.int32) if start is None else start)

    def draft(self, params: Params, target: TargetView, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """A proposal made of all slots in one pass; its tokens are then drawn, in sequence where they depend on each
        other."""
        model, at = self.model, (context.lengths - 1)[:, None]
        root = root_of(context)
        memory = model.blocks(state.fold().layers, model.sights(at))
        slots, module, first = model(params, root, at, memory), model.module(params), model.slot_of(0)
        final = slots[:, 0, first : first + self.k]
        unary = model.unary(module, final)

        def feed(state: tuple[Array, Any], newest: Int[Array, "B 1"], depth: Int[Array, ""]) -> tuple[Array, Any]:
            of_slot, hidden = (jax.lax.dynamic_slice_in_dim(x, depth, 1, axis=1) for x in (unary, final))
            sequence, read = model.read(module, state[0], newest, hidden)
            sure = jax.nn.sigmoid(model.confidence(module, hidden, read)[:, 0]) if model.confident else None
            return model.logits(module, of_slot, read), (sequence, sure)

        sure = jnp.zeros(len(root), jnp.float32) if model.confident else None
        begin = model.before_first(module, root, slots), sure
        draft = one_by_one(feed, begin, root, context, self.k, confidence=lambda state: state[1])[0]
        return with_a_token_before(draft, context), state

    def commit(self, params: Params, state: KVCache, outcome: Outcome) -> KVCache:
        """The state with the root and the accepted tokens after it injected."""
        return self._kept(params, state, outcome.target_out, outcome.context.lengths - 1)

    def _kept(self, params: Params, cache: KVCache, target_out: Output, start: Int[Array, " B"]) -> KVCache:
        model = self.model
        injected = model.injected(params, target_out)
        slots = start[:, None] + jnp.arange(injected.shape[1], dtype=jnp.int32)[None]
        memory = kv_sources(cache, slots, slots, None, (None,))[None]
        over = [memory.over(layer) for layer in cache.fold().layers]
        return cache.written([layer for layer, _ in model.keys_values(params, injected, slots, over)])
