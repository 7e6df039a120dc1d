"""The report's views for a terminal: a generation coloured by the origin of its tokens, figures, the decoding grid,
numerics.

Everything is built from rich `Text`, never from markup, so that generated text such as `[red]` is shown as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    format_or_dash,
    format_temperature,
    format_temperature_short,
    format_value,
    visible,
)
from specjax.report.palette import ORIGINS
from specjax.report.results import COMPARED, Comparison, DecodingRow, Figure, before_and_after, fastest, ordered


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


def plain_table(title: str, first: str | None = None, numbers: Iterable[str] = ()) -> Table:
    """Table without lines between columns, so that it fits into 80 characters. ``first``: head of a column of names,
    and ``numbers``: of columns of numbers, none of which is ever broken."""
    looks: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", header_style="bold", **looks)
    if first is not None:
        table.add_column(first, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _add_rows(table: Table, title: str, rows: Iterable[tuple[str, Sequence[Any]]], best: Any = None) -> None:
    """A section of names with values under its title; the row with the number ``best`` is bold."""
    table.add_section()
    table.add_row(Text(title, style="italic"))
    for number, (name, values) in enumerate(rows):
        style = "bold" if number == best else ""
        table.add_row(Text(f"  {name}"), *(Text(format_or_dash(value)) for value in values), style=style)


def figures_table(figures: Sequence[Any]) -> Table:
    """Table of figures (mappings or objects with key, value, bound, ok, timing); a bound is marked `ok` or `MISSED`."""
    table = plain_table("Figures", "figure", ["value"])
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
    table = plain_table("Before and after", "drafter", ("k", "alpha", "tokens\na block", "95%", "tokens/s"))
    for (source, temperature), group in before_and_after(tuple(map(Comparison.model_validate, rows))):
        prompts = f" ({counted(group[0].prompts, 'prompt')})" if group[0].prompts else ""
        cells = [(r.k, r.alpha, r.block_efficiency, format_interval(r.low, r.high), r.tokens_per_s) for r in group]
        title = f"{_short(visible(source))}, {format_temperature_short(temperature)}{prompts}"
        _add_rows(table, title, zip((drafter_name(row.drafter) for row in group), cells, strict=True))
    return table


def speedups(decoding: Sequence[Any], comparison: Sequence[Any]) -> Iterator[str]:
    """A line for each temperature: how many times as fast as plain decoding each drafter is at batch 1 and the draft
    length of the comparison, the fastest first (rows as in `decoding_table` and `comparison_table`)."""
    compared = [row for row in map(Comparison.model_validate, comparison) if row.k]
    lengths = {row.temperature: row for row in compared if row.source == compared[-1].source}
    for (batch_size, temperature), group in ordered(tuple(map(DecodingRow.model_validate, decoding))):
        if batch_size > 1 or temperature not in lengths:
            continue
        k, prompts = lengths[temperature].k, lengths[temperature].prompts or 0
        own = [row for row in group if row.speedup and row.drafter != COMPARED[0] and row.k in (k, None)]
        own += [row for row in group if row.speedup and row.drafter == "adaptive" and row not in own]
        own.sort(key=lambda row: row.speedup or 0.0, reverse=True)
        listed = ", ".join(f"{drafter_name(row.drafter)} {row.speedup:.2f}" for row in own)
        over = f"{format_temperature(temperature)}, k = {k}, {counted(prompts, 'prompt')}"
        yield f"times plain decoding ({over}): {listed}"


def decoding_table(rows: Sequence[Any]) -> Table:
    """The decoding grid (mappings or objects as in `results.DecodingRow`); the largest speedup of a group is bold."""
    headers = ("k", "tokens/s", "speedup", "pre-\ndicted", "tokens\na block", "kept", "same\ntext")
    table = plain_table("Decoding", "drafter", headers)
    for (batch_size, temperature), group in ordered(tuple(map(DecodingRow.model_validate, rows))):
        best, cells = fastest(group), []
        for row in group:
            speeds = (row.tokens_per_s, row.speedup, row.predicted_speedup)
            cells.append((row.k, *speeds, row.block_efficiency, row.acceptance_rate, row.identical))
        names = (drafter_name(row.drafter) for row in group)
        bold = None if best is None else group.index(best)
        _add_rows(table, f"batch {batch_size}, {format_temperature(temperature)}", zip(names, cells, strict=True), bold)
    return table


def numerics_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Table of the drift that `specjax.evaluation.numerics` found (its JSON), by reference path."""
    headers = ("max", "mean", "near\nties", "other", "first")
    table = plain_table("Drift of the logits of the same tokens", "against, path", headers)
    table.caption_justify = "left"
    table.caption = (
        "Absolute differences to single tokens at batch 1. near ties: positions where the two best logits are closer "
        "than the drift; other: where another token is best; first: the first such output token (its margin)."
    )
    for reference, group in itertools.groupby(comparisons, key=lambda found: found["reference"]):
        rows = []
        for found in group:
            first = min(found["differences"], key=lambda d: d["position"], default=None)
            cells = (
                *(found["drift_max"], found["drift_mean"]),
                *(f"{found['margin_below_drift']:.2%}", f"{found['choices_differ']:.2%}"),
                "none" if first is None else f"{first['position']} ({format_value(first['margin'])})",
            )
            rows.append((visible(found["name"].removeprefix(f"{reference}, ")), cells))
        _add_rows(table, visible(reference), rows)
    return table
