"""Multi-token prediction (DeepSeek-V3, 2412.19437): a layer that reads the target's last stream at the token before,
mixed with the token itself. `specjax.drafters.token_rows` says how its rows are decoded and trained.

Dims: B rows, T tokens fed, H hidden.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from pydantic import Field

from specjax.drafters import features as features_lib
from specjax.drafters.features import FeatureDraft, FeatureDrafter, embedding_and_head
from specjax.drafters.token_rows import BoundRows, RowModel, TrainedRows
from specjax.models.attention.memory import Attended
from specjax.models.layers import Linear, make_norm
from specjax.models.training import gathered
from specjax.models.transformer import Block
from specjax.types import PLAIN, Batch, Output, Params, TrainingForm

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows

Norms = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What published heads disagree about, and readers of the same head as well: measured acceptance decides."""

    state: Norms = "pre"
    """The target's last stream is read before its final norm, or after it."""
    recycled: Norms = "post"
    """What stands in for it behind the root is taken before the head's own last norm, or after it."""


class Net(nnx.Module):
    """The weights."""

    def __init__(self, spec: MTPModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        self.embedding, self.head = embedding_and_head(spec, rngs)
        self.token_norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.hidden_norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, rngs=rngs, dtype=dtype)
        blocks = [Block(config, config.layer(i), rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class MTPModel(RowModel):
    """See `FeatureModel`; ``reads`` is the target's last stream."""

    options: Options = Options()
    net: ClassVar[Any] = Net
    of_last: ClassVar[bool] = True

    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        chosen = target_out.hidden[0] if self.options.state == "pre" else target_out.final
        assert chosen is not None
        return chosen.astype(self.dtype)

    def __call__(
        self, params, tokens, features, positions, memory: Sequence[Attended], form: TrainingForm = PLAIN
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        module = self.module(gathered(params, form.sharding))
        token = module.token_norm(self.embedded(module, tokens))
        x = module.fc(jnp.concatenate([token, module.hidden_norm(features.astype(self.dtype))], axis=-1))
        layers = []
        for i, block in enumerate(module.layers):
            x, kept = self.run_block(block, i, x, positions, memory[i], form)
            layers.append(kept)
        final = module.norm(x)
        return final, final if self.options.recycled == "post" else x, tuple(layers)


@dataclasses.dataclass(frozen=True)
class MTP(FeatureDrafter):
    """A head for multi-token prediction (DeepSeek-V3, 2412.19437) that proposes ``k`` tokens one by one, reading what
    it made itself behind the first."""

    kind: Literal["mtp"] = "mtp"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundRows


@dataclasses.dataclass(frozen=True)
class TrainedMTP(TrainedRows):
    """In training."""

    drafter: ClassVar[Any] = MTP


@dataclasses.dataclass(frozen=True)
class MTPDraft(FeatureDraft):
    """The section `draft` of a config: a layer of the target's sizes, with its embedding and head, frozen."""

    depths: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens of a block that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.6
    """What the loss of a depth weighs beside that of the one before."""
    state: Norms | None = None
    """The target's last stream is read before its final norm, or after it; None: before, or as a stored head says."""
    recycled: Norms | None = None
    """What stands in for it behind the root is taken before the draft's own last norm, or after it; None: after,
    or as a stored head says."""
    kind: Literal["mtp"] = "mtp"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = MTP
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay", "state", "recycled"})

    def described(self, config: RunConfig, target: Any) -> TrainedMTP:
        full = target.config
        features_lib.refuse_architecture(config)
        options = dataclasses.replace(Options(), **self._named)
        model = MTPModel(features_lib.layers_like(full), (full.num_layers,), full.hidden_size, options=options)
        return TrainedMTP(model, features_lib.ENDS, depths=self.depths, decay=self.depth_decay)

    def load(self, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> MTP:
        """With the norms that are named here: a stored head rarely says them."""
        found: Any = super().load(directory, target, k, check_finite)
        spec = found.model.spec
        spec = dataclasses.replace(spec, options=dataclasses.replace(spec.options, **self._named))
        return dataclasses.replace(found, model=dataclasses.replace(found.model, spec=spec))

    @property
    def _named(self) -> dict[str, Any]:
        asked = {"state": self.state, "recycled": self.recycled}
        return {name: norms for name, norms in asked.items() if norms is not None}

    def first(self, drafter: Any, params: Params, target: Any, rows: Rows) -> Params:
        """The best linear guess from token and state, over which the layer says nothing yet."""
        from specjax.distill.fitting import linear_guess, silent

        inputs = _TokenAndState(before=drafter.model.options.state == "pre")
        fit = linear_guess(target, rows, drafter.model.reads, {}, inputs)
        layers = {i: silent(layer) for i, layer in params["layers"].items()}
        return {**params, "fc": {"kernel": jnp.asarray(fit.kernel)}, "layers": layers, "norm": fit.norm}


@dataclasses.dataclass(frozen=True)
class _TokenAndState:
    """What a linear guess is made of: `specjax.distill.fitting.Inputs`. ``before``: the final norm."""

    before: bool

    def __call__(self, own: Params, token: Array, batch: Batch, streams: tuple[Array, ...], out: Output) -> Array:
        from specjax.distill.fitting import unit

        assert out.final is not None
        state = streams[0] if self.before else jnp.roll(out.final, 1, axis=1)
        return jnp.concatenate([unit(token), unit(jnp.asarray(state, jnp.float32))], axis=-1)
