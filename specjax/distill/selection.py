"""A stage's draft decoded as it stands, on fixed held-out prompts: which checkpoint is kept, when training stops.

What is chosen follows from the scores so far, kept in a file that is written before the checkpoint of the same step: an
interrupted stage forgets what it measured past its last checkpoint, measures it again, and chooses the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import operator
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from specjax import config, registry
from specjax.config import RunConfig
from specjax.data.corpus import Document
from specjax.data.prompts import PLACES, HeldOutPrompt, cut_prompts
from specjax.decode.decoder import Decoder
from specjax.decode.result import check_finite
from specjax.distill.teacher import completed
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.metrics import DecodeStats, Interval, block_efficiency_interval, tokens_per_s
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.runtime import fingerprint
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.layout import make_layout
from specjax.runtime.log import note, read_log
from specjax.types import Params, Trainable

BEST, SCORES = "best", "scores.json"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Prompts decoded at one temperature, in one batch that took ``seconds``; ``by_prompt``: the counts of each."""

    temperature: float
    by_prompt: list[DecodeStats]
    seconds: float

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Decoded:
        """From `dataclasses.asdict`, through JSON."""
        names = [field.name for field in dataclasses.fields(DecodeStats)]

        def counts(row: Mapping[str, Any]) -> DecodeStats:
            values: dict[str, Any] = {
                n: tuple(row[n]) if isinstance(row[n], list) else row[n] for n in names if n in row
            }
            return DecodeStats(**values)

        return cls(found["temperature"], list(map(counts, found["by_prompt"])), found["seconds"])

    @property
    def stats(self) -> DecodeStats:
        return functools.reduce(operator.add, self.by_prompt)

    @property
    def interval(self) -> Interval:
        """95%, over prompts."""
        return block_efficiency_interval(self.by_prompt)

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.stats.emitted, self.seconds)


class Decodes(Protocol):
    """What a stage needs to decode with its draft."""

    @property
    def rule(self) -> config.Selection: ...

    def __call__(self, params: Params) -> list[Decoded]:
        """One a temperature, with the stage's own parameters as they are."""
        ...

    @property
    def identity(self) -> str:
        """A digest of everything beside the weights that the counts depend on."""
        ...


@dataclasses.dataclass(frozen=True)
class HeldOutDecoding:
    """The same prompts, seed and programs at every call: the draft's weights are an argument of what was compiled, so
    one evaluation after another compiles nothing. Over a mesh, draft and target decode where they lie."""

    rule: config.Selection
    target: LoadedModel
    drafter: Trainable
    spec: Model
    prompts: Sequence[HeldOutPrompt]
    temperatures: Sequence[float]
    verifier: Any
    sampling: Mapping[str, Any]
    seed: int

    def __call__(self, params: Params) -> list[Decoded]:
        draft = LoadedModel(self.spec, completed(self.drafter, params, self.target.params), self.target.tokenizer)
        # Another handle of the same weights: their copy laid out for decoding is freed with it, not kept by training.
        target = dataclasses.replace(self.target)
        verifier = registry.build(registry.VERIFIERS, self.verifier, "verifier")
        decoder = Decoder(target, DraftModel(draft, self.rule.k), verifier)
        return [self._decode(decoder, temperature) for temperature in self.temperatures]

    def _decode(self, decoder: Decoder, temperature: float) -> Decoded:
        prompts = [prompt.tokens for prompt in self.prompts]
        options = {**self.sampling, "stop_token_ids": (), "temperature": temperature}
        options |= {"max_new_tokens": self.rule.new_tokens}
        decoder.compile(prompts, **options)
        began = time.perf_counter()
        found = decoder.generate(prompts, seed=self.seed, ignore_eos=True, **options)
        seconds = time.perf_counter() - began
        check_finite(found, "the draft in training", f"target {self.target.name!r}")
        return Decoded(temperature, found.stats, seconds)

    @property
    def identity(self) -> str:
        prompts = [prompt.tokens for prompt in self.prompts]
        sizes = (self.rule.new_tokens, self.rule.k, self.seed)
        parts = (prompts, list(self.temperatures), self.verifier, dict(self.sampling), *sizes)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def held_out_decoding(
    config: RunConfig, target: LoadedModel, drafter: Trainable, spec: Model, held_out: Sequence[Document]
) -> HeldOutDecoding | None:
    """None where nothing is to be decoded. The prompts are cut from the ends of documents backwards, so that those of
    the benchmark are others as long as there is text enough. Raises `DataError` where there is no prompt, or where
    the target has too few positions, `ConfigError` as `decodes` does."""
    rule = config.selection
    if not decodes(config):
        if rule.prompts:
            note(
                "selection: several processes do not decode, so nothing is said of block efficiency; `specjax bench` "
                "measures it afterwards, in one process"
            )
        return None
    needed = rule.prompt_tokens + rule.new_tokens + rule.k + 1
    if needed > target.config.max_positions:
        raise DataError(
            f"selection: prompt_tokens={rule.prompt_tokens}, new_tokens={rule.new_tokens} and k={rule.k} need {needed} "
            f"positions, the target has {target.config.max_positions}; lower one of them, or set selection.prompts=0"
        )
    prompts = cut_prompts(held_out, target.tokenizer, rule.prompt_tokens, rule.prompts, PLACES[::-1])
    if not prompts:
        raise DataError(
            f"the held-out text has no prompt of selection.prompt_tokens={rule.prompt_tokens}; give more text, "
            "a larger data.held_out or fewer prompt_tokens, or set selection.prompts=0"
        )
    temperatures = config.bench.temperatures if rule.temperatures is None else rule.temperatures
    where = (prompts, temperatures, config.verifier, config.sampling.options(), config.seed)
    return HeldOutDecoding(rule, target, drafter, spec, *where)


