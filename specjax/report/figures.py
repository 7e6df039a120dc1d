"""Figures of a run, each beside the bound that the demo must reach.

The bounds are those of `configs/demo.yaml` and `configs/demo_full.yaml`; other configs are shown against them too.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from specjax.report.results import Figure


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Acceptance that a draft must reach, by how long it is trained."""

    alpha: str
    alpha_at_5: str
    above_before: float
    above_control: float
    positions: str


WHOLE = Bounds(">= 0.80", ">= 0.78", 0.08, 0.05, ">= 50,000")
SHORT = Bounds(">= 0.79", ">= 0.77", 0.05, 0.03, ">= 8,000")


def figures(summary: Mapping[str, Any], bounds: Bounds = WHOLE) -> list[Figure]:
    """Every figure of a run, in the order of a report. A figure that was not measured misses its bound; a run without a
    control has none to compare with."""
    gap = _difference(summary, "draft_nll", "target_nll")
    return [
        Figure(key="nll_gap", value=gap, bound="draft_nll - target_nll >= 0.2", ok=gap is not None and gap >= 0.2),
        _bounded(summary, "alpha_after", bounds.alpha),
        _above(summary, "alpha_after", "alpha_before", bounds.above_before),
        *_above_control(summary, bounds.above_control),
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
        _bounded(summary, "minutes", "<= 8" if summary.get("alpha_ce_control") is None else "<= 15", timing=True),
        _bounded(summary, "ar_tokens_per_s", "", timing=True),
        _bounded(summary, "spec_tokens_per_s", "", timing=True),
    ]


_HOLDS: dict[str, Callable[[Any, float], bool]] = {"": operator.eq, ">=": operator.ge, "<=": operator.le}


def _bounded(summary: Mapping[str, Any], key: str, bound: str, **kind: bool) -> Figure:
    """``bound``: a number, ``>=`` or ``<=`` one, ``true``, or nothing."""
    value = summary.get(key)
    if bound == "true":
        return Figure(key=key, value=value, bound=bound, ok=value is True, **kind)
    # A boolean is no number, so that `recompiles: false` does not pass for 0.
    relation, _, limit = bound.rpartition(" ")
    ok = _is_number(value) and (not bound or _HOLDS[relation](value, float(limit.replace(",", ""))))
    return Figure(key=key, value=value, bound=bound, ok=ok, **kind)


def _above(summary: Mapping[str, Any], key: str, rival: str, margin: float) -> Figure:
    gain = _difference(summary, key, rival)
    wanted = "not measured" if gain is None else _telling(summary[rival] + margin, summary[key])
    # Both sides are rounded by nobody: the tolerance is for the subtraction alone.
    ok = gain is not None and gain >= margin - 1e-9
    return Figure(key=key, value=summary.get(key), bound=f">= {rival} + {margin:g} = {wanted}", ok=ok)


def _above_control(summary: Mapping[str, Any], margin: float) -> list[Figure]:
    if summary.get("alpha_ce_control") is None:
        return []
    return [_above(summary, "alpha_after", "alpha_ce_control", margin)]


def _telling(bound: float, value: float) -> str:
    """``bound`` with as many digits as tell it from ``value``."""
    return next((text for d in range(4, 17) if (text := f"{bound:.{d}g}") != f"{value:.{d}g}"), f"{bound:.4g}")


def _difference(summary: Mapping[str, Any], key: str, other: str) -> float | None:
    if _is_number(summary.get(key)) and _is_number(summary.get(other)):
        return summary[key] - summary[other]
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
