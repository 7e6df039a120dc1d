"""Multi-token prediction (DeepSeek-V3, 2412.19437): a layer that reads a token mixed with the target's last stream at
the token before. `specjax.drafters.token_rows` says how it decodes and is trained.

Dims: B rows, T tokens fed, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from specjax.drafters.features import embedding_and_head
from specjax.drafters.token_rows import RowModel
from specjax.interfaces import PLAIN, Output, Params, TrainingForm
from specjax.models.attention.kv_source import KVSource
from specjax.models.layers import Linear, make_norm
from specjax.models.training import gathered
from specjax.models.transformer import Block

Norms = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices in which published heads differ, and readers of the same head as well; measured acceptance decides."""

    state: Norms = "pre"
    """Point at which the target's last stream is read: before its final norm (`pre`) or after it (`post`)."""
    recycled: Norms = "post"
    """Point at which the head's output is taken to stand in for that stream after the root: before the head's own last
    norm (`pre`) or after it (`post`)."""


class Net(nnx.Module):
    """Weights of the head."""

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
    """Forward pass of the head, see `FeatureModel`; ``reads`` is the target's last stream."""

    options: Options = Options()
    kind: ClassVar[str] = "mtp"
    net: ClassVar[Any] = Net
    of_last: ClassVar[bool] = True

    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        chosen = target_out.hidden[0] if self.options.state == "pre" else target_out.final
        assert chosen is not None
        return chosen.astype(self.dtype)

    def __call__(
        self, params, tokens, features, positions, kv: Sequence[KVSource], form: TrainingForm = PLAIN
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        module = self.module(gathered(params, form.sharding))
        token = module.token_norm(self.embedded(module, tokens))
        x = module.fc(jnp.concatenate([token, module.hidden_norm(features.astype(self.dtype))], axis=-1))
        layers = []
        for i, block in enumerate(module.layers):
            x, layer = self.run_block(block, i, x, positions, kv[i], form)
            layers.append(layer)
        final = module.norm(x)
        return final, final if self.options.recycled == "post" else x, tuple(layers)
