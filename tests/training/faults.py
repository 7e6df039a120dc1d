"""Kill a training process with SIGKILL at random moments, start it again until it finishes, and compare what it leaves
with what an uninterrupted run leaves: weights, optimizer state, log, order of the data and what was drawn at random
(half of the rows are sampled from the draft as it learns), bit for bit.

    python -m tests.training.faults [KILLS] [SEED]

The moments fall into steps, asynchronous saves (into the writing, and between the commit and its manifest) and
evaluations in turn; which step, save or evaluation, and how long after its beginning, is drawn. The processes share a
compile cache, whose files the kills may also cut short.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from specjax.data.rows import Batches
from specjax.runtime import checkpoint, fingerprint
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import read_log
from specjax.training import trainer
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState
from tests import processes
from tests.training import test_on_policy, toys

PHASES = ("step", "save", "evaluation", "manifest")
ORDER = "order.jsonl"
_SETTINGS = {"steps": 60, "eval_every": 9, "save_every": 7, "data": {**test_on_policy.DATA, "every": 11}}
_COUNTS = {"step": 50, "save": 8, "evaluation": 6, "manifest": 8}
_LONGEST_DELAY = {"step": 0.02, "save": 0.03, "evaluation": 0.03, "manifest": 0.0}


@dataclasses.dataclass(frozen=True)
class Kill:
    """``delay`` seconds after the ``number``-th step, save, ... of the process began."""

    phase: str
    number: int
    delay: float


def kills(count: int, seed: int) -> list[Kill]:
    draw = random.Random(seed)
    phases = itertools.islice(itertools.cycle(PHASES), count)
    return [Kill(p, draw.randint(1, _COUNTS[p]), draw.uniform(0, _LONGEST_DELAY[p])) for p in phases]


def train(directory: Path, kill: Kill | None = None) -> None:
    """The toy stage in this process, which may not survive it."""
    parts = {"save": (Checkpoints, "save"), "manifest": (checkpoint, "write_json"), "evaluation": (trainer, "evaluate")}
    directory.mkdir(parents=True, exist_ok=True)

    real = Batches.indices

    def recorded(self, step):
        numbers = real(self, step)
        with (directory / ORDER).open("a") as order:
            order.write(json.dumps([step, numbers.tolist()]) + "\n")
        return numbers

    with mock.patch.object(Batches, "indices", recorded):
        if kill is None or kill.phase == "step":
            test_on_policy.train(directory / "stage", _kill_at_step(kill) if kill else None, **_SETTINGS)
        else:
            owner, name = parts[kill.phase]
            with mock.patch.object(owner, name, _killing(getattr(owner, name), kill)):
                test_on_policy.train(directory / "stage", **_SETTINGS)


def _die(delay: float) -> None:
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _kill_at_step(kill: Kill):
    calls = itertools.count(1)

    def progress(step, record):
        if next(calls) == kill.number:
            _die(kill.delay)

    return progress


def _killing(real: Any, kill: Kill):
    """``real``, in whose ``number``-th call, or in what that call leaves running, the process dies."""
    calls = itertools.count(1)

    @functools.wraps(real)
    def killing(*args, **kwargs):
        if next(calls) != kill.number:
            return real(*args, **kwargs)
        if kill.phase == "save":
            real(*args, **kwargs)
        _die(kill.delay)
        while kill.phase == "evaluation":
            real(*args, **kwargs)
        return time.sleep(60)

    return killing


def start(directory: Path, kill: Kill | None = None) -> int:
    """`train` in a process of its own; its exit status."""
    plan = [] if kill is None else [json.dumps(dataclasses.asdict(kill))]
    root = Path(__file__).parents[2]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "programs")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment = {**os.environ, **cache, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.training.faults", str(directory), *plan]
    done = processes.run(command, root, environment)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"the training process failed by itself:\n{done.stderr}")
    return done.returncode


def left_by(directory: Path) -> dict[str, Any]:
    """Everything that must not depend on interruptions; a timing in the log may."""
    params = toys.bigram_params(1)
    state = TrainState(params, make_optimizer(toys.stage(**_SETTINGS)).init(params))
    with Checkpoints(directory / "stage" / "checkpoints") as checkpoints:
        restored = checkpoints.restore_latest(state)
    assert restored is not None
    order: dict[int, list[int]] = {}
    for line in (directory / ORDER).read_text().splitlines():
        step, rows = json.loads(line)
        assert order.setdefault(step, rows) == rows, f"step {step} saw other rows after a restart"
    state = restored.state
    return {
        "step": restored.step,
        "weights": fingerprint.digest(state.params),
        "optimizer state": fingerprint.digest(state.opt),
        "running alpha": float(state.alpha),
        "log": [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in read_log(directory / "stage")],
        "order of the data": order,
        # How many older pools are left depends on which checkpoint was committed by then.
        "samples": max((directory / "stage" / "pools").glob("*.safetensors")).read_bytes(),
    }


def half_written(directory: Path) -> bool:
    """A save was under way when the process died."""
    steps = [entry for entry in (directory / "stage" / "checkpoints").glob("*") if entry.is_dir()]
    return any("tmp" in step.name or not (step / checkpoint.MANIFEST).exists() for step in steps)


def survive(directory: Path, kill: Kill) -> tuple[bool, int]:
    """(whether the kill met a save under way, starts until the stage was finished)."""
    assert start(directory, kill) == -signal.SIGKILL, f"{kill}: the process finished before"
    met, starts = half_written(directory), 2
    while start(directory) != 0:
        starts += 1
    return met, starts


def main(count: int, seed: int) -> int:
    began, planned = time.monotonic(), kills(count, seed)
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(start, Path(scratch) / "uninterrupted")
        folders = [Path(scratch) / str(number) for number in range(count)]
        ran = list(pool.map(survive, folders, planned))
        assert plain.result() == 0
        expected = left_by(Path(scratch) / "uninterrupted")
        identical, met = 0, Counter()
        for folder, kill, (in_save, starts) in zip(folders, planned, ran, strict=True):
            found = left_by(folder)
            differing = [name for name in expected if found[name] != expected[name]]
            identical += not differing
            met[kill.phase] += 1
            met["half-written saves"] += in_save
            verdict = f"differs in {', '.join(differing)}" if differing else "identical"
            where = ", a save half-written" if in_save else ""
            print(f"{kill.phase} {kill.number} + {1000 * kill.delay:.0f} ms{where}, {starts} starts: {verdict}")
    print(", ".join(f"{what}: {times}" for what, times in met.items()), f"in {time.monotonic() - began:.0f} s")
    print(f"faults: {identical}/{count} bit-identical")
    return 0 if identical == count and met["half-written saves"] else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    if given and not given[0].isdigit():
        train(Path(given[0]), Kill(**json.loads(given[1])) if given[1:] else None)
    else:
        sys.exit(main(int(given[0]) if given else 20, int(given[1]) if given[1:] else 0))
