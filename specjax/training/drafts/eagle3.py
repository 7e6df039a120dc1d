"""The section `draft` of EAGLE-3 and P-EAGLE drafts, which begin as the best linear guess."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from pydantic import Field

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.drafters.eagle3 import Eagle3Model, Options
from specjax.drafters.features import EMBEDDING_AND_HEAD, layers_like
from specjax.drafters.p_eagle import PEagleModel
from specjax.drafters.token_rows import TrainedRows
from specjax.errors import ConfigError
from specjax.interfaces import Batch, Output, Params, Target
from specjax.models.config import ModelConfig
from specjax.training.drafts.features import FeatureDraft, mask_token, streams
from specjax.training.init.draft_vocabulary import first_ids
from specjax.training.init.least_squares import linear_guess, low_rank, silent, unit


@dataclasses.dataclass(frozen=True)
class _Eagle(FeatureDraft):
    """Fields that both kinds have."""

    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Numbers of the target's streams that the draft captures, ascending; stream i leaves layer i - 1. None: 2, L / 2
    and L - 3 of L layers; for a target of few layers L / 3, 2 L / 3 and L."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of the draft's layers; the paper of P-EAGLE has four."""
    depths: Annotated[int, Field(ge=1, le=16)] = 3
    """Number of a block's tokens that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of a depth's loss over that of the depth before."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Size of the draft vocabulary, the most frequent ids of the training data; None: all ids."""
    norm_before_residual: bool = True
    num_kv_heads: Annotated[int, Field(ge=1)] | None = None
    """Number of key-value heads; None: the target's. The token reaches the output through their values alone, so few
    of them make a narrow way."""
    of_training: ClassVar[Any] = frozenset({"depths", "depth_decay"})
    model: ClassVar[type[Eagle3Model]] = Eagle3Model

    def described(self, config: RunConfig, target: Target) -> TrainedRows:
        full: ModelConfig = target.config
        reads, own = streams(self.reads, config, full), self.own(full)
        names = {field.name for field in dataclasses.fields(Options)}
        options = Options(**{name: value for name, value in vars(self).items() if name in names})
        sizes = {"vocabulary": first_ids(self.draft_vocab_size, full), "options": options, **own}
        model = self.model(self._layers(full), reads, full.hidden_size, **sizes)
        return TrainedRows(model, EMBEDDING_AND_HEAD, depths=self.depths, decay=self.depth_decay)

    def _layers(self, full: ModelConfig) -> ModelConfig:
        config = layers_like(full, self.layers)
        if self.num_kv_heads is None:
            return config
        if config.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"draft.num_kv_heads: {self.num_kv_heads} does not divide the target's {config.num_heads} heads"
            )
        return dataclasses.replace(config, num_kv_heads=self.num_kv_heads)

    def own(self, full: ModelConfig) -> dict[str, Any]:
        """Fields of the model that its kind adds, for a target of these sizes."""
        return {}

    def first(self, drafter: Any, params: Params, target: Target, rows: Rows) -> Params:
        return as_a_linear_guess(drafter, params, target, rows)


@dataclasses.dataclass(frozen=True)
class Eagle3Draft(_Eagle):
    """The section `draft` of an EAGLE-3 draft: layers of the target's sizes, with its embedding and head, frozen."""

    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["eagle3"] = "eagle3"  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(frozen=True)
class _MaskToken:
    """A field that comes before the others."""

    mask_token: Annotated[int, Field(ge=0)] | None = None
    """Id that no text has, whose embedding mask rows have; None: the last of the vocabulary."""


@dataclasses.dataclass(frozen=True)
class PEagleDraft(_Eagle, _MaskToken):
    """The section `draft` of a P-EAGLE draft: layers of the target's sizes, with its embedding and head, frozen."""

    depths: Annotated[int, Field(ge=1, le=16)] = 5
    """Number of depths of a block that are trained."""
    norm_before_fc: bool = False
    fc_norm: bool = False
    kind: Literal["p_eagle"] = "p_eagle"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: ClassVar[type[Eagle3Model]] = PEagleModel

    def own(self, full: ModelConfig) -> dict[str, Any]:
        return {"mask_token": mask_token(self.mask_token, full)}


def as_a_linear_guess(drafter: TrainedRows, params: Params, target: Target, rows: Rows) -> Params:
    """``params`` that guess linearly from the captured streams and the token. The first layer's residual begins with
    the streams. The token is not in it: it comes through half of the layer's key-value heads, which attend to their own
    position. Everything else adds nothing yet."""
    model: Any = drafter.model
    size = model.config.hidden_size
    # Embedding and head are the target's; nothing of them is read here.
    own = {**params, "embedding": jnp.zeros((1, 1)), "head": {"kernel": jnp.zeros((1, 1))}}
    fit = linear_guess(target, rows, model.reads, own, _StreamsAndToken(model))
    layers = {i: silent(layer) for i, layer in params["layers"].items()}
    token = fit.kernel[-size:], fit.products[-size:, -size:]
    layers[0] = {**layers[0], "attention": _of_itself(model.config, layers[0]["attention"], *token)}
    if model.options.norm_before_residual:  # keep the streams' size, which that norm would set to 1
        layers[0]["hidden_norm"] = {"scale": jnp.full(size, fit.size(slice(0, -size)), jnp.float32)}
    return {**params, "fc": {"kernel": jnp.asarray(fit.kernel[:-size])}, "layers": layers, "norm": fit.norm}


@dataclasses.dataclass(frozen=True)
class _StreamsAndToken:
    """Inputs of the linear guess: streams and token, see `specjax.training.init.least_squares.Inputs`."""

    model: Any

    def __call__(self, own: Params, token: Array, batch: Batch, streams: tuple[Array, ...], out: Output) -> Array:
        return jnp.concatenate([self.model.together(own, streams), unit(token)], axis=-1)


SHARPNESS = 1.25
"""Scale of queries and keys that attend to their own position: in heads of 64, its own key scores 12, others 1.5."""


def _of_itself(
    config: ModelConfig, attention: Params, kernel: Float[np.ndarray, "H H"], products: Float[np.ndarray, "H H"]
) -> Params:
    """An attention that adds ``kernel`` of each position's own token, as well as the rank of half of its key-value
    heads allows: of all kernels of that rank, the one whose outputs differ least over tokens with these mean
    ``products`` of features. In those heads, the first query head asks for the position's own key, which is made of its
    token alone."""
    size, width, group = config.hidden_size, config.head_dim, config.num_heads // config.num_kv_heads
    q, k, v, o = (np.array(attention[f"{name}_proj"]["kernel"]) for name in "qkvo")
    left, strength, right = low_rank(kernel, products)
    for i in range(min(max(1, config.num_kv_heads // 2), size // width)):
        of_key = slice(i * width, (i + 1) * width)
        of_query = slice(i * group * width, (i * group + 1) * width)
        root = np.sqrt(strength[of_key])
        for own, of_head in ((k, of_key), (q, of_query), (v, of_key)):
            own[size:, of_head] = 0
        k[:size, of_key] *= SHARPNESS * np.sqrt(2)  # its weights were drawn for twice as many inputs
        q[:size, of_query] = k[:size, of_key]
        v[:size, of_key] = left[:, of_key] * root
        o[of_query] = root[:, None] * right[of_key]
    kernels = {f"{name}_proj": jnp.asarray(x) for name, x in zip("qkvo", (q, k, v, o), strict=True)}
    return {**attention, **{name: {**attention[name], "kernel": kernel} for name, kernel in kernels.items()}}
