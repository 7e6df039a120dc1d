"""Objectives, data and teachers compared on one pair: whose draft decodes fastest, at equal draft-token updates.

    python experiments/distill_objectives.py configs/objectives.yaml [a.b=v]... [--seeds 3] [--results FILE]
    python experiments/distill_objectives.py configs/objectives.yaml --tuned [--results FILE]
    python experiments/distill_objectives.py configs/objectives.yaml --own-text [--seeds 3] [--results FILE]

Every run starts from the same cut draft and sees as many tokens; `distill` of the config is the common part, and
`RECIPES` says what each recipe changes of it (``--tuned``: `TUNED`, other optimizers and steps for forward KL and for
cross-entropy; ``--own-text``: `OWN_TEXT`, text that the models write, with its prompts' predictions and without). With
the first seed: every recipe. With the others: the three recipes of most tokens a target call, cross-entropy at its best
(the control), and forward KL with the teacher online and cached; of ``--own-text`` all. Last, cross-entropy for as
long as the best recipe took, and the best recipe timed against the control.

Decoded on the held-out prompts of `selection`, timed on those of `bench` at batch 1, in turns. Intervals are 95%,
bootstrapped over prompts (in pairs for a ratio), all seeds of a recipe together. Each run has its directory under
`out`, and what is finished is reused.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drafters import bootstrap
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from specjax.config import RunConfig, load_config
from specjax.errors import SpecjaxError
from specjax.evaluation.held_out import HeldOutDecoding, held_out_decoding
from specjax.jobs import distill as job
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.metrics import Interval, block_efficiency_interval
from specjax.report import record
from specjax.runtime import artifact, fingerprint, memory
from specjax.runtime.compile_cache import keep_programs
from specjax.runtime.progress import console_bars
from specjax.training import selection
from specjax.training.init.first_weights import initial_draft
from specjax.training.selection import Decoded

CONTROL, ONLINE, CACHED = "cross_entropy", "forward_kl", "forward_kl, cached"
CONTROL_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
OTHER_DATA = ("forward_kl, target-generated", "forward_kl, on-policy 0.5")
MASKED = "prompts masked"
# Name -> what it changes of `distill`. OUT is the directory of the runs, SEED the run's, ROWS how many rows it sees.
RECIPES: dict[str, tuple[str, ...]] = {
    **{f"{CONTROL} {rate:g}": ("loss=cross_entropy", f"optimizer.learning_rate={rate}") for rate in CONTROL_RATES},
    ONLINE: ("loss=forward_kl",),
    "reverse_kl": ("loss=reverse_kl",),
    "jensen_shannon": ("loss=jensen_shannon",),
    "total_variation": ("loss=total_variation",),
    "lk_alpha": ("loss=lk_alpha",),
    "lk_lambda": ("loss=lk_lambda",),
    "forward_kl + cross_entropy": (
        "loss={kind: sum, of: [{kind: forward_kl, weight: 0.9}, {kind: cross_entropy, weight: 0.1}]}",
    ),
    "adaspec": ("loss={kind: adaspec, reference: OUT/forward_kl-0/draft}",),
    OTHER_DATA[0]: ("loss=forward_kl", "data={kind: generated, sequences: ROWS}"),
    OTHER_DATA[1]: ("loss=forward_kl", "data={kind: on_policy, share: 0.5}"),
    CACHED: ("loss=forward_kl", "teacher=cached"),
}
_HALF = ("batch_size=1", "steps=1200", "eval_every=1200", "optimizer.warmup_steps=100")
TUNED: dict[str, tuple[str, ...]] = {
    f"{CONTROL} 0.001": RECIPES[f"{CONTROL} 0.001"],
    f"{CONTROL}, Muon": ("loss=cross_entropy", "optimizer.kind=muon", "optimizer.learning_rate=2e-3"),
    f"{CONTROL}, half a batch": ("loss=cross_entropy", "optimizer.learning_rate=7e-4", *_HALF),
    ONLINE: RECIPES[ONLINE],
    f"{ONLINE} 0.003": ("loss=forward_kl", "optimizer.learning_rate=3e-3"),
    **{
        f"{ONLINE}, Muon {rate:g}": ("loss=forward_kl", "optimizer.kind=muon", f"optimizer.learning_rate={rate}")
        for rate in (1.5e-3, 3e-3, 6e-3)
    },
    f"{ONLINE}, half a batch": ("loss=forward_kl", "optimizer.learning_rate=1e-3", *_HALF),
    f"{ONLINE}, half a batch, Muon": (
        "loss=forward_kl",
        "optimizer.kind=muon",
        "optimizer.learning_rate=1e-3",
        *_HALF,
    ),
}
# One text of the target's for both ways to weigh it, made without the untrained draft, which would only slow it.
_OWN = "kind: generated, sequences: ROWS, k: 0, path: OUT/own-text-SEED"
OWN_TEXT: dict[str, tuple[str, ...]] = {
    **{recipe: RECIPES[recipe] for recipe in (f"{CONTROL} 0.001", ONLINE)},
    OTHER_DATA[0]: ("loss=forward_kl", f"data={{{_OWN}}}"),
    f"{OTHER_DATA[0]}, {MASKED}": ("loss=forward_kl", f"data={{{_OWN}, prompt_weight: 0}}"),
    OTHER_DATA[1]: RECIPES[OTHER_DATA[1]],
    f"{OTHER_DATA[1]}, {MASKED}": ("loss=forward_kl", "data={kind: on_policy, share: 0.5, prompt_weight: 0}"),
}
_DECODED = "decoded.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One draft. ``alpha``: held out, at temperature 1. ``tokens_per_s``: of training, the median over the log."""

    recipe: str
    seed: int
    steps: int
    draft: job.TrainedDraft
    alpha: float
    tokens_per_s: float
    decoded: list[Decoded]

    @property
    def score(self) -> float:
        return selection.score(self.decoded)


