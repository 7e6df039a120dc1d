"""What differs between decoder-only transformers: one frozen, hashable description, the static half of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from specjax.models.rotary import DynamicScaling, LongRope, Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""``gelu``: exact; ``gelu_tanh``: its approximation with a hyperbolic tangent."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """Every normalisation of the residual stream: RMSNorm (1910.07467) or LayerNorm (1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    """Added to the stored scale (Gemma: 1)."""
    bias: bool = False
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Of what attention and MLP read, of what they give (OLMo 2), or of both (Gemma 2 and 3)."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer."""

    rope: Rope | None = dataclasses.field(default=Rope())
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None: all before it."""
    dense: bool = False
    """A plain MLP, in a model whose other layers have experts."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token goes to the ``top_k`` that a softmax over all of them ranks
    first, weighted by it (2401.04088). ``normalised``: the weights of the chosen ones add up to one."""

    count: int
    top_k: int
    intermediate_size: int
    normalised: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder; as it stands, a Llama. Sizes are counts of features."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    layers: tuple[LayerKind, ...] = (LayerKind(),)
    """One kind for all layers, or one a layer."""
    norm: Norm = Norm()
    tie_embeddings: bool = True
    learned_positions: bool = False
    """A learned embedding of each position is added to that of the token (GPT-2)."""
    residual: Literal["sequential", "parallel", "parallel_one_norm"] = "sequential"
    """Parallel: the MLP reads what attention reads (GPT-NeoX), through the same norm (Cohere) or its own."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "each_head", "projection"] = "none"
    """Queries and keys are normalised before they are rotated: each head with a scale for all of them (Qwen3), with a
    scale of its own (Cohere), or all heads together (OLMo 2)."""
    attention_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Scores are capped smoothly: ``cap * tanh(score / cap)``."""
    gated: bool = True
    """``down(activation(gate(x)) * up(x))`` (2002.05202); otherwise ``down(activation(up(x)))``."""
    activation: Activation = "silu"
    mlp_bias: bool = False
    experts: Experts | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what attention and MLP add to the stream."""
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    fused_projections: bool = False
    """Query, key and value are one kernel, gate and up another, as `specjax.models.decode_layout` lays them out."""
    fused_shards: int = 1
    """Equal parts of their outputs, each with its own share of all that are fused: one a device."""

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
        """Of the layers: how many tokens each sees, itself among them; None: all before it."""
        return tuple(self.layer(i).window for i in range(self.num_layers))

    def widest(self, of: Callable[[int], int] = int) -> int:
        """Numbers that the widest layer makes of a token on its way through, beside scores: the stream, its norm, and
        either projections of attention or neurons with the gate's. ``of``: the part of a size that a device has."""
        heads, kv = of(self.num_heads) * self.head_dim, of(self.num_kv_heads) * self.head_dim
        neurons = of(self.intermediate_size) * (3 if self.gated else 2)
        if self.experts is not None:  # each token's own
            neurons = max(neurons, self.experts.top_k * self.experts.intermediate_size * 3)
        return 2 * self.hidden_size + max(2 * (heads + 2 * kv), neurons)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones."""
        return tuple(dict.fromkeys(kind.rope for kind in self.layers if kind.rope is not None))

    @property
    def rows_choose_frequencies(self) -> bool:
        """The rotary frequencies of a row depend on the length it will reach."""
        return any(isinstance(rope.scaling, LongRope) for rope in self.ropes)

    @property
    def dynamic_limit(self) -> int | None:
        """Positions past which rotary frequencies would change from token to token; None: they never do."""
        limits = [rope.scaling.original_positions for rope in self.ropes if isinstance(rope.scaling, DynamicScaling)]
        return min(limits, default=None)
