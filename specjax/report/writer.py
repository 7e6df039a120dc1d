"""Writer of `report/` from results: summary.json, PNG plots, report.md, and report.html, which is the same Markdown as
a page with plots and colours (no external asset or script)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from pydantic_core import to_json

from specjax.errors import SpecjaxError
from specjax.models.files import write_atomically
from specjax.report import labels, palette, plots, results
from specjax.report.results import Results, Sample, TrainingRecord

_PNG_COLUMNS = {"training": 3, "speedup": 2, "lengths": 2}
"""Panels side by side in each plot that is saved as PNG too, for documents that cannot hold the page."""


def write(run_dir: Path) -> Path:
    """Read `run_dir/results.json`, write the report beside it, return its directory. See `specjax.report.build`."""
    run = results.load(run_dir)
    panels = {
        "training": plots.training_panels(run.training),
        "speedup": plots.speedup_panels(run.decoding),
        "acceptance": plots.acceptance_panels(run.decoding),
        "lengths": plots.length_panels(run.decoding),
    }
    images = {f"{name}.png": plots.png(panels[name], columns) for name, columns in _PNG_COLUMNS.items() if panels[name]}
    drawn = {f"{name}.png": _figures(group) for name, group in panels.items() if group}
    files: dict[str, str | bytes] = {
        "summary.json": summary_json(run),
        **images,
        "report.md": _environment().get_template("report.md.jinja").render(_content(run), images=images, page=False),
        "report.html": _page(run, drawn),
    }
    directory = run_dir / "report"
    try:
        directory.mkdir(exist_ok=True)
        for name, content in files.items():
            write_atomically(directory / name, content)
    except OSError as error:
        raise SpecjaxError(
            f"{directory}: cannot write the report ({error}); free space or mend its permissions"
        ) from error
    return directory


def summary_json(run: Results) -> bytes:
    """JSON of the run's figures by name, then date, machine and the bound of each figure; NaN becomes null."""
    header = {"name": run.name, "date": run.date, "machine": run.machine, "figures": run.figures}
    return to_json({**run.summary, **header}, indent=2, inf_nan_mode="null") + b"\n"


def _page(run: Results, drawn: Mapping[str, str]) -> str:
    """HTML of the report's Markdown. ``drawn``: what stands in the place of each picture, by its file."""
    environment = _environment()
    markdown = environment.get_template("report.md.jinja").render(_content(run), images=drawn, page=True)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    drawn = {**drawn, "sample": _coloured(run.sample)}
    body = re.sub(r'<p><img src="([^"]*)" alt="[^"]*" /></p>', lambda image: drawn.get(image[1], ""), body)
    for key, meaning in labels.FIGURES.items():
        body = body.replace(f"<td>{key}</td>", f"<td>{key}<small>{meaning}</small></td>")
    looks = {"colors": palette.css_variables(), "origins": palette.ORIGINS}
    return environment.get_template("page.html.jinja").render(title=run.name, body=body, **looks)


def _figures(panels: Iterable[plots.Panel]) -> str:
    figures = (f"<figure><figcaption>{escape(p.title)}</figcaption>{plots.svg(p)}</figure>\n" for p in panels)
    return f'<div class="plots">\n{"".join(figures)}</div>'


def _pieces(sample: Sample | None) -> list[tuple[str, str]]:
    """(origin, text) of the prompt and all that follows."""
    return [] if sample is None else [("prompt", sample.prompt), *((p.origin, p.text) for p in sample.pieces)]


def _coloured(sample: Sample | None) -> str:
    spans = (f'<span class="{origin}">{escape(labels.visible(text))}</span>' for origin, text in _pieces(sample))
    return f'<pre class="sample">{"".join(spans)}</pre>'


