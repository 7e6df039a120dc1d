"""What is trained, on what, how and on which devices: the sections of a config before anything is measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from specjax.config.fields import (
    STRICT,
    Axis,
    Grid,
    Name,
    NonNegative,
    Positive,
    Rate,
    ascending,
    buildable,
    distinct,
    kind_in,
    path_or,
)
from specjax.errors import ConfigError
from specjax.registry import DATA, DRAFTS, INITS, LOSSES, OUTSIDE, build


@dataclass(frozen=True, config=STRICT)
class Architecture:
    """Sizes of a model to train from scratch or to cut from the target. A target is a Llama; a draft is of its target's
    family and has the target's vocabulary."""

    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    num_layers: Positive = 2
    num_heads: Positive | None = None
    """None: of a draft that is cut from the target or reads it all of the target's, else 4."""
    num_kv_heads: Positive | None = None
    """None: as few for each of `num_heads` as the target has, of random weights one each."""
    head_dim: Positive | None = None
    """Features of a head; None: hidden_size / num_heads, of a draft cut from the target the target's."""

    def filled(self, num_heads: int = 4, num_kv_heads: int = 4, head_dim: int | None = None) -> Architecture:
        """With heads as these where it says nothing. Raises `ConfigError` for sizes that do not go together."""
        heads = self.num_heads or num_heads
        kv_heads = self.num_kv_heads or max(1, heads * num_kv_heads // num_heads)
        features = self.head_dim or head_dim
        try:
            return dataclasses.replace(self, num_heads=heads, num_kv_heads=kv_heads, head_dim=features)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(f"draft.architecture: {reason}") from None

    @model_validator(mode="after")
    def _heads_fit(self) -> Architecture:
        if self.num_heads is None or self.num_kv_heads is None:
            return self  # asked again when it is `filled`
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


@dataclass(frozen=True, config=STRICT)
class Start:
    """Defaults that do not undo what the draft's first weights know."""

    learning_rate: float
    pretrain_steps: int


STARTS = {
    "scratch": Start(3e-3, 300),
    "pruned": Start(1e-3, 300),
    "layers": Start(3e-4, 300),
    "checkpoint": Start(1e-4, 0),
}
"""By kind of `draft.init`; another kind counts as trained weights."""
STARTS_OF_KINDS = dict.fromkeys({*DRAFTS} - {"draft_model"}, Start(1e-3, 0))
"""By `draft.kind`, of a draft that is cut from its target: one that reads the target has seen the text already."""
INIT_WORDS = {"target": "pruned", "scratch": "scratch"}
"""Short for these kinds; a directory of such a name is ./target."""


def start_of(init: Any, kind: Any = None) -> Start:
    """What is right for a draft of that `draft.init` and `draft.kind`, if nothing is said."""
    if kind in STARTS_OF_KINDS and init in (None, "target"):
        return STARTS_OF_KINDS[kind]
    if isinstance(init, Mapping):
        return STARTS.get(str(init.get("kind")), STARTS["checkpoint"])
    return STARTS["scratch" if init is None else INIT_WORDS.get(init, "checkpoint")]


@dataclass(frozen=True, config=STRICT)
class Optimizer:
    """AdamW or Muon, with linear warm-up, a schedule, decoupled decay, and clipping by the global norm."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the steps of the matrices inside the layers; embeddings, head and vectors stay with AdamW,
    whose learning rate suits both."""
    learning_rate: Rate | None = None
    """At the peak. None: what is safe for the weights that the draft starts from (`draft.init`): 3e-3 for random ones,
    1e-3 for those cut from the target, 3e-4 for layers of the target, 1e-4 for trained ones. For a target, 3e-3."""
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

    @property
    def peak(self) -> float:
        """`learning_rate`, outside of a run that of random weights."""
        return STARTS["scratch"].learning_rate if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, config=STRICT)
class Hub:
    """What is read of a data set on the hub (`data.path: hf:NAME`)."""

    subset: str | None = None
    """Its configuration, where it has several."""
    split: Name = "train"
    """As the `datasets` library reads it: `train`, `train[:10%]`, ..."""
    revision: str | None = None
    """Branch, tag or commit."""


Column = Literal[
    "text", "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system", "tools",
    "source",
]  # fmt: skip


@dataclass(frozen=True, config=STRICT)
class Data:
    """Text to train on and to measure on."""

    path: Name
    """`python-stdlib`; a text, .jsonl or .parquet file, or a directory of them; or `hf:NAME`, a data set on the hub or
    a directory that the `datasets` library loads. A record has `text`, or `prompt` and `completion`, or a chat
    (`messages`; ShareGPT's `conversations`; Alpaca's `instruction`, `input`, `output`), and perhaps `source`, a
    label."""
    hub: Hub = Hub()
    columns: dict[Column, Name] = dataclasses.field(default_factory=dict)
    """Where the records have other names: `{prompt: question, completion: answer}`. What is not named is not read."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the documents kept from training, chosen by content hash; all of a long text file is one document. Of
    few documents at least one, of a single long file its end."""
    seq_len: Annotated[int, Field(ge=8)] = 256
    prompt_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How much the prediction of a prompt's tokens counts; 0: prompts are masked, 1: they count like any text."""
    on_bad: Literal["error", "skip"] = "error"
    """Malformed lines, text that is not UTF-8, empty shards, documents shorter than two tokens: stop, or count and
    skip."""


