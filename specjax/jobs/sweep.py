"""Every point of a config's sweep, one run after the other.

Each point goes to `out/<id>`, and `out/results.jsonl` has one line a run. The same command again skips finished runs
and retries failed ones."""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from specjax.config import RunConfig, SweepRun, shipped
from specjax.errors import DataError, SpecjaxError
from specjax.models.files import plain_json, write_atomically
from specjax.report.figures import figures
from specjax.report.labels import counted, format_value
from specjax.report.terminal import plain_table
from specjax.runtime.artifact import exclusive

Run = Callable[[RunConfig], Mapping[str, Any]]
RESULTS, ERROR = "results.jsonl", "error.txt"
# Columns of the final table, where a run's summary has them.
HEADLINES = ("target_nll", "draft_nll", "alpha_before", "alpha_after", "speedup_greedy", "speedup_t1")
_LAST_TO_GO = ("target_nll", "draft_nll", "alpha_before", "speedup_greedy", "speedup_t1", "alpha_after")


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of results.jsonl. ``status``: `ok` or `failed`; ``error``: one line, None if ok."""

    id: str
    overrides: dict[str, Any]
    status: str
    error: str | None
    seconds: float
    summary: dict[str, Any] | None


def whole_run(config: RunConfig) -> Mapping[str, Any]:
    """The main job of one config, see `specjax.jobs.run`. Returns its summary."""
    from specjax.jobs.run import run  # it loads JAX, which a config error need not wait for

    return run(config)


def run_one(config: RunConfig, run: Run | None = None) -> None:
    """One run, and its figures on the terminal. ``run``: the job; None: `whole_run`."""
    summary = (run or whole_run)(config)
    from specjax.report.terminal import figures_table

    Console().print(figures_table(figures(summary)))


def run_or_sweep(config: Path, overrides: Sequence[str], run: Run | None = None) -> int:
    """The run that a config describes, or every point of its sweep. Returns the exit status: 1 if any point failed."""
    runs = shipped.load_runs(config, overrides)
    if [point.overrides for point in runs] != [{}]:
        return run_sweep(runs, run or whole_run, Console())
    assert runs[0].config is not None
    run_one(runs[0].config, run)
    return 0


def run_sweep(runs: Sequence[SweepRun], run: Run, console: Console) -> int:
    """Every run that is not finished yet; a failure is recorded and does not stop the rest. 1 if any failed."""
    root = runs[0].out.parent
    with exclusive(root):
        records = read_records(root / RESULTS)
        for number, point in enumerate(runs, 1):
            title = f"[{number}/{len(runs)}] {point.id}: {_described(point.overrides)}"
            if (known := records.get(point.id)) and known.status == "ok":
                console.print(Text(f"{title}: finished earlier, skipped"))
                continue
            console.print(Text(title))
            records[point.id] = record = _attempt(point, run)
            lines = [json.dumps(dataclasses.asdict(r), default=plain_json) for r in records.values()]
            write_atomically(root / RESULTS, "\n".join(lines) + "\n")
            if record.error:
                console.print(Text(f"failed: {record.error}", style="red"))
        swept = [records[point.id] for point in runs]
        console.print(_table(swept, console.width))
        failed = sum(record.status != "ok" for record in swept)
        finished = f"{len(swept) - failed} of {counted(len(swept), 'run')} finished; all figures: {root / RESULTS}"
        console.print(Text(finished), soft_wrap=True)
    return 1 if failed else 0


def read_records(path: Path) -> dict[str, Record]:
    """Records by id, in file order; none if there is no file yet. Raises `DataError` naming a line that is not one."""
    if not path.exists():
        return {}
    records = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            raise DataError(f"{path}, line {number}: not a record of a run; delete the line to run it again") from None
        records[record.id] = record
    return records


def _attempt(point: SweepRun, run: Run) -> Record:
    if point.config is None:
        return Record(point.id, point.overrides, "failed", _one_line(point.error), 0.0, None)
    began = time.monotonic()
    trace = point.out / ERROR
    try:
        summary = dict(run(point.config))
    # Whatever ends one run, an exit included, is that run's failure; Ctrl-C is neither and passes.
    except (Exception, SystemExit) as error:
        point.out.mkdir(parents=True, exist_ok=True)
        trace.write_text(traceback.format_exc(), encoding="utf-8")
        seconds = round(time.monotonic() - began, 3)
        return Record(point.id, point.overrides, "failed", _one_line(error), seconds, None)
    trace.unlink(missing_ok=True)
    return Record(point.id, point.overrides, "ok", None, round(time.monotonic() - began, 3), summary)


def _table(records: Sequence[Record], width: int) -> Table:
    """Table of the runs within ``width`` columns, settings and speed first; everything is in results.jsonl."""
    names = list(dict.fromkeys(name for record in records for name in record.overrides))
    shown = [key for key in HEADLINES if any((record.summary or {}).get(key) is not None for record in records)]
    wide = Console(width=10_000)
    while True:
        table = _table_of(records, names, shown)
        if not shown or Measurement.get(wide, wide.options, table).maximum <= width:
            return table
        shown = [key for key in shown if key != min(shown, key=_LAST_TO_GO.index)]


def _table_of(records: Sequence[Record], names: Sequence[str], shown: Sequence[str]) -> Table:
    table = plain_table("Sweep")
    leaves = [name.rpartition(".")[2] for name in names]
    # The last part of a field says enough where no two are alike.
    titles = [leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)]
    for header in ("run", *titles, "status", "seconds", *shown):
        table.add_column(header.replace("_", "\n").replace(".", ".\n"), no_wrap=True)
    for record in records:
        summary = record.summary or {}
        table.add_row(
            record.id,
            *(Text(_value(record.overrides.get(name))) for name in names),
            Text(record.status, style="green" if record.status == "ok" else "bold red"),
            f"{record.seconds:.0f}",
            *(Text(format_value(summary.get(key)) if summary.get(key) is not None else "–") for key in shown),
        )
    return table


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else json.dumps(value, default=plain_json).strip('"')


def _described(overrides: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={_value(value)}" for field, value in overrides.items())


def _one_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecjaxError) else f"{type(error).__name__}: {text}"
