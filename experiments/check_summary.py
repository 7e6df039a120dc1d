"""A demo's summary.json against the figures it must reach; prints all of them.

    python experiments/check_summary.py [--short] runs/demo/report/summary.json

``--short``: of a demo of 100 steps, a quarter of them. Exit status 1 if a figure misses its bound that is neither a
timing, which depends on the machine, nor counted on the few prompts that are decoded (those are shown, never fatal); 2
if the file cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.report.labels import format_against


@dataclasses.dataclass(frozen=True)
class Figure:
    """``bound``: what the value must reach, in words; empty for a figure that is only reported. ``timing``: it depends
    on the machine; ``counted``: on which few prompts were decoded."""

    key: str
    value: Any
    bound: str
    ok: bool
    timing: bool = False
    counted: bool = False

    @property
    def fatal(self) -> bool:
        return not (self.timing or self.counted)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What acceptance must reach, which depends on how long a draft is trained."""

    alpha: str
    alpha_at_5: str
    above_before: float
    above_control: float
    positions: str


WHOLE = Bounds(">= 0.80", ">= 0.78", 0.08, 0.05, ">= 50,000")
SHORT = Bounds(">= 0.79", ">= 0.77", 0.05, 0.03, ">= 8,000")


def figures(summary: Mapping[str, Any], bounds: Bounds = WHOLE) -> list[Figure]:
    """Every figure of a run, in the order of a report. A figure that was not measured misses its bound."""
    gap = _difference(summary, "draft_nll", "target_nll")
    return [
        Figure("nll_gap", gap, "draft_nll - target_nll >= 0.2", gap is not None and gap >= 0.2),
        _bounded(summary, "alpha_after", bounds.alpha),
        _above(summary, "alpha_after", "alpha_before", bounds.above_before),
        _above(summary, "alpha_after", "alpha_ce_control", bounds.above_control),
        _bounded(summary, "alpha_after_at_5", bounds.alpha_at_5),
        _bounded(summary, "alpha_positions", bounds.positions),
        _bounded(summary, "greedy_identical", "true"),
        _bounded(summary, "recompiles", "0"),
        _bounded(summary, "peak_rss_gb", "<= 6"),
        _bounded(summary, "tokens_a_call_greedy_k5", ">= 4.9", counted=True),
        _bounded(summary, "tokens_a_call_t1_k3", ">= 3.0", counted=True),
        _bounded(summary, "speedup_greedy", ">= 1.5", timing=True),
        _bounded(summary, "greedy_top_speedup", "", timing=True),
        _bounded(summary, "speedup_t1", ">= 1.2", timing=True),
        _bounded(summary, "t1_top_speedup", "", timing=True),
        _bounded(summary, "memory_floor_share", ">= 0.6", timing=True),
        _bounded(summary, "pass_of_4", "<= 1.45", timing=True),
        _bounded(summary, "ar_overhead", "<= 1.10", timing=True),
        _bounded(summary, "step_overhead", "<= 1.15", timing=True),
        _bounded(summary, "step_overhead_apart", "", timing=True),
        _bounded(summary, "speedup_predicted_error", "<= 0.07", timing=True),
        _bounded(summary, "speedup_predicted_error_in_sample", "", timing=True),
        _bounded(summary, "minutes", "<= 15", timing=True),
        _bounded(summary, "ar_tokens_per_s", "", timing=True),
        _bounded(summary, "spec_tokens_per_s", "", timing=True),
    ]


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
    checked = figures(summary, SHORT if given.short else WHOLE)
    for figure in checked:
        mark = ("ok" if figure.ok else "missed") if figure.bound else ""
        kind = "timing" if figure.timing else "counted" if figure.counted else ""
        print(f"{mark:7} {figure.key:33} {_shown(figure):>14}  {figure.bound:36} {kind}".rstrip())
    missed = [figure for figure in checked if not figure.ok and figure.fatal]
    for figure in missed:
        print(f"error: {figure.key} is {_shown(figure)}, must reach {figure.bound}", file=sys.stderr)
    return 1 if missed else 0


_HOLDS: dict[str, Callable[[Any, float], bool]] = {"": operator.eq, ">=": operator.ge, "<=": operator.le}


def _bounded(summary: Mapping[str, Any], key: str, bound: str, **kind: bool) -> Figure:
    """``bound``: a number, ``>=`` or ``<=`` one, ``true``, or nothing."""
    value = summary.get(key)
    if bound == "true":
        return Figure(key, value, bound, value is True, **kind)
    # A boolean is no number, so that `recompiles: false` does not pass for 0.
    relation, _, limit = bound.rpartition(" ")
    ok = _is_number(value) and (not bound or _HOLDS[relation](value, float(limit.replace(",", ""))))
    return Figure(key, value, bound, ok, **kind)


def _above(summary: Mapping[str, Any], key: str, rival: str, margin: float) -> Figure:
    gain = _difference(summary, key, rival)
    wanted = "not measured" if gain is None else _telling(summary[rival] + margin, summary[key])
    return Figure(
        key,
        summary.get(key),
        f">= {rival} + {margin:g} = {wanted}",
        # Both sides are rounded by nobody: the tolerance is for the subtraction alone.
        gain is not None and gain >= margin - 1e-9,
    )


def _telling(bound: float, value: float) -> str:
    """``bound`` with as many digits as tell it from ``value``."""
    return next((text for d in range(4, 17) if (text := f"{bound:.{d}g}") != f"{value:.{d}g}"), f"{bound:.4g}")


def _difference(summary: Mapping[str, Any], key: str, other: str) -> float | None:
    if _is_number(summary.get(key)) and _is_number(summary.get(other)):
        return summary[key] - summary[other]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(figure: Figure) -> str:
    if isinstance(figure.value, bool):
        return json.dumps(figure.value)
    return format_against(figure.value, figure.bound)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
