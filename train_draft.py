"""Distill a draft for a target: python train_draft.py configs/demo.yaml distill.steps=200

Resumable: the same command goes on after an interruption. Leaves the draft as a Hugging Face directory in `out`/draft.
Exit status: 2 for what the user can mend, 130 after Ctrl-C, 143 after SIGTERM, which saves the step under way first.
"""

from __future__ import annotations

from pathlib import Path

from specjax.cli import run_main


def main(config: Path, overrides: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specjax.compile_cache import keep_programs
    from specjax.config import load_config
    from specjax.distill import distributed, job, teacher_cache
    from specjax.distill.progress import console_bars, no_bars
    from specjax.report.terminal import comparison_table

    settings = load_config(config, overrides)
    keep_programs(settings.compile_cache)
    distributed.start(settings.distributed)
    console = Console()
    result = job.run(settings, console_bars(console) if distributed.is_first() else no_bars)
    if not distributed.is_first():
        return
    measures = result.measures
    table = Table("held out", "loss (nats a token)", "alpha", title=f"{measures.positions:,} positions")
    table.add_row("target", f"{measures.target_nll:.4f}", "")
    table.add_row("draft before", f"{measures.draft_nll:.4f}", f"{measures.alpha_before:.4f}")
    table.add_row("draft distilled", f"{measures.draft_nll_after:.4f}", f"{measures.alpha_after:.4f}")
    if measures.alpha_ce_control is not None:
        table.add_row("cross-entropy control", "", f"{measures.alpha_ce_control:.4f}")
    console.print(table)
    if result.comparison:
        console.print(comparison_table(result.comparison))
    for cache in sorted(Path(settings.out).glob("*/teacher/provenance.json")):
        console.print(f"cached logits: {teacher_cache.summary(cache.parent)}", soft_wrap=True)
    console.print(f"draft: {Path(settings.out) / 'draft'}", soft_wrap=True)


if __name__ == "__main__":
    run_main(main, __doc__)
