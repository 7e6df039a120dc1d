"""Rotary position embeddings (2104.09864), and the ways to stretch their frequencies over longer sequences.

Each way is one frozen dataclass: calling it returns the stretched frequencies, and its ``attention_factor`` multiplies
cosine and sine. ``total`` is the length that a row will reach, for the ways that depend on it: one number for a pass
without a cache (the tokens fed), one a row with a cache. Frequencies must not change inside a generation.

Dims: B rows, T tokens, H heads, C head features, F frequencies (half the features that are rotated).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Total = int | Int[Array, " B"] | None


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (2306.15595)."""

    factor: float
    attention_factor: float = 1.0

    def __call__(self, frequencies: Float[Array, " F"], theta: float, total: Total) -> Float[Array, " F"]:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware growth of the base with the length (2309.00071, section 3.3). Nothing changes up to
    ``original_positions``. Past them frequencies depend on the length: decoding ends there (see
    `specjax.decode.request`), and only a pass without a cache goes on."""

    factor: float
    original_positions: int
    attention_factor: float = 1.0

    def __call__(self, frequencies: Float[Array, " F"], theta: float, total: Total) -> Float[Array, " F"]:
        if not isinstance(total, int) or total <= self.original_positions:
            return frequencies
        growth = self.factor * total / self.original_positions - (self.factor - 1)
        features = 2 * len(frequencies)
        return frequencies * growth ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / (features - 2))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: waves longer than ``original_positions / low_frequency_factor`` are stretched by ``factor``, those
    shorter than ``original_positions / high_frequency_factor`` are unchanged, with a ramp between them (2407.21783)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int
    attention_factor: float = 1.0

    def __call__(self, frequencies: Float[Array, " F"], theta: float, total: Total) -> Float[Array, " F"]:
        waves = self.original_positions * frequencies / (2 * math.pi)
        kept = (waves - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (2309.00071): features that turn more than ``beta_fast`` times over ``original_positions`` are unchanged,
    those that turn less than ``beta_slow`` times are stretched by ``factor``. ``truncate``: the ramp between them
    begins and ends at whole features."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequencies: Float[Array, " F"], theta: float, total: Total) -> Float[Array, " F"]:
        features = 2 * len(frequencies)

        def feature_of(turns: float) -> float:
            return features * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = feature_of(self.beta_fast), feature_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, features - 1)
        width = last - first or 0.001  # a step where the ramp has no width
        stretched = jnp.clip((jnp.arange(len(frequencies), dtype=jnp.float32) - first) / width, 0.0, 1.0)
        return stretched * frequencies / self.factor + (1 - stretched) * frequencies


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (2402.13753): each frequency has two factors of its own, one for rows that stay within
    ``original_positions`` and one for longer rows. The choice is made once a row."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float

    def __call__(self, frequencies: Float[Array, " F"], theta: float, total: Total) -> Float[Array, "*B F"]:
        short, long = (jnp.asarray(factors, jnp.float32) for factors in (self.short_factors, self.long_factors))
        if total is None or isinstance(total, int):
            return frequencies / (long if (total or 0) > self.original_positions else short)
        factors = jnp.where((total > self.original_positions)[:, None], long[None], short[None])
        return frequencies[None] / factors


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRope


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of a layer. ``theta``: the base. ``partial``: the share of a head's features that is rotated.
    ``interleaved``: pairs are neighbours (2i, 2i + 1); otherwise feature i is paired with feature i + half, as most of
    Hugging Face has it."""

    theta: float = 10_000.0
    partial: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def features(self, head_dim: int) -> int:
        """Number of features of a head that are rotated."""
        return int(head_dim * self.partial)


def rotary_table(
    positions: Int[Array, "B T"], rope: Rope, head_dim: int, dtype, total: Total = None
) -> tuple[Array, Array]:
    """(cos, sin), each ``[B, T, 1, F]``; computed in float32 whatever the model's dtype."""
    features = rope.features(head_dim)
    frequencies = rope.theta ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    if rope.scaling is not None:
        frequencies = rope.scaling(frequencies, rope.theta, total)
    a_row = (None, None, None) if frequencies.ndim == 1 else (slice(None), None, None)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[a_row]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.scaling is not None and rope.scaling.attention_factor != 1:
        cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
    return cos.astype(dtype), sin.astype(dtype)


def rotate(
    x: Float[Array, "B T H C"], rotary: tuple[Array, Array], interleaved: bool = False
) -> Float[Array, "B T H C"]:
    """Rotate the first 2F features of every head by the table's angles, and leave the others."""
    cos, sin = rotary
    features = 2 * cos.shape[-1]
    if features < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :features], rotary, interleaved), x[..., features:]], axis=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
