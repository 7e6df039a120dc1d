"""Selection of a stage's checkpoint: the draft is decoded on fixed held-out prompts, which decides which checkpoint is
returned and when training stops.

The choice follows from the scores so far. Their file is written before the checkpoint of the same step: an interrupted
stage drops the scores past its last checkpoint, measures them again, and chooses the same.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import operator
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import config
from specjax.errors import TrainingError
from specjax.interfaces import Params
from specjax.metrics import DecodeStats, Interval, block_efficiency_interval, tokens_per_s
from specjax.runtime import artifact
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import read_log

BEST, SCORES = "best", "scores.json"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Prompts decoded at one temperature, in one batch that took ``seconds``. ``by_prompt``: counts of each prompt.
    ``simulated``: tokens per target call that the draft's training forward gives for the same texts; None where they
    cannot be simulated."""

    temperature: float
    by_prompt: list[DecodeStats]
    seconds: float
    simulated: float | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Decoded:
        """Inverse of `dataclasses.asdict`, through JSON."""
        stats = list(map(DecodeStats.of, found["by_prompt"]))
        return cls(found["temperature"], stats, found["seconds"], found.get("simulated"))

    @property
    def stats(self) -> DecodeStats:
        return functools.reduce(operator.add, self.by_prompt)

    @property
    def interval(self) -> Interval:
        """95% interval of the block efficiency, over prompts."""
        return block_efficiency_interval(self.by_prompt)

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.stats.emitted, self.seconds)


class DraftEvaluator(abc.ABC):
    """Evaluation by which a training stage decodes with its draft."""

    rule: config.Selection
    """Prompts and lengths to decode, and what the result decides."""

    @abc.abstractmethod
    def __call__(self, params: Params) -> list[Decoded]:
        """Results, one a temperature, with the stage's current parameters."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Digest of everything beside the weights that the counts depend on."""


def affects_selection(rule: config.Selection) -> bool:
    """True if the decoded evaluations affect the result; False if they are for the log only."""
    return rule.select == "best" or rule.patience is not None


def score(decoded: Sequence[Decoded]) -> float:
    """Tokens a target pass: the block efficiency, mean over the temperatures."""
    return sum(d.stats.block_efficiency for d in decoded) / len(decoded)


def record_of(decoded: Sequence[Decoded]) -> dict[str, float]:
    """Figures for a stage's log. ``block_efficiency``: the score. With a temperature in the name (``_t0``, ``_t1``):
    the score at that temperature alone, its interval, the value that the training forward pass predicts
    (``simulated``), and ``acceptance``, the share of blocks that accept so many proposed tokens."""
    record = {"block_efficiency": score(decoded)}
    for d in decoded:
        name, interval = f"_t{d.temperature:g}", d.interval
        record |= {f"block_efficiency{name}": d.stats.block_efficiency}
        record |= {f"block_efficiency{name}_low": interval.low, f"block_efficiency{name}_high": interval.high}
        if d.simulated is not None:
            record |= {f"block_efficiency{name}_simulated": d.simulated}
        record |= {f"acceptance{name}_at_{j}": s for j, s in enumerate(d.stats.acceptance_at, 1)}
    return record


class Selector:
    """Decisions from a stage's decoded evaluations. ``step``: step of the checkpoint that the stage goes on from; later
    scores are dropped. Without ``decoding``, nothing is measured and the last weights are the result."""

    def __init__(self, directory: Path, decoding: DraftEvaluator | None, step: int):
        self._directory, self._decoding = directory, decoding
        self._scores: dict[int, float] = {}
        if decoding is None:
            return
        self._scores = {s: value for s, value in _read_scores(directory).items() if s <= step}
        for folder in (directory / BEST).glob("*"):
            if folder.name.isdigit() and int(folder.name) > step:
                shutil.rmtree(folder)

    def measure(self, step: int, params: Params) -> dict[str, float]:
        """Figures for the log. If the stage returns its best weights, these are saved if they are the best so far."""
        if self._decoding is None:
            return {}
        record = record_of(self._decoding(params))
        self._scores[step] = record["block_efficiency"]
        if self._decoding.rule.select == "best" and self.best == step:
            # Close before the scores are written: weights that they name must be whole on disk.
            with Checkpoints(self._directory / BEST) as checkpoints:
                checkpoints.save(step, params)
        artifact.write_record(self._directory / SCORES, self._scores)
        return record

    @property
    def best(self) -> int | None:
        """The step of the highest score, the latest of several; None before the first evaluation."""
        return max(self._scores, key=lambda step: (self._scores[step], step), default=None)

    @property
    def stops(self) -> bool:
        """True if `patience` evaluations in a row were no better than one before them."""
        if self._decoding is None or self._decoding.rule.patience is None or not self._scores:
            return False
        highest = max(self._scores.values())
        since = min(step for step, value in self._scores.items() if value == highest)
        return sum(step > since for step in self._scores) >= self._decoding.rule.patience

    def result(self, last: Params, step: int | None = None) -> Params:
        """Resulting weights of the stage: ``last``, which are those of ``step``, or the best. Raises `TrainingError` if
        no undamaged best weights are left."""
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
    """Scores by step, from their file or else from the log, which has them too."""
    file, then = directory / SCORES, "the scores are those of the log"
    found = artifact.read_record(file, then)
    if found is not None:
        return {int(step): value for step, value in found.items()}
    known = {int(r["step"]): r["block_efficiency"] for r in read_log(directory) if "block_efficiency" in r}
    if known and not file.exists():
        _log.warning("%s: gone; %s", file, then)
    return known


def fingerprint_of(decoding: DraftEvaluator | None, stage: config.Stage) -> dict[str, Any] | None:
    """Settings that the result depends on beside the stage's own; None if decoding does not affect it."""
    if decoding is None or not affects_selection(decoding.rule):
        return None
    return {**dataclasses.asdict(decoding.rule), "eval_every": stage.eval_every, "decoding": decoding.identity}
