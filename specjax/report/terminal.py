"""The report's views for a terminal: a generation coloured by the origin of its tokens, figures, the decoding grid,
numerics.

Everything is built from rich `Text`, never from markup, so that generated text such as `[red]` is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich import box
from rich.table import Table
from rich.text import Text

from specjax.errors import SpecjaxError
from specjax.report.labels import (
    counted,
    drafter_name,
    format_against,
    format_interval,
    format_temperature,
    format_temperature_short,
    format_value,
    visible,
)
from specjax.report.palette import ORIGINS
from specjax.report.results import Comparison, DecodingRow, Figure, before_and_after, fastest, ordered


class PieceLike(Protocol):
    """Consecutive text of one origin (a key of `palette.ORIGINS`)."""

    @property
    def text(self) -> str: ...
    @property
    def origin(self) -> str: ...


def render_pieces(pieces: Iterable[PieceLike]) -> Text:
    """The pieces' text, each styled by its origin; control characters are shown, not obeyed."""
    result = Text()
    for piece in pieces:
        if piece.origin not in ORIGINS:
            raise SpecjaxError(f"origin {piece.origin!r} of a piece of text is unknown; known: {', '.join(ORIGINS)}")
        result.append(visible(piece.text), style=ORIGINS[piece.origin].rich_style)
    return result


def legend() -> Text:
    """One line for each origin: its style and its meaning."""
    width = max(map(len, ORIGINS))
    lines = [
        Text.assemble((name, origin.rich_style), " " * (width - len(name) + 2), origin.meaning)
        for name, origin in ORIGINS.items()
    ]
    return Text("\n").join(lines)


def plain_table(title: str) -> Table:
    """Table without lines between columns, so that it fits into 80 characters."""
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return Table(title=title, title_justify="left", header_style="bold", **looks)


def _table(title: str, first: str, numbers: Iterable[str]) -> Table:
    """Table for 80 characters whose names and numbers are never broken."""
    table = plain_table(title)
    table.add_column(first, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def figures_table(figures: Sequence[Any]) -> Table:
    """Table of figures (mappings or objects with key, value, bound, ok, timing); a bound is marked `ok` or `MISSED`."""
    table = _table("Figures", "figure", ["value"])
    table.add_column("must reach")
    table.add_column("", no_wrap=True)
    for figure in map(Figure.model_validate, figures):
        mark = Text("ok", style="green") if figure.ok else Text("MISSED", style="bold red")
        table.add_row(
            Text(visible(figure.key)),
            Text(format_against(figure.value, figure.bound)),
            Text((visible(figure.bound) + (f" ({figure.depends_on})" if figure.depends_on else "")).strip()),
            mark if figure.bound else Text(),
        )
    return table


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def comparison_table(rows: Sequence[Any]) -> Table:
    """Table of before and after distillation (mappings or objects as in `results.Comparison`), source by source."""
    table = _table("Before and after", "drafter", ("k", "alpha", "tokens\na block", "95%", "tokens/s"))
    for (source, temperature), group in before_and_after(tuple(map(Comparison.model_validate, rows))):
        table.add_section()
        prompts = f" ({counted(group[0].prompts, 'prompt')})" if group[0].prompts else ""
        table.add_row(
            Text(f"{_short(visible(source))}, {format_temperature_short(temperature)}{prompts}", style="italic")
        )
        for row in group:
            figures = ("–" if x is None else format_value(x) for x in (row.k, row.alpha, row.block_efficiency))
            interval = format_interval(row.low, row.high)
            speed = "–" if row.tokens_per_s is None else format_value(row.tokens_per_s)
            table.add_row(Text("  " + drafter_name(row.drafter)), *map(Text, (*figures, interval, speed)))
    return table


def decoding_table(rows: Sequence[Any]) -> Table:
    """The decoding grid (mappings or objects as in `results.DecodingRow`); the largest speedup of a group is bold."""
    headers = ("k", "tokens/s", "speedup", "pre-\ndicted", "tokens\na block", "kept", "same\ntext")
    table = _table("Decoding", "drafter", headers)
    for (batch_size, temperature), group in ordered(tuple(map(DecodingRow.model_validate, rows))):
        table.add_section()
        table.add_row(Text(f"batch {batch_size}, {format_temperature(temperature)}", style="italic"))
        best = fastest(group)
        for row in group:
            cells = (
                row.k,
                row.tokens_per_s,
                row.speedup,
                row.predicted_speedup,
                row.block_efficiency,
                row.acceptance_rate,
                row.identical,
            )
            table.add_row(
                Text("  " + drafter_name(row.drafter)),
                *(Text("–" if cell is None else format_value(cell)) for cell in cells),
                style="bold" if row is best else "",
            )
    return table


def numerics_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Table of the drift that `specjax.evaluation.numerics` found (its JSON), by reference path."""
    headers = ("max", "mean", "near\nties", "other", "first")
    table = _table("Drift of the logits of the same tokens", "against, path", headers)
    table.caption_justify = "left"
    table.caption = (
        "Absolute differences to single tokens at batch 1. near ties: positions where the two best logits are closer "
        "than the drift; other: where another token is best; first: the first such output token (its margin)."
    )
    reference = None
    for found in comparisons:
        if found["reference"] != reference:
            reference = found["reference"]
            table.add_section()
            table.add_row(Text(visible(reference), style="italic"))
        first = min(found["differences"], key=lambda d: d["position"], default=None)
        cells = (
            format_value(found["drift_max"]),
            format_value(found["drift_mean"]),
            f"{found['margin_below_drift']:.2%}",
            f"{found['choices_differ']:.2%}",
            "none" if first is None else f"{first['position']} ({format_value(first['margin'])})",
        )
        table.add_row(Text("  " + visible(found["name"].removeprefix(f"{reference}, "))), *map(Text, cells))
    return table
