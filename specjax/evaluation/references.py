"""Slow reference definitions in float64, to check the fast code against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Processor = Callable[[np.ndarray, Sequence[int], Sequence[int]], np.ndarray]
"""Effect of a `specjax.interfaces.LogitsProcessor` on one row: ``(logits[V], prompt, generated) -> logits[V]``."""


def sampling_logits(
    logits: np.ndarray,
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    bias: np.ndarray | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_new_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    processor: Processor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Result of `specjax.sampling.transform` for the ``[V]`` logits after ``prompt`` and ``generated``."""
    x = np.asarray(logits, np.float64) + (0.0 if bias is None else np.asarray(bias, np.float64))
    for token in {*prompt, *generated}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in set(generated):
        x[token] -= presence_penalty + frequency_penalty * list(generated).count(token)
    if len(generated) < min_new_tokens:
        x[list(stop_ids)] = -np.inf
    if processor is not None:
        x = processor(x, prompt, generated)
    if temperature == 0:
        return np.where(np.arange(len(x)) == x.argmax(), 0.0, -np.inf)
    x = x / temperature
    if top_k:
        x[x < np.sort(x)[-top_k]] = -np.inf
    p = softmax(x)
    if top_p < 1:
        # The least likely token that is still needed to reach top_p, and all that are as likely.
        descending = np.sort(p)[::-1]
        x[p < descending[np.argmax(descending.cumsum() >= top_p - 1e-12)]] = -np.inf
    x[p < min_p * p.max()] = -np.inf
    return x


def bias_vector(
    size: int,
    logit_bias: Mapping[int, float] | None = None,
    banned_tokens: Sequence[int] = (),
    allowed_tokens: Sequence[int] = (),
) -> np.ndarray:
    """Bias on the ``[V]`` logits from the three arguments of a generation that together are one bias."""
    bias = np.zeros(size)
    for token, value in (logit_bias or {}).items():
        bias[token] = value
    for token in range(size):
        if token in banned_tokens or (allowed_tokens and token not in allowed_tokens):
            bias[token] = -np.inf
    return bias


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
