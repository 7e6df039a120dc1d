"""Held-out windows in, per-position losses and acceptance out, under teacher forcing at temperature 1.

Dims: B rows, T predicted positions, J predictions a position, V vocabulary, M models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.distill.losses import negative_log_likelihood
from specjax.distill.progress import StepProgress
from specjax.metrics import alpha_per_position
from specjax.types import DraftOutput, Output, Params, Trainable


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over ``positions`` predicted tokens; nats a token. NaN without a target: ``target_nll`` and ``alpha``."""

    nll: float
    target_nll: float
    alpha: float
    positions: int


@flax.struct.dataclass
class Matched:
    """One prediction of every position beside what it is compared with."""

    draft_logits: Float[Array, "B T V"]
    target_logits: Float[Array, "B T V"] | None
    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


def matched(out: DraftOutput, target_out: Output | None, following: Int[Array, "B T"], j: int) -> Matched:
    """Prediction ``j`` of a drafter's training forward, aligned with the target's law and the text's next token."""
    rows = out.target_index[:, j]
    take = functools.partial(jnp.take, indices=rows, axis=1, mode="clip")
    target_logits = None if target_out is None else take(target_out.logits)
    return Matched(out.logits[:, :, j], target_logits, take(following), out.mask[:, :, j])


def target_output(spec: Any, params: Params, tokens: Int[Array, "B T"]) -> Output:
    """The target's forward over whole windows; no gradient reaches it."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return jax.lax.stop_gradient(spec(params, tokens, positions))


def spread(windows: np.ndarray, positions: int) -> np.ndarray:
    """As many of the ``[N, T + 1]`` windows as hold ``positions`` predicted tokens, evenly spread; else all."""
    count = min(len(windows), -(-positions // (windows.shape[1] - 1)))
    return windows[np.arange(count) * len(windows) // count]


def evaluate(
    drafter: Trainable, params: Params, target: Any, windows: np.ndarray, positions: int, batch_size: int
) -> Evaluation:
    """`evaluate_all` of one model."""
    return evaluate_all(drafter, [params], target, windows, positions, batch_size)[0]


def evaluate_all(
    drafter: Trainable,
    params: Sequence[Params],
    target: Any,
    windows: np.ndarray,
    positions: int,
    batch_size: int,
    progress: StepProgress | None = None,
) -> list[Evaluation]:
    """Every model of one shape on the same positions, at one target forward a batch.

    ``target``: a `LoadedModel`, or None for the models' own losses only. ``windows``: int32 ``[N, T + 1]``; at least
    ``positions`` predicted tokens are used, all if there are fewer, and the number used is reported.
    """
    windows = spread(windows, positions)
    spec, target_params = (None, None) if target is None else (target.spec, target.params)
    sums = []
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        # The last batch is filled up with rows that do not count, so that one shape is compiled.
        real = np.arange(batch_size) < len(batch)
        batch = np.concatenate([batch, np.repeat(batch[:1], batch_size - len(batch), axis=0)])
        sums.append(_sums(drafter, spec, tuple(params), target_params, jnp.asarray(batch), jnp.asarray(real)))
        if progress is not None:
            jax.block_until_ready(sums[-1])
            progress(len(sums), {})
    # Batches are added up in float64.
    totals = jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *jax.device_get(sums))
    return [
        Evaluation(
            nll=float(t["nll"] / t["count"]),
            target_nll=float(t.get("target_nll", np.nan) / t["count"]),
            alpha=float(t.get("alpha", np.nan) / t["count"]),
            positions=int(t["count"]),
        )
        for t in totals
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(drafter, spec, params: tuple, target_params, windows: Int[Array, "B T1"], real: Bool[Array, " B"]) -> list:
    tokens, following = windows[:, :-1], windows[:, 1:]
    target_out = None if spec is None else target_output(spec, target_params, tokens)
    mask = jnp.broadcast_to(real[:, None], tokens.shape)
    return [_sums_of(drafter.train_output(p, tokens, mask, target_out), target_out, following) for p in params]


def _sums_of(out: DraftOutput, target_out: Output | None, following: Int[Array, "B T"]) -> dict[str, jax.Array]:
    sums: dict[str, jax.Array] = {}
    for j in range(out.logits.shape[2]):
        m = matched(out, target_out, following, j)
        measured = {"nll": negative_log_likelihood(m.draft_logits, m.tokens), "count": jnp.ones(m.tokens.shape)}
        if m.target_logits is not None:
            measured["target_nll"] = negative_log_likelihood(m.target_logits, m.tokens)
            measured["alpha"] = alpha_per_position(m.target_logits, m.draft_logits)
        for name, values in measured.items():
            total = jnp.sum(jnp.where(m.mask, values, 0.0))
            sums[name] = sums[name] + total if name in sums else total
    return sums
