"""`specjax numerics`: compare the logits of a config's target between the ways to compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.config import RunConfig
from specjax.errors import DataError
from specjax.evaluation.numerics import COMPARISONS, compare_paths
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.runtime.progress import Bars, no_bars


def run_numerics(config: RunConfig, prompts: int, tokens: int, bars: Bars = no_bars) -> dict[str, Any]:
    """`compare_paths` on held-out prompts of the config, with the largest k and batch size of its benchmark. Returns
    the JSON object that `specjax numerics --out` writes."""
    settings = config.bench
    k, rows = max(settings.ks), max(settings.batch_sizes)
    trained = Path(config.out) / "target"
    if config.target.path is None and not trained.is_dir():
        raise DataError(f"out: {trained} does not exist; train the target first with `specjax train` and this config")
    prepared = inputs.prepare(config, bars)
    target, length = prepared.target, settings.prompt_tokens
    if length + tokens + k > target.config.max_positions:
        raise DataError(
            f"--tokens {tokens}: with bench.prompt_tokens={length} and k={k} that is {length + tokens + k} positions, "
            f"the target has {target.config.max_positions}; lower one of them"
        )
    try:
        found = held_out_prompts(prepared.corpus.held_out, target, length, prompts)
        length = min(map(len, found))  # chats have prompts of any length
        texts = np.asarray([prompt[-length:] for prompt in found], np.int32)
    except DataError as error:
        raise DataError(f"--prompts {prompts}: {error}") from error
    found = []
    with bars("numerics", COMPARISONS) as progress:
        for drift in compare_paths(target, texts, tokens, k, rows if rows > 1 else 8):
            found.append(drift.to_json())
            if progress:
                progress(len(found), {})
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "backend": jax.default_backend(),
        "prompts": prompts,
        "prompt_tokens": length,
        "tokens": tokens,
        "comparisons": found,
    }
