"""An autoregressive draft model: a small decoder with its own KV cache proposes K tokens one by one (2211.17192).

Dims: B rows, P prompt, T tokens fed, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Int, Key
from pydantic import Field

from specjax.drafters.base import TrainedDrafter
from specjax.drafters.one_by_one import one_by_one
from specjax.models import cache as cache_lib
from specjax.models.config import ModelConfig
from specjax.models.sharding import sharding_of
from specjax.models.training import training_model
from specjax.models.transformer import Model
from specjax.types import (
    Batch,
    Bound,
    Context,
    Draft,
    Outcome,
    Output,
    Params,
    Prediction,
    TargetView,
    Trainable,
    TrainingForm,
)


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """An autoregressive draft model: a small decoder proposes ``k`` tokens one by one from its own KV cache
    (2211.17192)."""

    model: Any
    """A `LoadedModel`, or the path of a model or of a run that left a draft, whose weights are cast to the target's
    dtype."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Tokens of a block, 1 to 64."""
    kind: Literal["draft_model"] = "draft_model"
    """Name in the registry, in configs and in results."""
    quantize: Literal["int8", "int4"] | None = None
    """How kernels of a model that is named by its path are stored; None: in the target's dtype."""

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        target: Any,
        k: int,
        check_finite: bool = True,
        quantize: Literal["int8", "int4"] | None = None,
    ) -> DraftModel:
        """The model in a directory, for decoding only; see `specjax.drafters.loading.load_drafter`.

        Args:
            directory: a Hugging Face directory or hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: draft tokens a block.
            check_finite: refuse NaN and infinite weights.
            quantize: how kernels are stored, see `specjax.load_model`.

        Returns:
            The drafter; its weights are in memory once, as decoding reads them.

        Raises:
            ModelError: for what cannot be read.
        """
        from specjax.models import hf

        model = hf.load_model(directory, str(target.dtype), check_finite=check_finite, quantize=quantize)
        model.free_originals()
        return cls(model, k)

    def bind(self, target: Any) -> Bound:
        """The draft model over the target's token ids (`specjax.models.vocabulary`).

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            What the engine runs, and the draft's weights laid out for decoding.

        Raises:
            ModelError: the vocabularies differ, or ``model`` is no model or cannot be read.
        """
        from specjax.models import hf, vocabulary
        from specjax.models.files import check_model

        named = isinstance(self.model, (str, os.PathLike))
        draft = self.model
        if named:
            draft = hf.load_model(hf.draft_of(self.model), str(target.dtype), quantize=self.quantize)
        check_model(draft, f"drafter {self.kind!r}: model")
        layout = draft.layout()
        spec = vocabulary.known_to(draft, target, layout.spec)
        return Bound(BoundDraftModel(spec, self.k), layout.params)


_PIECE = 32
"""Tokens that a draft which was not asked for a while reads at a time."""


