"""Evaluation of drafts on held-out rows: mean losses and acceptance, under teacher forcing at temperature 1.

Dims: B rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.data.rows import Rows, spread_predictions
from specjax.interfaces import Batch, FullLogits, Output, Params, Reads, Target, Trainable
from specjax.metrics import agreement_per_position, alpha_per_position, negative_log_likelihood
from specjax.models.vocabulary import TokenRows
from specjax.runtime import distributed
from specjax.runtime.progress import StepProgress
from specjax.training.chunked_loss import Matched, Matching, Positions, Teacher
from specjax.training.layout import ONE_DEVICE, Layout
from specjax.training.teacher import target_output, with_shared_params

DEPTHS = 5
"""Number of depths of a block at which acceptance is measured, however many training unrolls."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over ``positions`` predicted tokens; losses in nats a token. Without a target all but ``nll`` are NaN. For
    a drafter with several predictions of every position the means are of the first, the token after the root. ``nll``
    is the cross-entropy that training minimises (docs/metrics.md)."""

    nll: float
    target_nll: float
    alpha: float
    positions: int
    alpha_at: tuple[float, ...] = ()
    """``alpha`` by depth, for drafters that predict several depths."""
    nll_at: tuple[float, ...] = ()
    """``nll`` by depth, for drafters that predict several depths."""
    agreement: float = math.nan
    """Share of positions at which target and draft find the same token most likely."""
    agreement_at: tuple[float, ...] = ()
    """``agreement`` by depth, for drafters that predict several depths."""

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Evaluation:
        values: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in found.items()}
        unknown = (math.nan,) * len(values.get("alpha_at", ()))  # runs of before it was measured do not have it
        return cls(**{"agreement_at": unknown, **values})

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value != ()}


def evaluate(
    drafter: Trainable,
    params: Params,
    target: Target | None,
    rows: Rows,
    positions: int,
    batch_size: int,
    layout: Layout = ONE_DEVICE,
) -> Evaluation:
    """`evaluate_all` for one model."""
    return evaluate_all(drafter, [params], target, rows, positions, batch_size, layout=layout)[0]


def evaluate_all(
    drafter: Trainable,
    params: Sequence[Params],
    target: Target | None,
    rows: Rows,
    positions: int,
    batch_size: int,
    progress: StepProgress | None = None,
    layout: Layout = ONE_DEVICE,
) -> list[Evaluation]:
    """Evaluations of several models of one shape on the same positions, with one target forward a batch.

    ``target``: a `LoadedModel`, or None for the models' own losses only. The rows used hold ``positions`` predictions
    that count, or all rows are used if they hold fewer. The number of predictions is reported; if it is 0, all figures
    are NaN. ``batch_size`` is rounded up to fill the shards of ``layout``.
    """
    chosen = spread_predictions(rows, positions)
    batch_size = -(-batch_size // layout.row_shards) * layout.row_shards
    spec, target_params = None, None
    if target is not None:
        spec, target_params = target.spec, layout.put(target.params, layout.of_target(target.params, target.spec))
    params = [layout.put(model, layout.of_draft(model, drafter)) for model in params]
    drafter, spec, tokens = as_evaluated(drafter).in_training(layout.form()), layout.model(spec), TokenRows.of(target)
    sums = []
    for start in range(0, len(chosen.tokens), batch_size):
        batch = jax.tree.map(lambda x, start=start: _filled_up(x[start : start + batch_size], batch_size), chosen)
        real = (np.arange(batch_size) < len(chosen.tokens) - start).astype(np.float32)
        batch = batch.replace(weight=batch.weight * real[:, None])
        sums.append(_sums_of_all(drafter, spec, tokens, params, target_params, layout.place_batch(batch)))
        if progress is not None:
            jax.block_until_ready(sums[-1])
            progress(len(sums), {})
    # Batches are added up in float64.
    totals = jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *jax.device_get(sums))
    return [
        Evaluation(
            nll=_mean(t["nll"], t["scored"]),
            target_nll=_mean(t.get("target_nll", np.nan), t["count"]),
            alpha=_mean(t.get("alpha", np.nan), t["count"]),
            positions=int(t["count"]),
            alpha_at=_by_depth(t["at"], "alpha"),
            nll_at=_by_depth(t["at"], "nll"),
            agreement=_mean(t.get("agreement", np.nan), t["count"]),
            agreement_at=_by_depth(t["at"], "agreement"),
        )
        for t in totals
    ]


def _by_depth(at: Sequence[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    counted = "scored" if name == "nll" else "count"
    return tuple(_mean(sums[name], sums[counted]) for sums in at if name in sums and len(at) > 1)


def _mean(total: float, count: float) -> float:
    """Mean, or NaN if nothing was counted: a loss of 0 would be a perfect one."""
    return float(total / count) if count else float("nan")


def as_evaluated(drafter: Trainable) -> Trainable:
    """The drafter with predictions at `DEPTHS` depths, or at as many as it can make."""
    found = (drafter.unrolled(depths) for depths in range(DEPTHS, 0, -1))
    return next((deep for deep in found if deep is not None), drafter)


def _filled_up(leaf: np.ndarray, size: int) -> np.ndarray:
    """Rows filled up with copies of the first one, so that one shape is compiled; the copies do not count."""
    return np.concatenate([leaf, np.repeat(leaf[:1], size - len(leaf), axis=0)])


def _sums_of_all(
    drafter, spec, tokens: TokenRows | None, params: Sequence[Params], target_params, batch: Batch
) -> list:
    """Sums of every model, one after the other, with one forward pass of the target."""
    target_out = (
        None if spec is None else distributed.waited_for(_target_output(spec, drafter.reads, target_params, batch))
    )
    return [
        distributed.waited_for(_sums(drafter, spec, tokens, one, target_params, target_out, batch)) for one in params
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _target_output(spec: Any, reads: Reads, params: Params, batch: Batch) -> Output:
    out = target_output(spec, params, batch, reads)
    return out if out.final is None else dataclasses.replace(out, logits=out.logits[:, :0])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(
    drafter, spec, tokens: TokenRows | None, params: Params, target_params, target_out: Output | None, batch: Batch
) -> dict[str, Any]:
    """Sums over the positions of a batch; ``sums["at"]`` has those of each depth by itself."""
    teacher = None if target_out is None else Teacher.of(spec, target_params, target_out)
    whole = with_shared_params(drafter, params, target_params)

    def of_part(some: Batch) -> dict[str, Any]:
        predictions = drafter.predictions(whole, some, target_out)
        matchings = [Matching.of(prediction, teacher, batch.labels, tokens) for prediction in predictions]
        at = [matching.summed(_measured)[1] for matching in matchings]
        return {**at[0], "at": at}

    return drafter.by_part(batch, of_part)


def _measured(m: Matched, some: Positions) -> tuple[Array, dict[str, Array]]:
    # As cross-entropy trains it: a draft that draws from a few candidates has an infinite loss of any other token.
    own = m.over_draft_vocabulary(labels=True)
    measured = {
        "nll": negative_log_likelihood(own.draft_logits, m.tokens),
        "count": jnp.ones(m.tokens.shape, jnp.float32),
    }
    if isinstance(m.teacher, FullLogits):
        measured["target_nll"] = negative_log_likelihood(m.teacher.logits, m.tokens)
        measured["alpha"] = alpha_per_position(m.teacher.logits, m.draft_logits)
        measured["agreement"] = agreement_per_position(m.teacher.logits, m.draft_logits)
    # All predictions with a weight count alike here, whatever that weight is in training.
    counts, scored = m.weight > 0, own.weight > 0
    sums = {n: jnp.sum(jnp.where(scored if n == "nll" else counts, values, 0.0)) for n, values in measured.items()}
    sums["scored"] = jnp.sum(scored.astype(jnp.float32))
    return sums["nll"], sums
