"""Draft vocabularies: the ids that a draft proposes, chosen by how often the training text has them (2502.14856)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from jaxtyping import Float

from specjax.data.rows import Rows, StartRows, spread
from specjax.errors import ConfigError
from specjax.models.config import ModelConfig
from specjax.models.vocabulary import DraftVocabulary

_log = logging.getLogger(__name__)


def choosing_ids(drafter: Any, rows: Rows) -> Any:
    """``drafter`` with a draft vocabulary of as many ids as it has now, the most frequent ones; without one, itself."""
    first = drafter.vocabulary
    return drafter if first is None else drafter.with_vocabulary(most_frequent(rows, len(first.ids), first.size))


def first_ids(count: int | None, full: ModelConfig) -> DraftVocabulary | None:
    """Draft vocabulary of the first ``count`` ids, until a text says which are frequent (`most_frequent`); None: all
    ids. Raises `ConfigError`."""
    if count is None or count == full.vocab_size:
        return None
    if count > full.vocab_size:
        raise ConfigError(f"draft.draft_vocab_size: {count:,}, and the target has {full.vocab_size:,} ids; lower it")
    return DraftVocabulary(np.arange(count), full.vocab_size)


def most_frequent(rows: Rows, count: int, size: int) -> DraftVocabulary:
    """Draft vocabulary of the ``count`` ids to predict most often, in a sample of the rows. Its coverage is logged."""
    often = _counted(rows, size)
    vocabulary = DraftVocabulary(np.sort(np.argsort(-often, kind="stable")[:count]), size)
    share = 100 * often[vocabulary.ids].sum() / max(often.sum(), 1e-30)
    _log.info("draft vocabulary: %s of %s ids, %.2f%% of what is predicted", f"{count:,}", f"{size:,}", share)
    return vocabulary


def coverage(vocabulary: DraftVocabulary, rows: Rows) -> float:
    """Share of the ids to predict that a draft vocabulary covers, in a sample of the rows."""
    often = _counted(rows, vocabulary.size)
    return float(often[vocabulary.ids].sum() / max(often.sum(), 1e-30))


def _counted(rows: Rows, size: int) -> Float[np.ndarray, " V"]:
    """Mean number of times that a row has each id to predict, each weighted as the prediction counts: that of a
    prompt's token less or not at all."""
    total = np.zeros(size)
    for part, share in rows.counted() if isinstance(rows, StartRows) else [(rows, 1.0)]:
        sample = spread(part, _SAMPLE)
        labels, weight = (np.asarray(x).reshape(-1) for x in (sample.labels, sample.weight))
        total += share / len(sample.labels) * np.bincount(labels, weight.astype(np.float64), minlength=size)
    return total


_SAMPLE = 2**20
"""Number of tokens, in each part of the training rows, in which ids are counted."""