def with_median_seconds(turns: Sequence[Sequence[Decoded]]) -> list[Decoded]:
    """The same decoded several times over, of which only the seconds differ."""
    return [
        dataclasses.replace(same[0], seconds=statistics.median(d.seconds for d in same))
        for same in zip(*turns, strict=True)
    ]


def score(decoded: Sequence[Decoded]) -> float:
    """Tokens a target call: the block efficiency, mean over the temperatures."""
    return sum(d.stats.block_efficiency for d in decoded) / len(decoded)


def record_of(decoded: Sequence[Decoded]) -> dict[str, float]:
    """For a stage's log: ``block_efficiency``, the score; with a temperature in the name (``_t0``, ``_t1``) that of it
    alone, its interval, and ``acceptance``, the share of blocks that accept so many draft tokens."""
    record = {"block_efficiency": score(decoded)}
    for d in decoded:
        name, interval = f"_t{d.temperature:g}", d.interval
        record |= {f"block_efficiency{name}": d.stats.block_efficiency}
        record |= {f"block_efficiency{name}_low": interval.low, f"block_efficiency{name}_high": interval.high}
        record |= {f"acceptance{name}_at_{j}": s for j, s in enumerate(d.stats.acceptance_at, 1)}
    return record


class Selector:
    """What a stage's decoded evaluations decide. ``step``: of the checkpoint that the stage goes on from; what was
    measured later is forgotten. Without ``decoding``, nothing is measured and the last weights are the result."""

    def __init__(self, directory: Path, decoding: Decodes | None, step: int):
        self._directory, self._decoding = directory, decoding
        self._scores: dict[int, float] = {}
        if decoding is None:
            return
        self._scores = {s: value for s, value in _read_scores(directory).items() if s <= step}
        for folder in (directory / BEST).glob("*"):
            if folder.name.isdigit() and int(folder.name) > step:
                shutil.rmtree(folder)

    def measure(self, step: int, params: Params) -> dict[str, float]:
        """Figures for the log. Where the best so far is the result, these weights are kept if they are that."""
        if self._decoding is None:
            return {}
        record = record_of(self._decoding(params))
        self._scores[step] = record["block_efficiency"]
        if self._decoding.rule.select == "best" and self.best == step:
            # Closed, and so whole on disk, before the scores that name them.
            with Checkpoints(self._directory / BEST) as checkpoints:
                checkpoints.save(step, params)
        fingerprint.write_record(self._directory / SCORES, self._scores)
        return record

    @property
    def best(self) -> int | None:
        """The step of the highest score, the latest of several; None before the first evaluation."""
        return max(self._scores, key=lambda step: (self._scores[step], step), default=None)

    @property
    def stops(self) -> bool:
        """Whether `patience` evaluations in a row were no better than one before them."""
        if self._decoding is None or self._decoding.rule.patience is None or not self._scores:
            return False
        highest = max(self._scores.values())
        since = min(step for step, value in self._scores.items() if value == highest)
        return sum(step > since for step in self._scores) >= self._decoding.rule.patience

    def result(self, last: Params, step: int | None = None) -> Params:
        """The stage's: ``last``, those of ``step``, or the best. Raises `TrainingError` if nothing undamaged is left of
        the best ones."""
        if self._decoding is None or self._decoding.rule.select == "last" or (step is not None and step == self.best):
            return last
        with Checkpoints(self._directory / BEST) as checkpoints:
            restored = checkpoints.restore_latest(last)
        if restored is None:
            raise TrainingError(
                f"{self._directory / BEST}: the best checkpoint, of step {self.best}, is gone or damaged; put its "
                f"files back from a copy, or move {self._directory} elsewhere to train the stage again"
            )
        if restored.step != self.best:
            _log.warning(
                "%s: the best checkpoint, of step %s, is gone or damaged; the result is the best before it, of step %d",
                self._directory / BEST,
                self.best,
                restored.step,
            )
        return restored.state


def _read_scores(directory: Path) -> dict[int, float]:
    """By step. The log has them too."""
    file, then = directory / SCORES, "the scores are those of the log"
    found = fingerprint.read_record(file, then)
    if found is not None:
        return {int(step): value for step, value in found.items()}
    known = {int(r["step"]): r["block_efficiency"] for r in read_log(directory) if "block_efficiency" in r}
    if known and not file.exists():
        _log.warning("%s: gone; %s", file, then)
    return known


def decodes(config: RunConfig) -> bool:
    """Whether a run decodes: where there is something to decode, in one process. Raises `ConfigError` where decoding is
    to decide and cannot, or for a mesh that does not fit."""
    rule, several = config.selection, jax.process_count() > 1
    make_layout(config.mesh)
    if decides(rule) and several:
        raise ConfigError(
            f"selection: select={rule.select} and patience={rule.patience}, but several processes do not decode; set "
            "select=last and no patience, or run in one process, over any mesh"
        )
    return bool(rule.prompts) and not several


def decides(rule: config.Selection) -> bool:
    """Whether the decoded evaluations have a say in the result, or are for the log only."""
    return rule.select == "best" or rule.patience is not None


def fingerprint_of(decoding: Decodes | None, stage: config.Stage) -> dict[str, Any] | None:
    """What the result depends on beside the stage's own settings."""
    if decoding is None or not decides(decoding.rule):
        return None
    return {**dataclasses.asdict(decoding.rule), "eval_every": stage.eval_every, "decoding": decoding.identity}
