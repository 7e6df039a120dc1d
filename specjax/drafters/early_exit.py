"""Early exit (LayerSkip, 2404.16710): the target's own first layers, a small trained adapter and the target's head. The
tokens of a block read the target's keys and values of verified tokens. Their own are held beside these; the target's
cache is not touched.

For a token of the text, the first layers compute at every depth of a block what they compute in the target. So training
reads the stream that leaves them and trains the adapter alone, with one prediction that holds at all depths.

Dims: B rows, T tokens fed, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.base import StatelessDrafter
from specjax.drafters.features import FeatureModel, LoadedDraft, TrainedFeatureDraft
from specjax.drafters.glide import GlideModel, blocks_of, refuse_row_frequencies
from specjax.errors import ModelError
from specjax.interfaces import Batch, Bound, Context, Draft, Output, Params, Prediction, Reads, Target, TargetView
from specjax.models.config import ModelConfig
from specjax.models.layers import MLP, Linear, make_norm


class Net(nnx.Module):
    """Weights after the target's first layers: adapter, norm and head."""

    def __init__(self, spec: ExitModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        self.adapter_norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.adapter = MLP(config, rngs=rngs, dtype=dtype)
        self.adapter.down_proj.kernel[...] = jnp.zeros_like(self.adapter.down_proj.kernel[...])  # zero at first
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class ExitModel(FeatureModel):
    """Forward pass from the one stream that it reads, which leaves the target's first layers, to the head; see
    `FeatureModel`. ``config.intermediate_size`` is the adapter's."""

    kind: ClassVar[str] = "early_exit"
    net: ClassVar[Any] = Net

    @property
    def layers(self) -> int:
        """Number of the target's layers that are run."""
        return self.reads[0]

    def bound(self, k: int, draft: LoadedDraft, target: Target) -> Bound:
        """The exit bound to the target's own layers, which are not copied."""
        refuse_row_frequencies(self.kind, target.config)
        if not 1 <= self.layers < target.config.num_layers:
            many = target.config.num_layers
            raise ModelError(f"early_exit: leaves the target behind {self.layers} layers, and it has {many}")
        layout, numbers = target.layout(), tuple(range(self.layers))
        shared = layout.params["layers"]
        layers = {**layout.params, "layers": shared if layout.spec.looped else {i: shared[i] for i in numbers}}
        config: ModelConfig = layout.spec.config
        first = dataclasses.replace(config, num_layers=self.layers, layers=tuple(map(config.layer, numbers)))
        run = GlideModel(dataclasses.replace(layout.spec, config=first), numbers)
        return Bound(BoundExit(self, run, k), {"exit": draft.beside(target), "layers": layers})

    def __call__(self, params: Params, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Input of the head, made of the stream ``x``."""
        module, x = self.module(params), x.astype(self.dtype)
        return module.norm(x + module.adapter(module.adapter_norm(x)))


@dataclasses.dataclass(frozen=True)
class BoundExit(StatelessDrafter):
    """The bound form, which the engine runs. ``layers``: the target's first ones; each reads its own keys and values in
    the target's cache."""

    model: ExitModel
    layers: GlideModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.layers.reads)

    @property
    def model_config(self) -> ModelConfig:
        return self.model.config

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """A proposal made with one pass of the first layers a token, the root's first."""

        def head(x: Float[Array, "B 1 H"]) -> Array:
            return self.model.head(params["exit"], self.model(params["exit"], x))

        return blocks_of(self.layers, params["layers"], head, target, context, self.k), state


@dataclasses.dataclass(frozen=True)
class TrainedExit(TrainedFeatureDraft):
    """An early exit in training: an adapter on one stream of the target."""

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction, which holds at every depth."""
        assert target_out is not None
        model: Any = self.model
        x = model(params, target_out.hidden[0])
        yield Prediction(x, functools.partial(model.head, params), jnp.asarray(batch.weight))

    def unrolled(self, depths: int) -> Any:
        return self
