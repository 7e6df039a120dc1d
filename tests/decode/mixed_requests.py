"""Requests of all sizes, and the largest number of programs that they can need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from specjax.decode.request import LEAST_PROMPT, STOP_IDS, bucket, most_slots, slot_buckets
from specjax.models.hf import LoadedModel


def requests(count: int, seed: int, vocabulary: int, rows: int, prompt: int, new: int) -> Iterator[dict[str, Any]]:
    """Arguments of `Decoder.generate`, sizes spread evenly in their logarithms."""
    rng = np.random.default_rng(seed)

    def size(most: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    for i in range(count):
        batch = int(rng.integers(1, rows + 1))
        yield {
            "prompts": [rng.integers(0, vocabulary, min(size(prompt), prompt)).tolist() for _ in range(batch)],
            "max_new_tokens": [min(size(new), new) for _ in range(batch)],
            "temperature": 0.0 if i % 2 else [float(rng.choice([0.0, 0.7, 1.0])) for _ in range(batch - 1)] + [1.0],
            "top_p": float(rng.uniform(0.5, 1)),
            "seed": i,
        }


def most_programs(
    target: LoadedModel, k: int, *, rows: int, prompt: int, new: int, stop_ids: int = STOP_IDS
) -> tuple[int, str]:
    """Largest number of programs that any requests of at most these sizes need, and its formula. One program prefills a
    prompt for each bucket of rows and of prompts. One decodes blocks for each bucket of rows and of cache slots, greedy
    and sampling. Three grow the caches from each bucket but the last, with one more for each window of the target's
    layers, which also slides. All of them exist for each bucket of ``stop_ids`` a row, end-of-sequence ids included,
    and again for each kind of logprobs and each processor in use."""
    most = most_slots(target, k)
    batches = bucket(rows).bit_length()
    widths = len({min(bucket(size, LEAST_PROMPT), most) for size in range(1, prompt + 1)})
    slots = len(slot_buckets(1, min(prompt + new, target.config.max_positions) + k + 1, most))
    stops = (bucket(stop_ids, STOP_IDS) // STOP_IDS).bit_length()
    windows = len({*target.spec.windows} - {None})
    growths = f"{3 + windows} x {slots - 1} growths" + (f" + {windows} slides" if windows else "")
    formula = f"{batches} row buckets x ({widths} prompt buckets + 2 x {slots} cache buckets + {growths})"
    formula += f" x {stops} buckets of stop ids" if stops > 1 else ""
    return stops * batches * (widths + 2 * slots + (3 + windows) * (slots - 1) + windows), formula
