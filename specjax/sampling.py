"""Sampling parameters applied to logits, row by row, and keyed draws. One transform serves draft, target and plain
decoding.

Meanings and order are those of transformers: bias and forbidden tokens, repetition penalty (prompt and generated
tokens), `min_new_tokens`, the user's processor, then temperature, top-k, top-p, min-p. Presence and frequency
penalties, which it does not have, are vLLM's: over generated tokens alone, after the repetition penalty. vLLM applies
min-p before top-k and top-p, so with both, top-p can leave another set.

Dims: B rows, R nodes of a block, L token buffer, N proposed tokens, K draft length, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from specjax import backend
from specjax.interfaces import Context, CoupledNoise, LogitsContext, Noise, SamplingParams, TokenCounts
from specjax.models.attention.stored import write_rows
from specjax.proposal import Proposal

_CUTS = ("top_k", "top_p", "min_p")
_STEPS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens"),
    **{name: (name,) for name in _CUTS},
}
"""Step of `transform` -> parameters that ask for it."""


def argmax(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Index of the largest logit, ties to the lowest; of a row with NaN, any."""
    size = logits.shape[-1]
    if backend.reduces_together():
        # The largest logit must be used: XLA on a TPU would otherwise keep it in bfloat16 while it compares.
        top, index = _top(logits)
        return jnp.where(jnp.isnan(top), 0, index)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    at_top = logits == jnp.max(logits, axis=-1, keepdims=True)
    # A row of NaN has no top; keep the id in range.
    return jnp.minimum(jnp.min(jnp.where(at_top, index, size), axis=-1), size - 1)


def has_distribution(logits: Float[Array, "*B V"]) -> Bool[Array, "*B"]:
    """True if there is a distribution to draw from: no NaN, no +inf, and not all -inf."""
    if backend.reduces_together():
        return jnp.isfinite(_top(logits)[0])
    # No comparison holds for NaN. A maximum may lose it: XLA's on CPU (jax 0.10) does in all but small reductions.
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)


