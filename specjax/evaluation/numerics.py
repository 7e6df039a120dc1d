"""Comparison of one model's logits by different computations: float32 and bfloat16, one row and many, single tokens and
blocks.

Every computation is fed the same tokens: the prompts, and their greedy output by the autoregressive loop. It is
compared with the computation of that loop: single tokens over a KV cache, batch 1. Up to the first token that another
computation would choose differently, both decode the same prefix, so there their greedy outputs part. Weights are laid
out for decoding.

Dims: P prompts, T tokens (prompt and output), N output tokens, B rows of a pass, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from specjax.decode.decoder import Decoder
from specjax.errors import DataError
from specjax.evaluation import forced
from specjax.models.decode_layout import decode_layout
from specjax.models.hf import LoadedModel
from specjax.models.vocabulary import unused_ids


@dataclasses.dataclass(frozen=True)
class ForwardPath:
    """A way to compute the same logits. ``fed``: tokens that a row feeds in one pass over the cache; None: the whole
    sequence in one pass, without a cache. ``rows``: rows of a pass, filled up with the first prompts again."""

    fed: int | None = 1
    rows: int = 1


SINGLE_TOKENS = ForwardPath()


@dataclasses.dataclass(frozen=True)
class Difference:
    """First output token of a prompt that a path would choose differently. ``margin``: gap of the reference's two best
    logits there."""

    prompt: int
    position: int
    token: int
    other: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Drift:
    """Drift of the path ``name`` from the path ``reference``: absolute differences of logits, at each position over all
    prompts and the vocabulary. Positions are output tokens, from 0."""

    name: str
    reference: str
    drift_max_at: list[float]
    drift_mean_at: list[float]
    differences: list[Difference]
    """First difference of each prompt that has one, in the order of the prompts."""
    choices_differ: float
    """Share of positions at which another token has the largest logit, all on the reference's prefix."""
    margin_below_drift: float
    """Share of positions at which the gap of the two best logits is below the largest drift there, so that luck decides
    the choice."""

    @property
    def drift_max(self) -> float:
        return max(self.drift_max_at)

    @property
    def drift_mean(self) -> float:
        return float(np.mean(self.drift_mean_at))

    def to_json(self) -> dict[str, Any]:
        return {"drift_max": self.drift_max, "drift_mean": self.drift_mean, **dataclasses.asdict(self)}


def output_logits(
    model: LoadedModel, tokens: Int[np.ndarray, "P T"], start: int, path: ForwardPath
) -> Float[np.ndarray, "P N V"]:
    """Logits in float32 that choose ``tokens[:, start:]``, computed along ``path``; ``start``: size of the prompts."""
    count, fed = len(tokens), path.fed
    spec, params = (model.spec, model.params) if fed is None else decode_layout(model.spec, model.params)

    def run(sequences) -> Any:
        if fed is None:
            return np.asarray(model.logits(sequences))[:, start - 1 : -1]
        return forced.output_logits(spec, params, sequences[:, :start], sequences[:, start:], fed)

    filled = np.stack([*tokens, *itertools.islice(itertools.cycle(tokens), -count % path.rows)])
    logits = np.concatenate([run(filled[i : i + path.rows]) for i in range(0, len(filled), path.rows)])[:count]
    logits[..., unused_ids(model)] = np.finfo(np.float32).min  # never chosen, and no drift
    return logits