@dataclass(frozen=True, config=STRICT)
class Target:
    """The model to accelerate: ``path`` of a trained one, or the ``architecture`` of one to train from scratch."""

    path: Name | None = None
    """A Hugging Face directory or hub id. None: train one from scratch on `data`, of the shape `architecture`."""
    revision: str | None = None
    family: Annotated[str, Field(pattern=OUTSIDE)] | None = None
    """Where a model family of yours is, `package.module:NAME`; None: it is one of specjax/models/families."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of its weights and computations. None: float32 on CPU and for `specjax certify`, bfloat16 on accelerators."""
    quantize: Literal["int8", "int4"] | None = None
    """How its kernels are stored, made as it is loaded; it is another model then, to which decoding is exact."""
    kv_cache: Literal["int8"] | None = None
    """How decoding keeps its keys and values, in 8 bits with a scale for each vector: another model, too."""
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
        for name in ("quantize", "kv_cache"):
            if getattr(self, name) is not None and self.path is None:
                raise ValueError(f"{name}={getattr(self, name)!r} without a path: only a target that is loaded has it")
        if self.path is not None and self.steps:
            raise ValueError(f"steps={self.steps} with a path: only a target from scratch is trained; drop steps")
        if self.architecture is not None and not self.steps:
            raise ValueError("steps=0 with an architecture: a target from scratch has to be trained; set steps")
        return self


