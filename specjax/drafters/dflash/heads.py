"""Heads after the slots of a block, which make a token depend on the one before it.

Dims: B rows, T slots, R rank, C candidates, H hidden, V vocabulary, W ids that the draft can propose.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax.models.layers import Linear
from specjax.models.vocabulary import NEVER

Sequential = Literal["vanilla", "gated", "rnn"]


def codebook(size: int, rank: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (size, rank), dtype) * 0.02)


class Markov(nnx.Module):
    """A low-rank bias on a token's logits, made of the token before (DSpark): alone, gated by the slot, or with a
    state."""

    def __init__(
        self, kind: Sequential, ids: int, size: int, rank: int, hidden: int, *, rngs: nnx.Rngs, dtype: DTypeLike
    ):
        linear = functools.partial(Linear, rngs=rngs, dtype=dtype)
        self.rank = rank
        self.w1 = codebook(ids, rank, rngs=rngs, dtype=dtype)
        self.w2 = linear(rank, size)
        self.w2.kernel[...] = jnp.zeros_like(self.w2.kernel[...])  # the bias begins as zero
        self.gate_proj = linear(hidden + rank, rank, True) if kind == "gated" else None
        self.joint_proj = linear(2 * rank + hidden, 3 * rank, True) if kind == "rnn" else None

    def embedded(self, before: Int[Array, "B T"]) -> Float[Array, "B T R"]:
        """Low-rank embeddings of the tokens ``before``."""
        return self.w1[...][before]

    def __call__(
        self, state: Float[Array, "B T R"], before: Int[Array, "B T"], hidden: Float[Array, "B T H"]
    ) -> tuple[Array, Array]:
        """(state, input of `w2`, which makes the bias) for the token after ``before``, at slots ``hidden``."""
        read = self.embedded(before).astype(hidden.dtype)
        if self.gate_proj is not None:
            return state, read * jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, read], axis=-1)))
        if self.joint_proj is None:
            return state, read
        joint = self.joint_proj(jnp.concatenate([state, read, hidden], axis=-1))
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        return state, jnp.tanh(out)

    def proposed(self, unary: Float[Array, "B T W"], read: Float[Array, "B T R"]) -> Float[Array, "B T W"]:
        """Logits that a token is drawn from: ``unary``, those of its slot alone, with the bias added."""
        return unary + self.w2(read, wide=True)

    loss_logits = proposed
    """Logits that training compares."""


class Selector(nnx.Module):
    """The best candidates of a slot, scored by how well each follows the token before (DFlash2)."""

    def __init__(self, ids: int, rank: int, count: int, hidden: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.rank, self.count = rank, count
        self.predecessor = codebook(ids, rank, rngs=rngs, dtype=dtype)
        self.successor = codebook(ids, rank, rngs=rngs, dtype=dtype)
        self.hidden_projection = Linear(hidden, rank, rngs=rngs, dtype=dtype)

    def __call__(
        self, state: Any, before: Int[Array, "B T"], hidden: Float[Array, "B T H"]
    ) -> tuple[Any, Float[Array, "B T R"]]:
        """(state, vector that scores the candidates) for the token after ``before``, at slots ``hidden``."""
        return state, self.predecessor[...][before].astype(hidden.dtype) * self.hidden_projection(hidden)

    def scored(self, unary: Float[Array, "B T V"], read: Float[Array, "B T R"]) -> tuple[Array, Array]:
        """Candidates of each slot: (ids ``[B, T, C]``, scores)."""
        best, ids = jax.lax.top_k(unary, self.count)
        follows = self.successor[...][ids].astype(jnp.float32)
        return ids, best + jnp.einsum("btr,btcr->btc", read.astype(jnp.float32), follows)

    def proposed(self, unary: Float[Array, "B T V"], read: Float[Array, "B T R"]) -> Float[Array, "B T V"]:
        """Logits that a token is drawn from: ids that are no candidates have probability 0."""
        ids, scores = self.scored(unary, read)
        return jnp.put_along_axis(jnp.full_like(unary, NEVER), ids, scores, axis=-1, inplace=False)

    def loss_logits(self, unary: Float[Array, "B T V"], read: Float[Array, "B T R"]) -> Float[Array, "B T V"]:
        """Logits that training compares: other ids keep those of the slot alone, so that they can become candidates."""
        ids, scores = self.scored(unary, read)
        return jnp.put_along_axis(unary, ids, scores, axis=-1, inplace=False)
