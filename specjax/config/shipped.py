"""The configs that come with specjax, found by their names: beside a clone, or in the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from specjax.config.run import RunConfig, load_config
from specjax.errors import ConfigError

REPOSITORY = "https://github.com/specjax/specjax"
DEMO_TARGET = "models/demo-target"


def load(config: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings of a config (`config_file`). Raises `ConfigError` if its target is the demo's, outside of a clone:
    as the id of a hub it would be nobody's."""
    file = config_file(config)
    settings = load_config(file, overrides)
    if settings.target.path == DEMO_TARGET and not Path(DEMO_TARGET).exists():
        raise ConfigError(
            f"{file}: target.path {DEMO_TARGET}, of 49 MB, is in clones of specjax only, and not here ({Path.cwd()}); "
            f"`git clone {REPOSITORY}` and run this in its folder, or give your own: target.path=DIR"
        )
    return settings


def config_file(config: Path) -> Path:
    """``config`` if it is there; else the config of that name that comes with specjax, as in `train tiny`. Raises
    `ConfigError` with the names there are."""
    if config.is_file() or config.parent != Path() or config.suffix not in ("", ".yaml"):
        return config
    shipped = {file.stem: file for file in sorted(_shipped_configs())}
    if config.stem not in shipped:
        if config.exists():  # a directory, which says so when it is read
            return config
        known = f"; configs that come with specjax are {', '.join(shipped)}" if shipped else ""
        raise ConfigError(f"{config}: no such config file{known}")
    print(f"config: {shipped[config.stem]}", file=sys.stderr)
    return shipped[config.stem]


def _shipped_configs() -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):  # of a wheel, of a clone
        if (folder / "schema.json").is_file():
            yield from folder.glob("*.yaml")
            return
