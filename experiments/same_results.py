"""Whether a change of the code changes any result: tokens, weights and logs of this tree against those of a commit.

    python experiments/same_results.py HEAD~1 [--requests 50]     (10 minutes on 2 cores)

Both trees, each in processes of its own, train `configs/tiny.yaml` in three ways, and decode mixed requests with the
pair that the first one leaves: all verifiers, both drafters and none, batches of 1 to 5, sampling parameters, stop
strings, streams, logprobs. Whatever the commit recorded must be here too, bit for bit, but for timings. Prints how many
values were compared and the first that differ; exit status 1 if any does.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from against import ROOT, worktree

TRAININGS = {
    "online": [],
    "cached": [
        "distill={loss: {kind: lk_lambda}, teacher: cached, micro_batch_size: 2}",
        "distill.optimizer={kind: muon, ema: 0.9}",
    ],
    "on_policy": [
        "distill.data={kind: on_policy, share: 0.5, prompt_tokens: 8, new_tokens: 16}",
        "distill.loss=total_variation",
        "draft.init={kind: layers, keep: [1]}",
    ],
}
TIMINGS = ("seconds", "tokens_per_s", "compile", "date", "machine", "eta", "commit_times", "looks")
VERIFIERS = ("speculative", "block", "coupled", "lenient", "typical", "top_k")
SHOWN = 20


def train(tree: Path, out: Path) -> dict[str, Any]:
    """Logs, evaluations and weights of every training."""
    found: dict[str, Any] = {}
    for name, overrides in TRAININGS.items():
        run = out / name
        command = [sys.executable, "train_draft.py", "configs/tiny.yaml", f"out={run}", *overrides]
        done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} in {tree} failed:\n{done.stderr[-2000:]}")
        for log in sorted(run.rglob("log.jsonl")):
            found[f"{name}/{log.relative_to(run)}"] = [json.loads(line) for line in log.read_text().splitlines()]
        for weights in sorted(run.rglob("model.safetensors")):
            found[f"{name}/{weights.relative_to(run)}"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    return found


def decode(run: str, count: int) -> None:
    """Print the results of ``count`` requests as JSON; with whatever specjax is imported."""
    import specjax

    target, draft = specjax.load_model(f"{run}/target"), specjax.load_model(f"{run}/draft")
    found = [request(specjax, target, draft, np.random.default_rng(i), i) for i in range(count)]
    print(json.dumps(found))


def request(specjax: Any, target: Any, draft: Any, rng: np.random.Generator, number: int) -> Any:
    k, rows = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    drafter = [specjax.DraftModel(draft, k=k), specjax.DraftModel(draft, k=k), specjax.NGram(k=k), None][number % 4]
    decoder = specjax.Decoder(target, drafter, VERIFIERS[number % len(VERIFIERS)])
    text = Path(os.__file__).read_text()
    starts = rng.integers(0, len(text) - 400, rows)
    prompts = [text[start : start + int(rng.integers(1, 120))] for start in starts]
    options: dict[str, Any] = {
        "max_new_tokens": int(rng.integers(5, 100)),
        "temperature": 0.0 if number % 3 == 0 else float(rng.uniform(0.3, 1.3)),
        "seed": number,
        "ignore_eos": bool(rng.integers(2)),
        "logprobs": [None, "raw", "processed"][int(rng.integers(3))],
        "stop_strings": ["return", None][int(rng.integers(2))],
    }
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_new_tokens": 5}
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "banned_tokens": [10, 11], "logit_bias": {12: 2.0}}
    options |= {name: value for name, value in (penalties | filters).items() if rng.integers(3) == 0}
    if number % 5 == 4:
        return [_plain(event) for event in decoder.stream(prompts[0], **options)]
    return _plain(decoder.generate(prompts, **options))


def _plain(result: Any) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: _json(value) for name, value in values.items() if not callable(value)}


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(value)
    return [_json(item) for item in value] if isinstance(value, list | tuple) else value


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def results(tree: Path, out: Path, count: int) -> dict[str, Any]:
    found = train(tree, out)
    command = [sys.executable, __file__, "--decode", str(out / "online"), "--requests", str(count)]
    done = subprocess.run(command, cwd=tree, env=_environment(tree), stdout=subprocess.PIPE, check=True)
    return found | {"requests": json.loads(done.stdout)}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """By path, timings left out."""
    if isinstance(value, dict):
        items = {f"{name}.{key}": item for key, item in value.items() if not any(part in key for part in TIMINGS)}
    elif isinstance(value, list):
        items = {f"{name}[{i}]": item for i, item in enumerate(value)} | {f"{name}.length": len(value)}
    else:
        return {name: value}
    return {path: leaf for key, item in items.items() for path, leaf in flat(item, key).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode:
        decode(args.decode, args.requests)
        return
    if args.commit is None:
        parser.error("give the commit to compare with")
    with worktree(args.commit) as tree, tempfile.TemporaryDirectory() as directory:
        there = flat(results(tree, Path(directory) / "there", args.requests))
        here = flat(results(ROOT, Path(directory) / "here", args.requests))
    differing = [name for name in there if name not in here or here[name] != there[name]]
    for name in differing[:SHOWN]:
        print(f"{name}: {there[name]!r} there, {here.get(name, 'nothing')!r} here")
    print(f"against {args.commit}: {len(there):,} values compared, {len(differing):,} differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
