"""`specjax train`: run the distillation job of a config and print its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def train(config: Path, overrides: Sequence[str]) -> None:
    """Run the distillation job of a config and print its figures. With several processes, all call it."""
    from rich.console import Console
    from rich.table import Table

    from specjax.config.shipped import load
    from specjax.jobs import distill as job
    from specjax.report.terminal import comparison_table
    from specjax.runtime import distributed
    from specjax.runtime.compile_cache import programs_kept
    from specjax.runtime.progress import console_bars, no_bars
    from specjax.training import teacher_cache

    settings = load(config, overrides)
    console = Console()
    with programs_kept(settings.compile_cache):
        distributed.start(settings.distributed)
        result = job.run(settings, console_bars(console) if distributed.is_first() else no_bars)
    if not distributed.is_first():
        return
    measures = result.measures
    table = Table("held out", "loss (nats a token)", "alpha", "agreement", title=f"{measures.positions:,} positions")

    def row(name: str, *values: float) -> None:
        table.add_row(name, *(f"{value:.4f}" for value in values))

    row("target", measures.target_nll)
    row("draft before", measures.draft_nll, measures.alpha_before, measures.agreement_before)
    row("draft distilled", measures.draft_nll_after, measures.alpha_after, measures.agreement_after)
    by_depth = zip(measures.nll_at_after, measures.alpha_at_after, measures.agreement_at_after, strict=True)
    for depth, at in enumerate([*by_depth][1:], 2):
        row(f"  at depth {depth} of a block", *at)
    if measures.alpha_ce_control is not None:
        table.add_row("cross-entropy control", "", f"{measures.alpha_ce_control:.4f}")
    console.print(table)
    if result.comparison:
        console.print(comparison_table(result.comparison))
    for cache in sorted(Path(settings.out).glob("*/teacher/provenance.json")):
        console.print(f"cached: {teacher_cache.summary(cache.parent)}", soft_wrap=True)
    if "draft" in result.self_tests:
        console.print(f"loaded again after its export: {result.self_tests['draft']}", soft_wrap=True)
    console.print(f"draft: {Path(settings.out) / 'draft'}", soft_wrap=True)
