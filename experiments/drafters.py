"""Which draft to distill: kinds, widths and depths for one target, at equal tokens and at equal time of training.

    python experiments/drafters.py configs/demo.yaml [a.b=v]... [--kinds] [--seeds 3] [--best NAME...] [--results FILE]

Every draft is begun from the target and distilled for ``distill`` of the config, without pretraining: `SHAPES` of the
separate draft and of glide, or with ``--kinds`` one of every kind, as its recipe in configs/drafters has it, beside
n-gram lookup. With the first seed all of them, with the others the four that decode fastest (two of each kind of
`SHAPES`; ``--best`` names them where it is known), and those, or all kinds, once more for as long as the slowest of all
took to train. Each run has its directory in ``drafters`` beside ``out``; what is finished is reused.

Then all are decoded at batch 1, in turns prompt by prompt, with every k of ``bench`` at temperatures 0 and 1: on tuning
prompts, which choose k, and on as many others, which are what is told. Speeds are over plain decoding of the same
turns; intervals are 95%, bootstrapped over prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specjax import registry
from specjax.config import RunConfig, load_config
from specjax.config.training import Architecture
from specjax.data.rows import Rows
from specjax.decode import programs
from specjax.drafters.ngram import NGram
from specjax.evaluation.bench import AUTOREGRESSIVE, Bench, Cell, Run
from specjax.jobs import distill as job
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.metrics import block_efficiency_interval
from specjax.report import record
from specjax.runtime import artifact, memory
from specjax.runtime.compile_cache import keep_programs
from specjax.runtime.progress import console_bars
from specjax.training.exports import parameter_count
from specjax.training.init.draft_vocabulary import coverage


def bootstrap(base: np.ndarray, found: np.ndarray, resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio of two rates, ``found`` over ``base``, and its 95% interval over prompts, taken in pairs. Each array is
    ``[prompts, 2]``: tokens, and calls or seconds."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, len(base), (resamples, len(base)))

    def rate(counts):
        return counts[..., 0].sum(-1) / counts[..., 1].sum(-1)

    ratios = rate(found[chosen]) / rate(base[chosen])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(rate(found) / rate(base)), float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A draft; ``heads``: query and key-value heads of a separate one, None: the target's."""

    kind: str
    layers: int
    width: int
    neurons: int
    heads: tuple[int, int] | None = None
    reads: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        more = "" if self.heads is None else f" {self.heads[0]}-{self.heads[1]} heads"
        more += "" if self.reads is None else f" of {'-'.join(map(str, self.reads))}"
        return f"{'glide' if self.kind == 'glide' else 'separate'} {self.layers}x{self.width}-{self.neurons}{more}"

    def changes(self) -> list[str]:
        sizes = {"hidden_size": self.width, "intermediate_size": self.neurons, "num_layers": self.layers}
        heads = (None, None) if self.heads is None else self.heads
        sizes |= {"num_heads": heads[0], "num_kv_heads": heads[1]}
        told = [f"draft.architecture.{name}={'null' if x is None else x}" for name, x in sizes.items()]
        told += [] if self.reads is None else [f"draft.reads={list(self.reads)}"]
        return [f"draft.kind={self.kind}", "draft.init=target", "draft.pretrain.steps=0", *told]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A draft as configs/drafters has it; ``kind`` is the file's name. ``ids``: that it can propose; None: all."""

    kind: str
    ids: int | None = None

    @property
    def name(self) -> str:
        return self.kind if self.ids is None else f"{self.kind} of {self.ids:,} ids"

    def changes(self) -> list[str]:
        recipe: Any = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{self.kind}.yaml"))
        rate = recipe["distill"]["optimizer"]["learning_rate"]
        # Sizes of the config's own draft are none of theirs.
        cleared = [
            f"draft.architecture.{name}={json.dumps(value)}"
            for name, value in dataclasses.asdict(Architecture()).items()
        ]
        own = [f"draft.{name}={json.dumps(value)}" for name, value in recipe["draft"].items()]
        own += [] if self.ids is None else [f"draft.draft_vocab_size={self.ids}"]
        return [*cleared, *own, "draft.pretrain.steps=0", f"distill.optimizer.learning_rate={rate}"]


