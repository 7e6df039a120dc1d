"""On-policy training data: sequences that the draft itself samples as it learns, scored by the target in the same step
(GKD, 2306.13649; its lambda is ``share``).

Every ``every`` steps a pool is sampled from the newest weights: as many sequences as rows of the steps to come are
on-policy, each used once. It is written before it is used, so that a restart inside its period trains on the same
tokens; a restart before samples them again, from the same weights and seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.data import shards
from specjax.data.rows import Batches, ConcatenatedRows, Rows, Sequences, WholeSequenceRows
from specjax.decode.decoder import Decoder
from specjax.decode.request import derive_seeds
from specjax.distill.sources import generated
from specjax.distill.sources.continuations import Positive, Sampled, continue_prompts, prompts_of_text
from specjax.distill.sources.text import SourceContext
from specjax.drafters.base import TrainedDrafter, at_depths
from specjax.errors import TrainingError
from specjax.evaluation.teacher import with_shared_params
from specjax.proposal import leading_run
from specjax.runtime import fingerprint, store
from specjax.runtime.distributed import by_first, on_one_device
from specjax.types import Batch, Draft, Params, Verdict, VerdictDistribution

_COUNTED = 256
"""Sequences of the target's in which ids are counted before there is a draft to sample from."""
_log = logging.getLogger(__name__)
Sampler = Callable[[Params, Sequence[list[int]], Sequence[int], Sampled], list[list[int]]]
"""(the draft's weights, prompts, a seed each, how to sample) -> new tokens."""


@dataclasses.dataclass(frozen=True)
class OnPolicy(Sampled):
    """``share`` of the rows of the stage's batches are sampled from the draft as it was at most ``every`` steps before,
    after beginnings of the training text; the others are text. One sequence a row."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    every: Positive = 100
    kind: Literal["on_policy"] = "on_policy"

    def rows(self, context: SourceContext) -> Rows:
        self.check_fits(context.text.length, context.name)
        return Mixed(context.text, self.weight_of_prompts(context))

    def vocabulary_rows(self, context: SourceContext) -> list[tuple[Rows, float]]:
        """See `Text.vocabulary_rows`: what the target writes stands for what a draft that learns from it will."""
        sampling = {field.name: getattr(self, field.name) for field in dataclasses.fields(Sampled)}
        written = generated.Generated(**sampling, sequences=_COUNTED, shard_size=_COUNTED, k=0)
        found = written.vocabulary_rows(context)
        return [(context.text, 1.0 - self.share), *((rows, self.share * part) for rows, part in found)]

    def batches(self, batches: Batches, directory: Path, sample: Sampler | None, steps: int) -> Batches:
        if sample is None or not isinstance(batches.rows, Mixed):
            raise TrainingError("data: on_policy needs a draft that can be sampled from, and text with prompts")
        return OnPolicyBatches(self, batches, directory, sample, steps)

    def why_not_longer(self, steps: int, taken: int) -> str | None:
        """Why a stage of ``steps``, of which so many are taken, cannot become a longer one, or a longer one it: its
        last pool is one of a part of a period."""
        if steps % self.every == 0 or taken < steps - steps % self.every:
            return None
        return f"data.every={self.every} does not divide them, and the last sequences were sampled for so many steps"


def draft_sampler(drafter: Any, target: Any) -> Sampler | None:
    """A sampler of the draft by itself, with the weights it is given, which end as the target does. One that is no
    model of its own (`TrainedDraftModel.to_model`) writes block by block while its target reads; None for it where
    several processes hold the target, or where it does not decode."""
    if not hasattr(drafter, "to_model"):
        alone = jax.process_count() == 1 and isinstance(drafter, TrainedDrafter)
        return functools.partial(_written_in_blocks, drafter, target) if alone else None

    def sample(params: Params, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Sampled):
        params = on_one_device(with_shared_params(drafter, params, target.params))
        decoder = Decoder(drafter.to_model(params, target))
        return by_first(lambda: continue_prompts(decoder, prompts, seeds, settings).tokens)

    return sample


def _written_in_blocks(
    drafter: Any, target: Any, params: Params, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Sampled
) -> list[list[int]]:
    params = with_shared_params(drafter, params, target.params)
    # Two places where it has them: what it writes after a token of its own is what it will meet.
    k = 1 if at_depths(drafter, 2) is None else 2
    # At temperature 0 every lossless decoding is the target's; so near it the best token is as good as certain.
    settings = dataclasses.replace(settings, temperature=max(settings.temperature, 1e-4))
    decoder = Decoder(dataclasses.replace(target), drafter.to_drafter(params, target, k), DraftAlone())
    return continue_prompts(decoder, prompts, seeds, settings).tokens


@dataclasses.dataclass(frozen=True)
class DraftAlone:
    """Keeps the whole draft, its last token in place of the target's own: the text is the drafter's, and LOSSY. Where
    nothing valid is proposed the target's best token follows."""

    kind: Literal["draft_alone"] = "draft_alone"
    lossless: ClassVar[bool] = False
    noise: ClassVar[Literal["fresh", "coupled", "none"]] = "fresh"
    reference: ClassVar[str] = "2306.13649"

    def __call__(self, draft: Draft, p_logits: Float[Array, "B K1 V"], noise: Any) -> Verdict:
        proposed = leading_run(draft.valid)
        kept = jnp.maximum(proposed - 1, 0)
        last = jnp.take_along_axis(draft.tokens, kept[:, None], axis=1)[:, 0]
        return Verdict(kept, jnp.where(proposed > 0, last, jnp.argmax(p_logits[:, 0], axis=-1).astype(jnp.int32)))

    def distribution(self, draft: Draft, p: Float[Array, "B K1 V"], q: Any) -> VerdictDistribution:
        """Certain, whatever the probabilities."""
        verdict = self(draft, p, None)
        counts = jax.nn.one_hot(verdict.num_accepted, p.shape[1], dtype=p.dtype)
        following = jax.nn.one_hot(verdict.next_token, p.shape[2], dtype=p.dtype)
        return VerdictDistribution(counts, jnp.broadcast_to(following[:, None], p.shape))