class Experiment:
    def __init__(self, config: Path, overrides: Sequence[str], recipes: dict[str, tuple[str, ...]], console: Console):
        self._file, self._overrides, self._bars = config, list(overrides), console_bars(console)
        self._recipes = recipes
        self.config = self._config("", 0, ())
        self.prepared = inputs.prepare(self.config)
        target = self.prepared.target
        initial = initial_draft(self.config, target, self.prepared.train_rows)
        # Of the config that is common, so that all drafts meet the same prompts and random numbers.
        common = load_config(config, overrides)
        args = (common, target, initial.drafter, self.prepared.corpus.held_out)
        found = held_out_decoding(*args)
        if found is None:
            raise SystemExit("selection.prompts: 0; the recipes are compared on decoded prompts, give some")
        self.decoding: HeldOutDecoding = found
        self.timed = held_out_prompts(
            self.prepared.corpus.held_out, target, common.bench.prompt_tokens, common.bench.prompts
        )
        self.common = common

    def run(self, recipe: str, seed: int, steps: int | None = None) -> Run:
        """``steps``: instead of the config's."""
        changes = self._recipes[recipe]
        if steps is not None:
            changes = (*changes, f"steps={steps}", f"eval_every={steps}")
        name = f"{_file_name(recipe)}{'' if steps is None else '-long'}-{seed}"
        config = self._config(name, seed, changes)
        out = Path(config.out)
        with artifact.exclusive(out):
            distilled = job.distill(config, self._bars, self.prepared)
            draft, measures = distilled.draft_after, distilled.measures
            decoded = self._decoded(out / _DECODED, draft)
        log = [record["tokens_per_s"] for record in distilled.logs["draft-distill"] if "tokens_per_s" in record]
        return Run(recipe, seed, config.distill.num_steps, draft, measures.alpha_after, statistics.median(log), decoded)

    def _config(self, name: str, seed: int, changes: Sequence[str]) -> RunConfig:
        base = load_config(self._file, self._overrides)
        rows = base.distill.num_steps * base.distill.batch_size
        out = str(Path(base.out) / name)
        told = [f"distill.{c}".replace("OUT", base.out).replace("ROWS", str(rows)) for c in changes]
        told = [change.replace("SEED", str(seed)) for change in told]
        # Trained and evaluated here, decoded below; no pretraining, so that a recipe is all that a draft has seen.
        fixed = ["draft.pretrain.steps=0", "selection.prompts=0", "control.learning_rates=[]"]
        return load_config(self._file, [*self._overrides, *fixed, *told, f"seed={seed}", f"out={out}"])

    def _decoded(self, file: Path, draft: job.TrainedDraft) -> list[Decoded]:
        depends_on = [fingerprint.digest(draft.params), self.decoding.identity]
        known = artifact.read_record(file, "it is decoded again")
        if known is not None and known["depends_on"] == depends_on:
            return list(map(Decoded.from_json, known["decoded"]))
        decoded = self.decoding(draft.params)
        artifact.write_record(file, {"depends_on": depends_on, "decoded": list(map(dataclasses.asdict, decoded))})
        return decoded

    def timed_ratios(self, runs: Sequence[Run], others: Sequence[Run], repeats: int) -> list[dict[str, Any]]:
        """Tokens a second of ``runs`` over ``others`` at each temperature, pair by pair in turns at batch 1."""
        k, new_tokens = self.common.selection.k, self.common.bench.new_tokens
        target, verifier = self.prepared.target, self.common.verifier
        sides = [(side, run) for pair in zip(runs, others, strict=True) for side, run in enumerate(pair)]
        decoders = [specjax.Decoder(target, run.draft.of(k), verifier) for _, run in sides]
        found = []
        for temperature in self.decoding.temperatures:
            options: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos": True}
            for decoder in decoders:
                decoder.generate(self.timed[:1], **options)
            seconds = np.zeros((len(sides), len(self.timed), repeats))
            turns = [(repeat, i) for repeat in range(repeats) for i in range(len(self.timed))]
            for repeat, i in track(turns, f"temperature {temperature:g}", console=Console(stderr=True)):
                order = range(len(sides)) if (repeat + i) % 2 else reversed(range(len(sides)))
                for n in order:
                    began = time.perf_counter()
                    decoders[n].generate([self.timed[i]], seed=i, **options)
                    seconds[n, i, repeat] = time.perf_counter() - began
            medians = np.median(seconds, axis=-1)
            of_side = [medians[[n for n, (s, _) in enumerate(sides) if s == side]].sum(0) for side in (0, 1)]
            emitted = np.full(len(self.timed), float(new_tokens * len(runs)))
            best, control = (np.stack([emitted, times], axis=-1) for times in of_side)
            ratio, low, high = bootstrap(control, best)
            speeds = [float(emitted.sum() / times.sum()) for times in of_side]
            found.append(
                {"temperature": temperature, "tokens_per_s": speeds[0], "control_tokens_per_s": speeds[1],
                 "ratio": ratio, "low": low, "high": high}
            )  # fmt: skip
        return found


