"""Settings in which decoder-only transformers differ: one frozen, hashable description, the static half of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from specjax.models.rotary import DynamicScaling, LongRope, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""``gelu``: exact; ``gelu_tanh``: its approximation with a hyperbolic tangent."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """Settings of every normalisation of the residual stream: RMSNorm (1910.07467) or LayerNorm (1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    """Number added to the stored scale (Gemma: 1)."""
    bias: bool = False
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms on the inputs of attention and MLP (pre), on their outputs (post: OLMo 2), or on both (sandwich: Gemma 2
    and 3)."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Settings that may differ from layer to layer."""

    rope: Rope | None = dataclasses.field(default=Rope())
    window: int | None = None
    """Number of tokens that a token sees: itself and the ``window - 1`` before it; None: all before it."""
    dense: bool = False
    """True for a plain MLP, in a model whose other layers have experts."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP. A softmax over all experts ranks them for each token; the token goes to
    the ``top_k`` first ones, weighted by that softmax (2401.04088). ``normalised``: the weights of the chosen ones are
    scaled to add up to one."""

    count: int
    top_k: int
    intermediate_size: int
    normalised: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder; its defaults are a Llama's. Sizes are counts of features."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    layers: tuple[LayerKind, ...] = (LayerKind(),)
    """One kind for all layers, or one for each layer."""
    norm: Norm = Norm()
    tie_embeddings: bool = True
    learned_positions: bool = False
    """True if a learned embedding of each position is added to that of the token (GPT-2)."""
    residual: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"
    """Parallel: the MLP reads the stream that attention reads, through a norm of its own (``parallel``: GPT-NeoX) or
    through attention's (``parallel_one_norm``: Cohere)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "each_head", "projection"] = "none"
    """Norm of queries and keys before they are rotated: each head with one scale for all of them (``head``: Qwen3) or
    with its own (``each_head``: Cohere), or all heads together (``projection``: OLMo 2)."""
    attention_scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Smooth limit of the scores: ``cap * tanh(score / cap)``; None: no limit."""
    gated: bool = True
    """True: ``down(activation(gate(x)) * up(x))`` (2002.05202); False: ``down(activation(up(x)))``."""
    activation: Activation = "silu"
    mlp_bias: bool = False
    experts: Experts | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the stream."""
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    fused_projections: bool = False
    """True if query, key and value are one kernel, and gate and up another, as `specjax.models.decode_layout` lays them
    out."""
    fused_shards: int = 1
    """Number of equal parts of the fused outputs, one a device; each part holds its share of every fused projection."""
    narrow_head: int = 0
    """Rows of a head for a draft vocabulary alone, as `specjax.models.decode_layout` makes it; 0: there is none."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "every key-value head serves the same number of query heads"
            )
        if len(self.layers) not in (1, self.num_layers):
            raise ValueError(
                f"layers has {len(self.layers)} kinds for num_layers={self.num_layers}; give 1 or one each"
            )
        for rope in self.ropes:
            features = rope.features(self.head_dim)
            if features % 2:
                raise ValueError(
                    f"head_dim={self.head_dim} has {features} rotated features: rotary embeddings rotate pairs"
                )
            if isinstance(rope.scaling, LongRope):
                counts = len(rope.scaling.short_factors), len(rope.scaling.long_factors)
                if counts != (features // 2, features // 2):
                    raise ValueError(
                        f"short_factor and long_factor have {counts[0]} and {counts[1]} entries for {features // 2} "
                        "rotated pairs of features"
                    )

    def layer(self, index: int) -> LayerKind:
        return self.layers[index % len(self.layers)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer: the number of tokens that a token sees, itself included; None: all before it."""
        return tuple(self.layer(i).window for i in range(self.num_layers))

    def widest(self, of: Callable[[int], int] = int) -> int:
        """Largest number of values that one layer makes of a token, beside scores: the stream, its norm, and the larger
        of attention's projections and the MLP's neurons with the gate's. ``of``: maps a size to the part that one
        device has."""
        heads, kv = of(self.num_heads) * self.head_dim, of(self.num_kv_heads) * self.head_dim
        neurons = of(self.intermediate_size) * (3 if self.gated else 2)
        if self.experts is not None:  # every token has neurons of its own
            neurons = max(neurons, self.experts.top_k * self.experts.intermediate_size * 3)
        return 2 * self.hidden_size + max(2 * (heads + 2 * kv), neurons)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Distinct rotary embeddings of the layers."""
        return tuple(dict.fromkeys(kind.rope for kind in self.layers if kind.rope is not None))

    @property
    def rows_choose_frequencies(self) -> bool:
        """True if the rotary frequencies of a row depend on the length it will reach."""
        return any(isinstance(rope.scaling, LongRope) for rope in self.ropes)

    @property
    def dynamic_limit(self) -> int | None:
        """Number of positions past which rotary frequencies would change from token to token; None: they never do."""
        limits = [rope.scaling.original_positions for rope in self.ropes if isinstance(rope.scaling, DynamicScaling)]
        return min(limits, default=None)
