"""A stage's draft decoded as it stands, on fixed held-out prompts: which checkpoint is kept, when training stops.

What is chosen follows from the scores so far, kept in a file that is written before the checkpoint of the same step: an
interrupted stage forgets what it measured past its last checkpoint, measures it again, and chooses the same.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax import config
from specjax.errors import TrainingError
from specjax.evaluation.held_out import Decoded, DraftEvaluator, affects_selection
from specjax.runtime import fingerprint
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import read_log
from specjax.types import Params

BEST, SCORES = "best", "scores.json"
_log = logging.getLogger(__name__)


def score(decoded: Sequence[Decoded]) -> float:
    """Tokens a target call: the block efficiency, mean over the temperatures."""
    return sum(d.stats.block_efficiency for d in decoded) / len(decoded)


def record_of(decoded: Sequence[Decoded]) -> dict[str, float]:
    """For a stage's log: ``block_efficiency``, the score; with a temperature in the name (``_t0``, ``_t1``) that of it
    alone, its interval, what the training forward says it should be (``simulated``), and ``acceptance``, the share of
    blocks that accept so many draft tokens."""
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
    """What a stage's decoded evaluations decide. ``step``: of the checkpoint that the stage goes on from; what was
    measured later is forgotten. Without ``decoding``, nothing is measured and the last weights are the result."""

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


def fingerprint_of(decoding: DraftEvaluator | None, stage: config.Stage) -> dict[str, Any] | None:
    """What the result depends on beside the stage's own settings."""
    if decoding is None or not affects_selection(decoding.rule):
        return None
    return {**dataclasses.asdict(decoding.rule), "eval_every": stage.eval_every, "decoding": decoding.identity}