def main() -> None:
    memory.one_heap()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--tuned", action="store_true", help="other optimizers and steps instead of other objectives")
    instead.add_argument("--own-text", action="store_true", help="text of target and draft instead of other objectives")
    args = parser.parse_args()
    console = Console()
    recipes = TUNED if args.tuned else OWN_TEXT if args.own_text else RECIPES
    experiment = Experiment(args.config, args.overrides, recipes, console)
    keep_programs(experiment.common.compile_cache)
    runs = {}
    for recipe in recipes:
        runs[recipe] = [experiment.run(recipe, seed=0)]
        show(runs, console)
    control = max((r for r in runs if r.startswith(CONTROL)), key=lambda r: runs[r][0].score)
    rivals = [r for r in runs if not r.startswith(CONTROL) and r != CACHED]
    best_three = sorted(rivals, key=lambda r: runs[r][0].score, reverse=True)[:3]
    for seed in range(1, args.seeds):
        again = runs if args.own_text else (*best_three, control, *(r for r in (ONLINE, CACHED) if r in runs))
        for recipe in dict.fromkeys(again):
            runs[recipe].append(experiment.run(recipe, seed))
            show(runs, console)
    best = max(best_three, key=lambda r: _mean(run.score for run in runs[r]))
    # A step of the control has no teacher in it: as many steps as take the best recipe's time.
    quicker = training_speed(runs[control]) / training_speed(runs[best])
    long = experiment.run(control, 0, round(runs[control][0].steps * quicker))
    common, with_own_text = experiment.common, (*OTHER_DATA, *OWN_TEXT.keys() - RECIPES.keys())
    found = {
        "tokens": common.distill.num_steps * common.distill.batch_size * common.data.seq_len,
        "prompts": len(experiment.decoding.prompts),
        "recipes": [row(recipe, runs[recipe]) for recipe in runs],
        "equal_time": {"steps": long.steps, **row(f"{control}, equal time", [long])},
        "best": best,
        "control": control,
        "block_efficiency_ratios": [
            {"recipe": recipe, "against": against, "temperature": t, **ratio(runs[recipe], runs[against], i)}
            for recipe, against in [(best, control), (best, ONLINE), *((r, ONLINE) for r in runs if r in with_own_text)]
            if recipe != against
            for i, t in enumerate(experiment.decoding.temperatures)
        ],
        "cached_minus_online_alpha": [
            a.alpha - b.alpha for a, b in zip(runs.get(CACHED, ()), runs[ONLINE], strict=CACHED in runs)
        ],
        "speed": experiment.timed_ratios(runs[best], runs[control], args.repeats),
        "speed_equal_time": experiment.timed_ratios(runs[best][:1], [long], args.repeats),
    }  # fmt: skip
    show({**runs, f"{control}, equal time": [long]}, console)
    conclusions(found, console)
    if args.results is not None:
        record.write(args.results, found)


