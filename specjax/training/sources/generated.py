"""Training data that the target wrote: continuations of prompts, sampled by speculative decoding with the current draft
(2310.08461 distills on them), stored as shards with their provenance. The first of several processes makes them.

Verification is lossless, so the draft that helps decides the speed and not the distribution: a directory belongs to a
target, prompts, sampling parameters and a seed. Each shard has its own seed and a record with its SHA-256, written
after it: a shard without a record is half-written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
from pydantic import Field

from specjax import registry
from specjax.data import shards
from specjax.data.readers import BadRecordPolicy
from specjax.data.rows import Rows, Sequences, WholeSequenceRows
from specjax.decode.decoder import Decoder
from specjax.decode.request import derive_seeds
from specjax.errors import ConfigError
from specjax.interfaces import Source, Target
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process, on_one_device
from specjax.runtime.progress import StepProgress
from specjax.training.sources.continuations import (
    Positive,
    Prompts,
    Sampled,
    continue_prompts,
    prompts_of_file,
    prompts_of_text,
)
from specjax.training.sources.text import DraftHandle, SourceContext


@dataclasses.dataclass(frozen=True)
class Generated(Sampled, Source):
    """Train on ``sequences`` continuations by the target. Prompts are beginnings of the training text, or come from the
    file ``prompts``: JSONL with ``prompt``, ``text`` or ``messages``, or text with one prompt a line. ``k``,
    ``verifier``: draft length and verifier of the decoding; k = 0 decodes without the draft, which is faster if few of
    its tokens are accepted or many rows decode together. ``shard_size``: number of sequences a shard. ``path``: a
    directory that several runs share; None: one in the run's."""

    sequences: Positive = 2_000
    prompts: str | None = None
    k: Annotated[int, Field(ge=0, le=64)] = 5
    verifier: str = "block"
    shard_size: Positive = 256
    path: str | None = None
    kind: Literal["generated"] = "generated"

    def rows(self, context: SourceContext) -> Rows:
        """Rows of the sequences, which are read if they exist and made if not. Raises `ConfigError` for a lossy
        verifier or sequences longer than a row, `TrainingError` for a directory of another provenance."""
        directory = context.directory if self.path is None else Path(self.path).expanduser()
        prompts = self.prompts_from(context)
        with context.bars(f"{context.name}-data", self.sequences) as progress:
            sequences = make(directory, self, context.target, context.draft, prompts, context.seed, progress)
        return WholeSequenceRows(sequences, context.text.length, self.weight_of_prompts(context))

    def vocabulary_rows(self, context: SourceContext) -> list[tuple[Rows, float]]:
        """Rows to count ids in, see `specjax.interfaces.Source.vocabulary_rows`: the stage's own, which are made
        without a draft's help."""
        return [(self.rows(dataclasses.replace(context, draft=None)), 1.0)]

    def prompts_from(self, context: SourceContext) -> Prompts:
        self.check_fits(context.text.length, context.name)
        if self.prompts is None:
            return prompts_of_text(context.text, self)
        room = context.text.length - self.new_tokens
        return prompts_of_file(
            self.prompts, context.target.tokenizer, room, BadRecordPolicy(context.on_bad), context.today
        )


def make(
    directory: Path,
    settings: Generated,
    target: Target,
    draft: DraftHandle | None,
    prompts: Prompts,
    seed: int,
    progress: StepProgress | None = None,
) -> Sequences:
    """All sequences of ``directory``. Missing, half-written and damaged shards (a warning names the damaged ones) are
    made first, by ``target`` with the help of ``draft`` (None: without help). ``progress`` counts sequences. The same
    arguments give the same bits, however often the work was interrupted.

    Raises `TrainingError` naming the fields in which the directory's provenance differs, or if it is in use.
    """
    verifier = registry.build(registry.VERIFIERS, settings.verifier, "data.verifier")
    if not verifier.lossless and settings.temperature > 0:
        raise ConfigError(
            f"data.verifier: {verifier.kind!r} changes the target's distribution; use speculative or block"
        )
    provenance = _provenance(settings, target, prompts, seed)
    if draft is not None and settings.k:
        draft = dataclasses.replace(draft, params=on_one_device(draft.params))
    else:
        draft = None
    shard = _maker(settings, target, draft, verifier, prompts, seed)
    count = -(-settings.sequences // settings.shard_size)
    files = [directory / f"shard-{number:05}{shards.SUFFIX}" for number in range(count)]

    def complete() -> None:
        artifact.claim(directory, provenance)
        with artifact.exclusive(directory):
            records = []
            for number, (file, shard_seed) in enumerate(zip(files, derive_seeds(seed, count), strict=True)):
                record = artifact.record_of(file)
                records.append(shard(file, number, shard_seed) if record is None else record)
                if progress is not None:
                    progress(sum(r["sequences"] for r in records), {})
            _summarize(directory, records)

    on_main_process(complete)
    return Sequences.joined([shards.read(file) for file in files])


def _provenance(settings: Generated, target: Target, prompts: Prompts, seed: int) -> dict[str, Any]:
    """Settings that decide the distribution and the prompts."""
    names = ("new_tokens", "temperature", "top_k", "top_p", "min_p")
    target_params, target_config = fingerprint.of_model(target)
    return {
        "target": target_params,
        "target_config": target_config,
        "eos_ids": list(target.eos_ids),
        "sampling": {name: getattr(settings, name) for name in names},
        "prompts": prompts.digest,
        "sequences": settings.sequences,
        "shard_size": settings.shard_size,
        "seed": seed,
    }


def _maker(
    settings: Generated, target: Target, draft: DraftHandle | None, verifier: Any, prompts: Prompts, seed: int
) -> Callable[[Path, int, int], dict[str, Any]]:
    """Function that makes one shard; it builds the decoder for the first missing one."""
    numbered = prompts.shuffled(seed)

    @functools.cache
    def decoder() -> Decoder:
        if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(target.params)):
            raise ConfigError(
                "data: generated is made by one process, and the target lies on several; make it first with "
                "`specjax generate-data`, in one process with the same config, or set mesh.target=replicated"
            )
        return Decoder(target, draft and draft.drafter(draft.params, settings.k), verifier)

    made_by = {
        "draft": None if draft is None else fingerprint.digest(draft.params),
        "k": None if draft is None else settings.k,
        "verifier": verifier.kind,
    }

    def shard(file: Path, number: int, shard_seed: int) -> dict[str, Any]:
        begin = number * settings.shard_size
        chosen = [numbered(i) for i in range(begin, min(begin + settings.shard_size, settings.sequences))]
        continued = continue_prompts(decoder(), chosen, derive_seeds(shard_seed, len(chosen)), settings)
        sequences, stats = Sequences.of(chosen, continued.tokens), continued.stats
        assert stats is not None  # a shard has a sequence
        counts = {name: getattr(stats, name) for name in ("emitted", "blocks", "block_efficiency")}
        return artifact.write(file, shards.to_bytes(sequences), {"sequences": len(sequences), **counts, **made_by})

    return shard


def _summarize(directory: Path, records: list[dict[str, Any]]) -> None:
    emitted, blocks = (sum(record[name] for record in records) for name in ("emitted", "blocks"))
    totals = {"emitted": emitted, "blocks": blocks, "block_efficiency": emitted / max(blocks, 1)}
    artifact.write_provenance(directory, {**totals, "shards": records})
