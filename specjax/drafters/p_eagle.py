"""P-EAGLE (2602.01469), as the library speculators trains it: an EAGLE-3 draft (2503.01840) that proposes its whole
block in one pass. Mask rows follow the root's token row, one a depth: token rows of a mask token with learnt features.
Mask row d predicts the token d positions after the one that the root's row predicts. Of the tokens between, it knows
only that they are there. The tokens of a block are drawn independently.

Dims: B rows, T tokens fed, K tokens of a block, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.drafters import eagle3
from specjax.drafters.one_by_one import all_at_once
from specjax.drafters.token_rows import BoundRows, State, with_a_token_before
from specjax.interfaces import Context, Draft, Params, TargetView


class Net(eagle3.Net):
    """Weights of EAGLE-3, and the vector that stands in for the captured hidden states in a mask row."""

    def __init__(self, spec: PEagleModel, *, rngs: nnx.Rngs):
        super().__init__(spec, rngs=rngs)
        self.mask_hidden = nnx.Param(jnp.zeros((1, 1, len(spec.reads) * spec.feature_size), spec.dtype))


@dataclasses.dataclass(frozen=True)
class PEagleModel(eagle3.Eagle3Model):
    """Forward pass of P-EAGLE, see `FeatureModel`. ``mask_token``: id whose embedding mask rows read."""

    mask_token: int = 0
    kind: ClassVar[str] = "p_eagle"
    net: ClassVar[Any] = Net

    def decoding(self, k: int) -> BoundRows:
        return BoundPEagle(self, k)

    def behind(self, params, tokens, features) -> tuple[Int[Array, "B T"], Float[Array, "B T H"]]:
        """Tokens and features of mask rows, which depend on no row before them."""
        return jnp.full_like(tokens, self.mask_token), jnp.broadcast_to(self.masked(params), features.shape)

    def masked(self, params: Params) -> Float[Array, "1 1 H"]:
        """Features that mask rows read."""
        hidden = self.module(params).mask_hidden[...].astype(self.dtype)
        return self.mixed(params, tuple(jnp.split(hidden, len(self.reads), axis=-1)))


@dataclasses.dataclass(frozen=True)
class BoundPEagle(BoundRows):
    """The bound form, which the engine runs."""

    def draft(self, params: Params, target: TargetView, state: State, context: Context) -> tuple[Draft, State]:
        """A proposal made in one pass over the root's token row and the mask rows after it."""
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
