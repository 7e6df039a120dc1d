"""P-EAGLE (2602.01469), as the library speculators trains it: an EAGLE-3 draft (2503.01840) that proposes its whole
block in one pass. Behind the root's row come rows of a mask token with learnt features, one a place; row d predicts
what is d places behind the root's own, and knows of the tokens between nothing but that they are there. Its tokens are
drawn independently.

Dims: B rows, T tokens fed, K tokens of a block, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.drafters import eagle3
from specjax.drafters import features as features_lib
from specjax.drafters.features import FeatureDraft, FeatureDrafter
from specjax.drafters.one_by_one import all_at_once
from specjax.drafters.token_rows import BoundRows, State, TrainedRows, with_a_token_before
from specjax.types import Context, Draft, Params, TargetView

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows


class Net(eagle3.Net):
    """The weights of EAGLE-3, and what stands in for captured streams in a mask row."""

    def __init__(self, spec: PEagleModel, *, rngs: nnx.Rngs):
        super().__init__(spec, rngs=rngs)
        self.mask_hidden = nnx.Param(jnp.zeros((1, 1, len(spec.reads) * spec.feature_size), spec.dtype))


@dataclasses.dataclass(frozen=True)
class PEagleModel(eagle3.Eagle3Model):
    """See `FeatureModel`. ``mask_token``: an id whose embedding mask rows have."""

    mask_token: int = 0
    net: ClassVar[Any] = Net

    def behind(self, params, tokens, features) -> tuple[Int[Array, "B T"], Float[Array, "B T H"]]:
        """Mask rows, which no row before them is read by."""
        return jnp.full_like(tokens, self.mask_token), jnp.broadcast_to(self.masked(params), features.shape)

    def masked(self, params: Params) -> Float[Array, "1 1 H"]:
        """What mask rows read."""
        hidden = self.module(params).mask_hidden[...].astype(self.dtype)
        return self.mixed(params, tuple(jnp.split(hidden, len(self.reads), axis=-1)))


@dataclasses.dataclass(frozen=True)
class BoundPEagle(BoundRows):
    """What the engine runs."""

    def draft(self, params: Params, target: TargetView, state: State, context: Context) -> tuple[Draft, State]:
        """One pass over the root's row and the mask rows behind it."""
        model: Any = self.model
        root, slot = self._root(context)
        behind = (len(root), self.k - 1)
        masked = jnp.broadcast_to(model.masked(params), (*behind, model.config.hidden_size))
        tokens = jnp.concatenate([root, jnp.full(behind, model.mask_token, jnp.int32)], axis=1)
        features = jnp.concatenate([state.features[:, None], masked.astype(state.features.dtype)], axis=1)
        slots = slot + jnp.arange(self.k, dtype=jnp.int32)[None]
        final, _, cache = self._pass(params, state.cache, tokens, features, slots)
        draft = all_at_once(model.head(params, final), root, context)
        return with_a_token_before(draft, context), state._replace(cache=cache)


@dataclasses.dataclass(frozen=True)
class PEagle(FeatureDrafter):
    """A draft that reads its target's hidden states and proposes ``k`` tokens in one pass (P-EAGLE,
    2602.01469)."""

    kind: Literal["p_eagle"] = "p_eagle"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundPEagle


@dataclasses.dataclass(frozen=True)
class TrainedPEagle(TrainedRows):
    """In training: `TrainedRows` whose later depths are mask rows."""

    drafter: ClassVar[Any] = PEagle


@dataclasses.dataclass(frozen=True)
class PEagleDraft(FeatureDraft):
    """The section `draft` of a config: layers of the target's sizes, with its embedding and head, frozen."""

    mask_token: Annotated[int, Field(ge=0)] | None = None
    """An id that no text has, whose embedding mask rows have; None: the last of the vocabulary."""
    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """As of `eagle3`."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Of the draft; the paper has four."""
    depths: Annotated[int, Field(ge=1, le=16)] = 5
    """Places of a block that are trained."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """What the loss of a depth weighs beside that of the one before."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Ids that it can propose, the most frequent of what it is trained on; None: all."""
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["p_eagle"] = "p_eagle"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = PEagle
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay"})
    unsaid: ClassVar[Any] = {"reads": "specjax_reads"}

    def described(self, config: RunConfig, target: Any) -> TrainedPEagle:
        full = target.config
        reads = features_lib.streams(self.reads, config, full)
        mask = features_lib.mask_token(self.mask_token, full)
        options = eagle3.Options(self.norm_before_residual, False, self.norm_before_fc, self.fc_norm)
        layers = features_lib.layers_like(full, self.layers)
        kept = features_lib.first_ids(self.draft_vocab_size, full)
        model = PEagleModel(layers, reads, full.hidden_size, kept=kept, options=options, mask_token=mask)
        return TrainedPEagle(model, features_lib.ENDS, depths=self.depths, decay=self.depth_decay)

    def first(self, drafter: Any, params: Params, target: Any, rows: Rows) -> Params:
        return eagle3.as_a_linear_guess(drafter, params, target, rows)
