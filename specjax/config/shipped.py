"""Configs that come with specjax, found by their names in a clone or in the installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.config.run import RunConfig, load_config
from specjax.config.sweep import SweepRun, load_sweep
from specjax.errors import ConfigError

REPOSITORY = "https://github.com/specjax/specjax"
DEMO_TARGET = "models/demo-target"


def load(config: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings of a config (`config_file`). Raises `ConfigError` if its target is the demo's and this is no clone:
    the path would be looked up as a hub id, and no model has it."""
    file = config_file(config)
    settings = load_config(file, overrides)
    _check_target(file, settings)
    return settings


def load_runs(config: Path, overrides: Sequence[str]) -> list[SweepRun]:
    """Every run of a config's sweep, or the one run that it describes (`load_sweep`). Raises `ConfigError` as `load`
    does."""
    file = config_file(config)
    runs = load_sweep(file, overrides)
    for run in runs:
        if run.config is not None:
            _check_target(file, run.config)
    return runs


def _check_target(file: Path, settings: RunConfig) -> None:
    if settings.target.path == DEMO_TARGET and not Path(DEMO_TARGET).exists():
        raise ConfigError(
            f"{file}: target.path {DEMO_TARGET}, of 49 MB, is in clones of specjax only, and not here ({Path.cwd()}); "
            f"`git clone {REPOSITORY}` and run this in its folder, or give your own: target.path=DIR"
        )


def config_file(config: Path) -> Path:
    """``config`` if that file exists; else the config of that name that comes with specjax, as in `train tiny`. Raises
    `ConfigError` with the known names."""
    if config.is_file() or config.parent != Path() or config.suffix not in ("", ".yaml"):
        return config
    shipped = {file.stem: file for file in sorted(_shipped_configs())}
    if config.stem not in shipped:
        if config.exists():  # a directory: reading it raises the error
            return config
        known = f"; configs that come with specjax are {', '.join(shipped)}" if shipped else ""
        raise ConfigError(f"{config}: no such config file{known}")
    print(f"config: {shipped[config.stem]}", file=sys.stderr)
    return shipped[config.stem]


def _shipped_configs() -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):  # in a wheel, in a clone
        if (folder / "schema.json").is_file():
            yield from folder.glob("*.yaml")
            return
