"""What `specjax train` and `specjax demo` do, and where they find configs: beside a clone, or in the package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.errors import ConfigError, SpecjaxError

_REPOSITORY = "https://github.com/specjax/specjax"
_DEMO_FILES = ("models/demo-target/config.json", "configs/demo.yaml", "experiments/run.py")


def train(config: Path, overrides: Sequence[str]) -> None:
    """The distillation job of a config, and what it measured. Several processes of one job all call it."""
    from rich.console import Console
    from rich.table import Table

    from specjax.compile_cache import programs_kept
    from specjax.config import load_config
    from specjax.distill import distributed, job, teacher_cache
    from specjax.distill.progress import console_bars, no_bars
    from specjax.report.terminal import comparison_table

    settings = load_config(config_file(config), overrides)
    console = Console()
    with programs_kept(settings.compile_cache):
        distributed.start(settings.distributed)
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


def demo_command(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """(folder, command) of the demo: what `make demo` runs, in the clone that this package or the working directory is
    in. Raises `SpecjaxError` without a clone, whose target of 49 MB is no part of the package."""
    root = next((folder for folder in _folders() if all((folder / file).is_file() for file in _DEMO_FILES)), None)
    if root is None:
        raise SpecjaxError(
            f"demo: no clone of specjax here ({Path.cwd()}), and its target of 49 MB is no part of the package; "
            f"`git clone {_REPOSITORY}` and run `specjax demo` in it, or train a small target from nothing with "
            "`specjax train demo_from_scratch`"
        )
    return root, [sys.executable, "experiments/run.py", "configs/demo.yaml", *overrides]


def run_demo(overrides: Sequence[str]) -> None:
    """Becomes the demo's process, so that signals and the exit status are its own."""
    root, command = demo_command(overrides)
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    os.execv(command[0], command)


def config_file(config: Path) -> Path:
    """``config`` if it is there; else the config of that name that comes with specjax, as in `train tiny`. Raises
    `ConfigError` with the names there are."""
    if config.exists() or config.parent != Path() or config.suffix not in ("", ".yaml"):
        return config
    shipped = {file.stem: file for file in sorted(_shipped_configs())}
    if config.stem not in shipped:
        known = f"; configs that come with specjax are {', '.join(shipped)}" if shipped else ""
        raise ConfigError(f"{config}: no such config file{known}")
    print(f"config: {shipped[config.stem]}", file=sys.stderr)
    return shipped[config.stem]


def _shipped_configs() -> Iterator[Path]:
    package = Path(__file__).parent
    for folder in (package / "configs", package.parent / "configs"):  # of a wheel, of a clone
        if (folder / "schema.json").is_file():
            yield from folder.glob("*.yaml")
            return


def _folders() -> list[Path]:
    return [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[1]]