Draft = Shape | Recipe
RECIPES = Path(__file__).parent.parent / "configs" / "drafters"
NGRAM = "ngram"
"""Needs no training."""


def _both(*sizes: tuple[int, int, int]) -> list[Shape]:
    return [Shape(kind, *size) for size in sizes for kind in ("draft_model", "glide")]


SHAPES: list[Draft] = [
    Shape("draft_model", 4, 160, 320, heads=(4, 2)),
    *_both((4, 160, 320), (4, 192, 512), (4, 256, 640), (2, 256, 640)),
    Shape("glide", 3, 256, 640),
    Shape("glide", 2, 256, 640, reads=(2, 3)),
]
KINDS: list[Draft] = [
    Shape("glide", 4, 256, 640),
    Shape("draft_model", 4, 256, 640),
    *(Recipe(file.stem) for file in sorted(RECIPES.glob("*.yaml"))),
    Recipe("eagle3", ids=1024),
]
_AGAIN = 4
"""The fastest: trained with every seed; of the two kinds of `SHAPES`, half of them each."""


@dataclasses.dataclass(frozen=True)
class Trained:
    shape: Draft
    seed: int
    steps: int
    equal_time: bool
    draft: job.TrainedDraft
    measures: job.Measures
    tokens_per_s: float
    """Of training: the median over the log, or over the turns of those that are trained for equal times."""

    @property
    def name(self) -> str:
        return f"{self.shape.name}, seed {self.seed}{', equal time' if self.equal_time else ''}"


class Study:
    def __init__(self, file: Path, overrides: Sequence[str], console: Console):
        self._file, self._console = file, console
        self._overrides = [*overrides, "selection.prompts=0", "control.learning_rates=[]"]
        self.config = self._config(SHAPES[0], 0, None)
        self.prepared = inputs.prepare(self.config)

    def _config(self, shape: Draft, seed: int, steps: int | None, *more: str) -> RunConfig:
        out = Path(load_config(self._file, self._overrides).out).parent / "drafters"
        name = shape.name.replace(" ", "_") + ("" if steps is None else f"-{steps}")
        of_time = [] if steps is None else [f"distill.steps={steps}", f"distill.eval_every={steps}"]
        own = [*shape.changes(), *of_time, f"seed={seed}", f"out={out / f'{name}-{seed}'}", *more]
        return load_config(self._file, [*self._overrides, *own])

    def train(self, shape: Draft, seed: int, steps: int | None = None) -> Trained:
        """``steps``: instead of the config's."""
        config = self._config(shape, seed, steps)
        with artifact.exclusive(Path(config.out)):
            found = job.distill(config, console_bars(self._console), self.prepared)
        speed = statistics.median(r["tokens_per_s"] for r in found.logs["draft-distill"] if "tokens_per_s" in r)
        steps_done = config.distill.num_steps
        trained = Trained(shape, seed, steps_done, steps is not None, found.draft_after, found.measures, speed)
        self._console.print(f"{trained.name}: alpha {_alpha(trained)}, {speed:,.0f} tokens/s of training")
        return trained

    def speeds(self, shapes: Sequence[Draft], turns: int, steps: int = 30) -> dict[Draft, float]:
        """Tokens a second of short trainings in turns: hours apart, the machine differs by more than the shapes."""
        found: dict[Draft, list[float]] = {shape: [] for shape in shapes}
        for turn in range(turns):
            for shape, speeds in found.items():
                config = self._config(shape, turn, steps, "eval.positions=512")
                with artifact.exclusive(Path(config.out)):
                    log = job.distill(config, prepared=self.prepared).logs["draft-distill"]
                speeds += [r["tokens_per_s"] for r in log if "tokens_per_s" in r][1:]
        return {shape: statistics.median(speeds) for shape, speeds in found.items()}

    def decode(self, drafts: Sequence[Trained], repeats: int, ngram: bool) -> dict[str, dict[str, Any]]:
        """Name -> temperature -> figures at the best k, with all of them beside."""
        settings = dataclasses.replace(self.config.bench, batch_sizes=(1,))
        count, target = settings.prompts, self.prepared.target
        prompts = held_out_prompts(self.prepared.corpus.held_out, target, settings.prompt_tokens, 2 * count)
        timed, tuning = prompts[:count], prompts[count:]
        factories: dict[str, Any] = {d.name: d.draft.of for d in drafts}
        factories |= {NGRAM: lambda k: NGram(k=k)} if ngram else {}
        verifier = registry.build(registry.VERIFIERS, self.config.verifier, "verifier")
        sampling = self.config.sampling.options()
        bench = Bench(target, factories, settings, timed, tuning, verifier, sampling, self.config.seed)
        found: dict[str, dict[str, Any]] = {name: {} for name in factories}
        with Progress(console=self._console) as progress:
            for t in settings.temperatures:
                cells = bench.cells_of(list(factories), 1, t)
                bar = progress.add_task(f"temperature {t:g}", total=len(cells) * (1 + (1 + repeats) * count))
                for cell in cells:
                    options = {"max_new_tokens": settings.new_tokens, "temperature": t, **sampling}
                    bench.decoder(cell.drafter, cell.k).compile(timed[:1], **options)
                    progress.advance(bar)

                def tick(bar=bar):
                    progress.advance(bar)

                chosen = bench.run(cells, tuning, tick)
                runs = [bench.run(cells, timed, tick) for _ in range(repeats)]
                seconds = {c: np.median([[s for s, _ in run[c].by_row] for run in runs], axis=0) for c in cells}
                plain = seconds[Cell(AUTOREGRESSIVE, 0, 1, t)]
                for name in found:
                    own = [cell for cell in cells if cell.drafter == name]
                    best = min(own, key=lambda cell: chosen[cell].seconds)
                    by_k = {c.k: _cell(runs[0][c], seconds[c], plain, settings.new_tokens) for c in own}
                    found[name][f"{t:g}"] = {"k": best.k, **by_k[best.k], "by_k": by_k}
                # All of a study's programs take more mappings of memory than a process may have.
                programs.free_programs()
                jax.clear_caches()
        of_shape = {shape: _pass_ms(bench, name) for shape, name in {d.shape: d.name for d in drafts}.items()}
        for draft in drafts:
            found[draft.name]["pass_ms"] = of_shape[draft.shape]
        return found


