"""Views of measured costs and of a plan: tables for a terminal, and curves of equal speed as a plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, CostModel
from specjax.costs.memory import Footprint, gib
from specjax.costs.prediction import DraftEconomics, KnownDraft, Plan, Prediction
from specjax.costs.roofline import Pass
from specjax.costs.training import SHARE_OF_PEAK, TrainingCost
from specjax.models.files import plain_json, write_atomically
from specjax.report.labels import (
    drafter_name,
    format_duration,
    format_temperature,
    format_temperature_short,
    format_value,
)
from specjax.report.palette import PAGE, SERIES
from specjax.report.plots import Panel, png
from specjax.report.terminal import plain_table

_SPEEDS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Speedups whose curves are drawn."""
_COSTS = np.geomspace(0.005, 1.0, 60)
_TICKS = (0.005, 0.01, 0.03, 0.1, 0.3, 1.0)
_COMPUTED = "computed, not measured"


def _columns(table: Table, first: str, others: Iterable[str]) -> Table:
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def memory_table(footprints: Sequence[Footprint], limit: float | None) -> Table:
    """Table of bytes on each device at the peak of every job, a column a job."""
    several = bool(footprints) and footprints[0].devices > 1
    title = f"Memory at the peak{' on each device' if several else ''}, computed before anything is loaded"
    if limit is not None:
        title += f"; there is {gib(limit)}"
    heads = ("\n".join(textwrap.wrap(footprint.what, 12)) for footprint in footprints)
    table = _columns(plain_table(title), "", heads)
    for name in dict.fromkeys(name for footprint in footprints for name in footprint.parts):
        table.add_row(name, *(gib(f.parts[name]) if name in f.parts else "–" for f in footprints))
    table.add_section()
    if any(footprint.evaluation for footprint in footprints):
        table.add_row("in evaluation", *(gib(f.evaluation) if f.evaluation else "–" for f in footprints))
    table.add_row("all", *(gib(footprint.total) for footprint in footprints))
    return table


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.2f}"


def calibration_table(model: CostModel, kept: Mapping[int, bool]) -> Table:
    """Table of milliseconds of passes and blocks, a column a batch, with the error at the points that were left out of
    the fit."""
    batches = sorted(model.batches)
    names = [f"batch {rows}{'' if not kept.get(rows) else ' (kept)'}" for rows in batches]
    title = f"Costs on {model.device}, {model.dtype}, milliseconds"
    table = _columns(plain_table(title), "", names)
    costs = [model.batches[rows] for rows in batches]
    for m in sorted({int(m) for c in costs for m in c.target.at}):
        table.add_row(f"target, {m} token{'' if m == 1 else 's'}", *(_ms(c.target(m)) for c in costs))
    for mode in (GREEDY, SAMPLED):
        if all(mode in c.plain for c in costs):
            table.add_row(f"plain step, {mode}", *(_ms(c.block(PLAIN, 0, mode)) for c in costs))
    for name in dict.fromkeys(name for c in costs for name in c.drafters):
        table.add_section()
        table.add_row(f"{drafter_name(name)}, a pass", *(_ms(c.drafters[name].each) for c in costs))
        for mode, line in costs[0].drafters[name].beyond.items():
            for k in map(int, line.at):
                table.add_row(f"  block, k = {k}, {mode}", *(_ms(c.block(name, k, mode)) for c in costs))
    table.add_section()
    for width in map(int, costs[0].prefill.at):
        table.add_row(f"prefill, {width} tokens", *(_ms(c.prefill(width)) for c in costs))
    table.add_row("host, a generation", *(_ms(c.host) for c in costs))
    errors = [[check.error for check in c.checks] for c in costs]
    for label, of in (("median", np.median), ("worst", max)):
        table.add_row(f"error of the fit, {label}", *(f"{of(e):.1%}" if e else "–" for e in errors))
    return table


def predictions_table(predictions: Sequence[Prediction], measured: bool) -> Table:
    """Table of the grid; the fastest row of a group is bold. ``measured``: False if its times are computed."""
    with_measured = any(p.measured is not None for p in predictions)
    headers = ["k", "tokens/s\npredicted", "speedup", *(["measured", "error"] if with_measured else [])]
    source = "from times measured here" if measured else f"times {_COMPUTED}"
    table = _columns(plain_table(f"Plan,\n{source}"), "drafter", headers)
    group = None
    for p in sorted(predictions, key=lambda p: (p.batch, p.temperature)):
        if group != (group := (p.batch, p.temperature)):
            table.add_section()
            table.add_row(Text(f"batch {p.batch}, {format_temperature(p.temperature)}", style="italic"))
        cells = [str(p.k) if p.k else "–", format_value(p.tokens_per_s), f"{p.speedup:.2f}"]
        if with_measured:
            error = "–" if p.error is None else f"{p.error:+.1%}"
            cells += ["–" if p.measured is None else format_value(p.measured), error]
        table.add_row(Text("  " + drafter_name(p.drafter)), *cells, style="bold" if p.best else "")
    return table


def passes_table(passes: Sequence[Pass]) -> Table:
    """Table of the bound of each pass, and of the share of the roofline that the pass reaches."""
    device = passes[0].device
    source = "measured" if device.measured else "datasheet"
    title = (
        f"Roofline of {device.name} ({source}): {device.bandwidth / 1e9:,.0f} GB/s,\n"
        f"{device.flops / 1e12:,.2f} TFLOP/s in {device.dtype}, ridge {device.ridge:,.1f} FLOP/byte"
    )
    headers = ("batch", "GFLOP", "MB", "FLOP\n/byte", "bound\nby", "least\nms", "ms", "share")
    table = _columns(plain_table(title), "pass", headers)
    for found in passes:
        work = found.work
        table.add_row(
            Text(drafter_name(found.name)),
            str(found.batch),
            f"{work.flops / 1e9:.3f}",
            f"{work.num_bytes / 1e6:.1f}",
            f"{work.intensity:.1f}",
            work.bound(device),
            f"{1e3 * work.least_seconds(device):.3f}",
            _ms(found.seconds),
            "–" if found.share is None else f"{found.share:.0%}",
        )
    return table


