"""The typed schema of a run. OmegaConf reads YAML and ``a.b=v`` overrides, pydantic validates; errors name the field.

A run is a target, data, a draft to train, and how to measure decoding. Every section has defaults except ``target``
and ``data``, so a config file says only what is particular to it. A file may also carry ``sweep:``, a mapping from
dotted fields to lists of values; `load_sweep` expands the product. Interpolation inside the file is allowed; resolvers,
which read the environment, are not: a config says everything about its run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from specjax import config_io
from specjax.errors import ConfigError
from specjax.registry import DATA, DRAFTERS, INITS, LOSSES, VERIFIERS, build, resolve


def _kind_in(table: Mapping[str, str]) -> Any:
    """A name in a registry. Known names are not imported here: the table alone decides."""

    def known(kind: str) -> str:
        if kind not in table:
            try:
                resolve(table, kind, "")
            except ConfigError as error:
                raise ValueError(str(error).removeprefix(": ")) from None
        return kind

    return Annotated[str, AfterValidator(known), Field(json_schema_extra={"enum": [*sorted(table)]})]


def _buildable(table: Mapping[str, str]) -> Any:
    """A kind in a registry at its defaults, or a mapping ``{kind: ..., field: value}``."""

    def known(spec: Any) -> Any:
        if spec is not None:
            try:
                build(table, spec, "")
            except ConfigError as error:
                raise ValueError(str(error).removeprefix(": ").removeprefix(".")) from None
        return spec

    kinds: dict[str, Any] = {"enum": [*sorted(table)]}
    fields: dict[str, Any] = {"type": "object", "required": ["kind"], "properties": {"kind": kinds}}
    return Annotated[Any, AfterValidator(known), Field(json_schema_extra={"anyOf": [kinds, fields]})]


def _path_or(table: Mapping[str, str]) -> Any:
    """Text, or a mapping ``{kind: ..., field: value}`` of a registered kind."""

    def known(spec: Any) -> Any:
        if isinstance(spec, str):
            if not spec:
                raise ValueError("found an empty text; give a path, or null")
        elif spec is not None:
            try:
                build(table, spec, "")
            except ConfigError as error:
                raise ValueError(str(error).removeprefix(": ").removeprefix(".")) from None
        return spec

    kinds = {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": [*sorted(table)]}}}
    text = {"type": "string", "minLength": 1}
    return Annotated[Any, AfterValidator(known), Field(json_schema_extra={"anyOf": [text, kinds, {"type": "null"}]})]


def _distinct(values: tuple) -> tuple:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} repeats a value; give each once")
    return values


def _ascending(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError(f"{list(steps)} ends before it begins; give the first and the last step")
    return steps


def _no_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 devices; give their number, or -1 for all that remain")
    return value


_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
_Grid = (Field(min_length=1), AfterValidator(_distinct))
_WEIGHTLESS = {kind: where for kind, where in DRAFTERS.items() if kind != "draft_model"}
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Axis = Annotated[int, Field(ge=-1), AfterValidator(_no_zero)]


@dataclass(frozen=True, config=_STRICT)
class Architecture:
    """A Llama-shaped model to train from scratch; the vocabulary is the target's."""

    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 4
    head_dim: Positive | None = None
    """Features of a head; None: hidden_size / num_heads."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Architecture:
        if self.hidden_size % self.num_heads:
            # With a head_dim of its own it need not be; but transformers would refuse to load the draft.
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        if self.head_dim is not None:
            if self.head_dim % 2:
                raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even number")
        elif self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} over num_heads={self.num_heads} gives heads of "
                f"{self.hidden_size // self.num_heads} features; rotary embeddings need an even number"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return self


@dataclass(frozen=True, config=_STRICT)
class Optimizer:
    """AdamW or Muon, with linear warm-up, a schedule, decoupled decay, and clipping by the global norm."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the steps of the matrices inside the layers; embeddings, head and vectors stay with AdamW,
    whose learning rate suits both."""
    learning_rate: Rate = 3e-3
    """At the peak."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up, down to `final_scale` of the peak: as a cosine, along a line, not at all, or along a line in
    the last `decay_share` of the steps only (warm-up, stable, decay)."""
    warmup_steps: NonNegative = 50
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Of the steps; for `schedule: wsd`."""
    final_scale: Annotated[float, Field(ge=0, le=1)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Of matrices; norm scales and biases do not decay."""
    decay_embeddings: bool = True
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an average of the weights over the steps (0.999, say). It is then the average that is evaluated and that
    the stage results in."""


@dataclass(frozen=True, config=_STRICT)
class Hub:
    """What is read of a data set on the hub (`data.path: hf:NAME`)."""

    subset: str | None = None
    """Its configuration, where it has several."""
    split: Name = "train"
    """As the `datasets` library reads it: `train`, `train[:10%]`, ..."""
    revision: str | None = None
    """Branch, tag or commit."""


@dataclass(frozen=True, config=_STRICT)
class Data:
    """Text to train on and to measure on."""

    path: Name
    """`python-stdlib`; a text, .jsonl or .parquet file, or a directory of them; or `hf:NAME`, a data set on the hub or
    a directory that the `datasets` library loads. A record has `text`, or `prompt` and `completion`, or `messages`,
    and perhaps `source`, a label."""
    hub: Hub = Hub()
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the documents kept from training, chosen by content hash."""
    seq_len: Annotated[int, Field(ge=8)] = 256
    prompt_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much the prediction of a prompt's tokens counts; 0: prompts are masked, 1: they count like any text."""
    on_bad: Literal["error", "skip"] = "error"
    """Malformed lines, text that is not UTF-8, empty shards, documents shorter than two tokens: stop, or count and
    skip."""


@dataclass(frozen=True, config=_STRICT)
class Target:
    """The model to accelerate: ``path`` of a trained one, or the ``architecture`` of one to train from scratch."""

    path: Name | None = None
    """A Hugging Face directory or hub id. None: train one from scratch on `data`, of the shape `architecture`."""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    architecture: Architecture | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 2048
    """Of the byte-level BPE trained with a target from scratch; a loaded target brings its own."""
    steps: NonNegative = 0
    batch_size: Positive = 16
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _one_source(self) -> Target:
        if (self.path is None) == (self.architecture is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(
                f"{found} of path and architecture given, expected one: "
                "path loads a trained target, architecture trains one from scratch"
            )
        if self.path is not None and self.steps:
            raise ValueError(f"steps={self.steps} with a path: only a target from scratch is trained; drop steps")
        if self.architecture is not None and not self.steps:
            raise ValueError("steps=0 with an architecture: a target from scratch has to be trained; set steps")
        return self


@dataclass(frozen=True, config=_STRICT)
class Stage:
    """One training stage of the draft: data, a loss, a number of steps, an optimizer."""

    loss: _buildable(LOSSES) = "forward_kl"  # pyright: ignore[reportInvalidTypeForm]
    """A kind, or `{kind: jensen_shannon, beta: 0.3}` and the like; docs/losses.md lists them."""
    steps: NonNegative = 500
    batch_size: Positive = 16
    """Rows of a step, over all devices."""
    micro_batch_size: Positive | None = None
    """Rows at a time, of which a step adds up the gradients. None: the whole batch, on CPU as many as stay in its
    cache."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the draft's forward and backward pass. Weights, optimizer and loss are float32 in any case."""
    remat: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    scan_layers: bool = False
    """One program for all layers of a kind instead of one each: compiles sooner, for a copy of the weights."""
    optimizer: Optimizer = Optimizer()
    eval_every: Positive = 100
    eval_positions: Positive = 8_192
    """Held-out positions of the acceptance measured as training goes; the final figures use `eval.positions`."""
    save_every: Positive = 100
    skip_non_finite: NonNegative = 0
    """Steps that may be left out, and counted in the log, because their loss or gradient is NaN or infinite."""
    profile: Annotated[tuple[Positive, Positive], AfterValidator(_ascending)] | None = None
    """First and last step that `jax.profiler` traces, into `profile` in the stage's directory."""
    data: _buildable(DATA) = "text"  # pyright: ignore[reportInvalidTypeForm]
    """`text`; `{kind: generated, ...}`: continuations by the target; `{kind: on_policy, share: 0.5, every: 100, ...}`:
    in part the draft's own."""

    teacher: Literal["online", "cached"] = "online"
    """Where the target's logits come from: its forward in every step, or a pass over the stage's rows before the
    first, of which the `teacher_top_k` largest are kept on disk."""
    teacher_top_k: Positive = 64

    @model_validator(mode="after")
    def _samples_are_judged(self) -> Stage:
        kind = self.data.get("kind") if isinstance(self.data, Mapping) else self.data
        if kind == "on_policy" and not build(LOSSES, self.loss, "loss").needs_target:
            raise ValueError(
                "data on_policy with a loss that needs no target would teach the draft what it says already; use a "
                "loss against the target, such as forward_kl, or data: text"
            )
        if kind == "on_policy" and self.teacher == "cached":
            raise ValueError("teacher=cached keeps logits of text, on_policy data comes as it goes; use teacher=online")
        return self

    @model_validator(mode="after")
    def _loss_takes_the_cache(self) -> Stage:
        if self.teacher == "cached" and build(LOSSES, self.loss, "loss").needs_whole_law:
            kind = self.loss if isinstance(self.loss, str) else self.loss["kind"]
            raise ValueError(
                f"loss {kind!r} needs the target's whole law, teacher=cached keeps its {self.teacher_top_k} largest "
                "logits; use teacher=online, or one of forward_kl, total_variation, lk_alpha, lk_lambda (at "
                "target_temperature=1)"
            )
        return self

    @model_validator(mode="after")
    def _microbatches_fit(self) -> Stage:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}"
            )
        return self


