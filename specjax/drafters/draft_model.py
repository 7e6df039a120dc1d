"""An autoregressive draft model: a small decoder with its own KV cache proposes K tokens one by one (2211.17192).

Dims: B rows, P prompt, T tokens fed, K draft length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Int, Key

from specjax.drafters.base import ModelDrafter, heads_of
from specjax.drafters.one_by_one import one_by_one
from specjax.interfaces import (
    Batch,
    Bound,
    BoundDrafter,
    Context,
    Draft,
    Outcome,
    Output,
    Params,
    Prediction,
    Target,
    TargetInfo,
    TargetView,
    Trainable,
    TrainingForm,
)
from specjax.models import cache as cache_lib
from specjax.models.config import ModelConfig
from specjax.models.files import resolve
from specjax.models.sharding import sharding_of
from specjax.models.training import training_model
from specjax.models.transformer import Model
from specjax.models.vocabulary import DraftVocabulary


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """An autoregressive draft model: a small decoder proposes ``k`` tokens one by one from its own KV cache
    (2211.17192)."""

    model: Any
    """A `LoadedModel`, or the path of a model or of a run that left a draft; weights from a path are cast to the
    target's dtype."""
    kind: Literal["draft_model"] = "draft_model"
    """Name in the registry, in configs and in results."""
    quantize: Literal["int8", "int4"] | None = None
    """Number format of the kernels if ``model`` is a path; None: the target's dtype."""

    @property
    def tokenizer(self) -> Any:
        """The draft's own tokenizer; None for a draft that is given as a path."""
        return None if self.is_path else self.model.tokenizer

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike,
        target: TargetInfo,
        k: int,
        check_finite: bool = True,
        quantize: Literal["int8", "int4"] | None = None,
    ) -> DraftModel:
        """The draft model in a directory, for decoding only; see `specjax.formats.loading.load_drafter`.

        Args:
            directory: a Hugging Face directory or hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: proposed tokens of a block.
            check_finite: refuse NaN and infinite weights.
            quantize: number format of the kernels, see `specjax.load_model`.

        Returns:
            The drafter. Memory holds its weights once, laid out for decoding.

        Raises:
            ModelError: the directory cannot be read.
        """
        from specjax.models import hf

        model = hf.load_model(directory, str(target.dtype), check_finite=check_finite, quantize=quantize)
        model = with_its_vocabulary(model, directory)
        model.free_originals()
        return cls(model, k)

    def _read(self, target: Target) -> Any:
        from specjax.models import hf
        from specjax.models.files import draft_of

        directory = draft_of(self.model)
        return with_its_vocabulary(hf.load_model(directory, str(target.dtype), quantize=self.quantize), directory)

    def _bound(self, draft: Any, target: Target) -> Bound:
        """The draft model over the target's token ids (`specjax.models.vocabulary`)."""
        from specjax.models import vocabulary
        from specjax.models.files import check_model

        check_model(draft, f"drafter {self.kind!r}: model")
        layout = draft.layout()
        spec = vocabulary.known_to(draft, target, layout.spec)
        return Bound(BoundDraftModel(spec, self.k), layout.params)


def with_its_vocabulary(model: Any, directory: str | os.PathLike) -> Any:
    """A model that was loaded from ``directory``, with the draft vocabulary that is stored there."""
    vocabulary = DraftVocabulary.read(resolve(directory), model)
    if vocabulary is None:
        return model
    return dataclasses.replace(model, spec=dataclasses.replace(model.spec, vocabulary=vocabulary))


_PIECE = 32
"""Tokens that a draft reads at a time when it catches up on text that it has not read."""