@dataclass(frozen=True, config=STRICT)
class Stage:
    """One training stage of the draft: data, a loss, a number of steps, an optimizer."""

    loss: buildable(LOSSES) = "forward_kl"  # pyright: ignore[reportInvalidTypeForm]
    """A kind, or `{kind: jensen_shannon, beta: 0.3}` and the like; docs/losses.md lists them."""
    steps: NonNegative | None = None
    """None: 500, or those of `epochs`. May be raised when the stage goes on, where the learning rate of the steps taken
    does not depend on it: `schedule: constant`, or `wsd` before its decay."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Instead of `steps`: so often all rows of the stage's data."""
    batch_size: Positive = 16
    """Rows of a step, over all devices."""
    micro_batch_size: Positive | None = None
    """Rows at a time, of which a step adds up the gradients. None: as many as fit the device's memory (`specjax plan
    --memory`), on CPU as many as stay in its cache."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the draft's forward and backward pass; None: bfloat16 on accelerators, float32 on CPU. Weights, optimizer and
    loss are float32 in any case."""
    remat: bool | None = None
    """Compute each layer's activations again in the backward pass instead of keeping them; None: on accelerators, where
    the draft can."""
    scan_layers: bool = False
    """One program for all layers of a kind instead of one each: compiles sooner, for a copy of the weights."""
    optimizer: Optimizer = Optimizer()
    eval_every: Positive = 100
    eval_positions: Positive = 8_192
    """Held-out positions of the acceptance measured as training goes; the final figures use `eval.positions`."""
    save_every: Positive = 100
    skip_non_finite: NonNegative = 0
    """Steps that may be left out, and counted in the log, because their loss or gradient is NaN or infinite."""
    profile: Annotated[tuple[Positive, Positive], AfterValidator(ascending)] | None = None
    """First and last step that `jax.profiler` traces, into `profile` in the stage's directory."""
    data: buildable(DATA) = "text"  # pyright: ignore[reportInvalidTypeForm]
    """`text`; `{kind: generated, ...}`: continuations by the target; `{kind: on_policy, share: 0.5, every: 100, ...}`:
    in part the draft's own."""

    teacher: Literal["online", "cached"] = "online"
    """Where the target's logits come from: its forward in every step, or a pass over the stage's rows before the
    first, of which the `teacher_top_k` largest are kept on disk; of a draft that reads hidden states, those and what
    gives the whole distribution."""
    teacher_top_k: Positive = 64
    teacher_path: Name | None = None
    """Of what is cached: a directory that runs share, where that of the same target, rows and `teacher_top_k` is made
    once. None: in the stage's own."""
    teacher_gb: Annotated[float, Field(gt=0)] = 100.0
    """Most that it may take on disk, in 10^9 bytes; more is refused before anything is computed."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Stage:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g}; give one of them, and null for the other")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 500)  # what a directory says it was made with
        return self

    @property
    def num_steps(self) -> int:
        """`steps`, where they are known."""
        if self.steps is None:
            raise ValueError(f"epochs={self.epochs}: the steps depend on the data; see `over`")
        return self.steps

    def over(self, rows: int) -> Stage:
        """The stage on so many rows: with its steps, whichever way they were given."""
        if self.epochs is None:
            return self
        return dataclasses.replace(self, steps=math.ceil(self.epochs * rows / self.batch_size), epochs=None)

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

    def refuse_lossy_cache(self) -> None:
        """Raises `ValueError` where the loss needs more than the largest logits, which is all that is kept."""
        if self.teacher == "cached" and build(LOSSES, self.loss, "loss").needs_whole_distribution:
            kind = self.loss if isinstance(self.loss, str) else self.loss["kind"]
            raise ValueError(
                f"loss {kind!r} needs the target's whole distribution, teacher=cached keeps its "
                f"{self.teacher_top_k} largest logits; use teacher=online, or one of forward_kl, "
                "total_variation, lk_alpha, lk_lambda (at target_temperature=1)"
            )

    @model_validator(mode="after")
    def _microbatches_fit(self) -> Stage:
        if self.micro_batch_size is not None and self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of micro_batch_size={self.micro_batch_size}"
            )
        return self


def _open_to_kinds(schema: dict[str, Any]) -> None:
    """Only `draft_model` has no other fields than those that stand here."""
    closed = {"properties": {"kind": {"const": "draft_model"}}}, {"propertyNames": {"enum": [*schema["properties"]]}}
    schema |= dict(zip(("if", "then"), closed, strict=True))
    del schema["additionalProperties"]


@dataclass(frozen=True, config=STRICT | {"json_schema_extra": _open_to_kinds})
class Draft:
    """The drafter that is trained: its kind, shape or starting weights, and its training before distillation."""

    architecture: Architecture = Architecture()
    init: path_or(INITS) = None  # pyright: ignore[reportInvalidTypeForm]
    """Weights to start from: `scratch` or None for fresh ones; `target` for a part of the target, cut to `architecture`
    (specjax/distill/prune.py); else a Hugging Face directory, whose shape replaces `architecture`. Or
    `{kind: layers, keep: [0, 2, 5]}`: layers of the target, whole, between its embedding and head, copied or with
    `share: true` the target's own, frozen (specjax/distill/init.py)."""
    kind: kind_in(DRAFTS) = "draft_model"  # pyright: ignore[reportInvalidTypeForm]
    """`draft_model`: a separate model, of the fields above. `glide`: one that reads the target's keys and values, with
    `reads`, `depths` and `depth_decay` beside them (specjax/drafters/glide.py). `dflash`, `dflash2`, `dspark`,
    `eagle3`, `early_exit`, `medusa`, `mtp`, `p_eagle`: drafts that read its hidden states, with the fields that
    docs/drafters.md has. Another kind, `package.module:Class`,
    has fields of its own beside `pretrain`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights that are measured, decoded with and exported: training ends by rounding them. Decoding reads
    bfloat16 in half the time, and a draft has no exactness to lose."""
    pretrain: Stage = Field(
        default_factory=lambda given: Stage(
            loss="cross_entropy", steps=start_of(given.get("init"), given.get("kind")).pretrain_steps
        )
    )
    """Before distillation: cross-entropy on the data, 300 steps of it, or none where `init` names trained weights and
    for a kind that reads its target."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """The fields of another kind: in a file they stand beside `kind`."""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_a_kind(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("kind", "draft_model") == "draft_model":
            return given
        others = {name: value for name, value in given.items() if name not in cls.__dataclass_fields__}
        known = {name: value for name, value in given.items() if name not in others}
        return {**known, "settings": {**others, **known.get("settings", {})}}

    @model_validator(mode="after")
    def _kind_takes_them(self) -> Draft:
        try:
            if self.kind == "draft_model" and self.init in (None, "scratch"):
                self.architecture.filled()
            build(DRAFTS, {"kind": self.kind, **self.settings}, "")
        except ConfigError as error:
            raise ValueError(str(error).removeprefix(": ").removeprefix(".")) from None
        return self


@dataclass(frozen=True, config=STRICT)
class Control:
    """The rival of distillation: its extra tokens spent on cross-entropy instead, best of several learning rates."""

    learning_rates: Annotated[tuple[Rate, ...], AfterValidator(distinct)] = ()


@dataclass(frozen=True, config=STRICT)
class Selection:
    """Held-out prompts decoded with the draft at every evaluation of the distillation, and what follows from that."""

    prompts: NonNegative = 8
    """0: nothing is decoded."""
    prompt_tokens: Positive = 64
    """Of a plain text; a chat's prompt is what was said before an answer, of at most so many."""
    new_tokens: Positive = 64
    k: Annotated[int, Field(ge=1, le=64)] = 5
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *Grid] | None = None
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


@dataclass(frozen=True, config=STRICT)
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


@dataclass(frozen=True, config=STRICT)
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


@dataclass(frozen=True, config=STRICT)
class Wandb:
    """Weights & Biases; needs the extra `wandb`."""

    project: Name = "specjax"
    name: Name | None = None
    """None: the name of the run's directory."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's directory only, for `wandb sync`."""


@dataclass(frozen=True, config=STRICT)
class Logging:
    """Where training records go beside `log.jsonl`, which every stage has."""

    tensorboard: bool = False
    """Event files in `tensorboard` in the run's directory; needs the extra `tensorboard`."""
    wandb: Wandb | None = None
