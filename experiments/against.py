"""Decoding and training speed of this tree against that of another commit: the same work, in turns.

    python experiments/against.py HEAD~1 [--target DIR] [--draft DIR] [--pairs 160] [--k 5]     (6 minutes on 2 cores)
    python experiments/against.py HEAD~1 --training [--pairs 8] [--rounds 6]                   (18 minutes)

Each commit decodes in a process of its own (the other one from a worktree that git makes and removes). A pair is one
generation of each, the shortest that a slow spell of the machine can spoil. For plain and speculative decoding, greedy
and at temperature 1, batch 1: the median over pairs of (seconds a target call there / here), above 1 where this tree is
faster, with a 95% interval (bootstrap over the pairs). Where the tokens are the same, so are the calls; a commit that
draws others by the same seed has its luck taken out.

``--training``: the distillation of configs/demo.yaml from its first step; a pair is ten steps of each. Two processes of
one commit differ by two percent for as long as they run, so each round has new ones, and the interval is that of the
rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
POINTS = [(drafted, temperature) for drafted in (False, True) for temperature in (0.0, 1.0)]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 56, 192
_WINDOW, _STEP_TOKENS = 10, 512  # steps whose metrics are looked at together; tokens of a step of configs/demo.yaml


def serve(target: Path, draft: Path, k: int) -> None:
    """Decode as asked on standard input, one JSON line an answer: seconds and tokens."""
    import specjax

    model = specjax.load_model(target)
    decoders = {
        True: specjax.Decoder(model, specjax.load_drafter(draft, model, k), "block"),
        False: specjax.Decoder(model),
    }
    text = sorted(Path(os.__file__).parent.glob("*.py"))[:: 200 // PROMPTS][:PROMPTS]
    prompts = [model.tokenizer(path.read_text())["input_ids"][-PROMPT_TOKENS:] for path in text]

    def decode(drafted: bool, temperature: float, i: int) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "seed": i, "ignore_eos": True}
        start = time.perf_counter()
        result = decoders[drafted].generate([prompts[i]], temperature=temperature, **options)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "calls": result.stats[0].blocks, "tokens": result.tokens[0]}

    for point in POINTS:
        decode(*point, 0)  # compiles
    for line in sys.stdin:
        print(json.dumps(decode(*json.loads(line))), flush=True)


def serve_training(pairs: int, out: str) -> None:
    """Train ten steps for each line on standard input, one JSON line an answer: seconds of the ten, and their loss."""
    from specjax.config import load_config

    try:
        job: Any = importlib.import_module("specjax.jobs.distill")
    except ImportError:  # where it was before
        job = importlib.import_module("specjax.training.job")

    nothing = ["selection.prompts=0", "control.learning_rates=[]", "draft.pretrain.steps=0", "eval.positions=256"]
    never = [f"distill.{name}=100000" for name in ("eval_every", "save_every")]
    steps = _WINDOW * (pairs + 1)
    config = load_config("configs/demo.yaml", [*nothing, *never, f"distill.steps={steps + 1}", f"out={out}"])

    @contextlib.contextmanager
    def bars(name, count):
        began = 0.0

        def progress(step, record):
            nonlocal began
            if name != "draft-distill" or step % _WINDOW:
                return
            if step > _WINDOW:  # the first ones are warmer than the rest of their process
                answer = {"seconds": time.perf_counter() - began, "calls": _WINDOW, "tokens": [record["loss"]]}
                print(json.dumps(answer), flush=True)
            if step == steps or not sys.stdin.readline():
                sys.exit()
            began = time.perf_counter()

        yield progress

    with contextlib.redirect_stderr(open(os.devnull, "w")):
        job.run(config, bars)


class Worker:
    """A tree that decodes or trains, in its own process."""

    def __init__(self, tree: Path, arguments: Sequence[Any]):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=tree, env=environment, **pipes)

    def work(self, *what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """95%, of the median; ``ratios``: by round, if there are several, and pair."""
    rng = np.random.default_rng(0)
    each = np.median(ratios, axis=1) if len(ratios) > 1 else ratios[0]
    medians = np.median(rng.choice(each, (10_000, len(each))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def told(name: str, of_pair: int, rounds: int, pairs: list[tuple[dict, dict]]) -> str:
    """A line of the table; a pair is ``of_pair`` tokens of each."""
    seconds = np.asarray([[answer["seconds"] for answer in pair] for pair in pairs])
    of_call = np.asarray([[answer["seconds"] / answer["calls"] for answer in pair] for pair in pairs])
    ratios = of_call[:, 0] / of_call[:, 1]
    low, high = interval(ratios.reshape(rounds, -1))
    speeds = of_pair / np.median(seconds, axis=0)
    same = "same" if all(a["tokens"] == b["tokens"] for a, b in pairs) else "others"
    half = (high - low) / 2
    numbers = f"{speeds[0]:7.0f}{speeds[1]:7.0f}{np.median(ratios):9.3f}"
    return f"{name:22}{numbers}   {low:.3f} to {high:.3f} (half {half:.3f})   {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--target", type=Path, default=ROOT / "models/demo-target")
    parser.add_argument("--draft", type=Path, default=ROOT / "models/demo-drafts/separate")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    count, rounds = args.pairs or (8 if args.training else 160), args.rounds or (6 if args.training else 1)
    if args.serve:
        serve_training(count, args.out) if args.training else serve(args.target, args.draft, args.k)
        return
    if args.commit is None:
        parser.error("give the commit to compare with")
    points: list[tuple] = [()] if args.training else POINTS
    found: dict[tuple, list[tuple[dict, dict]]] = {point: [] for point in points}
    with worktree(args.commit) as tree, tempfile.TemporaryDirectory() as scratch:
        for turn in range(rounds):
            workers = []
            for name, where in (("there", tree), ("here", ROOT)):
                own = ["--training", "--pairs", str(count), "--out", f"{scratch}/{name}{turn}"]
                decoding = ["--target", args.target.resolve(), "--draft", args.draft.resolve(), "--k", str(args.k)]
                workers.append(Worker(where, own if args.training else decoding))
            there, here = workers
            try:
                for pair in range(count):
                    for point in points:
                        order = (there, here) if (turn + pair // PROMPTS) % 2 else (here, there)
                        what = (*point, pair % PROMPTS)
                        answers = {worker: worker.work(*what) for worker in order}
                        found[point].append((answers[there], answers[here]))
            finally:
                there.close()
                here.close()
    of_pair = _WINDOW * _STEP_TOKENS if args.training else NEW_TOKENS
    print(f"against {args.commit}, {rounds} x {count} pairs of {of_pair} tokens, k = {args.k}, {PROMPTS} prompts")
    print(f"{'tokens a second':22}{'there':>7}{'here':>7}{'ratio':>9}   95%                           tokens or losses")
    for point, pairs in found.items():
        name = f"{'speculative' if point[0] else 'plain'}, T = {point[1]:g}" if point else "training"
        print(told(name, of_pair, rounds, pairs))


if __name__ == "__main__":
    main()