@dataclass(frozen=True, config=_STRICT)
class Draft:
    """The model that proposes: its shape or starting weights, and its training before distillation."""

    architecture: Architecture = Architecture()
    init: _path_or(INITS) = None  # pyright: ignore[reportInvalidTypeForm]
    """Weights to start from: None for fresh ones; `target` for a part of the target, cut to `architecture`
    (specjax/distill/prune.py); else a Hugging Face directory, whose shape replaces `architecture`. Or
    `{kind: layers, keep: [0, 2, 5]}`: layers of the target, whole, between its embedding and head, copied or with
    `share: true` the target's own, frozen (specjax/distill/init.py)."""
    pretrain: Stage = dataclasses.field(default_factory=lambda: Stage(loss="cross_entropy", steps=300))
    """Cross-entropy on the data, before distillation; 0 steps to skip."""


@dataclass(frozen=True, config=_STRICT)
class Control:
    """The rival of distillation: its extra tokens spent on cross-entropy instead, best of several learning rates."""

    learning_rates: Annotated[tuple[Rate, ...], AfterValidator(_distinct)] = ()


@dataclass(frozen=True, config=_STRICT)
class Selection:
    """Held-out prompts decoded with the draft at every evaluation of the distillation, and what follows from that."""

    prompts: NonNegative = 8
    """0: nothing is decoded."""
    prompt_tokens: Positive = 64
    new_tokens: Positive = 64
    k: Annotated[int, Field(ge=1, le=64)] = 5
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *_Grid] | None = None
    """None: those of `bench`."""
    select: Literal["last", "best"] = "last"
    """The draft of the last step, or the one that emits the most tokens a target call (mean over the temperatures; of
    equals the latest)."""
    patience: Positive | None = None
    """The distillation stops after so many evaluations in a row without a better draft. None: at its last step."""

    @model_validator(mode="after")
    def _has_prompts(self) -> Selection:
        if not self.prompts and (self.select == "best" or self.patience is not None):
            raise ValueError("select=best and patience need prompts to decode, and prompts is 0; set prompts")
        return self


