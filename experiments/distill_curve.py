"""Speedup of drafts that `specjax distill` makes of a chat model, by minutes and kind.

    python experiments/distill_curve.py TARGET --out DIR [--kinds eagle3 glide ...] [--minutes 15 30 60]
        [--results FILE.json] [--figure FILE.png]

Every job begins from nothing but the model, and takes what it is given: chats, training, figures, export. The target's
chats are written once, as many as the longest job may have, and each job reads as many of them as its own time would
have allowed at their pace; so a job takes less time here than it is given. Speedups are those of the job's own bench:
held-out chats, batch 1, over plain decoding in turn; of each drafter the best draft length. Finished jobs are read, so
the same command goes on after an interruption. Jobs whose rows stand in --results are not run again, not even without
their files, so that several machines may share the work; each row says which one ran it.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from matplotlib.figure import Figure

import specjax
from specjax.config.recipe import Kind
from specjax.jobs.recipe import FILE, distill_target
from specjax.models.files import write_atomically
from specjax.report import record
from specjax.report.labels import drafter_name

SHOWN = ("draft_after", "hybrid")


def rows_of(run: Path, kind: str, minutes: float) -> Iterator[dict[str, Any]]:
    """The best length of each drafter of a finished job, at each temperature."""
    results = json.loads((run / "results.json").read_text())
    config = yaml.safe_load((run / FILE).read_text())
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for row in results["decoding"]:
        if row["batch_size"] == 1 and row["drafter"] != "autoregressive":
            at = row["drafter"], row["temperature"]
            best[at] = max(best.get(at, row), row, key=lambda row: row["speedup"])
    for (drafter, temperature), row in best.items():
        yield {
            "kind": kind,
            "minutes": minutes,
            "chats": config["data"]["self_chat"]["chats"],
            "steps": config["distill"]["steps"],
            "alpha": results["summary"]["alpha_after"],
            "drafter": drafter,
            "temperature": temperature,
            "cpu": record.machine()["cpu"],
            **{name: row[name] for name in ("k", "speedup")},
        }


def known_rows(results: Path | None) -> list[dict[str, Any]]:
    """Rows of the jobs that an earlier call finished, here or elsewhere."""
    return json.loads(results.read_text())["rows"] if results is not None and results.exists() else []


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Greedy speedup over minutes, a colour a kind: the draft alone, and with n-gram lookup."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for i, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        for drafter, style in zip(SHOWN, ("--", "-"), strict=True):
            own = [r for r in rows if (r["kind"], r["drafter"], r["temperature"]) == (kind, drafter, 0.0)]
            points = sorted((r["minutes"], r["speedup"]) for r in own)
            label = f"{kind}, {drafter_name(drafter)}"
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{i}", marker="o", label=label)
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="minutes given to specjax distill", ylabel="tokens/s over plain decoding, greedy, batch 1")
    axes.legend(frameon=False, fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    write_atomically(file, drawn.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--minutes", type=float, nargs="+", default=[15, 30, 60])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    rows = known_rows(args.results)
    done = {(row["kind"], row["minutes"]) for row in rows}
    for minutes in sorted(args.minutes):
        for kind in args.kinds:
            if (kind, minutes) in done:
                continue
            run = args.out / f"{kind}-{minutes:g}"
            distill_target(args.target, str(run), minutes, kind, chats=str(args.out / "self-chat"))
            rows += rows_of(run, kind, minutes)
            if args.results is not None:
                record.write(args.results, {"rows": rows})
            if args.figure is not None:
                draw(rows, args.figure)


if __name__ == "__main__":
    try:
        main()
    except specjax.SpecjaxError as error:
        sys.exit(str(error))
