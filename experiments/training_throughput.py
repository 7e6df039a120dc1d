"""Training throughput: what the trainer's loop adds to the bare jitted step, on the demo's distillation.

    python experiments/training_throughput.py [--steps 300]
    python experiments/training_throughput.py --kinds [NAME...] [--steps 100]

Three loops take turns of ten steps in one run, on the same machine, shapes and options of the compiler:

- **trainer**: `Trainer` as `make demo` calls it: rows cut and put together on the host, metrics fetched and logged
  every ten steps, checkpoints saved in the background, evaluations;
- **bare**: the same compiled update (`Update`) over batches that lie on the device: no data, no log, no saves;
- **hand-written**: a few lines of JAX and optax for the same loss, without metrics, clipping or schedule.

The trainer's step is the median over its turns without save or evaluation, plus what a save costs spread over
`save_every` steps: what its turn, and the next one, which runs beside the writing, take beyond the median. Evaluation,
held-out decoding included, is no training; its seconds and its share of the stage stand beside. Ratios are medians over
the turns, each over the turn next to it, between their 10th and 90th percentile. Exit status 1 if the trainer is below
85% of the bare step. About 5 minutes on 2 cores.

With ``--kinds``, the recipes of configs/drafters (all, or those that are named), each against its own bare step; about
2 minutes a kind.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from specjax import backend, registry
from specjax.cli import user_errors
from specjax.config import RunConfig, Stage, load_config
from specjax.data.rows import Batches
from specjax.evaluation.held_out import held_out_decoding
from specjax.interfaces import Batch, Initial
from specjax.jobs import inputs
from specjax.report import record
from specjax.runtime import memory
from specjax.runtime.compile_cache import keep_programs
from specjax.training.init.first_weights import initial_draft
from specjax.training.layout import ONE_DEVICE
from specjax.training.optimizer import make_optimizer
from specjax.training.step import Update, microbatch_rows, start_state
from specjax.training.teacher import target_output
from specjax.training.trainer import LOG_EVERY, StageData, Trainer, form_of, with_defaults

CONFIG = Path("configs/demo.yaml")
RECIPES = Path("configs/drafters")
RESULTS = Path(__file__).parent / "results"
REQUIRED = 0.85
"""Least speed of the trainer over that of the bare step."""
LOOPS = ("trainer", "bare", "hand-written")


class Loop:
    """A compiled ``step`` (state, teacher, batch) -> (state, loss or metrics), called over batches on the device."""

    def __init__(self, step: Callable, state: Any, teacher: Any, batches: Sequence[Batch]):
        self._step, self._state, self._teacher, self._batches = step, state, teacher, batches
        self.first = jax.device_get(self._run())

    def _run(self) -> Any:
        outputs = []
        for batch in self._batches:
            self._state, output = self._step(self._state, self._teacher, batch)
            outputs.append(output)
        return jax.block_until_ready(outputs)[0]

    def __call__(self) -> float:
        """Seconds a step."""
        began = time.perf_counter()
        self._run()
        return (time.perf_counter() - began) / len(self._batches)


@dataclasses.dataclass(frozen=True)
class Turn:
    """The trainer's steps ``first`` to ``last`` and, where they had a turn after it, the other loops' seconds a
    step."""

    first: int
    last: int
    seconds: float
    others: dict[str, float]


class Turns:
    """For `Trainer.run` to call after every step: where the device has nothing left to do, the others take a turn. Not
    after a save, which is being written."""

    def __init__(self, loops: Mapping[str, Callable[[], float]], stage: Stage):
        self._loops, self._stage = loops, stage
        self._began, self._step = 0.0, 0
        self.turns: list[Turn] = []

    def __call__(self, step: int, record: dict[str, float]) -> None:
        if record.get("step") != step:  # not logged, so not waited for
            return
        seconds, others = time.perf_counter() - self._began, {}
        if step % self._stage.save_every:
            order = list(self._loops) if len(self.turns) % 2 else list(self._loops)[::-1]
            others = {name: self._loops[name]() for name in order}
        if self._step:  # the first steps warm up
            self.turns.append(Turn(self._step + 1, step, seconds, others))
        self._began, self._step = time.perf_counter(), step


def figures(turns: Sequence[Turn], stage: Stage) -> dict[str, Any]:
    """``step_s``: seconds a step of every loop, the trainer's with saving. ``ratios``: name -> (median, 10%, 90%) of
    speeds."""

    def evaluates(turn: Turn) -> bool:
        return turn.last == stage.steps or turn.last % stage.eval_every == 0

    def saves(turn: Turn) -> bool:
        return turn.last == stage.steps or turn.last % stage.save_every == 0 or turn.first % stage.save_every == 1

    plain = [t for t in turns if not evaluates(t) and not saves(t)]
    own = np.array([t.seconds / (t.last - t.first + 1) for t in plain])
    others = {name: np.array([t.others[name] for t in plain]) for name in plain[0].others}
    step = float(np.median(own))

    def excess(some: Sequence[Turn]) -> list[float]:
        return [t.seconds - (t.last - t.first + 1) * step for t in some]

    # Of a save that falls together with an evaluation nothing is known.
    saving = sum(excess([t for t in turns if saves(t) and not evaluates(t)]))
    saved = sum(t.last % stage.save_every == 0 and not evaluates(t) for t in turns)
    saving = max(0.0, saving) / max(1, saved)
    evaluation = excess([t for t in turns if evaluates(t)])
    saving_share = saving / (saving + stage.save_every * step)
    slower = 1 - saving_share
    pairs = {"trainer / bare": others["bare"] / own * slower}
    if "hand-written" in others:
        pairs["trainer / hand-written"] = others["hand-written"] / own * slower
        pairs["bare / hand-written"] = others["hand-written"] / others["bare"]
    return {
        "turns": len(plain),
        "step_s": {"trainer": step / slower, **{name: float(np.median(s)) for name, s in others.items()}},
        "ratios": {name: [float(q) for q in np.quantile(r, [0.5, 0.1, 0.9])] for name, r in pairs.items()},
        "save_s": saving,
        "saving_share": saving_share,
        "evaluation_s": evaluation,
        "evaluation_share": evaluation[-1] / (evaluation[-1] + stage.eval_every * step / slower),
    }


def bare(initial: Initial, stage: Stage, target: Any, batches: Sequence[Batch]) -> Loop:
    """The trainer's own program."""
    optimizer = make_optimizer(stage)
    state = start_state(initial.params, optimizer, stage.optimizer.ema is not None, ONE_DEVICE, initial.drafter)
    rows = microbatch_rows(stage.batch_size, batches[0].tokens.shape[1])
    loss = registry.build(registry.LOSSES, stage.loss, "distill.loss")
    options = {
        "skip": stage.skip_non_finite > 0,
        "form": form_of(with_defaults(stage, initial.drafter)),
        "ema": stage.optimizer.ema,
    }
    update = Update(initial.drafter, loss, optimizer, target.spec, rows, **options).jitted()
    return Loop(update.lower(state, target.params, batches[0]).compile(), state, target.params, batches)