@dataclass(frozen=True, config=_STRICT)
class Mesh:
    """Devices that train together: a batch is split over `data` x `fsdp`; -1, on one axis, takes all devices that the
    others leave. See docs/multi_host.md."""

    data: Axis = 1
    """Copies of the weights."""
    fsdp: Axis = 1
    """Shards of the weights and of the optimizer's state, put together layer by layer as they are needed."""
    tensor: Axis = 1
    """Shards of every computation: of heads, neurons and vocabulary."""
    draft: Literal["sharded", "replicated"] = "sharded"
    """Over `fsdp` and `tensor`; a small draft trains faster where every device has all of it."""
    target: Literal["sharded", "replicated"] = "sharded"

    @model_validator(mode="after")
    def _one_remainder(self) -> Mesh:
        if [self.data, self.fsdp, self.tensor].count(-1) > 1:
            raise ValueError("-1 on more than one axis; one axis can take the remaining devices")
        return self


@dataclass(frozen=True, config=_STRICT)
class Distributed:
    """Several processes, one a host or a GPU, that run the same command. See docs/multi_host.md."""

    enabled: bool = False
    """TPU pods, SLURM, Kubernetes and Open MPI say by themselves who is who; elsewhere give all three of the others."""
    coordinator: Name | None = None
    """`host:port` of process 0."""
    num_processes: Positive | None = None
    process_id: NonNegative | None = None

    @model_validator(mode="after")
    def _all_or_none(self) -> Distributed:
        given = [value is not None for value in (self.coordinator, self.num_processes, self.process_id)]
        if any(given) and not (all(given) and self.enabled):
            raise ValueError("coordinator, num_processes and process_id go together, with enabled=true")
        return self