def to_pay_lines(found: Mapping[str, Any], target_weights: float) -> list[str]:
    """Sentences about the alpha and the cost that a draft needs to pay. ``target_weights``: number of the target's
    weights, which gives the size of a draft if reading weights is all that a pass costs."""
    where = f"batch {found['batch']}, {format_temperature_short(found['temperature'])}"
    free, tenth = found["least_alpha_without_cost"], found["least_alpha_at_a_tenth"]
    if free is None:
        return [f"{where}: no draft pays, not even one that costs nothing and is always right"]
    lines = [f"{where}: a draft pays with alpha above {free:.2f} if it cost nothing, " + _above(tenth, "0.10")]
    if "beside" in found:
        name, alpha, cost, most = found["beside"], found["alpha"], found["cost"], found["most_cost_at_its_alpha"]
        at_cost = _above(found["least_alpha_at_its_cost"], f"{cost:.2f}")
        if most is None:
            cheaper = f"with its alpha of {alpha:.2f} no cost is low enough"
        else:
            size = f"about {most * target_weights / 1e6:,.1f}M weights where reading them is all"
            cheaper = f"with its alpha of {alpha:.2f} it must cost less than {most:.2f} passes of the target ({size})"
        lines.append(f"  beside {drafter_name(name)}: {at_cost}; {cheaper}")
    return lines


def _above(alpha: float | None, cost: str) -> str:
    if alpha is None:
        return f"at {cost} passes of the target no alpha is enough"
    return f"above {alpha:.2f} at {cost} passes of the target"


def iso_speed_panels(
    economics: Mapping[tuple[int, float], DraftEconomics], known: Sequence[KnownDraft], measured: bool
) -> list[Panel]:
    """Panels of alpha against the cost of a draft's pass, one for every batch and temperature, with a curve a speedup
    and existing drafters as points."""
    panels = []
    for (batch, t), found in economics.items():
        title = f"Batch {batch}, {format_temperature(t)}" + ("" if measured else f" ({_COMPUTED})")
        points = [p for p in known if (p.batch, p.temperature) == (batch, t)]
        panels.append(Panel(title, lambda axes, found=found, points=points: _iso_speed(axes, found, points)))
    return panels


def print_plan(plan: Plan, console: Console) -> None:
    """Print tables and sentences of a plan."""
    console.print(predictions_table(plan.predictions, plan.measured_here))
    errors = [abs(p.error) for p in plan.predictions if p.error is not None]
    if errors:
        errors_text = f"median {np.median(errors):.1%}, worst {max(errors):.1%}"
        console.print(f"error of the prediction over {len(errors)} points: {errors_text}", soft_wrap=True)
    console.print(passes_table(plan.passes))
    for group in plan.economics:
        for line in to_pay_lines(plan.to_pay(*group), plan.target_weights):
            console.print(line, soft_wrap=True)
    console.print(training_line(plan.training), soft_wrap=True)


def training_line(cost: TrainingCost) -> str:
    """Sentence about the cost of the distillation that the config asks for."""
    how = "measured over a few steps" if cost.measured else f"{_COMPUTED}, at {SHARE_OF_PEAK:.0%} of the device's peak"
    amount = f"{cost.tokens:,} tokens, {format_duration(3600 * cost.hours)} at {cost.tokens_per_s:,.0f} tokens/s"
    memory = "memory unknown" if cost.memory is None else f"{cost.memory / 1e9:.2f} GB"
    return f"distillation as configured: {amount}, {memory} ({how})"


def write_plan(plan: Plan, directory: Path) -> None:
    """Write plan.json and plan.png, each in place of an older one."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "plan.json", json.dumps(plan.to_json(), indent=1, default=plain_json) + "\n")
    panels = iso_speed_panels(plan.economics, plan.known, plan.measured_here)
    write_atomically(directory / "plan.png", png(panels, columns=2))


def _iso_speed(axes: Axes, economics: DraftEconomics, points: Sequence[KnownDraft]) -> None:
    shades = np.linspace(1.0, 0.35, len(_SPEEDS))
    for speed, shade in zip(_SPEEDS, shades, strict=True):
        reached = [(c, alpha) for c in _COSTS if (alpha := economics.least_alpha(float(c), speed)) is not None]
        if reached:
            x, y = zip(*reached, strict=True)
            color = PAGE["bad"].light if speed == 1 else SERIES["draft_after"].light
            axes.plot(x, y, color=color, alpha=float(shade), label="pays" if speed == 1 else f"{speed:g}x")
    for rank, point in enumerate(sorted(points, key=lambda p: p.cost)):
        at = max(point.cost, float(_COSTS[0])), point.alpha
        axes.plot(*at, linestyle="", marker="o", markersize=5, color=PAGE["ink"].light, label="_")
        axes.annotate(
            drafter_name(point.drafter), at, textcoords="offset points", xytext=(5, (4, -11)[rank % 2]), fontsize=8
        )
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{c:g}" for c in _TICKS])
    axes.minorticks_off()
    axes.set_xlim(float(_COSTS[0]), float(_COSTS[-1]))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("a draft's pass, in passes of the target")
    axes.set_ylabel("alpha")
