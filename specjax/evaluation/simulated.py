"""Block efficiency of a draft on given texts, from forward passes alone: the value that its decoding should reach by
its training forward.

A lossless rule that writes a text accepts proposed tokens that agree with it. Given the text, it accepts at least i of
a block with a chance a_i that depends on the text alone, by the ratios q/p of its tokens. For the token rule
(2211.17192) a_i is the product of min(1, q/p) up to i; for block verification (2403.10444) the product of q/p up to i
times w_i, where w_i = min(1, w_{i-1} p/q); greedily 1 if the draft's best tokens up to i are the text's, else 0. The
next block starts at the text's token in place of the first one not accepted (its root), so one sum over roots gives the
expected number of blocks.

Dims: B texts, L tokens of the longest, K tokens of a block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.interfaces import Batch, FullLogits, Params, Target
from specjax.models.vocabulary import TokenRows
from specjax.training.chunked_loss import Matched, Matching, Positions, Teacher
from specjax.training.teacher import target_output

RULES = ("speculative", "block")
"""Rules that can be simulated at temperatures above 0; at 0 all lossless rules are alike."""


def simulated_block_efficiency(
    drafter: Any,
    params: Params,
    target: Target,
    texts: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    k: int,
    temperature: float,
    rule: str,
) -> float | None:
    """Expected tokens per target call on ``texts``.

    Args:
        drafter: a `Trainable`.
        params: all parameters that it computes with.
        target: the `LoadedModel` that wrote the texts at ``temperature``; with others the result means nothing.
        texts: token ids, prompts included.
        prompt_lengths: number of prompt tokens of each text, at least one.
        k: proposed tokens of a block.
        temperature: temperature of target and draft, which have no other sampling parameter.
        rule: kind of the verifier.

    Returns:
        Tokens per block over all texts; None for a rule or drafter that cannot be simulated.
    """
    trainable = drafter.unrolled(k)
    if trainable is None or (temperature > 0 and rule not in RULES):
        return None
    longest = -(-max(map(len, texts)) // 64) * 64
    rows = np.zeros((len(texts), longest), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    ratios = np.asarray(
        _ratios(trainable, k, target.spec, TokenRows.of(target), params, target.params, jnp.asarray(rows), temperature),
        np.float64,
    )
    emitted, blocks = 0, 0.0
    for of_text, text, prompt in zip(ratios.transpose(1, 0, 2), texts, prompt_lengths, strict=True):
        emitted += len(text) - prompt
        blocks += expected_blocks(of_text, prompt, len(text), "speculative" if temperature == 0 else rule)
    return emitted / blocks


def expected_blocks(ratios: Float[np.ndarray, "K L"], prompt: int, length: int, rule: str) -> float:
    """Expected number of blocks that write a text of ``length`` tokens after its first ``prompt``. ``ratios[j, i]``:
    q/p of token i as the (j+1)-th of a block."""
    depth = np.arange(len(ratios))
    at = np.zeros(length + len(ratios) + 1)
    at[prompt - 1] = 1.0
    for root in range(prompt - 1, length - 1):
        r = ratios[depth, np.minimum(root + 1 + depth, ratios.shape[1] - 1)]
        least = _accepted(r, rule)
        at[root + 1 : root + 2 + len(r)] += at[root] * (least - np.append(least[1:], 0.0))
    return float(at[: length - 1].sum())


def _accepted(ratios: Float[np.ndarray, " K"], rule: str) -> Float[np.ndarray, " K1"]:
    """Chance that at least 0 .. K proposed tokens are accepted, given the text."""
    if rule == "speculative":
        return np.cumprod(np.minimum(1.0, np.append(1.0, ratios)))
    kept, weight, product = [1.0], 1.0, 1.0
    for ratio in ratios:
        weight = min(1.0, weight / ratio) if ratio > 0 else 1.0
        product *= ratio
        kept.append(weight * product)
    return np.asarray(kept)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _ratios(
    drafter: Any,
    k: int,
    spec: Any,
    tokens: TokenRows | None,
    params: Params,
    target_params: Params,
    texts: Int[jax.Array, "B L"],
    temperature: float,
) -> Float[jax.Array, "K B L"]:
    """Ratio q/p of every token at each depth of a block; greedily 1 where the token is the draft's best, else 0."""
    labels = jnp.roll(texts, -1, axis=1)
    batch = Batch(texts, labels, jnp.ones(texts.shape, jnp.float32))
    out = target_output(spec, target_params, batch, drafter.reads)
    teacher = Teacher.of(spec, target_params, out)

    def ratios(m: Matched, _: Positions) -> Float[jax.Array, "B L"]:
        assert isinstance(m.teacher, FullLogits)
        p, q = m.teacher.logits, m.draft_logits
        best = (jnp.argmax(q, axis=-1) == m.tokens).astype(jnp.float32)
        p, q = (jax.nn.log_softmax(x / jnp.where(temperature > 0, temperature, 1.0), axis=-1) for x in (p, q))
        chosen = jnp.take_along_axis(q - p, m.tokens[..., None], axis=-1)[..., 0]
        return jnp.where(temperature > 0, jnp.exp(chosen), best)

    nothing = jnp.zeros(texts.shape[1], jnp.float32)

    def of_part(some: Batch) -> Float[jax.Array, "K B L"]:
        found = []
        for prediction in itertools.islice(drafter.predictions(params, some, out), k):
            ratio = Matching.of(prediction, teacher, labels, tokens).mapped(ratios)
            # The prediction at target row i is of token i + 1.
            at = jnp.where(prediction.weight > 0, prediction.target_rows + 1, texts.shape[1])
            scattered = jax.vmap(lambda at, ratio: nothing.at[at].set(ratio, mode="drop"))(at, ratio)
            found.append(scattered)
        return jnp.stack(found * (k if len(found) == 1 else 1))

    return drafter.by_part(batch, of_part)