class OnPolicyBatches(Batches):
    """``batches`` of text, with sequence g of the stage in place of the rows that are on-policy; batch i is a function
    of (seed, i) and of the pool of i's period. As a row, sequence g has number ``len(text) + g``."""

    def __init__(self, settings: OnPolicy, batches: Batches, directory: Path, sample: Sampler, steps: int):
        assert isinstance(batches.rows, Mixed)
        super().__init__(batches.rows, batches.batch_size, batches.seed)
        self.rows = self._mixed = Mixed(batches.rows.text, batches.rows.prompt_weight)
        self._settings, self._directory, self._sample, self._steps = settings, directory, sample, steps
        self._prompts = prompts_of_text(self._mixed.text, settings)
        self._numbered = self._prompts.shuffled(batches.seed)

    def indices(self, step: int) -> Int[np.ndarray, " B"]:
        before = self._sampled_before(step * self.batch_size + np.arange(self.batch_size + 1))
        return np.where(np.diff(before) > 0, len(self.rows) + before[:-1], super().indices(step))

    def refresh(self, step: int, params: Params, oldest: int | None) -> None:
        """Samples the pool of ``step``'s period, or reads it. One that is damaged or gone within its period is sampled
        anew, but from the newest weights: those that it came from are gone."""
        begin = step - step % self._settings.every
        if self._mixed.begin == begin:
            return
        end = min(begin + self._settings.every, self._steps)
        first, stop = (int(self._sampled_before(np.asarray(at * self.batch_size))) for at in (begin, end))
        file = self._directory / f"{begin:08}{shards.SUFFIX}"
        made_from = {"prompts": self._prompts.digest, "first": first, "sequences": stop - first, "seed": self.seed}
        if step == begin:
            made_from["draft"] = fingerprint.digest(params)
        record = by_first(lambda: store.record_of(file))
        if record is None or not made_from.items() <= record.items():
            if step != begin:
                _log.warning(
                    "%s: damaged or gone, and so is the draft of step %d that it was sampled from; what is left of it, "
                    "to step %d, is sampled from that of step %d: the weights will not be bit for bit those of a run "
                    "without the damage",
                    *(file, begin, end, step),
                )
                made_from["draft"] = fingerprint.digest(params)
            prompts = [self._numbered(g) for g in range(first, stop)]
            seeds = derive_seeds(self.seed, stop)[first:]
            sampled = Sequences.of(prompts, self._sample(params, prompts, seeds, self._settings))
            by_first(lambda: store.write(file, shards.to_bytes(sampled), made_from))
        self._mixed.pool = WholeSequenceRows(shards.read(file), self.rows.length, self._mixed.prompt_weight, alone=True)
        self._mixed.begin, self._mixed.first = begin, first
        by_first(lambda: self._forget(oldest))

    def _sampled_before(self, rows: np.ndarray) -> np.ndarray:
        """Count, of so many rows from the start of training: how many are on-policy, evenly spread."""
        return np.floor(self._settings.share * rows).astype(np.int64)

    def _forget(self, oldest: int | None) -> None:
        """Pools that no kept checkpoint goes on with."""
        if oldest is None:
            return
        for file in self._directory.glob(f"*{shards.SUFFIX}"):
            if int(file.stem) < oldest - oldest % self._settings.every:
                store.remove(file)


class Mixed:
    """Rows of text, then the sequences of the current pool, which are for the steps from ``begin`` on and of which
    ``first`` is the first: row ``len(text) + g`` is sequence g. ``prompt_weight``: of these."""

    def __init__(self, text: ConcatenatedRows, prompt_weight: float):
        self.text, self.prompt_weight = text, prompt_weight
        self.pool: WholeSequenceRows | None = None
        self.begin: int | None = None
        self.first = 0

    @property
    def length(self) -> int:
        return self.text.length

    @property
    def digest(self) -> str:
        text = np.frombuffer(self.text.digest.encode(), np.uint8)
        return fingerprint.digest((text, np.asarray(self.prompt_weight)))

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> Batch:
        if index < len(self.text):
            return self.text[index]
        assert self.pool is not None  # `refresh` comes first
        return self.pool[index - len(self.text) - self.first]