def row(recipe: str, runs: Sequence[Run]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "recipe": recipe,
        "seeds": len(runs),
        "alpha": _mean(run.alpha for run in runs),
        "training_tokens_per_s": training_speed(runs),
    }
    for i, decoded in enumerate(runs[0].decoded):
        by_prompt = _by_prompt(runs, i)
        interval: Interval = block_efficiency_interval(by_prompt)
        value = functools.reduce(operator.add, by_prompt).block_efficiency
        found[f"block_efficiency_t{decoded.temperature:g}"] = {"value": value, **dataclasses.asdict(interval)}
    return found


def training_speed(runs: Sequence[Run]) -> float:
    """Tokens a second; the most, because another job beside some of them slows those down and teaches nothing."""
    return max(run.tokens_per_s for run in runs)


def ratio(runs: Sequence[Run], others: Sequence[Run], temperature: int) -> dict[str, float]:
    """Of block efficiencies, over the seeds that both have."""
    seeds = min(len(runs), len(others))
    base, found = (_counts(side[:seeds], temperature) for side in (others, runs))
    return dict(zip(("ratio", "low", "high"), bootstrap(base, found), strict=True)) | {"seeds": seeds}


def show(runs: dict[str, list[Run]], console: Console) -> None:
    """The best first."""
    rows = sorted((row(r, found) for r, found in runs.items()), key=_efficiency, reverse=True)
    names = [key for key in rows[0] if key.startswith("block_efficiency")]
    table = Table(header_style="bold")
    for name in ("recipe", "seeds", "alpha", *(n.replace("block_efficiency_t", "tokens a call, T=") for n in names)):
        table.add_column(name)
    table.add_column("training tokens/s", justify="right")
    for one in rows:
        intervals = ("{value:.3f} [{low:.3f}, {high:.3f}]".format(**one[name]) for name in names)
        figures = (str(one["seeds"]), f"{one['alpha']:.4f}", *intervals, f"{one['training_tokens_per_s']:.0f}")
        table.add_row(one["recipe"], *figures)
    console.print(table)


def conclusions(found: dict[str, Any], console: Console) -> None:
    for one in found["block_efficiency_ratios"]:
        console.print(
            "tokens a call, {recipe} / {against}, T={temperature:g}: {ratio:.3f} [{low:.3f}, {high:.3f}], "
            "{seeds} seeds".format(**one)
        )
    if differences := found["cached_minus_online_alpha"]:
        console.print(f"alpha, cached - online: mean {_mean(differences):+.4f} of {[round(d, 4) for d in differences]}")
    for name, what in (("speed", "equal tokens"), ("speed_equal_time", "equal time")):
        for one in found[name]:
            console.print(
                f"tokens/s, {found['best']} / {found['control']} at {what}, "
                "T={temperature:g}: {ratio:.3f} [{low:.3f}, {high:.3f}] "
                "({tokens_per_s:.0f} against {control_tokens_per_s:.0f})".format(**one)
            )


def _by_prompt(runs: Sequence[Run], temperature: int) -> list[Any]:
    """Each prompt's counts, over all seeds."""
    all_runs = (run.decoded[temperature].by_prompt for run in runs)
    return [functools.reduce(operator.add, own) for own in zip(*all_runs, strict=True)]


def _counts(runs: Sequence[Run], temperature: int) -> np.ndarray:
    return np.asarray([(stats.emitted, stats.target_calls) for stats in _by_prompt(runs, temperature)], float)


def _efficiency(one: dict[str, Any]) -> float:
    return sum(value["value"] for key, value in one.items() if key.startswith("block_efficiency"))


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _file_name(recipe: str) -> str:
    return "".join(c if c.isalnum() or c in "_-." else "-" for c in recipe.replace(", ", "-").replace(" ", "-"))


if __name__ == "__main__":
    try:
        main()
    except SpecjaxError as error:
        raise SystemExit(f"error: {error}") from None
