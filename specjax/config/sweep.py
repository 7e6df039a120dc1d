"""The points of a `sweep:`, each with its config or the error that makes it invalid."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specjax.config import loading
from specjax.config.run import RunConfig, completed
from specjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One point of a sweep: either ``config`` or ``error`` is set. ``id``: digest of the whole configuration without
    ``out``; it stays the same when the sweep grows. ``out``: directory of this run."""

    id: str
    overrides: dict[str, Any]
    out: Path
    config: RunConfig | None
    error: ConfigError | None = None


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> list[SweepRun]:
    """All runs of a file: the product of its ``sweep`` in file order, the last field varying fastest; each run has a
    directory under ``out``. Without ``sweep``: the one run that the file describes, in ``out`` itself.

    An invalid point carries its error and does not affect the others. Raises `ConfigError` if the file or the sweep
    itself is wrong, or if no point is valid.
    """
    raw = loading.read(path, overrides, RunConfig)
    sweep = _sweep_values(path, raw.pop("sweep", None))
    sources = loading.sources_of(overrides)
    if not sweep:
        config = loading.validate(path, completed(raw), RunConfig, sources)
        return [SweepRun(_identity(raw), {}, Path(config.out), config)]
    for field in sweep:
        if field in sources:
            raise ConfigError(f"{path}: {field}: set by {sources[field]} and by the sweep; drop one of them")
    runs = [
        _sweep_run(path, raw, dict(zip(sweep, values, strict=True)), sources)
        for values in itertools.product(*sweep.values())
    ]
    if len({run.id for run in runs}) < len(runs):
        raise ConfigError(f"{path}: sweep: the same run occurs twice; give each value once")
    if all(run.config is None for run in runs):
        raise ConfigError("\n".join(dict.fromkeys(str(run.error) for run in runs)))
    return runs


def _sweep_values(path: str | Path, sweep: DictConfig | None) -> dict[str, list[Any]]:
    """``sweep`` as dotted field -> values. Overrides produce nested mappings; these are flattened."""
    if sweep is None:
        return {}
    if not isinstance(sweep, DictConfig) or not sweep:
        raise ConfigError(f"{path}: sweep: expected a mapping from fields to lists, as in 'distill.steps: [100, 200]'")
    known, values = loading.known_fields(RunConfig), {}
    for field, choices in loading.leaves("", OmegaConf.to_container(sweep, resolve=False)):
        if field == "out":
            raise ConfigError(f"{path}: sweep.out: not a field to sweep; every run gets its own directory under out")
        if field not in known:
            raise ConfigError(f"{path}: sweep.{field}: {loading.unknown_key(RunConfig, field)}")
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"{path}: sweep.{field}: found {json.dumps(choices)}, expected a list of values")
        values[field] = choices
    return values


def _sweep_run(path: str | Path, raw: DictConfig, point: dict[str, Any], sources: Mapping[str, str]) -> SweepRun:
    nested: list[dict[str, Any]] = []
    for field, value in point.items():
        for part in reversed(field.split(".")):
            value = {part: value}
        nested.append(value)
    try:
        merged = loading.merged(raw, typing.cast(DictConfig, OmegaConf.merge({}, *nested)), RunConfig)
    except TypeError:
        raise ConfigError(f"{path}: sweep: a field of {', '.join(point)} lies in a list, expected a section") from None
    run_id = _identity(merged)
    try:
        swept = {field: f"the sweep: {field}={json.dumps(value)}" for field, value in point.items()}
        config = loading.validate(path, completed(merged), RunConfig, {**sources, **swept})
    except ConfigError as error:
        out = OmegaConf.select(raw, "out", throw_on_resolution_failure=False, default=RunConfig.out)
        return SweepRun(run_id, point, Path(str(out)).expanduser() / run_id, None, error)
    out = Path(config.out) / run_id
    return SweepRun(run_id, point, out, dataclasses.replace(config, out=str(out)))


def _identity(raw: DictConfig) -> str:
    values = {key: value for key, value in loading.unresolved(raw).items() if key != "out"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:10]