def hand_written(initial: Initial, stage: Stage, target: Any, batches: Sequence[Batch]) -> Loop:
    """The same forward KL without anything of `specjax.training`; the models are the project's."""
    optimizer, drafter = optax.adamw(stage.optimizer.peak), initial.drafter

    def kl(params: Any, target_params: Any, batch: Batch) -> jax.Array:
        out = target_output(target.spec, target_params, batch, drafter.reads)
        log_p, total, weights = jax.nn.log_softmax(out.logits), jnp.float32(0), jnp.float32(0)
        for prediction in drafter.predictions(params, batch, out):
            assert prediction.rows is None  # position by position, as the target's
            log_q, weight = jax.nn.log_softmax(prediction.logits), prediction.share * prediction.weight
            total += jnp.sum(weight * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
            weights += jnp.sum(weight)
        return total / weights

    def step(state: tuple, target_params: Any, batch: Batch) -> tuple:
        params, opt = state
        loss, grads = jax.value_and_grad(kl)(params, target_params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    step = jax.jit(step, donate_argnums=0, compiler_options=backend.compiler_options())
    params = jax.tree.map(jnp.array, initial.params)
    return Loop(step, (params, optimizer.init(params)), target.params, batches)


def measure(config: RunConfig, stage: Stage, out: Path, makers: Mapping[str, Callable[..., Loop]]) -> dict[str, Any]:
    prepared = inputs.prepare(config)
    target, rows = prepared.target, prepared.train_rows
    initial = initial_draft(config, target, rows)
    order = Batches(rows, stage.batch_size, config.seed)
    batches = [jax.device_put(order[i]) for i in range(LOG_EVERY)]
    loops = {name: make(initial, stage, target, batches) for name, make in makers.items()}
    losses = [float(first["loss"] if isinstance(first, dict) else first) for first in (x.first for x in loops.values())]
    np.testing.assert_allclose(losses[1:], losses[:-1], rtol=1e-4, err_msg="the loops compute different losses")
    turns = Turns(loops, stage)
    decoding = held_out_decoding(config, target, initial.drafter, prepared.corpus.held_out)
    data = StageData(rows, prepared.held_out_rows, config.seed)
    Trainer(out, stage, initial.drafter, initial.params, target, data, decoding=decoding).run(turns)
    return {"tokens": stage.batch_size * rows.length, "loss": losses, **figures(turns.turns, stage)}


def table_of(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"forward KL, online teacher, {found['tokens']} tokens a step, {found['turns']} turns")
    for name in ("loop", "ms a step", "tokens/s", "speed / bare", "speed / hand-written"):
        table.add_column(name, justify="left" if name == "loop" else "right")

    def shown(ratio: str) -> str:
        return "{:.3f} ({:.3f} to {:.3f})".format(*found["ratios"][ratio]) if ratio in found["ratios"] else ""

    for name in found["step_s"]:
        step = found["step_s"][name]
        ratios = (shown(f"{name} / {other}") for other in LOOPS[1:])
        table.add_row(name, f"{1e3 * step:.1f}", f"{found['tokens'] / step:,.0f}", *ratios)
    return table


def of_kinds(names: Sequence[str], steps: int, console: Console) -> dict[str, Any]:
    """The trainer against its bare step, by recipe."""
    table = Table("kind", "tokens/s", "trainer / bare")
    found: dict[str, Any] = {}
    for name in names:
        sizes = [f"distill.{field}={steps}" for field in ("steps", "eval_every")]
        recipe = [*sizes, f"distill.save_every={steps // 2}", "selection.prompts=0", "eval.positions=512"]
        config = load_config(RECIPES / f"{name}.yaml", recipe)
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = measure(config, config.distill, Path(scratch) / "stage", {"bare": bare})
        jax.clear_caches()
        speed = found[name]["tokens"] / found[name]["step_s"]["trainer"]
        table.add_row(
            name, f"{speed:,.0f}", "{:.3f} ({:.3f} to {:.3f})".format(*found[name]["ratios"]["trainer / bare"])
        )
    console.print(table)
    return found


def of_demo(steps: int, console: Console) -> dict[str, Any]:
    """All three loops."""
    config = load_config(CONFIG, [])
    keep_programs(config.compile_cache)
    stage = dataclasses.replace(config.distill, steps=steps)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(config, stage, Path(scratch) / "stage", {"bare": bare, "hand-written": hand_written})
    console.print(table_of(found))
    first, *later = found["evaluation_s"]
    print(f"a save: {found['save_s']:.2f} s, {found['saving_share']:.1%} of training, in the trainer's figures; "
          f"an evaluation: {later[-1] if later else first:.1f} s ({first:.1f} s with compiling), "
          f"{found['evaluation_share']:.0%} of the stage beside training")  # fmt: skip
    return found


def main() -> int:
    memory.one_heap()
    recipes = sorted(file.stem for file in RECIPES.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, help="of the trainer; as many of each other loop")
    parser.add_argument("--kinds", nargs="*", choices=recipes, metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console()
    if args.kinds is None:
        steps, name = args.steps or 300, "training_throughput.json"
        found = of_demo(steps, console)
        ratios = {"trainer / bare": found["ratios"]["trainer / bare"][0]}
    else:
        steps, name = args.steps or 100, "training_throughput_kinds.json"
        kinds = of_kinds(args.kinds or recipes, steps, console)
        ratios = {kind: of_kind["ratios"]["trainer / bare"][0] for kind, of_kind in kinds.items()}
        found = {"kinds": kinds}
    lowest = min(ratios, key=lambda name: ratios[name])
    met = ratios[lowest] >= REQUIRED
    print(f"{lowest} {ratios[lowest]:.3f}, asked >= {REQUIRED}: {'met' if met else 'MISSED'}")
    record.write(args.out or RESULTS / name, {"steps": steps, **found})
    return 0 if met else 1


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
