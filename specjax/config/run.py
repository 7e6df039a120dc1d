"""The whole config: its sections, and the checks of one section against another."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from specjax.config import loading
from specjax.config.decoding import Bench, Certify, Eval, Sampling
from specjax.config.fields import STRICT, Directory, NonNegative, buildable
from specjax.config.training import Control, Data, Distributed, Draft, Logging, Mesh, Selection, Stage, Target, start_of
from specjax.errors import ConfigError
from specjax.registry import DRAFTS, VERIFIERS, build, resolve


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """A run: a target, data, a draft to train, and how to measure decoding."""

    target: Target
    """The model to accelerate."""
    data: Data
    """Text to train on and to measure on."""
    # Made on demand: the check of a loss imports its class, which needs JAX.
    draft: Draft = dataclasses.field(default_factory=Draft)
    """The model that proposes."""
    distill: Stage = dataclasses.field(default_factory=Stage)
    """The distillation of the draft."""
    control: Control = Control()
    """Cross-entropy training of the same length, to compare the distillation with."""
    selection: Selection = Selection()
    """Decoding with the draft at every evaluation, to select a checkpoint or to stop early."""
    mesh: Mesh = Mesh()
    """Devices that train together."""
    distributed: Distributed = Distributed()
    """Processes that train together."""
    eval: Eval = Eval()
    """Acceptance and losses on held-out text."""
    bench: Bench = Bench()
    """The benchmark of decoding."""
    sampling: Sampling = Sampling()
    """Sampling parameters of all decoding in the run, apart from the temperature."""
    certify: Certify = Certify()
    """Checks that the output is the target's."""
    verifier: buildable(VERIFIERS) = "speculative"  # pyright: ignore[reportInvalidTypeForm]
    """Rule that accepts proposed tokens: a kind, or a mapping such as `{kind: lenient, lenience: 0.5}`."""
    require_lossless: bool = False
    """Refuse a verifier that changes the target's distribution."""
    logging: Logging = Logging()
    """Destinations of training records besides `log.jsonl`."""
    compile_cache: bool = True
    """Keep compiled programs in the user's cache directory for the next run; `SPECJAX_COMPILE_CACHE=0` turns it off for
    all runs."""
    seed: NonNegative = 0
    """Seed of every random choice of the run."""
    out: Directory = "runs/run"
    """Directory of all that the run writes: checkpoints, logs, the draft, the report."""

    @model_validator(mode="after")
    def _rates_fit_the_start(self) -> RunConfig:
        def rated(section: Any, rate: float) -> Any:
            if section.optimizer.learning_rate is not None:
                return section
            return dataclasses.replace(section, optimizer=dataclasses.replace(section.optimizer, learning_rate=rate))

        start = start_of(self.draft.init, self.draft.kind)
        pretrain = rated(self.draft.pretrain, start.learning_rate)
        for name, section in {
            "target": rated(self.target, self.target.optimizer.peak),
            "draft": dataclasses.replace(self.draft, pretrain=pretrain),
            "distill": rated(self.distill, start.learning_rate),
        }.items():
            object.__setattr__(self, name, section)
        return self

    @model_validator(mode="after")
    def _target_can_chat(self) -> RunConfig:
        if self.data.kind == "self_chat" and self.target.path is None:
            raise ValueError(
                "data.kind=self_chat with a target from scratch, which has learned no chat; give target.path"
            )
        return self

    @model_validator(mode="after")
    def _losses_take_the_cache(self) -> RunConfig:
        stages = [stage for stage in (self.draft.pretrain, self.distill) if stage.teacher == "cached"]
        # For a draft that reads hidden states the cache holds those, which give the whole distribution.
        if stages and not resolve(DRAFTS, self.draft.kind, "draft.kind").keeps_hidden:
            for stage in stages:
                stage.refuse_lossy_cache()
        return self

    @model_validator(mode="after")
    def _verifier_fits(self) -> RunConfig:
        asked = {"bench": self.bench.temperatures, "selection": self.selection.temperatures or ()}
        # A verifier without randomness emits the most likely token: the target's distribution at temperature 0 only.
        verifier = build(VERIFIERS, self.verifier, "verifier")
        for section, temperatures in asked.items():
            sampled = [t for t in temperatures if t > 0]
            if sampled and verifier.noise == "none":
                raise ValueError(
                    f"verifier {verifier.kind!r} decodes at temperature 0 only, {section}.temperatures has "
                    f"{sampled[0]:g}; set {section}.temperatures=[0] or verifier=speculative"
                )
        if self.require_lossless and not verifier.lossless:
            exact = sorted(kind for kind in VERIFIERS if resolve(VERIFIERS, kind, "").lossless)
            raise ValueError(
                f"verifier {verifier.kind!r} changes the target's distribution and require_lossless is true; "
                f"use one of {', '.join(exact)}, or require_lossless=false"
            )
        return self


def completed(raw: DictConfig) -> DictConfig:
    """The settings with a partly given `draft.pretrain` filled in; its defaults are not those of other stages."""
    select = functools.partial(OmegaConf.select, raw, throw_on_resolution_failure=False)
    given = select("draft.pretrain")
    if not isinstance(given, DictConfig):
        return raw
    default: dict[str, Any] = {"loss": "cross_entropy"}
    if not {"steps", "epochs"} & given.keys():
        init = select("draft.init")
        init = OmegaConf.to_container(init) if isinstance(init, DictConfig) else init
        default["steps"] = start_of(init, select("draft.kind")).pretrain_steps
    missing = {key: value for key, value in default.items() if key not in given}
    return typing.cast(DictConfig, OmegaConf.merge(raw, {"draft": {"pretrain": missing}}))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run that a YAML file describes, with overrides.

    Args:
        path: the YAML file.
        overrides: ``a.b=v``, in which values are YAML.

    Returns:
        The validated run.

    Raises:
        ConfigError: the file is no valid run; one line for each problem: file, field, value, what was expected, and
            for an unknown key the nearest known one.
    """
    raw = loading.read(path, overrides, RunConfig)
    if raw.get("sweep") is not None:
        raise ConfigError(f"{path}: sweep: this file describes many runs; use `specjax sweep`, or override sweep=null")
    raw.pop("sweep", None)
    return loading.validate(path, completed(raw), RunConfig, loading.sources_of(overrides))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file, ``sweep`` included, for editors."""
    schema = TypeAdapter(RunConfig).json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["sweep"] = {
        "type": ["object", "null"],
        "description": "Dotted fields, each with the values to run; `specjax sweep` runs their product.",
        "additionalProperties": {"type": "array", "minItems": 1},
    }
    return schema
