"""An autoregressive draft model: a small decoder with its own KV cache proposes K tokens one by one (2211.17192).

Dims: B rows, P prompt, T tokens fed, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key
from pydantic import Field

from specjax import sampling
from specjax.models.cache import dtype_for, with_total
from specjax.types import Batch, Context, Draft, DraftOutput, Output, Params, Verdict


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """``model``: a path, of a model or of a run that left a draft, whose weights are cast to the target's dtype, or a
    `LoadedModel`; after `bind`, its static spec."""

    model: Any
    k: Annotated[int, Field(ge=1, le=64)] = 5
    kind: Literal["draft_model"] = "draft_model"

    def bind(self, target: Any) -> tuple[DraftModel, Params]:
        """Raises `ModelError` if the vocabularies differ (`specjax.models.vocabulary`)."""
        from specjax.models import hf, vocabulary
        from specjax.models.files import check_model

        named = isinstance(self.model, (str, os.PathLike))
        draft = hf.load_model(hf.draft_of(self.model), str(target.dtype)) if named else self.model
        check_model(draft, f"drafter {self.kind!r}: model")
        layout = draft.layout()
        return dataclasses.replace(self, model=vocabulary.known_to(draft, target, layout.spec)), layout.params

    @property
    def max_positions(self) -> int:
        """Positions of the bound draft."""
        return self.model.config.max_positions

    def init(
        self,
        params: Params,
        prompt: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        num_slots: int,
        target_out: Output | None,
    ) -> Any:
        batch, fed = prompt.shape
        positions = jnp.broadcast_to(jnp.arange(fed, dtype=jnp.int32)[None], (batch, fed))
        cache = self.model.init_cache(batch, num_slots, dtype_for(params))
        # The target knows how long rows will get, if that matters to it; otherwise the prompts decide.
        total = getattr(target_out and target_out.cache, "total", None)
        cache = with_total(cache, lengths if total is None else total)
        return self.model(params, prompt, positions, positions, cache).cache

    def draft(self, params: Params, state: Any, context: Context) -> tuple[Draft, Any]:
        """The first pass feeds the last two committed tokens: after a full acceptance the cache has not seen the last
        accepted one (x_K was proposed, never fed), and feeding it again otherwise changes nothing."""
        start = jnp.maximum(context.lengths - 2, 0)
        slots = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(context.tokens, slots, axis=1)
        newest = (context.lengths - 1 - start)[:, None]
        out = self.model(params, fed, slots, slots, state, rows=newest)
        tokens, logits = self._propose(out, context, jnp.zeros((len(start), self.k), jnp.int32), 0)
        first = _finite(out), logits

        def step(carry, _):
            cache, tokens, offset = carry
            newest = jnp.full((len(start), 1), offset - 1)
            token = jnp.take_along_axis(tokens, newest, axis=1)
            slot = (context.lengths - 1)[:, None] + offset
            out = self.model(params, token, slot, slot, cache)
            tokens, logits = self._propose(out, context, tokens, offset)
            return (out.cache, tokens, offset + 1), (_finite(out), logits)

        # The offset is carried: read from an array of offsets, its slice shared a fusion with one made of a gather, and
        # XLA on CPU (jax 0.10) gave both the same name when their numbers happened to be equal.
        carry = (out.cache, tokens, jnp.int32(1))
        (cache, tokens, _), rest = jax.lax.scan(step, carry, length=self.k - 1)
        finite, logits = jax.tree.map(lambda a, b: jnp.concatenate([a[:, None], jnp.moveaxis(b, 0, 1)], 1), first, rest)
        return Draft(tokens, jnp.ones(tokens.shape, bool), logits=logits, finite=finite), cache

    def commit(self, params: Params, state: Any, draft: Draft, verdict: Verdict, target_out: Output) -> Any:
        # Slots past the accepted prefix are stale: masked by length, then overwritten.
        return state

    def _propose(self, out: Output, context: Context, tokens: Int[Array, "B K"], offset):
        """``tokens`` with the one at ``offset`` drawn, and the logits it was drawn from (None without noise)."""
        raw = _over(out.logits, context.sampling.bias.shape[1])
        if context.noise is None:
            logits, noise = sampling.process(raw, context, tokens, offset)[:, 0], None
        else:
            logits, noise = sampling.transform(raw, context, tokens, offset)[:, 0], context.noise.draft(offset)
        drawn = sampling.draw(logits, noise)[:, None]
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, drawn, offset, axis=1)
        return tokens, None if noise is None else logits

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return self.model.init(key)

    def train_output(self, params: Params, batch: Batch, target_out: Output | None) -> DraftOutput:
        """Position t predicts what the target's row t predicts: one prediction a position, no shift."""
        logits = self.model(params, batch.tokens, batch.token_positions, mask=batch.attention_mask).logits
        rows = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[:, None]
        return DraftOutput(logits[:, :, None], rows, batch.weight[..., None], jnp.ones((1,), jnp.float32))


def _finite(out: Output) -> Bool[Array, " B"]:
    """Of a pass over one row of logits: whether they are a distribution's."""
    return sampling.has_distribution(out.logits)[:, 0]


def _over(logits: Float[Array, "B R W"], size: int) -> Float[Array, "B R V"]:
    """Over the target's ``size`` ids: a row that only one of the two models has is padding, and is never drafted."""
    missing = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
