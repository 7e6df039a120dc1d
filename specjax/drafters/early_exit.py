"""Early exit (LayerSkip, 2404.16710): the target's own first layers, a small trained adapter and the target's head. A
block's tokens read the target's keys and values of what is verified, and keep their own beside them; the target's cache
is not touched.

What the first layers make of a true token is what they make of it in the target, at every depth of a block. So training
reads the stream that leaves them and trains the adapter alone, with one prediction that holds at all depths.

Dims: B rows, T tokens fed, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field

from specjax.drafters import features as features_lib
from specjax.drafters.base import StatelessDrafter
from specjax.drafters.features import FeatureDraft, FeatureDrafter, FeatureModel, TrainedFeatureDraft
from specjax.drafters.glide import GlideModel, blocks_of
from specjax.errors import ConfigError, ModelError
from specjax.models.config import ModelConfig
from specjax.models.layers import MLP, Linear, make_norm
from specjax.types import Batch, Bound, Context, Draft, Output, Params, Prediction, Reads, TargetView

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows


class Net(nnx.Module):
    """What is behind the target's layers."""

    def __init__(self, spec: ExitModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        self.adapter_norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.adapter = MLP(config, rngs=rngs, dtype=dtype)
        self.adapter.down_proj.kernel[...] = jnp.zeros_like(self.adapter.down_proj.kernel[...])  # at first nothing
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class ExitModel(FeatureModel):
    """See `FeatureModel`: what is made of the one stream that it reads, that which leaves the target's first layers.
    ``config.intermediate_size`` is the adapter's."""

    net: ClassVar[Any] = Net

    @property
    def layers(self) -> int:
        """Of the target's, that are run."""
        return self.reads[0]

    def __call__(self, params: Params, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """What the head reads."""
        module, x = self.module(params), x.astype(self.dtype)
        return module.norm(x + module.adapter(module.adapter_norm(x)))


@dataclasses.dataclass(frozen=True)
class BoundExit(StatelessDrafter):
    """What the engine runs. ``layers``: the target's first ones, each of which reads itself."""

    model: ExitModel
    layers: GlideModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.layers.reads)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """One pass of the first layers a token, the root's first."""

        def head(x: Float[Array, "B 1 H"]) -> Array:
            return self.model.head(params["exit"], self.model(params["exit"], x))

        return blocks_of(self.layers, params["layers"], head, target, context, self.k), state


@dataclasses.dataclass(frozen=True)
class EarlyExit(FeatureDrafter):
    """The target's first layers with an exit of their own (LayerSkip, 2404.16710), which propose ``k`` tokens one by
    one."""

    kind: Literal["early_exit"] = "early_exit"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""

    def bind(self, target: Any) -> Bound:
        """The exit beside the target's own layers, which are not copied; see `FeatureDrafter.bind`."""
        draft = self._loaded(target)
        check_exit(draft.spec.reads[0], target.config)
        layout, count = target.layout(), draft.spec.reads[0]
        layers = {**layout.params, "layers": {i: layout.params["layers"][i] for i in range(count)}}
        model = dataclasses.replace(layout.spec, config=_first(layout.spec.config, count))
        spec: Any = draft.spec
        bound = BoundExit(spec, GlideModel(model, tuple(range(count))), self.k)
        return Bound(bound, {"exit": draft.beside(target), "layers": layers})


def _first(config: ModelConfig, count: int) -> ModelConfig:
    return dataclasses.replace(config, num_layers=count, layers=tuple(config.layer(i) for i in range(count)))


def check_exit(count: int, target: ModelConfig) -> None:
    """Raises `ModelError` unless the target can be left behind so many layers."""
    if target.rows_choose_frequencies:
        raise ModelError(
            "early_exit: the rotary frequencies of this target depend on the length that a row will reach, which a "
            "draft is not told; use a separate draft (kind: draft_model)"
        )
    if not 1 <= count < target.num_layers:
        raise ModelError(f"early_exit: leaves the target behind {count} layers, and it has {target.num_layers}")


@dataclasses.dataclass(frozen=True)
class TrainedExit(TrainedFeatureDraft):
    """In training: an adapter on a stream of the target's."""

    drafter: ClassVar[Any] = EarlyExit
    serving: ClassVar[str] = "It runs its target's own layers, so only specjax can serve it (`specjax.load_drafter`)."
    library: ClassVar[str] = "specjax"

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One, which holds at every depth."""
        assert target_out is not None
        model: Any = self.model
        x = model(params, target_out.hidden[0])
        yield Prediction(x, functools.partial(model.head, params), jnp.asarray(batch.weight))

    def at_depths(self, depths: int) -> Any:
        return self


@dataclasses.dataclass(frozen=True)
class EarlyExitDraft(FeatureDraft):
    """The section `draft` of a config."""

    layers: Annotated[int, Field(ge=1)] | None = None
    """Of the target's, that are run; None: a third of them."""
    adapter: Annotated[int, Field(ge=1)] | None = None
    """Neurons of the adapter; None: as many as the target's hidden size."""
    kind: Literal["early_exit"] = "early_exit"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = EarlyExit

    def described(self, config: RunConfig, target: Any) -> TrainedExit:
        full = target.config
        features_lib.refuse_architecture(config)
        count = max(1, full.num_layers // 3) if self.layers is None else self.layers
        if count >= full.num_layers:
            raise ConfigError(f"draft.layers: {count}, and the target has {full.num_layers}; leave it earlier")
        sizes = features_lib.layers_like(full)
        sizes = dataclasses.replace(sizes, intermediate_size=self.adapter or full.hidden_size)
        return TrainedExit(ExitModel(sizes, (count,), full.hidden_size), ("head",))

    def first(self, drafter: Any, params: Params, target: Any, rows: Rows) -> Params:
        """With the target's final norm, where it is of the same kind."""
        norm = features_lib.in_float32(target.params["norm"])
        return {**params, "norm": norm} if features_lib.same_norm(target.config) else params