def _pass_ms(bench: Bench, name: str) -> dict[str, float]:
    """What drafting costs a token, in a block of 3: alone in a loop, and in turn with the target's pass."""
    timer = bench.timer(name, 3)
    for _ in range(9):
        timer.turn()
    costs = [(c.draft, c.passes - c.target) for c in timer.costs()[0]]
    apart, in_turn = (1e3 * float(np.median(x)) / 3 for x in zip(*costs, strict=True))
    return {"apart": apart, "in_turn": in_turn}


def _cell(run: Run, seconds: np.ndarray, plain: np.ndarray, new_tokens: int) -> dict[str, Any]:
    emitted = np.full(len(seconds), float(new_tokens))
    ratio, low, high = bootstrap(np.stack([emitted, plain], axis=-1), np.stack([emitted, seconds], axis=-1))
    stats = [stats for _, stats in run.by_row]
    efficiency = {"value": run.stats.block_efficiency, **dataclasses.asdict(block_efficiency_interval(stats))}
    speed = float(emitted.sum() / seconds.sum())
    return {"tokens_per_s": speed, "speedup": {"value": ratio, "low": low, "high": high}, "tokens_a_call": efficiency}


def _alpha(trained: Trained) -> str:
    return " ".join(f"{a:.3f}" for a in _alphas(trained))


def _alphas(trained: Trained) -> tuple[float, ...]:
    """By place of a block; of a separate draft one, the same at each."""
    return trained.measures.alpha_at_after or (trained.measures.alpha_after,)