def _top(logits: Float[Array, "*B V"]) -> tuple[Float[Array, "*B"], Int[Array, "*B"]]:
    """The largest logit and its lowest index, in one reduction; NaN is larger than any other logit."""
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)

    def larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        first = jnp.isnan(a[0]) | (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jax.lax.select(first, a[0], b[0]), jax.lax.select(first, a[1], b[1])

    # `jnp.where` in a reduction that nobody reads ends the process while JAX 0.10 compiles it.
    none = jnp.asarray(-jnp.inf, logits.dtype), jnp.int32(logits.shape[-1] - 1)
    top, index = jax.lax.reduce((logits, index), none, larger, (logits.ndim - 1,))
    return top, index


def transform(
    logits: Float[Array, "B R V"],
    context: Context,
    drafted: Int[Array, "B N"] | Proposal,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "B R V"]:
    """float32 logits after all sampling parameters: tokens are drawn from them, and verifiers compare them. Entry r of
    axis 1 follows node ``first + r`` of a proposal; if ``drafted`` is an array of tokens, a chain, it follows the first
    ``first + r`` of them. Temperature 0 becomes the log of a one-hot (0 at the argmax, -inf elsewhere), so nothing
    downstream branches on temperature."""
    return warp(process(logits, context, drafted, first), context.sampling, context.extras)


def process(
    logits: Float[Array, "B R V"],
    context: Context,
    drafted: Int[Array, "B N"] | Proposal,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "B R V"]:
    """The first half of `transform`, which can move the argmax: everything but temperature, top-k, top-p and min-p."""
    proposal = drafted if isinstance(drafted, Proposal) else Proposal.chain(context, drafted)
    s = context.sampling
    # Always added, since a model with padded head rows always has a bias.
    logits = logits.astype(jnp.float32) + s.bias[:, None]
    penalties = (s.repetition_penalty != 1, s.presence_penalty != 0, s.frequency_penalty != 0, s.min_new_tokens > 0)
    wanted = functools.reduce(jnp.logical_or, penalties)
    logits = _if_any(
        wanted, _pays(context.extras, "penalties"), lambda x: _penalised(x, context, proposal, first), logits
    )
    processor = context.processor
    if processor is None:
        return logits

    def at_node(of_node, node):
        path, count = proposal.prefix(node)
        tokens = write_rows(context.tokens, context.lengths, path)
        return processor(of_node, LogitsContext(tokens, context.lengths + count, context.prompt_lengths))

    return jax.vmap(at_node, in_axes=(1, 0), out_axes=1)(logits, first + jnp.arange(logits.shape[1], dtype=jnp.int32))


def _if_any(
    wanted: Bool[Array, " B"], pays: bool | None, change: Callable[[Array], Array], logits: Float[Array, "B R V"]
) -> Float[Array, "B R V"]:
    """``change(logits)`` if some row wants it, so that other batches do not pay for it; ``change`` leaves rows that do
    not want it as they are. ``pays``: the answer, where it is known before, see `Context.extras`."""
    if pays is None:
        return jax.lax.cond(jnp.any(wanted), change, lambda x: x, logits)
    return change(logits) if pays else logits


def extras_of(parameters: Collection[str]) -> tuple[str, ...]:
    """Steps of `transform` that these parameters ask for, see `Context.extras`."""
    return tuple(step for step, names in _STEPS.items() if any(name in parameters for name in names))


def _pays(extras: tuple[str, ...] | None, *steps: str) -> bool | None:
    return None if extras is None else any(step in extras for step in steps)


def count(tokens: Int[Array, "B L"], counted: Bool[Array, "B L"], counts: Int[Array, "B V"]) -> Int[Array, "B V"]:
    """The counts, with those of ``tokens`` added that are ``counted``."""
    of_row = jax.vmap(lambda counts, tokens, more: counts.at[tokens].add(more, mode="drop"))
    return of_row(counts, tokens, counted.astype(jnp.int32))


def counts_of(context: Context, size: int) -> TokenCounts:
    """Number of times that each of ``size`` tokens occurs in the prompts and in the generated text."""
    if context.counts is not None:
        return context.counts
    position = jnp.arange(context.tokens.shape[1], dtype=jnp.int32)[None]
    prompt, zeros = position < context.prompt_lengths[:, None], jnp.zeros((len(context.tokens), size), jnp.int32)
    generated = (position < context.lengths[:, None]) & ~prompt
    return TokenCounts(count(context.tokens, prompt, zeros), count(context.tokens, generated, zeros))


def _penalised(logits, context: Context, proposal: Proposal, first) -> Float[Array, "B R V"]:
    s, (batch, nodes, size) = context.sampling, logits.shape

    def of_nodes(values):
        return jax.lax.dynamic_slice_in_dim(values, first, nodes, axis=1)

    on_path, token = of_nodes(proposal.path), jnp.arange(size, dtype=jnp.int32)
    of_drafts = jnp.zeros((batch, nodes, size), jnp.int32)
    for i in range(proposal.drafted.shape[1]):
        counts = (proposal.drafted[:, i, None, None] == token[None, None]) & on_path[:, :, i, None]
        of_drafts += counts.astype(jnp.int32)
    known = counts_of(context, size)
    generated = known.generated[:, None] + of_drafts
    seen = (known.prompt[:, None] + generated) > 0

    def each(values):
        return values[:, None, None]

    penalty = jnp.where(seen, each(s.repetition_penalty), 1.0)
    logits = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits -= jnp.where(generated > 0, each(s.presence_penalty), 0.0)
    logits -= each(s.frequency_penalty) * generated.astype(jnp.float32)
    # Ids of -1 pad the list; they index past the end and are dropped.
    stop = jnp.where(context.stop_ids < 0, size, context.stop_ids)
    stops = jax.vmap(lambda ids: jnp.zeros((size,), bool).at[ids].set(True, mode="drop"))(stop)
    new = (context.lengths - context.prompt_lengths)[:, None] + of_nodes(proposal.depth)
    return jnp.where(stops[:, None] & (new < s.min_new_tokens[:, None])[..., None], -jnp.inf, logits)


def warp(
    logits: Float[Array, "B R V"], sampling: SamplingParams, extras: tuple[str, ...] | None = None
) -> Float[Array, "B R V"]:
    """The second half of `transform`: temperature, then top-k, top-p and min-p. None of them moves the argmax.
    ``extras``: see `Context`."""
    temperature = sampling.temperature[:, None, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    cut = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    scaled = _if_any(cut, _pays(extras, *_CUTS), lambda x: _cut(x, sampling, extras), scaled)

    def with_greedy_rows(scaled):
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        one_hot = jnp.where(index == argmax(logits)[..., None], jnp.float32(0.0), -jnp.inf)
        return jnp.where(temperature > 0, scaled, jnp.where(has_distribution(logits)[..., None], one_hot, jnp.nan))

    # Only batches with a greedy row pay for the argmax over V, if finding that out costs less than the argmax.
    return _if_any(sampling.temperature == 0, None if extras is None else True, with_greedy_rows, scaled)


def _cut(
    logits: Float[Array, "B R V"], sampling: SamplingParams, extras: tuple[str, ...] | None
) -> Float[Array, "B R V"]:
    """Logits after top-k, then top-p of the tokens it left, then min-p, each where a row asks for it. Tokens equal to
    the last one kept are kept too. No comparison holds for NaN, so it stays, for `has_distribution` to find."""
    top_k, top_p, min_p = (x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))

    def drop(logits, low, wanted):
        return jnp.where(low & wanted, -jnp.inf, logits)

    def of_top_k(logits):
        ones = jnp.ones_like(logits)
        return drop(logits, logits < _threshold(logits, ones, top_k.astype(jnp.float32)), top_k > 0)

    def of_top_p(logits):
        p = jax.nn.softmax(logits, axis=-1)
        best = jnp.max(p, axis=-1, keepdims=True)
        return drop(logits, (p < _threshold(p, p, top_p)) & (p < best), top_p < 1)

    logits = _if_any(sampling.top_k > 0, _pays(extras, "top_k"), of_top_k, logits)
    logits = _if_any(sampling.top_p < 1, _pays(extras, "top_p"), of_top_p, logits)
    # In logarithms, min-p takes one maximum and no softmax; log(min_p) is -inf without it.
    if _pays(extras, "min_p") is False:
        return logits
    return drop(logits, logits < jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p), min_p > 0)


