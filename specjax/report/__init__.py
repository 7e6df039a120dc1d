"""Reports of a finished run from its `results.json`: tables, plots and one self-contained page. `terminal` has the same
views for rich, `results` is the schema of the input, `writer` makes the files, `palette` holds every colour, `labels`
every wording.
"""

from __future__ import annotations

from pathlib import Path


def build(run_dir: str | Path) -> Path:
    """Write `run_dir/report/` (summary.json, report.md, report.html, PNG plots) from `run_dir/results.json`.

    Each file is replaced atomically. Returns the report's directory; raises SpecjaxError when the results are missing
    or malformed, and then writes nothing.
    """
    from specjax.report.writer import write  # here, so that the terminal views do not wait for matplotlib to load

    return write(Path(run_dir))
