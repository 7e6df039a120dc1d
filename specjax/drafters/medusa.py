"""Medusa (2401.10774): heads on what the target's own head reads. Head i reads what the target made of the token before
the root and predicts what is i + 1 places behind the root; nothing knows of the root itself, and the heads not of each
other, so that a block is drawn from the product of their distributions.

Dims: B rows, T tokens fed, K tokens of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.drafters import features as features_lib
from specjax.drafters.features import BoundFeatures, FeatureDraft, FeatureDrafter, FeatureModel, TrainedFeatureDraft
from specjax.drafters.glide import inside_document
from specjax.drafters.one_by_one import all_at_once, root_of
from specjax.drafters.token_rows import at, with_a_token_before
from specjax.models.layers import Linear
from specjax.types import Batch, Context, Draft, Outcome, Output, Params, Prediction, TargetView

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows


class Head(nnx.Module):
    """Residual layers, and a projection to the vocabulary unless that is the target's."""

    def __init__(self, spec: MedusaModel, *, rngs: nnx.Rngs):
        size, dtype = spec.config.hidden_size, spec.dtype
        blocks = [Linear(size, size, True, rngs=rngs, dtype=dtype) for _ in range(spec.blocks)]
        for block in blocks:
            block.kernel[...] = jnp.zeros_like(block.kernel[...])  # at first it predicts as the target's head does
        self.blocks = nnx.List(blocks)
        self.head = Linear(size, spec.config.vocab_size, rngs=rngs, dtype=dtype) if spec.own_heads else None

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return x


class Net(nnx.Module):
    """The weights."""

    def __init__(self, spec: MedusaModel, *, rngs: nnx.Rngs):
        size, vocabulary = spec.config.hidden_size, spec.config.vocab_size
        self.heads = nnx.List([Head(spec, rngs=rngs) for _ in range(spec.heads)])
        if not spec.own_heads:
            self.head = Linear(size, vocabulary, rngs=rngs, dtype=spec.dtype)


@dataclasses.dataclass(frozen=True)
class MedusaModel(FeatureModel):
    """See `FeatureModel`; ``reads`` is the target's last stream, which it reads after the final norm. ``heads`` of
    ``blocks`` residual layers each; ``own_heads``: with a projection to the vocabulary each."""

    heads: int = 5
    blocks: int = 1
    own_heads: bool = False
    net: ClassVar[Any] = Net
    of_last: ClassVar[bool] = True

    @property
    def most(self) -> int:
        return self.heads

    def of_head(self, params: Params, i: int, final: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """What is projected to the vocabulary for place ``i``."""
        return self.module(params).heads[i](final.astype(self.dtype))

    def logits(self, params: Params, i: int, x: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Of place ``i``, in float32."""
        module = self.module(params)
        return module.heads[i].head(x, wide=True) if self.own_heads else self.scaled(module.head(x, wide=True))


@dataclasses.dataclass(frozen=True)
class BoundMedusa(BoundFeatures):
    """What the engine runs; its state is what the target made of the token before the root."""

    model: MedusaModel

    def init(self, batch: int, num_slots: int) -> Float[Array, "B H"]:
        return jnp.zeros((batch, self.model.config.hidden_size), self.model.dtype)

    def extend(
        self,
        params: Params,
        state: Float[Array, "B H"],
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B H"]:
        """That of the last token fed."""
        return jnp.where((lengths > 0)[:, None], at(self._final(target_out), lengths - 1), state)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """All heads at once. Without a token before the root there is nothing to read, nor a draft."""
        read = [self.model.of_head(params, i, state[:, None]) for i in range(self.k)]
        logits = [self.model.logits(params, i, x) for i, x in enumerate(read)]
        draft = all_at_once(jnp.concatenate(logits, axis=1), root_of(context), context)
        return with_a_token_before(draft, context), state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Float[Array, "B H"]:
        """That of the last token that was kept."""
        return at(self._final(outcome.target_out), outcome.verdict.num_accepted)

    def _final(self, target_out: Output) -> Float[Array, "B T H"]:
        assert target_out.final is not None
        return target_out.final.astype(self.model.dtype)


@dataclasses.dataclass(frozen=True)
class Medusa(FeatureDrafter):
    """Heads on the target's last hidden state (Medusa, 2401.10774), each of which proposes one of ``k`` tokens."""

    kind: Literal["medusa"] = "medusa"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundMedusa


@dataclasses.dataclass(frozen=True)
class TrainedMedusa(TrainedFeatureDraft):
    """In training. ``decay``: what a head weighs beside the one before; ``depths``: heads that are trained, None:
    all."""

    decay: float = 0.8
    depths: int | None = None
    drafter: ClassVar[Any] = Medusa

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One of all positions by head; what it reads lies in the same document, or it does not count."""
        assert target_out is not None
        assert target_out.final is not None
        model: Any = self.model
        place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
        shares = [self.decay**i for i in range(model.heads if self.depths is None else self.depths)]
        read = target_out.final
        for i, share in enumerate(shares):
            read = jnp.roll(read, 1, axis=1)  # of the token before the root, i + 1 places back
            inside = inside_document(batch.documents, place - 1 - i)
            weight = jnp.where(inside, jnp.asarray(batch.weight), 0.0)
            x = model.of_head(params, i, read)
            yield Prediction(x, functools.partial(model.logits, params, i), weight, None, share / sum(shares))

    def passes(self, length: int) -> int:
        return 1

    def at_depths(self, depths: int) -> Any:
        return dataclasses.replace(self, depths=depths) if depths <= (self.model.most or depths) else None


@dataclasses.dataclass(frozen=True)
class MedusaDraft(FeatureDraft):
    """The section `draft` of a config."""

    heads: Annotated[int, Field(ge=1, le=16)] = 5
    """The longest block."""
    blocks: Annotated[int, Field(ge=1, le=8)] = 1
    """Residual layers of a head."""
    own_heads: bool = False
    """Each head has a projection to the vocabulary of its own, which begins as the target's; otherwise all have the
    target's, frozen."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """What the loss of a head weighs beside that of the one before."""
    kind: Literal["medusa"] = "medusa"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = Medusa
    of_training: ClassVar[Any] = frozenset({"depth_decay"})

    def described(self, config: RunConfig, target: Any) -> TrainedMedusa:
        full = target.config
        features_lib.refuse_architecture(config)
        sizes = features_lib.layers_like(full)
        options = {"heads": self.heads, "blocks": self.blocks, "own_heads": self.own_heads}
        model = MedusaModel(sizes, (full.num_layers,), full.hidden_size, **options)
        return TrainedMedusa(model, () if self.own_heads else ("head",), decay=self.depth_decay)

    def first(self, drafter: Any, params: Params, target: Any, rows: Rows) -> Params:
        """Every projection as the target's."""
        if not self.own_heads:
            return params
        own = features_lib.in_float32(features_lib.dense(target.params, "head", jnp.float32))
        own = jax.tree.map(lambda x: x * target.config.logit_multiplier, own)
        # Of each head its own array, since each is trained.
        heads = {i: {**head, "head": jax.tree.map(jnp.copy, own)} for i, head in params["heads"].items()}
        return {**params, "heads": heads}
