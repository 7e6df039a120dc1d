"""Targets of any size without a checkpoint, and a draft that agrees with them as often as it is told: what decoding
costs does not depend on what the weights know.

The target continues t with t + 1, by a margin that no rounding reaches: its layers are random and computed in full, but
add little to the stream, and its head is its embedding moved by a row. The draft runs all its passes and then says what
the target will, or with a set chance something else.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.drafters.draft_model import BoundDraftModel, Consumed
from specjax.interfaces import Bound, Context, Draft, Drafter, Params, TargetView
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import decode_layout
from specjax.models.hf import LoadedModel, quantize_model
from specjax.models.transformer import Model

POSITIONS = 2**17
TARGETS = {
    "8B": ModelConfig(128_256, 4096, 14336, 32, 32, 8, 128, max_positions=POSITIONS, tie_embeddings=False),
    "1B": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, max_positions=POSITIONS, tie_embeddings=False),
    "tiny": ModelConfig(512, 256, 512, 4, 4, 2, 64, max_positions=POSITIONS, tie_embeddings=False),
}
DRAFTS = {
    "8B": ModelConfig(128_256, 1024, 3072, 16, 16, 8, 64, max_positions=POSITIONS, tie_embeddings=True),
    "1B": ModelConfig(128_256, 256, 1024, 4, 4, 4, 64, max_positions=POSITIONS, tie_embeddings=True),
    "tiny": ModelConfig(512, 64, 128, 1, 2, 2, 32, max_positions=POSITIONS, tie_embeddings=True),
}
"""Of about a twentieth of the target's weights each."""
_ADDED = 1e-4
"""What a layer adds to the stream, over what random weights would."""


def successor(config: ModelConfig, dtype: str, quantize: str | None = None) -> LoadedModel:
    """The target of these sizes, which continues t with t + 1."""
    model = Model(config, dtype)

    def made(key: jax.Array) -> Params:
        def weak(path: Any, leaf: jax.Array) -> jax.Array:
            names = {key.key for key in path}
            return leaf * jnp.asarray(_ADDED, leaf.dtype) if names & {"o_proj", "down_proj"} else leaf

        params = jax.tree_util.tree_map_with_path(weak, model.init(key))
        return {**params, "head": {"kernel": jnp.roll(params["embedding"], 1, axis=0).T}}

    target = LoadedModel(model, jax.jit(made)(jax.random.key(0)), name="successor")
    return target if quantize is None else quantize_model(target, quantize)


@dataclasses.dataclass(frozen=True)
class BoundAgreeing(BoundDraftModel):
    """All passes of a draft model, and then the target's next tokens, each with the chance ``agreement``."""

    agreement: float = 1.0

    def draft(self, params: Params, target: TargetView, state: Consumed, context: Context) -> tuple[Draft, Consumed]:
        """A block, at temperature 0."""
        draft, state = super().draft(params, target, state, context)
        at = context.lengths[:, None] + jnp.arange(self.k, dtype=jnp.int32)[None]
        root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)

        def agrees_at(first: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), first), position)
            return jax.random.uniform(key) < self.agreement

        # Chances of each row's own, by the first token of its prompt: otherwise all rows accept in lockstep.
        agrees = jax.vmap(jax.vmap(agrees_at, (None, 0)))(context.tokens[:, 0], at)
        count = context.sampling.bias.shape[1]
        right = (root + 1 + jnp.arange(self.k, dtype=jnp.int32)[None]) % count
        told = jnp.where(agrees, right, (right + 1) % count)
        # Tied to what was drafted, or no pass would be left of the program.
        return dataclasses.replace(draft, tokens=jnp.where(draft.tokens < 0, draft.tokens, told)), state


@dataclasses.dataclass(frozen=True, eq=False)
class Agreeing(Drafter):
    """A drafter for `specjax.Decoder`."""

    config: ModelConfig
    dtype: str
    k: int
    agreement: float
    kind: Literal["agreeing"] = "agreeing"

    def bind(self, target: Any) -> Bound:
        model = Model(self.config, self.dtype)
        spec, params = decode_layout(model, jax.jit(model.init)(jax.random.key(1)))
        return Bound(BoundAgreeing(spec, self.k, self.agreement), params)
