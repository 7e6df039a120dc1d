"""The plots of a report, drawn once: as inline SVG whose colours follow the page's theme, and as PNG files.

A panel draws into one axes and knows nothing of the figure around it. The page shows one panel a figure, so that text
stays readable on a phone; a PNG shows several side by side.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import matplotlib
from markupsafe import Markup
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


def training_panels(training: Training) -> list[Panel]:
    """Panels of losses and held-out acceptance over steps; distillation and its controls continue the pretraining."""
    end = training.pretrain[-1].step if training.pretrain else 0
    before = [("cross-entropy", "draft_before", 0, training.pretrain)]
    distill = [("distillation", "draft_after", end, training.distill)]
    controls = [
        (f"control, rate {rate}", "control", end, records)
        for rate, records in sorted(training.control.items(), key=lambda item: item[0])
    ]
    panels = (
        ("Cross-entropy of the draft", "loss, nats a token", "loss", before + controls),
        ("Distillation loss", "loss, nats a token", "loss", distill),
        ("Held-out acceptance", "α = E Σ min(p, q)", "alpha", before + controls + distill),
    )
    return [
        Panel(title, _curves(label, field, curves))
        for title, label, field, curves in panels
        if any(_points(records, field) for *_, records in curves)
    ]


def speedup_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the speedup over the autoregressive loop against k, by batch size and temperature, on one scale."""
    rows = [row for row in rows if row.k is not None and _finite(row.speedup)]
    if not rows:
        return []
    values = [v for row in rows for v in (row.speedup, row.predicted_speedup) if _finite(v)] + [1.0]
    low, high = min(values), max(values)
    limits = (max(0.0, low - 0.08 * (high - low + 0.2)), high + 0.08 * (high - low + 0.2))
    panels = []
    for (batch_size, temperature), group in ordered(tuple(rows)):
        title = f"Batch {batch_size}, {format_temperature(temperature)}"
        panels.append(Panel(title, lambda axes, group=group: _speedup(axes, group, limits)))
    return panels