class Consumed(NamedTuple):
    """A draft's cache, and the number of each row's tokens whose cached keys and values are right."""

    cache: Any
    lengths: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class BoundDraftModel(BoundDrafter):
    """The bound form, which the engine runs. ``model``: a static spec, a function of its parameters."""

    model: Any
    k: int = 5
    reads_late: ClassVar[bool] = True
    """The draft reads for itself what it missed, so a prompt need not be read before a block asks the draft."""

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    @property
    def model_config(self) -> Any:
        return self.model.config

    def init(self, batch: int, num_slots: int) -> Consumed:
        return Consumed(self.model.init_cache(batch, num_slots), jnp.zeros((batch,), jnp.int32))

    def extend(self, params, state: Consumed, tokens, lengths, target_out: Output | None, start=None) -> Consumed:
        """The state after ``tokens``. ``start``: position of the first of them in each row; None: 0."""
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        places = places if start is None else start[:, None] + places
        ends = lengths if start is None else start + lengths
        cache = self.model(params, tokens, places, None if start is None else places, state.cache).cache
        return Consumed(cache, jnp.where(lengths > 0, ends, state.lengths))

    def draft(self, params: Params, target: TargetView, state: Consumed, context: Context) -> tuple[Draft, Consumed]:
        """The proposal and the state. The first pass feeds the last two committed tokens: after a full acceptance the
        cache lacks the last accepted one (x_K was proposed, never fed), and otherwise feeding it again changes nothing.
        Rows that grew without a draft catch up first."""
        if context.limit is not None:
            state = self._caught_up(params, state, context)
        start = jnp.maximum(context.lengths - 2, 0)
        slots = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(context.tokens, slots, axis=1)
        newest = (context.lengths - 1 - start)[:, None]
        out = self.model(params, fed, slots, slots, state.cache, rows=newest)

        def feed(cache: Any, token: Int[Array, "B 1"], depth: Int[Array, ""]) -> tuple[Any, Any]:
            slot = (context.lengths - 1)[:, None] + depth
            out = self.model(params, token, slot, slot, cache)
            return out.logits, out.cache

        root = jnp.take_along_axis(fed, newest, axis=1)
        draft, cache, passes = one_by_one(feed, out.cache, root, context, self.k, out.logits)
        behind = _behind(state, context)
        return draft, Consumed(cache, jnp.where(behind, state.lengths, context.lengths - 1 + passes))

    def _caught_up(self, params: Params, state: Consumed, context: Context) -> Consumed:
        """The state after the rows that want a proposal have read the text committed without a draft."""
        width = min(_PIECE, cache_lib.num_slots(state.cache))

        def wanting(state: Consumed) -> Bool[Array, " B"]:
            assert context.limit is not None
            return (context.limit > 0) & _behind(state, context)

        def piece(state: Consumed) -> Consumed:
            # A piece that would pass the cache's end begins earlier and writes some slots again: writes are clamped.
            start = jnp.minimum(state.lengths, cache_lib.num_slots(state.cache) - width)
            tokens = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(context.tokens, start)
            counted = jnp.where(wanting(state), jnp.minimum(context.lengths - 1 - start, width), 0)
            return self.extend(params, state, tokens, counted, None, start)

        return jax.lax.while_loop(lambda state: jnp.any(wanting(state)), piece, state)

    def commit(self, params: Params, state: Consumed, outcome: Outcome) -> Consumed:
        """The state cut to the accepted prefix: later slots are stale, masked by length, then overwritten."""
        right = outcome.context.lengths + outcome.verdict.num_accepted
        return state._replace(lengths=jnp.minimum(state.lengths, right))


def _behind(state: Consumed, context: Context) -> Bool[Array, " B"]:
    """True for rows that miss more tokens than the first pass of a block feeds."""
    return state.lengths < context.lengths - 2


@dataclasses.dataclass(frozen=True)
class TrainedDraftModel(Trainable):
    """A draft model in training. ``model``: a static spec; ``family``: the Hugging Face model type it is saved as."""

    serving: ClassVar[str] = "A model of its own: transformers and vLLM load it too, as a draft or assistant model."
    library: ClassVar[str] = "transformers"
    samples_alone: ClassVar[bool] = True
    model: Any
    family: str = "llama"

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model that is trained."""
        return self.model.config

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.model.vocabulary

    def with_vocabulary(self, vocabulary: DraftVocabulary) -> Trainable:
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocabulary=vocabulary))

    def init_params(self, key: Key[Array, ""], target: Target | None) -> Params:
        return self.model.init(key)

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction a position, without a shift: position t predicts what the target predicts at t."""
        out = self.model(params, batch.tokens, batch.token_positions, mask=batch.mask_for(self.model))
        assert out.final is not None
        yield Prediction(out.final, weight=batch.weight, **heads_of(self.model, params))

    def unrolled(self, depths: int) -> Trainable:
        """The drafter itself: its prediction of a token does not depend on the root of the block."""
        return self

    def in_training(self, form: TrainingForm) -> Trainable:
        if not isinstance(self.model, Model):
            return super().in_training(form)
        return dataclasses.replace(self, model=training_model(self.model, form))

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.model.config, mesh) if isinstance(self.model, Model) else None

    def to_model(self, params: Params, target: Target, name: str = "draft") -> Any:
        """The draft as a `LoadedModel` of its own, with the target's tokenizer, to sample from without a target."""
        from specjax.models.hf import LoadedModel

        return LoadedModel(self.model, params, target.tokenizer, target.eos_ids, name, family=self.family)

    def to_drafter(self, params: Params, target: Target, k: int) -> DraftModel:
        return DraftModel(self.to_model(params, target), k)

    def save(self, params: Params, target: Target, directory: Path, *, name: str = "draft", card: str | None = None):
        """Write a Hugging Face directory, which transformers and vLLM read too."""
        from specjax.models.hf import save_model
        from specjax.models.weights import narrowest

        save_model(self.to_model(params, target, name), directory, dtype=narrowest(params), overwrite=True, card=card)