def _row(trained: Trained, decoded: Mapping[str, Any], tokens_a_step: int, rows: Rows) -> dict[str, Any]:
    count = parameter_count(trained.draft.params)
    kept = getattr(getattr(trained.draft.drafter, "model", None), "kept", None)
    return {
        "text_covered": 1.0 if kept is None else coverage(kept, rows),
        "name": trained.shape.name,
        "seed": trained.seed,
        "equal_time": trained.equal_time,
        **dataclasses.asdict(trained.shape),
        "parameters": count,
        "megabytes": 2 * count / 1e6,
        "tokens": trained.steps * tokens_a_step,
        "training_tokens_per_s": trained.tokens_per_s,
        "alpha_at": list(_alphas(trained)),
        "alpha_untrained": trained.measures.alpha_before,
        "draft_nll": trained.measures.draft_nll_after,
        **decoded,
    }


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table(header_style="bold")
    for name in ("draft", "seed", "MB", "k tokens", "alpha, place 1 / last", "ms a drafted token"):
        table.add_column(name)
    for t in ("0", "1"):
        table.add_column(f"T={t}: k, tokens a call, speedup")
    for row in sorted(rows, key=lambda row: -row["0"]["speedup"]["value"]):
        figures = [
            "k={k}, {tokens_a_call[value]:.2f}, {speedup[value]:.2f} [{speedup[low]:.2f}, {speedup[high]:.2f}]".format(
                **row[t]
            )
            for t in ("0", "1")
        ]
        trained = ["", "", "", "", ""]
        if "seed" in row:
            alphas = f"{row['alpha_at'][0]:.3f} / {row['alpha_at'][-1]:.3f}"
            cost = f"{row['pass_ms']['in_turn']:.2f} ({row['pass_ms']['apart']:.2f} apart)"
            seed = f"{row['seed']}{' (equal time)' if row['equal_time'] else ''}"
            trained = [seed, f"{row['megabytes']:.1f}", f"{row['tokens'] / 1e3:.0f}", alphas, cost]
        table.add_row(row["name"], *trained, *figures)
    console.print(table)


def _fastest(drafts: Sequence[Trained], decoded: Mapping[str, Any], of_each: bool) -> list[Draft]:
    """`_AGAIN` by the two temperatures' speedups, ``of_each`` kind as many."""

    def speed(draft: Trained) -> float:
        return float(np.prod([decoded[draft.name][t]["speedup"]["value"] for t in ("0", "1")]))

    kinds = dict.fromkeys(d.shape.kind if of_each else "" for d in drafts)
    ranked = [sorted((d for d in drafts if kind in ("", d.shape.kind)), key=speed, reverse=True) for kind in kinds]
    return [d.shape for best in ranked for d in best[: _AGAIN // len(kinds)]]


def main() -> None:
    memory.one_heap()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="of the short trainings that tell equal times")
    parser.add_argument("--kinds", action="store_true", help="one draft of every kind")
    parser.add_argument("--best", nargs="+", choices=[shape.name for shape in (*SHAPES, *KINDS)], metavar="NAME")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    console = Console()
    study = Study(args.config, args.overrides, console)
    keep_programs(study.config.compile_cache)
    shapes = KINDS if args.kinds else SHAPES
    drafts = [study.train(shape, 0) for shape in shapes]
    named = [shape for shape in shapes if shape.name in (args.best or ())]
    best = named or _fastest(drafts, study.decode(drafts, 1, False), of_each=not args.kinds)
    jax.clear_caches()
    longer = {d.shape: d for d in drafts if args.kinds or d.shape in best}
    drafts += [study.train(shape, seed) for shape in best for seed in range(1, args.seeds)]
    slowest = min(drafts, key=lambda d: d.tokens_per_s).shape
    speeds = study.speeds(list(dict.fromkeys([*longer, slowest])), args.turns)
    steps = {s: round(d.steps * speeds[s] / min(speeds.values())) for s, d in longer.items()}
    drafts += [study.train(shape, 0, n) for shape, n in steps.items() if n > longer[shape].steps]
    drafts = [dataclasses.replace(d, tokens_per_s=speeds.get(d.shape, d.tokens_per_s)) for d in drafts]
    decoded = study.decode(drafts, args.repeats, args.kinds)
    distill, seq_len = study.config.distill, study.config.data.seq_len
    rows = [_row(d, decoded[d.name], distill.batch_size * seq_len, study.prepared.train_rows) for d in drafts]
    rows += [{"name": NGRAM, "kind": NGRAM, **decoded[NGRAM]}] if args.kinds else []
    show(rows, console)
    if args.results is not None:
        record.write(args.results, {"prompts": study.config.bench.prompts, "drafts": rows})


if __name__ == "__main__":
    main()