def acceptance_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the acceptance by depth before and after distillation, one a temperature. Each shows one cell (batch
    size and k): of those with both drafts, if there are any, the one of the smallest batch, then of the largest k."""
    rows = [row for row in rows if row.drafter in ("draft_before", "draft_after") and row.acceptance_at]
    panels = []
    for temperature in sorted({row.temperature for row in rows}):
        group = [row for row in rows if row.temperature == temperature]
        cells = collections.Counter((row.batch_size, row.k or 0) for row in group)
        batch_size, k = min(cells, key=lambda cell: (-cells[cell], cell[0], -cell[1]))
        chosen = [row for row in group if (row.batch_size, row.k or 0) == (batch_size, k)]
        title = f"{format_temperature(temperature).capitalize()}, k = {k}, batch {batch_size}"
        panels.append(Panel(title, lambda axes, chosen=chosen: _acceptance(axes, chosen)))
    return panels


def length_panels(rows: Sequence[DecodingRow]) -> list[Panel]:
    """Panels of the chosen draft lengths, block by block, by batch size and temperature; a line a row of the batch."""
    panels = []
    for row in rows:
        if row.proposals:
            title = f"Batch {row.batch_size}, {format_temperature(row.temperature)}"
            panels.append(Panel(title, lambda axes, chosen=row.proposals: _lengths(axes, chosen)))
    return panels


def svg(panel: Panel) -> Markup:
    """The panel as an `<svg>` element for a page that defines `palette.css_variables`."""
    with matplotlib.rc_context({**_RC, "svg.hashsalt": panel.title}):
        figure = _figure([panel], titles=False)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]  # the page is HTML: no XML prologue, no namespaces, no metadata
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # figure_1, axes_1: the same in every plot; nothing refers to them
    head, body = text.split(">", 1)
    text = re.sub(r' (width|height)="[^"]*"', "", head) + ">" + body  # the page sets the size
    for name, tone in css_variables().items():
        text = text.replace(tone.light, f"var({name})")
    label = Markup.escape(panel.title)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))


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
        axes = figure.add_subplot(lines, columns, index + 1)
        panel.draw(axes)
        if titles:
            axes.set_title(panel.title, fontsize=10.5, fontweight="bold")
        for handle in axes.get_lines():
            label = str(handle.get_label())
            if not label.startswith("_"):
                handles.setdefault(label, handle)
    if len(handles) > 1:
        figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=2 if columns == 1 else 4)
    return figure


def _line(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    series: str,
    label: str,
    *,
    dashed: bool = False,
    marked: bool = True,
    marker: str = "o",
) -> None:
    """Draw one series. ``marker``: marker of a series that has none of its own."""
    color = SERIES[series].light if series in SERIES else _MUTED
    axes.plot(
        x,
        y,
        color=color,
        linestyle=_DASHED if dashed else "-",
        marker=_MARKERS.get(series, marker) if marked and len(x) <= 16 else "",
        markersize=5,
        markerfacecolor=_SURFACE if dashed else color,
        label=label,
    )


def _curves(y_label: str, field: str, curves: Iterable[tuple[str, str, int, Sequence[TrainingRecord]]]):
    curves = list(curves)
    start = [point for *_, offset, records in curves if offset == 0 for point in _points(records, field)[-1:]]

    def draw(axes: Axes) -> None:
        for rank, (label, series, offset, records) in enumerate(curves):
            if points := _points(records, field):
                points = [(offset + step, value) for step, value in points]
                if offset and field == "alpha":  # the curve starts from the pretrained draft
                    points = start + points
                x, y = zip(*points, strict=True)
                _line(axes, x, y, series, label, marked=field == "alpha")
                if series == "control":  # several learning rates share a colour; the dashes tell them apart
                    axes.get_lines()[-1].set_linestyle((0, (1 + 3 * (rank - 1), 1.5)))
        axes.set_xlabel("training step")
        axes.set_ylabel(y_label)
        axes.margins(x=0.02)

    return draw


def _speedup(axes: Axes, rows: Sequence[DecodingRow], limits: tuple[float, float]) -> None:
    axes.axhline(1.0, color=_MUTED, linewidth=1.2, label="autoregressive")
    more = itertools.cycle("DvPX*h")  # drafts from disk share a colour
    for drafter in dict.fromkeys(row.drafter for row in rows):
        series = [row for row in rows if row.drafter == drafter]
        if drafter == "adaptive":  # it has no single k
            axes.axhline(series[0].speedup or 0.0, color=_INK, linestyle=(0, (1, 1)), label=drafter_name(drafter))
            continue
        x, y = zip(*((row.k or 0, row.speedup or 0.0) for row in series), strict=True)
        _line(axes, x, y, drafter, drafter_name(drafter), marker="o" if drafter in _MARKERS else next(more))
        predicted = [(row.k or 0, row.predicted_speedup) for row in series if _finite(row.predicted_speedup)]
        if predicted:
            x, y = zip(*predicted, strict=True)
            _line(axes, x, y, drafter, "_", dashed=True)
            _line(axes, [], [], "predicted", "predicted", dashed=True)
    axes.set_ylim(*limits)
    axes.set_xticks(sorted({row.k or 0 for row in rows}))
    axes.set_xlabel("draft length k")
    axes.set_ylabel("speedup")


def _lengths(axes: Axes, chosen: Sequence[Sequence[int]]) -> None:
    colors = [SERIES[name].light for name in SERIES]
    for row, proposals in enumerate(chosen):
        # Lines lie a little apart, or rows of equal lengths would hide one another.
        y = [k + 0.5 * (row / len(chosen) - 0.5) for k in proposals]
        axes.step(range(1, len(y) + 1), y, where="mid", linewidth=1, color=colors[row % len(colors)], label=f"_{row}")
    axes.set_ylim(-0.5, max((1, *(k for proposals in chosen for k in proposals))) + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("block")
    axes.set_ylabel("proposals")


def _acceptance(axes: Axes, rows: Sequence[DecodingRow]) -> None:
    for row in rows:
        for values, dashed in ((row.acceptance_at, False), (row.conditional_acceptance_at, True)):
            if values:
                _line(axes, range(1, len(values) + 1), values, row.drafter, "_", dashed=dashed)
        _line(axes, [], [], row.drafter, drafter_name(row.drafter))
    for label, dashed in (("unconditional", False), ("given all earlier ones", True)):
        axes.plot([], [], color=_MUTED, linestyle=_DASHED if dashed else "-", label=label)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share accepted")


def _points(records: Sequence[TrainingRecord], field: str) -> list[tuple[int, float]]:
    return [(record.step, getattr(record, field)) for record in records if _finite(getattr(record, field))]


def _finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
