"""Toy targets whose logits are a known function of the whole prefix, read back from the KV cache slot by slot.

`PrefixModel` has random logits for every (slot, token) it has seen, so its distribution depends on the context and
every valid cache slot matters. Slots never written hold a large poison. A missing, stale, shifted or surplus slot
therefore moves the distribution visibly; in a random transformer it would hardly show.

Dims: B rows, T tokens fed, S cache slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.evaluation import references
from specjax.interfaces import NOTHING, Context, Model, Output, Params, SamplingParams, Target
from specjax.models.attention.stored import LayerKV
from specjax.models.cache import KVCache
from specjax.models.decode_layout import LaidOut

POISON = 1e6


@dataclasses.dataclass(frozen=True)
class PrefixConfig:
    vocab_size: int = 4
    max_positions: int = 4096
    period: int = 7
    """Number of random tables: slots s and s + period share one, so the parameters stay small at any length."""


@dataclasses.dataclass(frozen=True)
class PrefixModel(Model):
    """Target with ``logits after token i = bias + sum over slots s <= i of table[s % period, token_s] / sqrt(slots)``.
    The cache stores ``table[...]`` of every fed token as its 'keys', and the position as its 'values'; a block may be a
    tree. A drafter can read ``table[...]`` as hidden layer 0, the sum as hidden layer 1, the cache as key layer 0."""

    config: PrefixConfig

    def init(self, key: jax.Array, scale: float = 2.5) -> Params:
        config, (a, b) = self.config, jax.random.split(key)
        table = jax.random.normal(a, (config.period, config.vocab_size, config.vocab_size), jnp.float32) * scale
        return {"table": table, "bias": jax.random.normal(b, (config.vocab_size,), jnp.float32)}

    def init_cache(self, batch: int, num_slots: int, dtype=jnp.float32) -> KVCache:
        shape = (batch, 1, num_slots, self.config.vocab_size)
        poison = POISON * jnp.broadcast_to(jnp.arange(1.0, self.config.vocab_size + 1, dtype=dtype), shape)
        return KVCache((LayerKV(poison, jnp.full((batch, 1, 1, num_slots), POISON, dtype)),))

    def __call__(
        self, params, tokens, positions, slots=None, cache=None, mask=None, reads=NOTHING, rows=None
    ) -> Output:
        new = params["table"][positions % self.config.period, tokens][:, :, None]
        where = positions.astype(jnp.float32)[:, :, None, None]
        slots = positions if slots is None else slots
        layer = (
            LayerKV.of(new, where)
            if cache is None
            else cache.fold().layers[0].write(slots[:, 0], LayerKV.of(new, where))
        )
        keys, values = layer.keys, layer.values[:, 0]
        visible, misplaced = seen(positions, slots, values, mask)
        summed = jnp.sum(jnp.where(visible[..., None], keys[:, None], 0.0), axis=2)
        summed += misplaced[..., None] * jnp.arange(self.config.vocab_size, dtype=jnp.float32)[None, None]
        scale = jnp.sqrt(positions.astype(jnp.float32) + 1.0)[..., None]
        logits = params["bias"][None, None] + summed / scale
        if rows is not None:
            logits = jnp.take_along_axis(logits, rows[..., None], axis=1)
        cache = KVCache((layer,)) if cache is None else cache.written([layer], None if mask is None else [(new, where)])
        hidden = tuple((new[:, :, 0], summed)[i] for i in reads.hidden_layers)
        return Output(logits, hidden, cache, tuple((new, where) for _ in reads.kv_layers))


def seen(positions, slots, stored, mask) -> tuple[jax.Array, jax.Array]:
    """(slots that each token sees ``[B, T, S]``, error of the positions in them ``[B, T]``). A token sees the slots
    before the block, and in the block those of ``mask``, or without a mask those that are not after it. The positions
    ``stored[B, S]`` should be the slot's number before the block, and in it one of every position from the root's to
    the token's own."""
    slot = jnp.arange(stored.shape[1], dtype=jnp.int32)[None, None]
    inside = slot - slots[:, :1, None]
    visible = slot <= slots[..., None]
    if mask is not None:
        in_block = jnp.take_along_axis(mask, jnp.clip(inside, 0, mask.shape[2] - 1), axis=2)
        visible = (inside < 0) | ((inside < mask.shape[2]) & in_block)
    at_own = visible & ((inside < 0) | (mask is None))
    wrong = jnp.where(at_own, jnp.abs(stored[:, None] - slot.astype(jnp.float32)), 0.0)
    if mask is None:
        return visible, jnp.sum(wrong, axis=2)
    first, last = positions[:, :1], positions
    for moment in range(2):  # the number of positions, then their sum
        found = jnp.sum(jnp.where(visible & (inside >= 0), stored[:, None] ** moment, 0.0), axis=2)
        count = (last - first + 1).astype(jnp.float32)
        wanted = count if moment == 0 else count * (first + last).astype(jnp.float32) / 2
        wrong += (jnp.abs(found - wanted) / stored.shape[1])[..., None]
    return visible, jnp.sum(wrong, axis=2)


