"""The typed schema of a run. OmegaConf reads YAML and ``a.b=v`` overrides, pydantic validates; errors name the field.

A run is a target, data, a draft to train, and how to measure decoding. Every section has defaults except ``target``
and ``data``, so a config file holds only what differs from them. A file may also carry ``sweep:``, a mapping from
dotted fields to lists of values; `load_sweep` expands the product. An override or a sweep that sets a loss, a drafter
or anything else to another kind drops the fields of the kind before. Interpolation inside the file is allowed;
resolvers, which read the environment, are not: a config says everything about its run.
"""

from specjax.config.decoding import Bench, Certify, Eval, Sampling
from specjax.config.run import RunConfig, json_schema, load_config
from specjax.config.sweep import SweepRun, load_sweep
from specjax.config.training import (
    INIT_WORDS,
    Architecture,
    Control,
    Data,
    Distributed,
    Draft,
    Hub,
    Logging,
    Mesh,
    Optimizer,
    Selection,
    Stage,
    Target,
    Wandb,
)

__all__ = [
    "INIT_WORDS",
    "Architecture",
    "Bench",
    "Certify",
    "Control",
    "Data",
    "Distributed",
    "Draft",
    "Eval",
    "Hub",
    "Logging",
    "Mesh",
    "Optimizer",
    "RunConfig",
    "Sampling",
    "Selection",
    "Stage",
    "SweepRun",
    "Target",
    "Wandb",
    "json_schema",
    "load_config",
    "load_sweep",
]
