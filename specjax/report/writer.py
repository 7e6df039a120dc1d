"""Writer of `report/` from results: summary.json, report.md, report.html (no external asset or script), PNG plots."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from specjax.errors import SpecjaxError
from specjax.report import labels, palette, plots, results
from specjax.report.results import Results
from specjax.runtime.files import write_atomically

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
    context = {
        "run": run,
        "groups": [(*key, rows, results.fastest(rows)) for key, rows in results.ordered(run.decoding)],
        "compared": results.before_and_after(run.comparison),
        "bounded": sum(bool(figure.bound) for figure in run.figures),
        "missed": [figure for figure in run.figures if figure.bound and not figure.ok],
        "origins": palette.ORIGINS,
        "counts": _characters_by_origin(run),
        "css_variables": palette.css_variables(),
        "descriptions": labels.FIGURES,
        "summary_rows": labels.flat(run.summary),
        "images": images,
    }
    drawn = {name: [(panel.title, plots.svg(panel)) for panel in group] for name, group in panels.items()}
    environment = _environment()
    html = environment.get_template("report.html.jinja").render(**context, plots=drawn)
    markdown = environment.get_template("report.md.jinja").render(**context)

    directory = run_dir / "report"
    try:
        directory.mkdir(exist_ok=True)
        write_atomically(directory / "summary.json", summary_json(run))
        for name, content in images.items():
            write_atomically(directory / name, content)
        write_atomically(directory / "report.md", markdown)
        write_atomically(directory / "report.html", html)
    except OSError as error:
        raise SpecjaxError(
            f"{directory}: cannot write the report ({error}); free space or mend its permissions"
        ) from error
    return directory


def summary_json(run: Results) -> str:
    """JSON of the run's figures by name, then date, machine and the bound of each figure; NaN becomes null."""
    content = {
        **run.summary,
        "name": run.name,
        "date": run.date,
        "machine": run.machine,
        "figures": [figure.model_dump() for figure in run.figures],
    }
    return json.dumps(_finite(content), indent=2) + "\n"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specjax.report"),
        autoescape=jinja2.select_autoescape(["html.jinja"], default=False),
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        value=labels.format_value,
        against=labels.format_against,
        date=labels.format_date,
        duration=labels.format_duration,
        temperature=labels.format_temperature,
        drafter=labels.drafter_name,
        interval=lambda row: labels.format_interval(row.low, row.high),
        cell=_markdown_cell,
        fenced=_fenced,
    )
    return environment


def _finalize(value: Any) -> Any:
    """Value of any expression of a template as the page shows it: no control characters, and no `None`."""
    if value is None:
        return labels.NOT_MEASURED
    return labels.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _markdown_cell(value: Any) -> str:
    text = labels.format_value(value)
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _fenced(text: str, language: str = "") -> str:
    """Code block whose fence is longer than any run of backticks in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _characters_by_origin(run: Results) -> dict[str, str]:
    """Share of the sample's new text that each origin wrote, as a percentage."""
    pieces = run.sample.pieces if run.sample else ()
    total = sum(len(piece.text) for piece in pieces if piece.origin != "prompt")
    return {
        origin: f"{sum(len(piece.text) for piece in pieces if piece.origin == origin) / max(total, 1):.0%}"
        for origin in palette.ORIGINS
        if origin != "prompt"
    }


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