@dataclasses.dataclass(eq=False, repr=False)
class ToyModel(LaidOut, Target):
    """Toy model in place of a `LoadedModel`."""

    spec: Any
    params: Params
    eos_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    name: str = "toy"

    @property
    def config(self):
        return self.spec.config

    @property
    def vocab_size(self) -> int:
        return self.spec.config.vocab_size

    def logits(self, tokens):
        tokens = jnp.asarray(tokens, jnp.int32)
        return _logits(self.spec, self.params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return spec(params, tokens, positions).logits.astype(jnp.float32)


def prefix_model(seed: int, vocab_size: int = 4, eos_ids: tuple[int, ...] = (), scale: float = 2.5) -> ToyModel:
    spec = PrefixModel(PrefixConfig(vocab_size))
    return ToyModel(spec, spec.init(jax.random.key(seed), scale), eos_ids)


def related(model: ToyModel, seed: int, share: float = 0.6) -> ToyModel:
    """Draft for ``model``: ``share`` of its logits are the model's, the rest those of another random model. Blocks are
    accepted in part, so every branch of a verifier is taken often."""
    other = model.spec.init(jax.random.key(seed))
    params = jax.tree.map(lambda a, b: share * a + (1 - share) * b, model.params, other)
    return ToyModel(model.spec, params, model.eos_ids)


def neutral_sampling(batch: int, vocab_size: int, **fields: Any) -> SamplingParams:
    """Sampling parameters that change nothing; ``fields`` replace single ones, one value a row."""
    zeros, ones = jnp.zeros(batch, jnp.float32), jnp.ones(batch, jnp.float32)
    whole = jnp.zeros(batch, jnp.int32)
    bias = jnp.zeros((batch, vocab_size), jnp.float32)
    neutral = SamplingParams(ones, whole, ones, zeros, ones, zeros, zeros, whole, bias)
    values = {name: jnp.asarray(x, getattr(neutral, name).dtype) for name, x in fields.items()}
    return dataclasses.replace(neutral, **values)


def context(tokens, lengths, sampling: SamplingParams, noise=None, prompt_lengths=None, stop_ids=(-1,)) -> Context:
    """Context of draft and transform in the middle of a generation."""
    lengths = jnp.asarray(lengths, jnp.int32)
    stops = jnp.tile(jnp.asarray(stop_ids, jnp.int32)[None], (len(lengths), 1))
    prompt_lengths = lengths if prompt_lengths is None else jnp.asarray(prompt_lengths, jnp.int32)
    return Context(jnp.asarray(tokens, jnp.int32), lengths, prompt_lengths, stops, sampling, noise)


def exact_distribution(
    model: ToyModel,
    prompt: Sequence[int],
    length: int,
    *,
    stop_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    banned_tokens: Sequence[int] = (),
    allowed_tokens: Sequence[int] = (),
    **settings: Any,
) -> dict[tuple[int, ...], float]:
    """Distribution of ``length`` new tokens after ``prompt`` by enumeration in float64, without sequences of
    probability zero. A sequence ends early after a stop id. The arguments are those of a generation; ``settings``:
    further arguments of `references.sampling_logits`, which alone defines their meaning."""
    stops = [*model.eos_ids, *stop_token_ids]
    bias = references.bias_vector(model.vocab_size, logit_bias, banned_tokens, allowed_tokens)
    distribution: dict[tuple[int, ...], float] = {}
    continuations = list(itertools.product(range(model.vocab_size), repeat=length))
    batch = np.asarray([[*prompt, *c] for c in continuations])
    rows = np.asarray(model.logits(batch), np.float64)[:, len(prompt) - 1 : -1]
    for logits, continuation in zip(rows, continuations, strict=True):
        end = next((i + 1 for i, token in enumerate(continuation) if token in stops), length)
        if any(continuation[end:]):
            continue  # one representative of each early end
        probability = 1.0
        for i, token in enumerate(continuation[:end]):
            after = references.sampling_logits(
                logits[i], prompt, continuation[:i], bias=bias, stop_ids=stops, **settings
            )
            probability *= references.softmax(after)[token]
        if probability > 0:
            distribution[continuation[:end]] = float(probability)
    return distribution
