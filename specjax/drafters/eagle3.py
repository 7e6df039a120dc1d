"""EAGLE-3 (2503.01840): one or more layers that read a token beside features of the token before, which are made of
several hidden states of the target. `specjax.drafters.token_rows` says how it decodes and is trained.

Dims: B rows, T tokens fed, S features of one hidden state, I of all of them side by side, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from specjax.drafters.features import embedding_and_head, of_hidden
from specjax.drafters.token_rows import RowModel
from specjax.errors import ConfigError
from specjax.interfaces import PLAIN, Output, Params, TrainingForm
from specjax.models.attention.kv_source import KVSource
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import MLP, Attention, Linear, make_norm
from specjax.models.training import gathered
from specjax.models.transformer import Block


@dataclasses.dataclass(frozen=True)
class Options:
    """Variants of EAGLE-3 in which published drafts differ."""

    norm_before_residual: bool = True
    """True: the residual stream goes on with the normed features; False: with the features."""
    norm_output: bool = False
    """True: the draft's output that stands in for features is normed, as the head's input is (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """True: the captured hidden states are normed together before they are mixed."""
    fc_norm: bool = False
    """True: each captured hidden state is normed by itself before they are mixed (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc=True, fc_norm=True: norms of the same layers; choose one")


class FirstBlock(nnx.Module):
    """The first layer, whose attention reads token and features side by side."""

    def __init__(self, config: ModelConfig, kind: LayerKind, options: Options, *, rngs: nnx.Rngs, dtype: DTypeLike):
        norm = functools.partial(make_norm, config, config.hidden_size, dtype=dtype)
        self.attention_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(config, kind, rngs=rngs, dtype=dtype, inputs=2 * config.hidden_size)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        self.normed_residual = options.norm_before_residual

    def __call__(self, token, features, rotary, kv: KVSource):
        """The layer's output, and its keys and values with those of the tokens fed."""
        normed = self.hidden_norm(features)
        read = jnp.concatenate([self.attention_norm(token), normed], axis=-1)
        attended, layer, _ = self.attention(read, rotary, kv)
        x = (normed if self.normed_residual else features) + attended
        return x + self.mlp(self.mlp_norm(x)), layer


class Net(nnx.Module):
    """Weights of the draft."""

    def __init__(self, spec: Eagle3Model, *, rngs: nnx.Rngs):
        config, dtype, options = spec.config, spec.dtype, spec.options
        captured = len(spec.reads)
        self.embedding, self.head = embedding_and_head(spec, rngs)
        self.fc = Linear(captured * spec.feature_size, config.hidden_size, rngs=rngs, dtype=dtype)
        if options.norm_before_fc:
            self.input_norm = make_norm(config, captured * spec.feature_size, dtype=dtype)
        if options.fc_norm:
            self.fc_norms = nnx.List([make_norm(config, spec.feature_size, dtype=dtype) for _ in range(captured)])
        others = [Block(config, config.layer(i), rngs=rngs, dtype=dtype) for i in range(1, config.num_layers)]
        self.layers = nnx.List([FirstBlock(config, config.layer(0), options, rngs=rngs, dtype=dtype), *others])
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Eagle3Model(RowModel):
    """Forward pass of EAGLE-3, see `FeatureModel`."""

    options: Options = Options()
    kind: ClassVar[str] = "eagle3"
    net: ClassVar[Any] = Net

    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        return self.mixed(params, of_hidden(target_out, self.dtype))

    def mixed(self, params: Params, hidden: tuple[Float[Array, "B T S"], ...]) -> Float[Array, "B T H"]:
        """Features that token rows read, mixed from the captured hidden states."""
        return self.module(params).fc(self.together(params, hidden))

    def together(self, params: Params, hidden: tuple[Float[Array, "B T S"], ...]) -> Float[Array, "B T I"]:
        """Captured hidden states side by side, normed as the options say: the input of ``fc``."""
        module = self.module(params)
        if self.options.fc_norm:
            hidden = tuple(norm(x) for norm, x in zip(module.fc_norms, hidden, strict=True))
        together = jnp.concatenate(hidden, axis=-1)
        return module.input_norm(together) if self.options.norm_before_fc else together

    def __call__(
        self, params, tokens, features, positions, kv: Sequence[KVSource], form: TrainingForm = PLAIN
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        module = self.module(gathered(params, form.sharding))
        token, first = self.embedded(module, tokens), module.layers[0]

        def block(x: Array, table: Any, kv: Any) -> tuple[Array, Any]:
            return first(token, x, table, kv)

        x, layer = self.run(block, 0, features.astype(self.dtype), positions, kv[0], form)
        layers = [layer]
        for i in range(1, self.config.num_layers):
            x, layer = self.run_block(module.layers[i], i, x, positions, kv[i], form)
            layers.append(layer)
        final = module.norm(x)
        return final, final if self.options.norm_output else x, tuple(layers)
