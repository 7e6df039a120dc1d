"""A demo's summary.json against the figures it must reach; prints all of them.

    python experiments/check_summary.py [--short] runs/demo_full/report/summary.json

``--short``: the figures of a demo of 100 steps, a quarter of them, with its control. Exit status 1 if a figure misses
its bound that is neither a timing, which depends on the machine, nor counted on the few prompts that are decoded (those
are shown, never fatal); 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from specjax.report.figures import SHORT, WHOLE, figures
from specjax.report.labels import format_against
from specjax.report.results import Figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("summary", type=Path, metavar="SUMMARY_JSON")
    parser.add_argument("--short", action="store_true", help="of a demo of 100 steps")
    given = parser.parse_args(argv)
    path = given.summary
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        print(f"error: {path}: {error.strerror}; make demo writes it", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {path}: not JSON ({error})", file=sys.stderr)
        return 2
    if not isinstance(summary, dict):
        print(f"error: {path}: a {type(summary).__name__}, expected an object", file=sys.stderr)
        return 2
    if given.short and summary.get("alpha_ce_control") is None:
        print(f"error: {path}: alpha_ce_control was not measured; run configs/demo_full.yaml", file=sys.stderr)
        return 1
    checked = figures(summary, SHORT if given.short else WHOLE)
    for figure in checked:
        mark = ("ok" if figure.ok else "missed") if figure.bound else ""
        kind = "timing" if figure.timing else "counted" if figure.counted else ""
        print(f"{mark:7} {figure.key:33} {_shown(figure):>14}  {figure.bound:36} {kind}".rstrip())
    missed = [figure for figure in checked if not figure.ok and figure.fatal]
    for figure in missed:
        print(f"error: {figure.key} is {_shown(figure)}, must reach {figure.bound}", file=sys.stderr)
    return 1 if missed else 0


def _shown(figure: Figure) -> str:
    if isinstance(figure.value, bool):
        return json.dumps(figure.value)
    return format_against(figure.value, figure.bound)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