@dataclass(frozen=True, config=_STRICT)
class Eval:
    """Acceptance and losses on held-out text, under teacher forcing."""

    positions: Positive = 50_000
    """Held-out positions of the final acceptance and losses."""
    batch_size: Positive = 8


@dataclass(frozen=True, config=_STRICT)
class Bench:
    """Decoding of held-out prompts: everything in the grid, timed interleaved."""

    prompts: Positive = 12
    """Timed prompts. As many others choose k; three times as many count the acceptance that predicts the speedup."""
    prompt_tokens: Annotated[int, Field(ge=1)] = 64
    new_tokens: Positive = 192
    batch_sizes: Annotated[tuple[Positive, ...], *_Grid] = (1, 8)
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *_Grid] = (0.0, 1.0)
    ks: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], *_Grid] = (3, 5, 7)
    drafters: Annotated[tuple[_kind_in(_WEIGHTLESS), ...], AfterValidator(_distinct)] = ("ngram",)  # pyright: ignore
    """Registered drafters that need no weights, beside the trained draft; at their default settings."""
    price_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Of the machine, in any currency: adds the cost of a thousand tokens to every point."""
    repeats: Positive = 5
    """Timed repetitions of the autoregressive loop and of the best k; the rest of the grid is timed once."""


@dataclass(frozen=True, config=_STRICT)
class Sampling:
    """Sampling parameters of all decoding in a run, beside the temperature; their meanings: specjax/sampling.py."""

    top_k: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: NonNegative = 0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    """Token id -> what is added to its logit."""
    banned_tokens: tuple[NonNegative, ...] = ()
    allowed_tokens: tuple[NonNegative, ...] = ()
    """All others are banned; empty: none is."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Beside the target's end-of-sequence ids."""

    def options(self) -> dict[str, Any]:
        """As arguments of `Decoder.generate`."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, config=_STRICT)
class Certify:
    """What `specjax certify` checks, and how surely."""

    drafter: _buildable(DRAFTERS) = None  # pyright: ignore[reportInvalidTypeForm]
    """`{kind: draft_model, model: PATH, k: 5}`, `{kind: ngram, k: 5}`, ...; None: the draft trained in `out`."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Draft length of the trained draft."""
    temperature: Annotated[float, Field(ge=1e-5)] = 1.0
    prompts: Annotated[int, Field(ge=4)] = 8
    prompt_tokens: Positive = 64
    new_tokens: Annotated[int, Field(ge=3)] = 192
    batch_size: Positive = 16
    """Rows of a batch of sampled generations; the prompts take turns."""
    total_variation: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """A law this far off is found with probability `power`."""
    power: Annotated[float, Field(gt=0, lt=1)] = 0.99
    level: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Probability that an exact pair is failed by chance."""
    margin: Annotated[float, Field(ge=0)] = 1e-4
    """Largest gap between the two best logits at which another choice is put down to rounding."""


@dataclass(frozen=True, config=_STRICT)
class Wandb:
    """Weights & Biases; needs the extra `wandb`."""

    project: Name = "specjax"
    name: Name | None = None
    """None: the name of the run's directory."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's directory only, for `wandb sync`."""


@dataclass(frozen=True, config=_STRICT)
class Logging:
    """Where training records go beside `log.jsonl`, which every stage has."""

    tensorboard: bool = False
    """Event files in `tensorboard` in the run's directory; needs the extra `tensorboard`."""
    wandb: Wandb | None = None


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    """A run: a target, data, a draft to train, and how to measure decoding."""

    target: Target
    data: Data
    # Made when asked for: a loss is checked by its class, which needs JAX.
    draft: Draft = dataclasses.field(default_factory=Draft)
    distill: Stage = dataclasses.field(default_factory=Stage)
    control: Control = Control()
    selection: Selection = Selection()
    mesh: Mesh = Mesh()
    distributed: Distributed = Distributed()
    eval: Eval = Eval()
    bench: Bench = Bench()
    sampling: Sampling = Sampling()
    certify: Certify = Certify()
    verifier: _buildable(VERIFIERS) = "speculative"  # pyright: ignore[reportInvalidTypeForm]
    """A kind, or `{kind: lenient, lenience: 0.5}` and the like."""
    require_lossless: bool = False
    """Refuse a verifier that changes the target's law."""
    logging: Logging = Logging()
    compile_cache: bool = True
    """Keep compiled programs in the user's cache directory for the next run; `SPECJAX_COMPILE_CACHE=0` turns it off for
    all runs."""
    seed: NonNegative = 0
    out: Name = "runs/run"
    """Where everything of this run goes: checkpoints, logs, the draft, the report."""

    @model_validator(mode="after")
    def _verifier_fits(self) -> RunConfig:
        asked = {"bench": self.bench.temperatures, "selection": self.selection.temperatures or ()}
        # A verifier without randomness keeps the most likely token, which is the target's law at temperature 0 only.
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
                f"verifier {verifier.kind!r} changes the target's law and require_lossless is true; "
                f"use one of {', '.join(exact)}, or require_lossless=false"
            )
        return self


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One point of a sweep: either ``config`` or ``error`` is set. ``id`` names the whole configuration but ``out`` and
    stays the same when the sweep grows; ``out`` is this run's directory."""

    id: str
    overrides: dict[str, Any]
    out: Path
    config: RunConfig | None
    error: ConfigError | None = None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that the YAML file ``path`` describes, with ``a.b=v`` overrides (values are YAML).

    Raises `ConfigError`, one line a problem: file, field, value, what was expected, the nearest key for unknown ones.
    """
    raw = config_io.read(path, overrides)
    if raw.get("sweep") is not None:
        raise ConfigError(
            f"{path}: sweep: this file describes many runs; use experiments/run.py, or override sweep=null"
        )
    raw.pop("sweep", None)
    return config_io.validate(path, raw, RunConfig, config_io.sources_of(overrides))


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> list[SweepRun]:
    """Every run of the file: the product of its ``sweep`` in file order, the last field varying fastest. Without
    ``sweep`` the one run it describes, in ``out`` itself; in a sweep each run has a directory under ``out``.

    A point that does not validate carries its error and leaves the others alone. Raises `ConfigError` if the file or
    the sweep itself is wrong, or if no point is valid.
    """
    raw = config_io.read(path, overrides)
    sweep = _sweep_values(path, raw.pop("sweep", None))
    sources = config_io.sources_of(overrides)
    if not sweep:
        config = config_io.validate(path, raw, RunConfig, sources)
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


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file, ``sweep`` included, for editors."""
    schema = TypeAdapter(RunConfig).json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["sweep"] = {
        "type": ["object", "null"],
        "description": "Dotted fields, each with the values to run; the product is run by experiments/run.py.",
        "additionalProperties": {"type": "array", "minItems": 1},
    }
    return schema


