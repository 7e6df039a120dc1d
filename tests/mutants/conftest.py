"""Closes a run of the mutants with their table: which error, found by which test."""

from __future__ import annotations


def pytest_terminal_summary(terminalreporter) -> None:
    from tests.mutants.mutants import MUTANTS

    rows = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(report.user_properties).get("mutant")
            if found and report.when == "call":
                name, part, killer = found
                rows.append((part, name, killer, "yes" if outcome == "passed" else "NO", f"{report.duration:.1f}"))
    if not rows:
        return
    killed = sum(row[3] == "yes" for row in rows)
    table = [("part", "mutant", "killed by", "killed", "seconds"), *sorted(rows)]
    widths = [max(len(row[i]) for row in table) for i in range(5)]
    terminalreporter.section("mutants")
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells).rstrip())
    # Of all that were asked for: one that could not even be planted is not killed.
    asked = len(MUTANTS) if len(rows) + len(terminalreporter.stats.get("error", [])) >= len(MUTANTS) else len(rows)
    terminalreporter.write_line(f"mutants: {killed}/{asked} killed")
