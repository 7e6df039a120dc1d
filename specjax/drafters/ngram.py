"""Prompt lookup: propose the tokens that followed the latest earlier occurrence of the current suffix (prompt lookup
decoding, Saxena 2023; 2304.04487). It runs on the device, without weights and without a host sync.

Dims: B rows, L token buffer, K draft length.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from pydantic import Field

from specjax.drafters.base import StatelessDrafter
from specjax.errors import ConfigError
from specjax.interfaces import Context, Draft, Params, TargetView


@dataclasses.dataclass(frozen=True)
class NGram(StatelessDrafter):
    """Prompt lookup (prompt lookup decoding, Saxena 2023; 2304.04487): propose the tokens that followed the latest
    earlier occurrence of the newest tokens. The longest match of ``min_n`` to ``max_n`` tokens wins, the most recent
    among equals; without a match nothing is proposed. Only committed tokens are proposed, and the suffix never matches
    itself. Where fewer than ``k`` tokens followed, they are proposed again and again: the text repeats itself with that
    period.

    Raises:
        ConfigError: ``min_n`` is above ``max_n``.
    """

    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Most proposed tokens of a block, 1 to 64."""
    max_n: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens of the longest match, 1 to 16."""
    min_n: Annotated[int, Field(ge=1, le=16)] = 2
    """Tokens of the shortest match, 1 to ``max_n``."""
    kind: Literal["ngram"] = "ngram"
    """Name in the registry, in configs and in results."""
    previews: ClassVar[bool] = True
    """True: a proposal costs nothing beside its verification and is deterministic, so a controller may see it before it
    sets the length."""

    @property
    def match_classes(self) -> int:
        """Number of match classes that controllers tell apart: a longer match is accepted more often."""
        return self.max_n - self.min_n + 1

    def __post_init__(self):
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(f"ngram: min_n={self.min_n}, max_n={self.max_n}; need 1 <= min_n <= max_n")

    def draft(self, params: Params, target: TargetView, state: dict, context: Context) -> tuple[Draft, dict]:
        """The committed tokens that followed the match.

        Args:
            params: not used.
            target: not used.
            state: empty.
            context: only its committed tokens and their lengths are read.

        Returns:
            A deterministic proposal of ``k`` tokens (``logits`` None), and ``state``.
        """
        return self.preview(context), state

    def preview(self, context: Context) -> Draft:
        """The whole proposal, which costs nothing.

        Args:
            context: only its committed tokens and their lengths are read.

        Returns:
            A deterministic proposal of ``k`` tokens (``logits`` None).
        """
        tokens, lengths = context.tokens, context.lengths[:, None]
        end = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # matched[b, e]: number of tokens, backwards from position e, that equal the suffix, up to max_n.
        matched, alive = jnp.zeros(tokens.shape, jnp.int32), end < lengths - 1
        for back in range(self.max_n):
            last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1 - back, 0), axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, : tokens.shape[1]]
            alive &= (shifted == last) & (back < lengths)
            matched += alive.astype(jnp.int32)
        # One number orders matches by length, then by position: its maximum is the latest of the longest.
        best = jnp.max(jnp.where(matched >= self.min_n, matched * tokens.shape[1] + end, -1), axis=1, keepdims=True)
        found, longest = best >= 0, best[:, 0] // tokens.shape[1]
        behind = best % tokens.shape[1] + 1
        # What repeats with a period shorter than the block goes on with it.
        period = jnp.maximum(lengths - behind, 1)
        source = behind + jnp.arange(self.k, dtype=jnp.int32)[None] % period
        valid = jnp.broadcast_to(found, source.shape)
        proposed = jnp.take_along_axis(tokens, jnp.minimum(source, tokens.shape[1] - 1), axis=1)
        match_class = jnp.maximum(longest - self.min_n, 0)
        return Draft(tokens=jnp.where(valid, proposed, 0), valid=valid, match_class=match_class)