def _sweep_values(path: str | Path, sweep: DictConfig | None) -> dict[str, list[Any]]:
    """``sweep`` as dotted field -> values; nested mappings, which overrides produce, are flattened."""
    if sweep is None:
        return {}
    if not isinstance(sweep, DictConfig) or not sweep:
        raise ConfigError(f"{path}: sweep: expected a mapping from fields to lists, as in 'distill.steps: [100, 200]'")
    known, values = config_io.known_fields(RunConfig), {}
    for field, choices in config_io.leaves("", OmegaConf.to_container(sweep, resolve=False)):
        if field == "out":
            raise ConfigError(f"{path}: sweep.out: not a field to sweep; every run gets its own directory under out")
        if field not in known:
            raise ConfigError(f"{path}: sweep.{field}: {config_io.unknown_key(RunConfig, field)}")
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
        merged = typing.cast(DictConfig, OmegaConf.merge(raw, *nested))
    except TypeError:
        raise ConfigError(f"{path}: sweep: a field of {', '.join(point)} lies in a list, expected a section") from None
    run_id = _identity(merged)
    try:
        swept = {field: f"the sweep: {field}={json.dumps(value)}" for field, value in point.items()}
        config = config_io.validate(path, merged, RunConfig, {**sources, **swept})
    except ConfigError as error:
        out = OmegaConf.select(raw, "out", throw_on_resolution_failure=False, default=RunConfig.out)
        return SweepRun(run_id, point, Path(str(out)) / run_id, None, error)
    out = Path(config.out) / run_id
    return SweepRun(run_id, point, out, dataclasses.replace(config, out=str(out)))


def _identity(raw: DictConfig) -> str:
    values = {key: value for key, value in config_io.unresolved(raw).items() if key != "out"}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:10]