def _threshold(
    values: Float[Array, "B R V"], weights: Float[Array, "B R V"], enough: Float[Array, "B 1 1"]
) -> Float[Array, "B R 1"]:
    """The largest t for which the entries ``values >= t`` weigh ``enough``; -inf if, by rounding, not even all of them
    do. The search goes bit by bit through the floats in their order: 32 passes over V, and no sort."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    top = jnp.uint32(1 << 31)
    # Integers in the order of the floats: negative ones reversed, below the others.
    order = jnp.where(bits >= top, ~bits, bits | top)

    def add_bit(i, found):
        candidate = found | (top >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(order >= candidate, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(weight >= enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*values.shape[:2], 1), jnp.uint32))
    threshold = jax.lax.bitcast_convert_type(jnp.where(found >= top, found & ~top, ~found), jnp.float32)
    return jnp.where(found == 0, -jnp.inf, threshold)


def fresh_noise(seeds: UInt[Array, "B 2"], lengths: Int[Array, " B"], k: int) -> Noise:
    """The noise of one block, keyed by (row seed, row length at its start, purpose, depth). The key holds no batch slot
    and no step number, so that a row replays alone; it never comes twice, so that rejected positions are drawn again
    with independent noise; and it does not depend on k."""

    def of_row(seed, length):
        block = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), length)

        def words(number):
            # The key that `fold_in` gives is two words of the cipher, used as words: no other key is made of it.
            return jax.random.key_data(jax.random.fold_in(block, number))

        # One number for (purpose, depth): proposed tokens have 1 and 2, 4 and 5, ...; the target's own token has 0.
        offsets = 3 * jnp.arange(k, dtype=jnp.uint32)
        return jax.vmap(words)(offsets + 1), jax.vmap(words)(offsets + 2)[:, 0], words(0)

    drafts, accepts, following = jax.vmap(of_row)(seeds, lengths)
    # 24 bits, as many as float32 holds everywhere below 1.
    return Noise(drafts, (accepts >> 8).astype(jnp.float32) * 2.0**-24, following)


def coupled_noise(seeds: UInt[Array, "B 2"], lengths: Int[Array, " B"], k: int, size: int) -> CoupledNoise:
    """Gumbel noise of the next ``k + 1`` positions over ``size`` tokens, keyed by (row seed, absolute position)."""

    def at(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        # "high" keeps tokens of probability below 2^-23 possible.
        return jax.random.gumbel(key, (size,), jnp.float32, mode="high")

    positions = lengths[:, None] + jnp.arange(k + 1, dtype=jnp.int32)[None]
    return CoupledNoise(jax.vmap(jax.vmap(at, in_axes=(None, 0)))(seeds, positions))


def draw(logits: Float[Array, "B V"], noise: UInt[Array, "B 2"] | Float[Array, "B V"] | None) -> Int[Array, " B"]:
    """One token a row, drawn from transformed logits: by inverse CDF from random words, or as the argmax with Gumbel
    noise added. Without noise (an all-greedy batch), the argmax."""
    if noise is None:
        return argmax(logits)
    if noise.dtype != jnp.uint32:
        return argmax(logits + noise)
    # Unnormalised weights: the inverse CDF scales its threshold by their sum.
    return inverse_cdf(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), noise)


def inverse_cdf(weights: Float[Array, "B V"], words: UInt[Array, "B 2"]) -> Int[Array, " B"]:
    """An index drawn with chances proportional to ``weights``: first one of about sqrt(V) groups, then one inside it,
    each with 32 random bits of its own. An index of positive weight can be drawn, one of weight zero never.

    The distribution over all words differs from the weights' by less than 1e-6 in total variation at V = 152k (a choice
    is exact but for the rounding of its `shares`; the rest is the rounding of the groups' sums). One float32 uniform
    against float32 cumulative sums is off by 3e-3 there, and never draws most of the tail.
    """
    batch, size = weights.shape
    width = _group_width(size)
    groups = -(-size // width)
    weights = jnp.pad(weights, ((0, 0), (0, groups * width - size))).reshape(batch, groups, width)
    group = _choose(jnp.sum(weights, axis=-1), words[:, 0])
    inside = jnp.take_along_axis(weights, group[:, None, None], axis=1)[:, 0]
    # Without any weight (nothing but NaN, say) the index means nothing, but must be in range.
    return jnp.minimum(group * width + _choose(inside, words[:, 1]), size - 1)


def _group_width(size: int) -> int:
    """The smallest power of two that is at least sqrt(size), and 64."""
    return max(64, 1 << ((size - 1).bit_length() + 1) // 2)


def _choose(weights: Float[Array, "B N"], words: UInt[Array, " B"]) -> Int[Array, " B"]:
    """The first index whose cumulative share exceeds ``words / 2^32`` of their sum, in exact integers."""
    edges = jnp.cumsum(shares(weights), axis=-1, dtype=jnp.uint32)
    threshold = _high_word(words, edges[:, -1])
    below = jnp.sum(edges <= threshold[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(below, weights.shape[1] - 1)


def shares(weights: Float[Array, "B N"]) -> UInt[Array, "B N"]:
    """Each weight in units of 2^-31 of their sum, rounded down, but a positive one to at least 1."""
    scale = 2.0**31 / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(weights > 0, jnp.maximum(weights * scale, 1.0), 0.0).astype(jnp.uint32)


def _high_word(a: UInt[Array, " B"], b: UInt[Array, " B"]) -> UInt[Array, " B"]:
    """The upper 32 of the 64 bits of ``a * b``, in halves of 16."""
    low, half = jnp.uint32(0xFFFF), 16
    inner = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    outer = (a & low) * (b >> half) + (inner & low)
    return (a >> half) * (b >> half) + (inner >> half) + (outer >> half)