def compare(
    names: tuple[str, str],
    reference: Float[np.ndarray, "P N V"],
    logits: Float[np.ndarray, "P N V"],
    chosen: Int[np.ndarray, "P N"],
) -> Drift:
    """Drift of a path from a reference. ``names``: those of path and reference; ``chosen``: tokens that the reference
    chooses from its logits. Raises `DataError` if logits are not finite."""
    name, reference_name = names
    broken = np.argwhere(~np.isfinite(logits).all(axis=2))
    if len(broken):
        prompt, position = broken[0]
        raise DataError(f"{name}: the logits of output token {position} of prompt {prompt} are not finite; use float32")
    drift = np.abs(logits - reference)
    worst = drift.max(axis=2)
    second, best = np.moveaxis(np.partition(reference, -2, axis=2)[..., -2:], 2, 0)
    choice = logits.argmax(axis=2)
    differences = []
    for prompt, other in enumerate(choice != chosen):
        if other.any():
            at = int(other.argmax())
            margin = float(best[prompt, at] - second[prompt, at])
            differences.append(Difference(prompt, at, int(chosen[prompt, at]), int(choice[prompt, at]), margin))
    return Drift(
        name=name,
        reference=reference_name,
        drift_max_at=worst.max(axis=0).tolist(),
        drift_mean_at=drift.mean(axis=(0, 2), dtype=np.float64).tolist(),
        differences=differences,
        choices_differ=float(np.mean(choice != reference.argmax(axis=2))),
        margin_below_drift=float(np.mean(best - second < worst)),
    )


def greedy_output(target: LoadedModel, prompts: Int[np.ndarray, "P S"], count: int) -> Int[np.ndarray, "P N"]:
    """Greedy output of ``count`` tokens a prompt, by the autoregressive loop at batch 1, with end-of-sequence off."""
    decoder = Decoder(target)
    return np.asarray(
        [decoder.generate([p.tolist()], max_new_tokens=count, ignore_eos=True).tokens[0] for p in prompts], np.int32
    )


def compare_paths(
    target: LoadedModel, prompts: Int[np.ndarray, "P S"], count: int, k: int, rows: int
) -> Iterator[Drift]:
    """Drift of every path from single tokens, on the ``count`` greedy tokens after ``prompts``; blocks have ``k`` + 1
    tokens, batches ``rows`` rows. The first comparison shows if single tokens choose what the loop chose. The last one
    is of blocks with single tokens in the other dtype, on the same prefixes."""
    chosen, start = greedy_output(target, prompts, count), prompts.shape[1]
    tokens = np.concatenate([prompts, chosen], axis=1)
    plain = output_logits(target, tokens, start, SINGLE_TOKENS)
    own = _path_name(target, SINGLE_TOKENS)
    yield compare((own, "the loop"), plain, plain, chosen)
    block, batch = ForwardPath(k + 1), ForwardPath(1, rows)
    for path in (block, ForwardPath(None), batch, ForwardPath(k + 1, rows)):
        yield compare((_path_name(target, path), own), plain, output_logits(target, tokens, start, path), chosen)
    other = cast(target, other_dtype(target))
    other_plain = output_logits(other, tokens, start, SINGLE_TOKENS)
    name = _path_name(other, SINGLE_TOKENS)
    yield compare((name, own), plain, other_plain, chosen)
    logits = output_logits(other, tokens, start, block)
    yield compare((_path_name(other, block), name), other_plain, logits, other_plain.argmax(axis=2))


COMPARISONS = 7
"""Number of comparisons that `compare_paths` yields."""


def _path_name(model: LoadedModel, path: ForwardPath) -> str:
    """Name of a path: dtype, and everything that differs from single tokens at batch 1."""
    fed = {None: "whole sequence", 1: ""}.get(path.fed, f"blocks of {path.fed}")
    return ", ".join(part for part in (str(model.dtype), f"batch {path.rows}" * (path.rows > 1), fed) if part)


def other_dtype(target: LoadedModel) -> str:
    return "bfloat16" if target.dtype == jnp.float32 else "float32"


def cast(model: LoadedModel, dtype: str) -> LoadedModel:
    """The model with its weights rounded or widened to ``dtype``, in which it computes too."""
    spec = dataclasses.replace(model.spec, dtype=dtype)
    return dataclasses.replace(model, spec=spec, params=jax.tree.map(lambda x: x.astype(dtype), model.params))
