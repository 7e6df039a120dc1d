"""The plots of a report, drawn once: as inline SVG whose colours follow the page's theme, and as PNG files.

A panel draws into one axes and knows nothing of the figure around it. The page shows one panel a figure, so that text
stays readable on a phone; a PNG shows several side by side.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Literal, TypeGuard

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from specjax.report.labels import drafter_name, format_temperature
from specjax.report.palette import PAGE, SERIES, css_variables
from specjax.report.results import DecodingRow, Training, TrainingRecord, ordered

_INK, _MUTED, _LINE, _SURFACE = (PAGE[name].light for name in ("ink", "muted", "line", "surface"))
_MARKERS = {"draft_after": "o", "draft_before": "s", "ngram": "^", "control": "D"}
_DASHED = (0, (4, 2))
_RC: dict[Any, Any] = {
    "font.size": 9.5,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """A titled plot; `draw` fills the axes, handles of its legend included."""

    title: str
    draw: Callable[[Axes], None]
    x_label: str = ""
    y_label: str = ""


_Field = Literal["loss", "alpha"]
_Curve = tuple[str, str, Sequence[tuple[float, float]]]
"""Label, series and points."""


def training_panels(training: Training) -> list[Panel]:
    """Panels of losses and held-out acceptance over steps; distillation and its controls continue the pretraining."""

    def curves(field: _Field, stages: Sequence[str]) -> list[_Curve]:
        before = _points(training.pretrain, field)
        begin = training.pretrain[-1].step if training.pretrain else 0
        first = before[-1:] if field == "alpha" else []  # its curve goes on from the pretrained draft
        later = [("control", f"control, rate {rate}", records) for rate, records in sorted(training.control.items())]
        later.append(("draft_after", "distillation", training.distill))
        found: list[_Curve] = [("cross-entropy", "draft_before", before)]
        for series, label, records in later:
            points = [(begin + step, value) for step, value in _points(records, field)]
            found.append((label, series, first + points if points else []))
        return [curve for curve in found if curve[1] in stages and curve[2]]

    panels: tuple[tuple[str, str, _Field, tuple[str, ...]], ...] = (
        ("Cross-entropy of the draft", "loss, nats a token", "loss", ("draft_before", "control")),
        ("Distillation loss", "loss, nats a token", "loss", ("draft_after",)),
        ("Held-out acceptance", "α = E Σ min(p, q)", "alpha", ("draft_before", "control", "draft_after")),
    )
    return [
        Panel(title, functools.partial(_curves, curves=found, marked=field == "alpha"), "training step", label)
        for title, label, field, stages in panels
        if (found := curves(field, stages))
    ]


def speedup_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the speedup over the autoregressive loop against k, by batch size and temperature, on one scale."""
    rows = [row for row in rows if row.k is not None and _finite(row.speedup)]
    values = [v for row in rows for v in (row.speedup, row.predicted_speedup) if _finite(v)] + [1.0]
    room = 0.08 * (max(values) - min(values) + 0.2)
    limits = max(0.0, min(values) - room), max(values) + room
    return [
        Panel(_where(*group), functools.partial(_speedup, rows=found, limits=limits), "draft length k", "speedup")
        for group, found in ordered(tuple(rows))
    ]


def acceptance_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the acceptance by depth before and after distillation, one a temperature. Each shows one cell (batch
    size and k): of those with both drafts, if there are any, the one of the smallest batch, then of the largest k."""
    rows = [row for row in rows if row.drafter in ("draft_before", "draft_after") and row.acceptance_at]
    panels = []
    for temperature in sorted({row.temperature for row in rows}):
        cells: dict[tuple[int, int], list[DecodingRow]] = collections.defaultdict(list)
        for row in rows:
            if row.temperature == temperature:
                cells[row.batch_size, row.k or 0].append(row)
        batch_size, k = min(cells, key=lambda cell: (-len(cells[cell]), cell[0], -cell[1]))
        title = f"{format_temperature(temperature).capitalize()}, k = {k}, batch {batch_size}"
        draw = functools.partial(_acceptance, rows=cells[batch_size, k])
        panels.append(Panel(title, draw, "depth in a block", "share accepted"))
    return panels


def length_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the chosen draft lengths, block by block, by batch size and temperature; a line a row of the batch."""
    return [
        Panel(
            _where(row.batch_size, row.temperature),
            functools.partial(_lengths, chosen=row.proposals),
            *("block", "proposals"),
        )
        for row in rows
        if row.proposals
    ]


def _where(batch_size: int, temperature: float) -> str:
    return f"Batch {batch_size}, {format_temperature(temperature)}"


def svg(panel: Panel) -> str:
    """The panel as an `<svg>` element for a page that defines `palette.css_variables`."""
    with matplotlib.rc_context({**_RC, "svg.hashsalt": panel.title}):
        stream = io.StringIO()
        _figure([panel], titles=False).savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]  # the page is HTML: no XML prologue, no namespaces, no metadata
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Names such as figure_1 and axes_1 are the same in every plot, and nothing refers to them.
    text = re.sub(r' xmlns(:\w+)?="[^"]*"| id="[\w.]+_\d+"', "", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)  # the page sets the size
    for name, tone in css_variables().items():
        body = body.replace(tone.light, f"var({name})")
    return head.replace("<svg", f'<svg role="img" aria-label="{escape(panel.title)}"', 1) + ">" + body


