"""Speedup of drafts that `specjax distill` makes of a chat model, by minutes and kind, on questions.

    python experiments/distill_curve.py FILE ... --target MODEL --out DIR [--kinds eagle3 glide ...]
        [--minutes 15 30 60] [--limit 5] [--offset 0] [--new-tokens 128] [--temperatures 0] [--repeats 2]
        [--results FILE.json] [--figure FILE.png]

Every job begins from nothing but the model, and takes what it is given: chats, training, figures, export. The target's
chats are written once, as many as the longest job may have, and each job reads as many of them as its own time would
have allowed at their pace; so a job takes less time here than it is given. Finished jobs are not run again: the same
command goes on after an interruption, and with more kinds or minutes. Then the drafts of all finished jobs in --out,
those of earlier calls too, decode the same questions in turn, each alone and behind n-gram lookup, as in
`questions.py`, whose results these are; `jobs` has what each job was given and did.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import questions
import yaml
from matplotlib.figure import Figure
from prompts import read_questions
from question_figures import ALL

import specjax
from specjax.config.recipe import Kind
from specjax.jobs.recipe import FILE, distill_target
from specjax.models.files import sha256, write_atomically
from specjax.report import record
from specjax.runtime.compile_cache import keep_programs

K, NGRAM = 3, 5
"""Longest blocks of a draft and of lookup."""
_NAME = re.compile(r"(?P<kind>\w+)-(?P<minutes>[\d.]+)(?P<lookup>\+ngram)?")


def run_jobs(out: Path, kinds: Sequence[Kind], minutes: Sequence[float], target: str) -> None:
    """Run the jobs that are not finished, the shortest first."""
    for given in sorted(minutes):
        for kind in kinds:
            run = out / f"{kind}-{given:g}"
            if not _is_finished(run):
                distill_target(target, str(run), given, kind, chats=str(out / "self-chat"))


def _is_finished(run: Path) -> bool:
    return (run / "results.json").exists()


def facts_of(run: Path) -> dict[str, Any]:
    """Results of a job: chats, steps, acceptance, and the seconds of its stages that it did not share with others."""
    results = json.loads((run / "results.json").read_text())
    config = yaml.safe_load((run / FILE).read_text())
    return {
        "job": run.name,
        "chats": config["data"]["self_chat"]["chats"],
        "steps": config["distill"]["steps"],
        "alpha": results["summary"]["alpha_after"],
        "stage_seconds": results["stage_seconds"],
        "cpu": results["machine"]["cpu"],
    }


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Greedy speedup over minutes with its interval, a colour a kind: dashed alone, solid behind n-gram lookup."""
    whole = {r["drafter"]: r for r in rows if (r["category"], r["temperature"]) == (ALL, 0.0)}
    found = {name: match for name in whole if (match := _NAME.fullmatch(name))}
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for i, kind in enumerate(dict.fromkeys(match["kind"] for match in found.values())):
        for lookup, style in ((None, "--"), ("+ngram", "-")):
            names = [name for name, match in found.items() if (match["kind"], match["lookup"]) == (kind, lookup)]
            points = sorted((float(found[name]["minutes"]), whole[name]) for name in names)
            speeds = [r["speedup"] for _, r in points]
            ends = [[r["speedup"] - r["low"] for _, r in points], [r["high"] - r["speedup"] for _, r in points]]
            label = f"{kind}, behind n-gram lookup" if lookup else kind
            if points:
                at = [given for given, _ in points]
                axes.errorbar(at, speeds, ends, fmt=f"o{style}", color=f"C{i}", capsize=2, label=label)
    if "ngram" in whole:
        axes.axhline(whole["ngram"]["speedup"], color="0.4", linewidth=0.8, linestyle=":", label="n-gram lookup")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="minutes given to specjax distill", ylabel="tokens/s over plain decoding, greedy, batch 1")
    axes.legend(frameon=False, fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    write_atomically(file, drawn.getvalue())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSONL files of questions")
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the jobs")
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--minutes", type=float, nargs="+", default=[15, 30, 60])
    parser.add_argument("--limit", type=int, default=5, help="most questions of a category")
    parser.add_argument("--offset", type=int, default=0, help="questions to move on from where they would begin")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument("--figure", type=Path, help="PNG file to draw")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    keep_programs()
    asking = [question for file in args.files for question in read_questions(file)]  # refused before hours of training
    run_jobs(args.out, args.kinds, args.minutes, args.target)
    runs = [run for run in sorted(args.out.iterdir()) if _NAME.fullmatch(run.name) and _is_finished(run)]
    target = specjax.load_model(args.target)
    drafts = {run.name: specjax.load_drafter(run, target, K) for run in runs}
    asked = questions.Asked.of(target, asking, args.limit, args.offset, args.new_tokens)
    decoders = questions.with_controls(target, drafts, NGRAM)
    found = questions.figures_of(target, asked, decoders, args.temperatures, args.repeats, args.new_tokens)
    questions.tell(found)
    if args.results is not None:
        sums = questions.checksums(target, {"target": args.target, **{run.name: run for run in runs}})
        sums["questions"] = {file.name: sha256(file) for file in args.files}
        record.write(args.results, {"jobs": [facts_of(run) for run in runs], **found, "sha256": sums})
    if args.figure is not None:
        draw(found["rows"], args.figure)


if __name__ == "__main__":
    try:
        main()
    except specjax.SpecjaxError as error:
        sys.exit(str(error))
