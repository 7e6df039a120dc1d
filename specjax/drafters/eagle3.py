"""EAGLE-3 (2503.01840): a layer or a few that read what several of the target's layers made of the token before, beside
the token itself. `specjax.drafters.token_rows` says how its rows are decoded and trained.

Dims: B rows, T tokens fed, S features of the target's, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from pydantic import Field

from specjax.drafters import features as features_lib
from specjax.drafters.features import FeatureDraft, FeatureDrafter, embedding_and_head, of_hidden
from specjax.drafters.token_rows import BoundRows, RowModel, TrainedRows
from specjax.errors import ConfigError
from specjax.models.attention.memory import Attended
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.layers import MLP, Attention, Linear, make_norm
from specjax.models.training import gathered
from specjax.models.transformer import Block
from specjax.types import PLAIN, Batch, Output, Params, TrainingForm

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows


@dataclasses.dataclass(frozen=True)
class Options:
    """What differs between published drafts."""

    norm_before_residual: bool = True
    """The stream goes on with the normed features, not with the features."""
    norm_output: bool = False
    """What stands in for features is normed, as what the head reads is (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Captured layers are normed together before they are mixed."""
    fc_norm: bool = False
    """Captured layers are normed each by itself before they are mixed (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc=True, fc_norm=True: norms of the same layers; choose one")


class FirstBlock(nnx.Module):
    """A layer whose attention reads token and features side by side."""

    def __init__(self, config: ModelConfig, kind: LayerKind, options: Options, *, rngs: nnx.Rngs, dtype: DTypeLike):
        norm = functools.partial(make_norm, config, config.hidden_size, dtype=dtype)
        self.attention_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = Attention(config, kind, rngs=rngs, dtype=dtype, inputs=2 * config.hidden_size)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        self.normed_residual = options.norm_before_residual

    def __call__(self, token, features, rotary, memory: Attended):
        """Returns (x, the layer's keys and values with those of the tokens fed)."""
        normed = self.hidden_norm(features)
        read = jnp.concatenate([self.attention_norm(token), normed], axis=-1)
        attended, layer, _ = self.attention(read, rotary, memory)
        x = (normed if self.normed_residual else features) + attended
        return x + self.mlp(self.mlp_norm(x)), layer


class Net(nnx.Module):
    """The weights."""

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
    """See `FeatureModel`."""

    options: Options = Options()
    net: ClassVar[Any] = Net

    def features(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        return self.mixed(params, of_hidden(target_out, self.dtype))

    def mixed(self, params: Params, hidden: tuple[Float[Array, "B T S"], ...]) -> Float[Array, "B T H"]:
        """What rows read of captured streams."""
        return self.module(params).fc(self.together(params, hidden))

    def together(self, params: Params, hidden: tuple[Float[Array, "B T S"], ...]) -> Float[Array, "B T I"]:
        """Captured streams side by side, as they are mixed."""
        module = self.module(params)
        if self.options.fc_norm:
            hidden = tuple(norm(x) for norm, x in zip(module.fc_norms, hidden, strict=True))
        together = jnp.concatenate(hidden, axis=-1)
        return module.input_norm(together) if self.options.norm_before_fc else together

    def __call__(
        self, params, tokens, features, positions, memory: Sequence[Attended], form: TrainingForm = PLAIN
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        module = self.module(gathered(params, form.sharding))
        token, first = self.embedded(module, tokens), module.layers[0]

        def block(x: Array, table: Any, memory: Any) -> tuple[Array, Any]:
            return first(token, x, table, memory)

        x, kept = self.run(block, 0, features.astype(self.dtype), positions, memory[0], form)
        layers = [kept]
        for i in range(1, self.config.num_layers):
            x, kept = self.run_block(module.layers[i], i, x, positions, memory[i], form)
            layers.append(kept)
        final = module.norm(x)
        return final, final if self.options.norm_output else x, tuple(layers)


@dataclasses.dataclass(frozen=True)
class Eagle3(FeatureDrafter):
    """A draft that reads its target's hidden states (EAGLE-3, 2503.01840), and proposes ``k`` tokens one by one."""

    kind: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundRows


@dataclasses.dataclass(frozen=True)
class TrainedEagle3(TrainedRows):
    """In training."""

    drafter: ClassVar[Any] = Eagle3


@dataclasses.dataclass(frozen=True)
class Eagle3Draft(FeatureDraft):
    """The section `draft` of a config: layers of the target's sizes, with its embedding and head, frozen."""

    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The target's streams that it captures, ascending, i: what leaves layer i - 1; None: 2, L / 2 and L - 3 of L, of
    a target of few layers L / 3, 2 L / 3 and L."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Of the draft."""
    depths: Annotated[int, Field(ge=1, le=16)] = 3
    """Tokens of a block that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """What the loss of a depth weighs beside that of the one before."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Ids that it can propose, the most frequent of what it is trained on; None: all."""
    norm_before_residual: bool = True
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = Eagle3
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay"})
    unsaid: ClassVar[Any] = {"reads": "specjax_reads"}

    def described(self, config: RunConfig, target: Any) -> TrainedEagle3:
        full: ModelConfig = target.config
        reads = features_lib.streams(self.reads, config, full)
        options = Options(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Options)})
        kept, layers = features_lib.first_ids(self.draft_vocab_size, full), features_lib.layers_like(full, self.layers)
        model = Eagle3Model(layers, reads, full.hidden_size, kept=kept, options=options)
        return TrainedEagle3(model, features_lib.ENDS, depths=self.depths, decay=self.depth_decay)

    def first(self, drafter: Any, params: Params, target: Any, rows: Rows) -> Params:
        return as_a_linear_guess(drafter, params, target, rows)


def as_a_linear_guess(drafter: TrainedRows, params: Params, target: Any, rows: Rows) -> Params:
    """``params`` that guess linearly, from the captured streams and the token: the streams are what the first layer's
    residual begins with; the token, which is not in it, comes through half of the layer's key-value heads, which look
    for themselves. All else says nothing yet."""
    from specjax.distill.fitting import linear_guess, silent

    model: Any = drafter.model
    size = model.config.hidden_size
    # Of the ends, which are the target's, nothing is read here.
    own = {**params, "embedding": jnp.zeros((1, 1)), "head": {"kernel": jnp.zeros((1, 1))}}
    fit = linear_guess(target, rows, model.reads, own, _StreamsAndToken(model))
    layers = {i: silent(layer) for i, layer in params["layers"].items()}
    layers[0] = {**layers[0], "attention": _of_itself(model.config, layers[0]["attention"], fit.kernel[-size:])}
    if model.options.norm_before_residual:  # which would give all of it the size 1
        layers[0]["hidden_norm"] = {"scale": jnp.full(size, fit.size(slice(0, -size)), jnp.float32)}
    return {**params, "fc": {"kernel": jnp.asarray(fit.kernel[:-size])}, "layers": layers, "norm": fit.norm}


@dataclasses.dataclass(frozen=True)
class _StreamsAndToken:
    """What a linear guess is made of: `specjax.distill.fitting.Inputs`."""

    model: Any

    def __call__(self, own: Params, token: Array, batch: Batch, streams: tuple[Array, ...], out: Output) -> Array:
        from specjax.distill.fitting import unit

        return jnp.concatenate([self.model.together(own, streams), unit(token)], axis=-1)


SHARPNESS = 1.25
"""Of queries and keys that look for themselves: of heads of 64, a token's own key scores 12 and others 1.5."""


def _of_itself(config: ModelConfig, attention: Params, kernel: Float[np.ndarray, "H H"]) -> Params:
    """An attention whose rows add ``kernel`` of their own token, as well as the rank of half of its key-value heads
    allows: in those, the first query head asks for the row's own key, which is of its token alone."""
    size, width, group = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads
    q, k, v, o = (np.array(attention[f"{name}_proj"]["kernel"]) for name in "qkvo")
    left, strength, right = np.linalg.svd(kernel)
    for i in range(min(max(1, config.num_kv_heads // 2), size // width)):
        of_key = slice(i * width, (i + 1) * width)
        of_query = slice(i * group * width, (i * group + 1) * width)
        root = np.sqrt(strength[of_key])
        for own, of_head in ((k, of_key), (q, of_query), (v, of_key)):
            own[size:, of_head] = 0
        k[:size, of_key] *= SHARPNESS * np.sqrt(2)  # drawn for twice as many inputs
        q[:size, of_query] = k[:size, of_key]
        v[:size, of_key] = left[:, of_key] * root
        o[of_query] = root[:, None] * right[of_key]
    kernels = {f"{name}_proj": jnp.asarray(x) for name, x in zip("qkvo", (q, k, v, o), strict=True)}
    return {**attention, **{name: {**attention[name], "kernel": kernel} for name, kernel in kernels.items()}}
