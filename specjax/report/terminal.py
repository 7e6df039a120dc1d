"""The report's views for a terminal: a generation coloured by the origin of its tokens, figures, the decoding grid,
numerics.

Everything is built from rich `Text`, never from markup, so that generated text such as `[red]` is shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.table import Table
from rich.text import Text

from specjax.errors import SpecjaxError
from specjax.report.labels import drafter_name, format_interval, format_temperature, format_value, visible
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
    """One line an origin: its style and what it means."""
    width = max(map(len, ORIGINS))
    lines = [
        Text.assemble((name, origin.rich_style), " " * (width - len(name) + 2), origin.meaning)
        for name, origin in ORIGINS.items()
    ]
    return Text("\n").join(lines)


def figures_table(figures: Sequence[Any]) -> Table:
    """Figures (mappings or objects with key, value, bound, ok, timing) with an `ok` or `MISSED` mark."""
    table = Table(title="Figures", title_justify="left", header_style="bold")
    for header in ("figure", "value", "must reach", ""):
        table.add_column(header, justify="right" if header == "value" else "left")
    for figure in map(Figure.model_validate, figures):
        table.add_row(
            Text(visible(figure.key)),
            Text(format_value(figure.value)),
            Text(visible(figure.bound) + (" (timing)" if figure.timing else "")),
            Text("ok", style="green") if figure.ok else Text("MISSED", style="bold red"),
        )
    return table


def comparison_table(rows: Sequence[Any]) -> Table:
    """Before and after distillation (mappings or objects as in `results.Comparison`), source by source."""
    table = Table(title="Before and after", title_justify="left", header_style="bold")
    table.add_column("drafter")
    for header in ("k", "alpha", "tokens a block", "95%", "tokens/s"):
        table.add_column(header, justify="right")
    for (source, temperature), group in before_and_after(tuple(map(Comparison.model_validate, rows))):
        table.add_section()
        prompts = f" ({group[0].prompts} prompts)" if group[0].prompts else ""
        table.add_row(Text(f"{visible(source)}, {format_temperature(temperature)}{prompts}", style="italic"))
        for row in group:
            figures = ("–" if x is None else format_value(x) for x in (row.k, row.alpha, row.block_efficiency))
            interval = format_interval(row.low, row.high)
            speed = "–" if row.tokens_per_s is None else format_value(row.tokens_per_s)
            table.add_row(Text("  " + drafter_name(row.drafter)), *map(Text, (*figures, interval, speed)))
    return table


def decoding_table(rows: Sequence[Any]) -> Table:
    """The decoding grid (mappings or objects as in `results.DecodingRow`); the fastest of each group is bold."""
    table = Table(title="Decoding", title_justify="left", header_style="bold")
    table.add_column("drafter")
    for header in ("k", "tokens/s", "speedup", "predicted", "tokens a block", "accepted", "identical"):
        table.add_column(header, justify="right")
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
                *(Text("-" if cell is None else format_value(cell)) for cell in cells),
                style="bold" if row is best else "",
            )
    return table


def numerics_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """What `specjax.numerics` found (its JSON), a section for each path that others are compared with."""
    table = Table(
        title="Drift of the logits of the same tokens",
        title_justify="left",
        header_style="bold",
        caption_justify="left",
    )
    table.caption = (
        "Absolute differences to single tokens at batch 1. near ties: positions where the two best logits are closer "
        "than the drift; other: where another token is best; first: the first such output token (its margin)."
    )
    table.add_column("against, path")
    for header in ("max", "mean", "near ties", "other", "first"):
        table.add_column(header, justify="right")
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
