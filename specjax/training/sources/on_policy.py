"""On-policy training data: sequences that the draft itself samples as it learns, scored by the target in the same step
(GKD, 2306.13649; its lambda is ``share``).

Every ``every`` steps a pool is sampled from the newest weights: a sequence for each on-policy row of the steps to come,
used once. The pool is written before it is used, so that a restart inside its period trains on the same tokens; an
earlier restart samples them again, from the same weights and seeds.
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
from specjax.errors import TrainingError
from specjax.interfaces import Batch, Draft, Params, Source, Verdict, VerdictDistribution, Verifier
from specjax.models.hf import LoadedModel
from specjax.proposal import leading_run
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process, on_one_device
from specjax.training.sources import generated
from specjax.training.sources.continuations import Positive, Sampled, continue_prompts, prompts_of_text
from specjax.training.sources.text import SourceContext
from specjax.training.teacher import with_shared_params

_COUNTED = 256
"""Number of the target's sequences in which ids are counted before there is a draft to sample from."""
_log = logging.getLogger(__name__)
Sampler = Callable[[Params, Sequence[list[int]], Sequence[int], Sampled], list[list[int]]]
"""Function (the draft's weights, prompts, a seed for each, sampling settings) -> new tokens."""


@dataclasses.dataclass(frozen=True)
class OnPolicy(Sampled, Source):
    """Train on rows of which ``share`` are sampled, one sequence a row; the others are text. The draft as it was at
    most ``every`` steps before samples them, after beginnings of the training text."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    every: Positive = 100
    kind: Literal["on_policy"] = "on_policy"

    def rows(self, context: SourceContext) -> Rows:
        self.check_fits(context.text.length, context.name)
        return Mixed(context.text, self.weight_of_prompts(context))

    def vocabulary_rows(self, context: SourceContext) -> list[tuple[Rows, float]]:
        """Rows to count ids in, see `specjax.interfaces.Source.vocabulary_rows`: text, and continuations by the target,
        which stand in for those of a draft that learns from it."""
        sampling = {field.name: getattr(self, field.name) for field in dataclasses.fields(Sampled)}
        written = generated.Generated(**sampling, sequences=_COUNTED, shard_size=_COUNTED, k=0)
        found = written.vocabulary_rows(context)
        return [(context.text, 1.0 - self.share), *((rows, self.share * part) for rows, part in found)]

    def batches(self, batches: Batches, directory: Path, sample: Sampler | None, steps: int) -> Batches:
        if sample is None or not isinstance(batches.rows, Mixed):
            raise TrainingError("data: on_policy needs a draft that can be sampled from, and text with prompts")
        return OnPolicyBatches(self, batches, directory, sample, steps)

    def why_not_longer(self, steps: int, taken: int) -> str | None:
        """Reason why a stage of ``steps``, of which ``taken`` are taken, cannot become a longer one, or a longer one
        become it: its last pool covers part of a period. None if it can."""
        if steps % self.every == 0 or taken < steps - steps % self.every:
            return None
        return f"data.every={self.every} does not divide them, and the last sequences were sampled for so many steps"


def draft_sampler(drafter: Any, target: LoadedModel) -> Sampler | None:
    """A sampler of the draft alone, with the weights it is given; its text ends where the target's does. A draft that
    is no separate model (`TrainedDraftModel.to_model`) writes block by block while its target reads. None for such a
    draft if several processes hold the target, or if it does not decode."""
    if not drafter.samples_alone:
        return functools.partial(_written_in_blocks, drafter, target) if jax.process_count() == 1 else None

    def sample(params: Params, prompts: Sequence[list[int]], seeds: Sequence[int], settings: Sampled):
        params = on_one_device(with_shared_params(drafter, params, target.params))
        decoder = Decoder(drafter.to_model(params, target))
        return on_main_process(lambda: continue_prompts(decoder, prompts, seeds, settings).tokens)

    return sample


def _written_in_blocks(
    drafter: Any,
    target: LoadedModel,
    params: Params,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    settings: Sampled,
) -> list[list[int]]:
    params = with_shared_params(drafter, params, target.params)
    # Draft length 2 if it has that: decoding, too, will ask it for tokens after its own.
    k = 1 if drafter.unrolled(2) is None else 2
    # At temperature 0 the decoder would write the target's text; this close to 0 the best token is almost certain.
    settings = dataclasses.replace(settings, temperature=max(settings.temperature, 1e-4))
    decoder = Decoder(dataclasses.replace(target), drafter.to_drafter(params, target, k), DraftAlone())
    return continue_prompts(decoder, prompts, seeds, settings).tokens


@dataclasses.dataclass(frozen=True)
class DraftAlone(Verifier):
    """Verifier that accepts the whole proposal, with its last token in place of the target's own: the text is the
    drafter's, and LOSSY. If nothing valid is proposed, the target's best token follows."""

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
        """Distribution of the verdict, which is certain, whatever the probabilities."""
        verdict = self(draft, p, None)
        counts = jax.nn.one_hot(verdict.num_accepted, p.shape[1], dtype=p.dtype)
        following = jax.nn.one_hot(verdict.next_token, p.shape[2], dtype=p.dtype)
        return VerdictDistribution(counts, jnp.broadcast_to(following[:, None], p.shape))


class OnPolicyBatches(Batches):
    """Batches of text in which the stage's sequences replace, in order, the rows that are on-policy. Batch i is a
    function of (seed, i) and of the pool of i's period. Sequence g is row number ``len(text) + g``."""

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
        """Sample the pool of ``step``'s period, or read it. A pool that is damaged or gone within its period is sampled
        anew, but from the newest weights: the weights that it came from are gone."""
        begin = step - step % self._settings.every
        if self._mixed.begin == begin:
            return
        end = min(begin + self._settings.every, self._steps)
        first, stop = (int(self._sampled_before(np.asarray(at * self.batch_size))) for at in (begin, end))
        file = self._directory / f"{begin:08}{shards.SUFFIX}"
        made_from = {"prompts": self._prompts.digest, "first": first, "sequences": stop - first, "seed": self.seed}
        if step == begin:
            made_from["draft"] = fingerprint.digest(params)
        record = on_main_process(lambda: artifact.record_of(file))
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
            on_main_process(lambda: artifact.write(file, shards.to_bytes(sampled), made_from))
        self._mixed.pool = WholeSequenceRows(shards.read(file), self.rows.length, self._mixed.prompt_weight, alone=True)
        self._mixed.begin, self._mixed.first = begin, first
        on_main_process(lambda: self._forget(oldest))

    def _sampled_before(self, rows: np.ndarray) -> np.ndarray:
        """Number of on-policy rows among the first ``rows`` rows of training, evenly spread."""
        return np.floor(self._settings.share * rows).astype(np.int64)

    def _forget(self, oldest: int | None) -> None:
        """Remove pools that no stored checkpoint goes on with."""
        if oldest is None:
            return
        for file in self._directory.glob(f"*{shards.SUFFIX}"):
            if int(file.stem) < oldest - oldest % self._settings.every:
                artifact.remove(file)


class Mixed:
    """Rows of text, then the sequences of the current pool: row ``len(text) + g`` is sequence g. The pool is for the
    steps from ``begin`` on, and its first sequence is ``first``. ``prompt_weight``: weight of the sequences' prompts.
    """

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
