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
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key
from pydantic import Field

from specjax import sampling
from specjax.drafters.base import TrainedDrafter
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

    @classmethod
    def load(cls, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> DraftModel:
        """The model in a directory, for decoding only; see `specjax.drafters.loading.load_drafter`.

        Args:
            directory: a Hugging Face directory or hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: draft tokens a block.
            check_finite: refuse NaN and infinite weights.

        Returns:
            The drafter; its weights are in memory once, as decoding reads them.

        Raises:
            ModelError: for what cannot be read.
        """
        from specjax.models import hf

        model = hf.load_model(directory, str(target.dtype), check_finite=check_finite)
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
        draft = hf.load_model(hf.draft_of(self.model), str(target.dtype)) if named else self.model
        check_model(draft, f"drafter {self.kind!r}: model")
        layout = draft.layout()
        spec = vocabulary.known_to(draft, target, layout.spec)
        return Bound(BoundDraftModel(spec, self.k), layout.params)


class Proposed(NamedTuple):
    """A draft token: whether the draft's own logits are a distribution's, what it was drawn from (None without noise),
    and the rows that stop before it (None: nobody)."""

    finite: Bool[Array, " B"]
    logits: Float[Array, "B V"] | None
    stops: Bool[Array, " B"] | None


@dataclasses.dataclass(frozen=True)
class BoundDraftModel:
    """``model``: a static spec, a function of its parameters."""

    model: Any
    k: int = 5

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    def init(self, batch: int, num_slots: int) -> Any:
        return self.model.init_cache(batch, num_slots)

    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output | None,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        """``start``: where the tokens stand in their rows; None: at the beginning."""
        slots = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        slots = slots if start is None else start[:, None] + slots
        return self.model(params, tokens, slots, slots, state).cache

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The first pass feeds the last two committed tokens: after a full acceptance the cache has not seen the last
        accepted one (x_K was proposed, never fed), and feeding it again otherwise changes nothing."""
        start = jnp.maximum(context.lengths - 2, 0)
        slots = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(context.tokens, slots, axis=1)
        newest = (context.lengths - 1 - start)[:, None]
        out = self.model(params, fed, slots, slots, state, rows=newest)
        tokens, first = propose(out.logits, context, jnp.zeros((len(start), self.k), jnp.int32), 0)

        def step(carry, _):
            cache, tokens, offset = carry
            newest = jnp.full((len(start), 1), offset - 1)
            token = jnp.take_along_axis(tokens, newest, axis=1)
            slot = (context.lengths - 1)[:, None] + offset
            out = self.model(params, token, slot, slot, cache)
            tokens, proposed = propose(out.logits, context, tokens, offset)
            return (out.cache, tokens, offset + 1), proposed

        # The offset is carried: read from an array of offsets, its slice shared a fusion with one made of a gather, and
        # XLA on CPU (jax 0.10) gave both the same name when their numbers happened to be equal.
        carry = (out.cache, tokens, jnp.int32(1))
        (cache, tokens, _), rest = jax.lax.scan(step, carry, length=self.k - 1)
        return chain(tokens, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)), cache

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        # Slots past the accepted prefix are stale: masked by length, then overwritten.
        return state


@dataclasses.dataclass(frozen=True)
class TrainedDraftModel(TrainedDrafter):
    """A draft model in training. ``model``: a static spec; ``family``: the Hugging Face model type it is saved as."""

    serving: ClassVar[str] = "A model of its own: transformers and vLLM load it too, as a draft or assistant model."
    library: ClassVar[str] = "transformers"
    model: Any
    family: str = "llama"

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return self.model.init(key)

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """Position t predicts what the target predicts there: one prediction a position, no shift."""
        out = self.model(params, batch.tokens, batch.token_positions, mask=batch.attention_mask)
        assert out.final is not None
        yield Prediction(out.final, functools.partial(self.model.head, params), batch.weight)

    def at_depths(self, depths: int) -> Trainable:
        """As it is: what it says of a token does not depend on where the block began."""
        return self

    def in_training(self, form: TrainingForm) -> Trainable:
        if not isinstance(self.model, Model):
            return super().in_training(form)
        return dataclasses.replace(self, model=training_model(self.model, form))

    def parameter_sharding(self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding | None:
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


def propose(
    raw: Float[Array, "B 1 W"], context: Context, tokens: Int[Array, "B K"], offset: int | Int[Array, ""]
) -> tuple[Int[Array, "B K"], Proposed]:
    """``tokens`` with the one at ``offset`` drawn from the draft's own logits ``raw``."""
    transform = sampling.process if context.noise is None else sampling.transform
    logits = transform(_over(raw, context.sampling.bias.shape[1]), context, tokens, offset)[:, 0]
    noise = None if context.noise is None else context.noise.draft(offset)
    drawn = sampling.draw(logits, noise)[:, None]
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, drawn, offset, axis=1)
    finite = sampling.has_distribution(raw)[:, 0]
    return tokens, Proposed(finite, None if noise is None else logits, context.stop(logits, offset))


def chain(tokens: Int[Array, "B K"], found: Proposed) -> Draft:
    """The block of ``tokens``; ``found``: what `propose` said of each, ``[K, ...]``."""
    found = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), found)
    valid = jnp.ones(tokens.shape, bool) if found.stops is None else jnp.cumsum(found.stops, axis=1) == 0
    return Draft(tokens, valid, logits=found.logits, finite=found.finite)


def _over(logits: Float[Array, "B R W"], size: int) -> Float[Array, "B R V"]:
    """Over the target's ``size`` ids: a row that only one of the two models has is padding, and is never drafted."""
    missing = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
