"""Medusa (2401.10774): heads on the input of the target's own head. The root is the newest token. Head i reads the
target's final hidden state of the token before the root, and predicts the token i + 1 positions after the root. No head
sees the root or the tokens of other heads, so a block is drawn from the product of their distributions.

Dims: B rows, T tokens fed, K tokens of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.block_kv import by_depth
from specjax.drafters.features import BoundFeatures, FeatureModel, TrainedFeatureDraft
from specjax.drafters.one_by_one import all_at_once, root_of
from specjax.drafters.token_rows import at, with_a_token_before
from specjax.interfaces import Batch, Context, Draft, Outcome, Output, Params, Prediction, TargetView
from specjax.models.layers import Linear


class Head(nnx.Module):
    """Residual layers, and a projection to the vocabulary unless the target's is used."""

    def __init__(self, spec: MedusaModel, *, rngs: nnx.Rngs):
        size, dtype = spec.config.hidden_size, spec.dtype
        blocks = [Linear(size, size, True, rngs=rngs, dtype=dtype) for _ in range(spec.blocks)]
        for block in blocks:
            block.kernel[...] = jnp.zeros_like(block.kernel[...])  # the heads begin as the target's head
        self.blocks = nnx.List(blocks)
        self.head = Linear(size, spec.config.vocab_size, rngs=rngs, dtype=dtype) if spec.own_heads else None

    def __call__(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return x


class Net(nnx.Module):
    """Weights of the heads."""

    def __init__(self, spec: MedusaModel, *, rngs: nnx.Rngs):
        size, vocabulary = spec.config.hidden_size, spec.config.vocab_size
        self.heads = nnx.List([Head(spec, rngs=rngs) for _ in range(spec.heads)])
        if not spec.own_heads:
            self.head = Linear(size, vocabulary, rngs=rngs, dtype=spec.dtype)


@dataclasses.dataclass(frozen=True)
class MedusaModel(FeatureModel):
    """Forward pass of Medusa, see `FeatureModel`. ``reads``: the target's last stream, read after the final norm;
    ``heads``: number of heads, of ``blocks`` residual layers each; ``own_heads``: True if each has its own projection
    to the vocabulary."""

    heads: int = 5
    blocks: int = 1
    own_heads: bool = False
    kind: ClassVar[str] = "medusa"
    net: ClassVar[Any] = Net
    of_last: ClassVar[bool] = True

    @property
    def most(self) -> int:
        return self.heads

    def decoding(self, k: int) -> BoundMedusa:
        return BoundMedusa(self, k)

    def of_head(self, params: Params, i: int, final: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Input of the projection to the vocabulary, for depth ``i``."""
        return self.module(params).heads[i](final.astype(self.dtype))

    def logits(self, params: Params, i: int, x: Float[Array, "B T H"]) -> Float[Array, "B T V"]:
        """Logits for depth ``i``, in float32."""
        module = self.module(params)
        return module.heads[i].head(x, wide=True) if self.own_heads else self.scaled(module.head(x, wide=True))


@dataclasses.dataclass(frozen=True)
class BoundMedusa(BoundFeatures):
    """The bound form, which the engine runs. Its state is the target's final hidden state of the token before the
    root."""

    model: MedusaModel

    def init(self, batch: int, num_slots: int) -> Float[Array, "B H"]:
        return jnp.zeros((batch, self.model.config.hidden_size), self.model.dtype)

    def extend(
        self, params, state: Float[Array, "B H"], tokens, lengths, target_out, start=None
    ) -> Float[Array, "B H"]:
        """Final hidden state of the last token fed."""
        return jnp.where((lengths > 0)[:, None], at(self._final(target_out), lengths - 1), state)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """A proposal of all heads at once. A root without a token before it gets none."""
        read = [self.model.of_head(params, i, state[:, None]) for i in range(self.k)]
        logits = [self.model.logits(params, i, x) for i, x in enumerate(read)]
        draft = all_at_once(jnp.concatenate(logits, axis=1), root_of(context), context)
        return with_a_token_before(draft, context), state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Float[Array, "B H"]:
        """Final hidden state of the last accepted token, or of the root if none is accepted."""
        return at(self._final(outcome.target_out), outcome.verdict.num_accepted)

    def _final(self, target_out: Output) -> Float[Array, "B T H"]:
        assert target_out.final is not None
        return target_out.final.astype(self.model.dtype)


@dataclasses.dataclass(frozen=True)
class TrainedMedusa(TrainedFeatureDraft):
    """Medusa's heads in training. ``decay``: weight of a head relative to the one before; ``depths``: number of heads
    that are trained; None: all."""

    decay: float = 0.8
    depths: int | None = None

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction a head, at all positions. A position counts only if the token that is read lies in the same
        document."""
        assert target_out is not None
        assert target_out.final is not None
        model: Any = self.model
        heads, read = model.heads if self.depths is None else self.depths, target_out.final
        for i, weight, share in by_depth(batch, heads, self.decay, before=1):
            read = jnp.roll(read, 1, axis=1)  # state of the token before the root, i + 1 positions back
            x = model.of_head(params, i, read)
            yield Prediction(x, functools.partial(model.logits, params, i), weight, None, share)

    def unrolled(self, depths: int) -> Any:
        return dataclasses.replace(self, depths=depths) if depths <= (self.model.most or depths) else None