def _content(run: Results) -> dict[str, Any]:
    """Content of the report's template beside the run itself: rows of its tables, and its generation."""
    bounded = [figure for figure in run.figures if figure.bound]
    groups = {
        key: [{**dict(row), "fastest": row is results.fastest(rows)} for row in rows]
        for key, rows in results.ordered(run.decoding)
    }
    smallest = next(iter(groups), (0,))[0]  # batches differ in speed, not in acceptance
    stages = {**run.stage_seconds, "compilation": run.compile_seconds}
    durations = [(stage, labels.format_duration(seconds)) for stage, seconds in stages.items()]
    pieces = _pieces(run.sample)
    lengths = {origin: sum(len(text) for at, text in pieces if at == origin) for origin in palette.ORIGINS}
    new = max(sum(lengths.values()) - lengths["prompt"], 1)
    return {
        "run": run,
        "missing": labels.NOT_MEASURED,
        "descriptions": labels.FIGURES,
        "origins": palette.ORIGINS,
        "bounded": len(bounded),
        "missed": [figure.key for figure in bounded if not figure.ok],
        "figures": [_figure(figure) for figure in run.figures],
        "passes": [_pass(row) for row in run.roofline],
        "compared": [row for _, rows in results.before_and_after(run.comparison) for row in rows],
        "curves": _curves(run.training),
        "groups": groups,
        "adaptive": [row for row in run.decoding if row.proposals],
        "accepted": [
            {**row, "number": f"{temperature:g}", "fastest": False}
            for (batch_size, temperature), rows in groups.items()
            for row in rows
            if batch_size == smallest and row["acceptance_at"]
        ],
        "shares": {origin: f"{length / new:.0%}" for origin, length in lengths.items()},
        "marked": "".join(text.join(palette.ORIGINS[origin].brackets) for origin, text in pieces),
        "machine": [*((key, labels.format_value(value)) for key, value in run.machine.items()), *durations],
        "summary": [(key, labels.format_value(value)) for key, value in labels.flat(run.summary)],
    }


def _figure(figure: results.Figure) -> tuple[str, ...]:
    """Cells of a figure: its name, value, bound and mark."""
    depends = f" ({figure.depends_on})" if figure.depends_on else ""
    mark = ("✓ ok" if figure.ok else _Markdown("✗ **missed**")) if figure.bound else ""
    return figure.key, labels.format_against(figure.value, figure.bound), figure.bound + depends, mark


def _pass(row: results.Pass) -> tuple[Any, ...]:
    """Cells of a pass: its name, batch, intensity and bound, least and measured milliseconds, and share."""
    share = None if row.share_of_roofline is None else f"{row.share_of_roofline:.0%}"
    seconds = None if row.seconds is None else 1000 * row.seconds
    return row.name, row.batch, row.intensity, row.bound, 1000 * row.least_seconds, seconds, share


def _curves(training: results.Training) -> dict[str, list[TrainingRecord]]:
    """Records of each stage with a held-out measurement, and its last one, by the stage's title."""
    control = "Control (cross-entropy for as long), learning rate"
    stages = {"Cross-entropy": training.pretrain, "Distillation": training.distill}
    stages |= {f"{control} {_cell(rate)}": records for rate, records in training.control.items()}
    return {
        title: [r for r in records if r is records[-1] or r.alpha is not None or r.held_out_nll is not None]
        for title, records in stages.items()
        if records
    }


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specjax.report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        against=labels.format_against,
        cell=_cell,
        date=labels.format_date,
        drafter=labels.drafter_name,
        fenced=_fenced,
        table=_table,
        temperature=labels.format_temperature,
    )
    return environment


class _Markdown(str):
    """A cell that is Markdown already."""


def _cell(value: Any) -> str:
    """One line of Markdown that shows a value as it stands and keeps a table's columns; a dash for None."""
    if isinstance(value, _Markdown):
        return value
    text = " ".join(labels.format_or_dash(value).split())
    return re.sub(r"([\\\\|*`\[])", r"\\\1", text).replace("<", "&lt;")


def _in_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its drafter, temperature and interval as a reader sees them."""
    words = dict(row)
    if "drafter" in row:
        words["drafter"] = labels.drafter_name(row["drafter"]) + (" (fastest)" if row.get("fastest") else "")
    if "temperature" in row:
        words["temperature"] = labels.format_temperature(row["temperature"])
    if "low" in row:
        words["interval"] = labels.format_interval(row["low"], row["high"])
    return words


def _table(rows: Iterable[Any], titles: str, names: str = "") -> str:
    """Table with a column for each title, those with ``>`` of numbers. ``names``: the field of a row that each column
    shows; empty for rows that are the cells."""
    heads = titles.split(" | ")
    rule = "|".join("---:" if head.startswith(">") else "---" for head in heads)
    lines = [f"| {' | '.join(head.removeprefix('>') for head in heads)} |", f"|{rule}|"]
    for row in rows:
        words = _in_words(dict(row)) if names else {}
        cells = [words[name] for name in names.split()] if names else row
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) if rows else labels.NOT_MEASURED


def _fenced(text: str, language: str = "") -> str:
    """Code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max([3, *(1 + len(run) for run in re.findall("`+", text))])
    return f"{fence}{language}\n{labels.visible(text).rstrip()}\n{fence}"
