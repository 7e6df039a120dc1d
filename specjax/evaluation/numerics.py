"""Where the same model gives other logits: float32 and bfloat16, one row and many, single tokens and blocks.

Every way to compute is fed the same tokens, the prompts and what the autoregressive loop made of them greedily, and is
compared with the way of that loop: single tokens over a KV cache, batch 1. Up to the first token that another way
chooses otherwise, both decoded the same prefix, so there their greedy outputs part. Weights are laid out as decoding
has them.

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
    """A way to compute the same logits. ``fed``: tokens a row feeds in one pass over the cache; None: the whole
    sequence in one pass, no cache. ``rows`` of a pass: a prompt beside others, or beside itself if it is alone."""

    fed: int | None = 1
    rows: int = 1


SINGLE_TOKENS = ForwardPath()


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first output token of a prompt that a path would choose otherwise. ``margin``: between the two best logits of
    the reference there."""

    prompt: int
    position: int
    token: int
    other: int
    margin: float


@dataclasses.dataclass(frozen=True)
class Drift:
    """The path ``name`` against the path ``reference``. Drift is the absolute difference of logits; by position it is
    over all prompts and the vocabulary. Positions are output tokens, from 0."""

    name: str
    reference: str
    drift_max_at: list[float]
    drift_mean_at: list[float]
    differences: list[Difference]
    """At most one a prompt, in their order."""
    choices_differ: float
    """Share of positions whose largest logit is another token's, all on the reference's prefix."""
    margin_below_drift: float
    """Share of positions at which the margin of the two best logits is below the largest drift there: those that only
    luck decides."""

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
    """float32 logits that choose ``tokens[:, start:]``, computed along ``path``; ``start`` is the prompts' length."""
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
    """``names`` of path and reference; ``chosen``: the tokens that the reference chooses from its logits. Raises
    `DataError` where logits are not finite."""
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
    """``count`` tokens a prompt, by the autoregressive loop at batch 1; end-of-sequence is a token like any other."""
    decoder = Decoder(target)
    return np.asarray(
        [decoder.generate([p.tolist()], max_new_tokens=count, ignore_eos=True).tokens[0] for p in prompts], np.int32
    )


def compare_paths(
    target: LoadedModel, prompts: Int[np.ndarray, "P S"], count: int, k: int, rows: int
) -> Iterator[Drift]:
    """Every path against single tokens, on the ``count`` greedy tokens after ``prompts``; blocks are of ``k`` + 1
    tokens, batches of ``rows``. First that reference itself: does it choose what the loop chose? Last, in the other
    dtype, blocks against single tokens, on the same prefixes."""
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
"""How many comparisons `compare_paths` yields."""


def _path_name(model: LoadedModel, path: ForwardPath) -> str:
    """What is said is what differs from single tokens at batch 1."""
    fed = {None: "whole sequence", 1: ""}.get(path.fed, f"blocks of {path.fed}")
    return ", ".join(part for part in (str(model.dtype), f"batch {path.rows}" * (path.rows > 1), fed) if part)


def other_dtype(target: LoadedModel) -> str:
    return "bfloat16" if target.dtype == jnp.float32 else "float32"


def cast(model: LoadedModel, dtype: str) -> LoadedModel:
    """The same weights, rounded or widened to ``dtype``; the model computes in it, too."""
    spec = dataclasses.replace(model.spec, dtype=dtype)
    return dataclasses.replace(model, spec=spec, params=jax.tree.map(lambda x: x.astype(dtype), model.params))