class Consumed(NamedTuple):
    """A draft's cache, and how many of each row's tokens it holds the right keys and values of."""

    cache: Any
    lengths: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class BoundDraftModel:
    """``model``: a static spec, a function of its parameters."""

    model: Any
    k: int = 5
    reads_late: ClassVar[bool] = True
    """It reads for itself what it missed, so that a prompt need not be read before it is asked."""

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    def init(self, batch: int, num_slots: int) -> Consumed:
        return Consumed(self.model.init_cache(batch, num_slots), jnp.zeros((batch,), jnp.int32))

    def extend(
        self,
        params: Params,
        state: Consumed,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output | None,
        start: Int[Array, " B"] | None = None,
    ) -> Consumed:
        """``start``: where the tokens stand in their rows; None: at the beginning."""
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        places = places if start is None else start[:, None] + places
        ends = lengths if start is None else start + lengths
        cache = self.model(params, tokens, places, None if start is None else places, state.cache).cache
        return Consumed(cache, jnp.where(lengths > 0, ends, state.lengths))

    def draft(self, params: Params, target: TargetView, state: Consumed, context: Context) -> tuple[Draft, Consumed]:
        """The first pass feeds the last two committed tokens: after a full acceptance the cache has not seen the last
        accepted one (x_K was proposed, never fed), and feeding it again otherwise changes nothing. Rows that were
        longer without a draft are caught up with before."""
        if context.limit is not None:
            state = self._caught_up(params, state, context)
        start = jnp.maximum(context.lengths - 2, 0)
        slots = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(context.tokens, slots, axis=1)
        newest = (context.lengths - 1 - start)[:, None]
        out = self.model(params, fed, slots, slots, state.cache, rows=newest)

        def feed(cache: Any, token: Int[Array, "B 1"], offset: Int[Array, ""]) -> tuple[Any, Any]:
            slot = (context.lengths - 1)[:, None] + offset
            out = self.model(params, token, slot, slot, cache)
            return out.logits, out.cache

        root = jnp.take_along_axis(fed, newest, axis=1)
        draft, cache, passes = one_by_one(feed, out.cache, root, context, self.k, out.logits)
        behind = _behind(state, context)
        return draft, Consumed(cache, jnp.where(behind, state.lengths, context.lengths - 1 + passes))

    def _caught_up(self, params: Params, state: Consumed, context: Context) -> Consumed:
        """With what was committed without a draft, of the rows that want one."""
        width = min(_PIECE, cache_lib.num_slots(state.cache))

        def wanting(state: Consumed) -> Bool[Array, " B"]:
            assert context.limit is not None
            return (context.limit > 0) & _behind(state, context)

        def piece(state: Consumed) -> Consumed:
            # At the cache's end what is there is written once more, since a write is clamped to it.
            start = jnp.minimum(state.lengths, cache_lib.num_slots(state.cache) - width)
            tokens = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(context.tokens, start)
            counted = jnp.where(wanting(state), jnp.minimum(context.lengths - 1 - start, width), 0)
            return self.extend(params, state, tokens, counted, None, start)

        return jax.lax.while_loop(lambda state: jnp.any(wanting(state)), piece, state)

    def commit(self, params: Params, state: Consumed, outcome: Outcome) -> Consumed:
        """Slots past the accepted prefix are stale: masked by length, then overwritten."""
        right = outcome.context.lengths + outcome.verdict.num_accepted
        return state._replace(lengths=jnp.minimum(state.lengths, right))


def _behind(state: Consumed, context: Context) -> Bool[Array, " B"]:
    """Rows of which more is missing than the first pass of a block feeds."""
    return state.lengths < context.lengths - 2


@dataclasses.dataclass(frozen=True)
class TrainedDraftModel(TrainedDrafter):
    """A draft model in training. ``model``: a static spec; ``family``: the Hugging Face model type it is saved as."""

    serving: ClassVar[str] = "A model of its own: transformers and vLLM load it too, as a draft or assistant model."
    library: ClassVar[str] = "transformers"
    model: Any
    family: str = "llama"

    @property
    def config(self) -> ModelConfig:
        """The sizes of what is trained."""
        return self.model.config

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return self.model.init(key)

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """Position t predicts what the target predicts there: one prediction a position, no shift."""
        out = self.model(params, batch.tokens, batch.token_positions, mask=batch.mask_for(self.model))
        assert out.final is not None
        yield Prediction(out.final, functools.partial(self.model.head, params), batch.weight)

    def at_depths(self, depths: int) -> Trainable:
        """As it is: what it says of a token does not depend on where the block began."""
        return self

    def in_training(self, form: TrainingForm) -> Trainable:
        if not isinstance(self.model, Model):
            return super().in_training(form)
        return dataclasses.replace(self, model=training_model(self.model, form))

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.model.config, mesh) if isinstance(self.model, Model) else None

    def to_model(self, params: Params, target: Any, name: str = "draft") -> Any:
        """The draft as a `LoadedModel` of its own, with the target's tokenizer: to be sampled from without a target."""
        from specjax.models.hf import LoadedModel

        return LoadedModel(self.model, params, target.tokenizer, target.eos_ids, name, family=self.family)

    def to_drafter(self, params: Params, target: Any, k: int) -> DraftModel:
        return DraftModel(self.to_model(params, target), k)

    def save(self, params: Params, target: Any, directory: Path, *, name: str = "draft", card: str | None = None):
        """A Hugging Face directory, which transformers and vLLM read too."""
        from specjax.models.hf import save_model
        from specjax.models.weights import narrowest

        save_model(self.to_model(params, target, name), directory, dtype=narrowest(params), overwrite=True, card=card)