def png(panels: Sequence[Panel], columns: int) -> bytes:
    """PNG of the panels side by side on white, for documents that cannot hold the page."""
    with matplotlib.rc_context(_RC):
        stream = io.BytesIO()
        _figure(panels, titles=True, columns=columns).savefig(stream, format="png", dpi=160, facecolor=_SURFACE)
    return stream.getvalue()


def _figure(panels: Sequence[Panel], *, titles: bool, columns: int = 1) -> Figure:
    columns = min(columns, len(panels))
    lines = math.ceil(len(panels) / columns)
    pad = 0.12 if titles else 0.04  # inches; several panels need air between them
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), layout=ConstrainedLayoutEngine(w_pad=pad, h_pad=pad))
    handles: dict[str, Line2D] = {}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1, xlabel=panel.x_label, ylabel=panel.y_label)
        panel.draw(axes)
        if titles:
            axes.set_title(panel.title, fontsize=10.5, fontweight="bold")
        for handle in axes.get_lines():
            handles.setdefault(str(handle.get_label()), handle)
    shown = [handle for label, handle in handles.items() if not label.startswith("_")]
    if len(shown) > 1:
        figure.legend(handles=shown, loc="outside lower center", ncols=2 if columns == 1 else 4)
    return figure


def _line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    series: str,
    label: str,
    *,
    dashed: bool = False,
    marker: str = "",
) -> Line2D:
    """One series. ``marker``: its marker; empty for that of the series, if it has one."""
    x, y = zip(*points, strict=True) if points else ((), ())
    color = SERIES[series].light if series in SERIES else _MUTED
    [line] = axes.plot(
        x,
        y,
        color=color,
        linestyle=_DASHED if dashed else "-",
        marker=(marker or _MARKERS.get(series, "")) if len(x) <= 16 else "",
        markersize=5,
        markerfacecolor=_SURFACE if dashed else color,
        label=label,
    )
    return line


def _curves(axes: Axes, curves: Sequence[_Curve], marked: bool) -> None:
    controls = itertools.count()
    for label, series, points in curves:
        line = _line(axes, points, series, label)
        if not marked:
            line.set_marker("")
        if series == "control":  # several learning rates share a colour; the dashes tell them apart
            line.set_linestyle((0, (1 + 3 * next(controls), 1.5)))
    axes.margins(x=0.02)


def _speedup(axes: Axes, rows: Sequence[DecodingRow], limits: tuple[float, float]) -> None:
    axes.axhline(1.0, color=_MUTED, linewidth=1.2, label="autoregressive")
    more = itertools.cycle("DvPX*h")  # drafts from disk share a colour
    for drafter in dict.fromkeys(row.drafter for row in rows):
        series = [row for row in rows if row.drafter == drafter]
        if drafter == "adaptive":  # it has no single k
            axes.axhline(series[0].speedup or 0.0, color=_INK, linestyle=(0, (1, 1)), label=drafter_name(drafter))
            continue
        marker = _MARKERS.get(drafter) or next(more)
        _line(axes, [(row.k or 0, row.speedup or 0.0) for row in series], drafter, drafter_name(drafter), marker=marker)
        predicted = [(row.k or 0, row.predicted_speedup) for row in series if _finite(row.predicted_speedup)]
        if predicted:
            _line(axes, predicted, drafter, "_", dashed=True)
            _line(axes, [], "", "predicted", dashed=True, marker="o")
    axes.set_ylim(*limits)
    axes.set_xticks(sorted({row.k or 0 for row in rows}))


def _lengths(axes: Axes, chosen: Sequence[Sequence[int]]) -> None:
    colors = [tone.light for tone in SERIES.values()]
    for row, proposals in enumerate(chosen):
        # Lines lie a little apart, or rows of equal lengths would hide one another.
        y = [k + 0.5 * (row / len(chosen) - 0.5) for k in proposals]
        axes.step(range(1, len(y) + 1), y, where="mid", linewidth=1, color=colors[row % len(colors)], label=f"_{row}")
    axes.set_ylim(-0.5, max((1, *(k for proposals in chosen for k in proposals))) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _acceptance(axes: Axes, rows: Sequence[DecodingRow]) -> None:
    for row in rows:
        for values, dashed in ((row.acceptance_at, False), (row.conditional_acceptance_at, True)):
            if values:
                _line(axes, [*enumerate(values, 1)], row.drafter, "_", dashed=dashed)
        _line(axes, [], row.drafter, drafter_name(row.drafter))
    for label, dashed in (("unconditional", False), ("given all earlier ones", True)):
        _line(axes, [], "", label, dashed=dashed)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _points(records: Sequence[TrainingRecord], field: _Field) -> list[tuple[float, float]]:
    values = ((record.step, record.loss if field == "loss" else record.alpha) for record in records)
    return [(step, value) for step, value in values if _finite(value)]


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
