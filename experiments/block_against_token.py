"""Block verification against the token rule on one pair at temperature 1: tokens a target call, with intervals.

    python experiments/block_against_token.py configs/demo.yaml [a.b=v]... [--prompts 48] [--ks 5 7]

The same held-out prompts and seeds for both rules; the interval of the ratio is a bootstrap over prompts (95%, 10,000
resamples), so what differs between prompts does not count for the rules. Needs the draft that train_draft.py leaves in
`out`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import record
from rich.console import Console
from rich.progress import track

from specjax.config import load_config
from specjax.decode.decoder import Decoder
from specjax.drafters.loading import load_drafter
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts

RULES = ("speculative", "block")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--ks", type=int, nargs="+", default=[5, 7])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    prepared = inputs.prepare(config)
    draft: Any = load_drafter(Path(config.out) / "draft", prepared.target)
    settings = config.bench
    prompts = held_out_prompts(prepared.corpus.held_out, prepared.target, settings.prompt_tokens, args.prompts)
    rows = []
    for k in args.ks:
        drafter = dataclasses.replace(draft, k=k)
        counts = {rule: tokens_and_calls(prepared.target, drafter, rule, prompts, args.batch, config) for rule in RULES}
        ratio, low, high = bootstrap(counts["speculative"], counts["block"])
        tau = {rule: float(counts[rule][:, 0].sum() / counts[rule][:, 1].sum()) for rule in RULES}
        rows.append({"k": k, **tau, "ratio": ratio, "low": low, "high": high, "prompts": len(prompts)})
        print(f"k = {k}: token {tau['speculative']:.3f}, block {tau['block']:.3f} tokens a target call; "
              f"block / token {ratio:.3f} [{low:.3f}, {high:.3f}]")  # fmt: skip
    if args.out is not None:
        record.write(args.out, {"new_tokens": settings.new_tokens, "rows": rows})


def tokens_and_calls(target, drafter, rule: str, prompts, batch: int, config) -> np.ndarray:
    """``[prompts, 2]``: emitted tokens and target calls of each."""
    decoder, found = Decoder(target, drafter, rule), []
    for start in track(range(0, len(prompts), batch), f"{rule}, k = {drafter.k}", console=Console(stderr=True)):
        options = {"temperature": 1.0, "seed": start, "ignore_eos": True, **config.sampling.options()}
        result = decoder.generate(prompts[start : start + batch], max_new_tokens=config.bench.new_tokens, **options)
        found += [(s.emitted, s.target_calls) for s in result.stats]
    return np.asarray(found, float)


def bootstrap(token: np.ndarray, block: np.ndarray, resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of block efficiencies, block over token, and its 95% interval over prompts, taken in pairs."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(token), (resamples, len(token)))

    def efficiency(counts):
        return counts[..., 0].sum(-1) / counts[..., 1].sum(-1)

    ratios = efficiency(block[chosen]) / efficiency(token[chosen])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(efficiency(block) / efficiency(token)), float(low), float(high)


if __name__ == "__main__":
    main()
