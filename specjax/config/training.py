"""Sections of a config for training: target, data, draft, its stages, devices and logs."""

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
from specjax.config.self_chat import SelfChat
from specjax.errors import ConfigError
from specjax.registry import DATA, DRAFTS, INITS, LOSSES, OUTSIDE, build


@dataclass(frozen=True, config=STRICT)
class Architecture:
    """Sizes of a model to train from scratch or to cut from the target. A target is a Llama. A draft has the family and
    the vocabulary of its target."""

    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    num_layers: Positive = 2
    num_heads: Positive | None = None
    """Number of attention heads. None: the target's for a draft that is cut from the target or reads it, else 4."""
    num_kv_heads: Positive | None = None
    """Number of key-value heads. None: in the target's ratio to `num_heads`; with random weights, one for each head."""
    head_dim: Positive | None = None
    """Features of a head. None: the target's for a draft cut from the target, else hidden_size / num_heads."""

    def filled(self, num_heads: int = 4, num_kv_heads: int = 4, head_dim: int | None = None) -> Architecture:
        """The sizes with these heads in place of None. Raises `ConfigError` for sizes that do not fit together."""
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
            return self  # checked again once it is `filled`
        if self.hidden_size % self.num_heads:
            # A model with its own head_dim could do without, but transformers would refuse to load the draft.
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
    """Training defaults that do not undo what the draft's first weights have learned."""

    learning_rate: float
    pretrain_steps: int


STARTS = {
    "scratch": Start(3e-3, 300),
    "pruned": Start(1e-3, 300),
    "layers": Start(3e-4, 300),
    "checkpoint": Start(1e-4, 0),
}
"""Kind of `draft.init` -> training defaults; another kind counts as trained weights."""
STARTS_OF_KINDS = dict.fromkeys({*DRAFTS} - {"draft_model"}, Start(1e-3, 0))
"""`draft.kind` -> training defaults of a draft cut from its target: it needs no pretraining, as it reads the target."""
INIT_WORDS = {"target": "pruned", "scratch": "scratch"}
"""Word for `draft.init` -> kind that it stands for; a directory of that name is given as ./target."""


def start_of(init: Any, kind: Any = None) -> Start:
    """Training defaults of a draft with this `draft.init` and `draft.kind`."""
    if kind in STARTS_OF_KINDS and init in (None, "target"):
        return STARTS_OF_KINDS[kind]
    if isinstance(init, Mapping):
        return STARTS.get(str(init.get("kind")), STARTS["checkpoint"])
    return STARTS["scratch" if init is None else INIT_WORDS.get(init, "checkpoint")]


@dataclass(frozen=True, config=STRICT)
class Optimizer:
    """AdamW or Muon, with linear warm-up, a schedule, decoupled decay, and clipping by the global norm."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the steps of the matrices inside the layers; embeddings, head and vectors stay with AdamW.
    AdamW's learning rate suits both."""
    learning_rate: Rate | None = None
    """Learning rate at the peak of the schedule. None: a safe one for the draft's first weights (`draft.init`): 3e-3
    for random ones, 1e-3 for those cut from the target, 3e-4 for layers of the target, 1e-4 for trained ones; 3e-3 for
    a target."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Fall of the learning rate after the warm-up, down to `final_scale` of the peak: as a cosine, along a line, not at
    all, or along a line in the last `decay_share` of the steps only (warm-up, stable, decay)."""
    warmup_steps: NonNegative = 50
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps in which the learning rate decays; for `schedule: wsd`."""
    final_scale: Annotated[float, Field(ge=0, le=1)] = 0.05
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Weight decay of matrices; norm scales and biases do not decay."""
    decay_embeddings: bool = True
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an average of the weights over the steps, such as 0.999. The stage then evaluates the average and ends
    with it. None: no average."""

    @property
    def peak(self) -> float:
        """Learning rate at the peak; outside of a run, which fills in None, that of random weights."""
        return STARTS["scratch"].learning_rate if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, config=STRICT)
class Hub:
    """Part of a data set on the hub to read (`data.path: hf:NAME`)."""

    subset: str | None = None
    """Configuration of the data set, if it has several."""
    split: Name = "train"
    """Split in the notation of the `datasets` library: `train`, `train[:10%]`, ..."""
    revision: str | None = None
    """Branch, tag or commit."""


Column = Literal[
    "text", "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system", "tools",
    "source",
]  # fmt: skip


@dataclass(frozen=True, config=STRICT)
class Data:
    """Text to train on and to measure on."""

    path: Name | None = None
    """`python-stdlib`; a text, .jsonl or .parquet file, or a directory of them; or `hf:NAME`, for a data set on the hub
    or a directory that the `datasets` library loads. A record has `text`, or `prompt` and `completion`, or a chat
    (`messages`; ShareGPT's `conversations`; Alpaca's `instruction`, `input`, `output`), and perhaps a label,
    `source`. None: the target's own chats are all the text (`kind`)."""
    hub: Hub = Hub()
    columns: dict[Column, Name] = dataclasses.field(default_factory=dict)
    """Names of these fields in the records, if they differ: `{prompt: question, completion: answer}`. Then only named
    fields, and `source`, are read."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the documents withheld from training, chosen by content hash; a long text file is one document. Of
    few documents at least one is held out; of a single long file, its end."""
    seq_len: Annotated[int, Field(ge=8)] = 256
    prompt_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the prediction of a prompt's tokens; 0: prompts are masked, 1: they count like any text."""
    on_bad: Literal["error", "skip"] = "error"
    """Response to malformed lines, text that is not UTF-8, empty shards and documents shorter than two tokens: stop, or
    count and skip them."""

    kind: Literal["text", "self_chat"] = "text"
    """`text`: the documents of `path`. `self_chat`: chats that the target writes by itself, with those documents mixed
    in if `path` is given."""
    self_chat: SelfChat | None = None
    """The chats of `kind: self_chat`; None: as many and such as by default."""
    mixed: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the text that the documents of `path` make beside the target's chats, counted in characters."""

    @property
    def chats(self) -> SelfChat:
        """The settings of `self_chat`, filled in."""
        return self.self_chat or SelfChat()

    @model_validator(mode="after")
    def _has_text(self) -> Data:
        if self.kind == "text" and self.path is None:
            raise ValueError(
                "no path: give a file, a directory, hf:NAME or python-stdlib, or kind=self_chat, for chats that the "
                "target writes"
            )
        if self.kind == "text" and self.self_chat is not None:
            raise ValueError("self_chat without kind=self_chat, so that no chat is written; set it, or drop self_chat")
        return self


@dataclass(frozen=True, config=STRICT)
class Target:
    """The model to accelerate: the ``path`` of a trained one, or the ``architecture`` of one to train from scratch."""

    path: Name | None = None
    """A Hugging Face directory, hub id or GGUF file. None: train one from scratch on `data`, of the shape
    `architecture`."""
    revision: str | None = None
    family: Annotated[str, Field(pattern=OUTSIDE)] | None = None
    """Model family of your own, as `package.module:NAME`; None: one of specjax/models/families."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of weights and computations. None: float32 on CPU and for `specjax certify`, bfloat16 on accelerators."""
    quantize: Literal["int8", "int4"] | None = None
    """Number format that kernels are quantised to on loading; decoding is then exact for the quantised model."""
    kv_cache: Literal["int8"] | None = None
    """Number format of cached keys and values: 8 bits, with a scale for each vector; this too is another model."""
    architecture: Architecture | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 2048
    """Size of the byte-level BPE vocabulary trained with a target from scratch; a loaded target brings its own."""
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
    """Loss: a kind, or a mapping such as `{kind: jensen_shannon, beta: 0.3}`; docs/losses.md lists the kinds."""
    steps: NonNegative | None = None
    """Number of steps. None: 500, or the number that follows from `epochs`. A stage that goes on may take more steps
    than it began with, if the learning rate of the steps taken does not depend on their number: `schedule: constant`,
    or `wsd` before its decay."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Number of times that the stage reads all rows of its data, instead of `steps`."""
    batch_size: Positive = 16
    """Number of rows of a step, over all devices."""
    micro_batch_size: Positive | None = None
    """Number of rows computed at a time; a step adds up their gradients. None: as many as fit the device's memory
    (`specjax plan --memory`), on CPU as many as stay in its cache."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the draft's forward and backward pass. None: bfloat16 on accelerators, float32 on CPU. Weights,
    optimizer and loss are float32 in any case."""
    matmul_dtype: Literal["bfloat16"] | None = None
    """Dtype to which operands of matrix products are rounded in a float32 computation, those of the gradient and of the
    target's cached pass among them; sums stay float32. Processors with units for it (Intel's AMX) take half the time.
    None: operands stay float32."""
    remat: bool | None = None
    """Compute each layer's activations again in the backward pass instead of storing them. None: on accelerators, if
    the draft can."""
    scan_layers: bool = False
    """Share one program among all layers of a kind: it compiles sooner, at the price of a copy of the weights."""
    optimizer: Optimizer = Optimizer()
    eval_every: Positive = 100
    eval_positions: Positive = 8_192
    """Number of held-out positions that acceptance is measured on in training; the final figures use
    `eval.positions`."""
    save_every: Positive = 100
    skip_non_finite: NonNegative = 0
    """Most steps that may be skipped because their loss or gradient is NaN or infinite; the log counts them."""
    profile: Annotated[tuple[Positive, Positive], AfterValidator(ascending)] | None = None
    """First and last step that `jax.profiler` traces; the trace is written to `profile` in the stage's directory."""
    data: buildable(DATA) = "text"  # pyright: ignore[reportInvalidTypeForm]
    """Training data: `text`; `{kind: generated, ...}`, continuations by the target; or `{kind: on_policy, share: 0.5,
    every: 100, ...}`, in part continuations by the draft."""

    teacher: Literal["online", "cached"] = "online"
    """Source of the target's logits. `online`: a pass of the target in every step. `cached`: the target reads the
    stage's rows once, before the first step, and the `teacher_top_k` largest logits are stored on disk. For a draft
    that reads hidden states those are stored, with the last ones, which give the whole distribution."""
    teacher_top_k: Positive = 64
    teacher_path: Name | None = None
    """Directory of the cache, shared by runs: those with the same target, rows and `teacher_top_k` make it once. None:
    inside the stage's own directory."""
    teacher_gb: Annotated[float, Field(gt=0)] = 100.0
    """Largest size of the cache on disk, in 10^9 bytes; a larger one is refused before anything is computed."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Stage:
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs:g}; give one of them, and null for the other")
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", 500)  # recorded in the stage's directory
        return self

    @property
    def num_steps(self) -> int:
        """Number of steps. Raises `ValueError` if it still depends on the data (`over`)."""
        if self.steps is None:
            raise ValueError(f"epochs={self.epochs}: the steps depend on the data; see `over`")
        return self.steps

    def over(self, rows: int) -> Stage:
        """The stage with its number of steps on ``rows`` rows of data, given as `steps` or as `epochs`."""
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
        """Raise `ValueError` if the loss needs more than the largest logits, the only ones in the cache."""
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


_OF_SEPARATE = ("draft_vocab_size",)
"""Fields of the kind `draft_model` beside those of every draft."""


def _open_to_kinds(schema: dict[str, Any]) -> None:
    """Allow fields beyond those of the schema for every kind of draft but `draft_model`."""
    names = [*schema["properties"], *_OF_SEPARATE]
    closed = {"properties": {"kind": {"const": "draft_model"}}}, {"propertyNames": {"enum": names}}
    schema |= dict(zip(("if", "then"), closed, strict=True))
    del schema["additionalProperties"]


@dataclass(frozen=True, config=STRICT | {"json_schema_extra": _open_to_kinds})
class Draft:
    """The drafter to train: its kind, its shape or first weights, and its training before distillation."""

    architecture: Architecture = Architecture()
    init: path_or(INITS) = None  # pyright: ignore[reportInvalidTypeForm]
    """First weights: `scratch` or None for random ones; `target` for a part of the target, cut to `architecture`
    (specjax/training/init/prune.py); else a Hugging Face directory, whose shape replaces `architecture`. Or
    `{kind: layers, keep: [0, 2, 5]}`: whole layers of the target between its embedding and head. Those two are copied,
    or with `share: true` the target's own, frozen (specjax/training/init/first_weights.py)."""
    kind: kind_in(DRAFTS) = "draft_model"  # pyright: ignore[reportInvalidTypeForm]
    """Kind of draft. `draft_model`: a separate model, with the fields above and `draft_vocab_size`. `glide`: one that
    reads the target's keys and values, with `reads`, `depths`, `depth_decay` and `draft_vocab_size` beside them.
    `dflash`, `dflash2`, `dspark`, `eagle3`, `early_exit`, `medusa`, `mtp`, `p_eagle`: drafts that read its hidden
    states; docs/drafters.md lists their fields. A kind of your own, `package.module:Class`, has fields beside
    `pretrain`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights that are measured, decoded with and exported: training ends by rounding to it. Decoding
    reads bfloat16 in half the time, and the output is exact for any draft."""
    pretrain: Stage = Field(
        default_factory=lambda given: Stage(
            loss="cross_entropy", steps=start_of(given.get("init"), given.get("kind")).pretrain_steps
        )
    )
    """Stage before distillation: 300 steps of cross-entropy on the data, or none if `init` names trained weights or the
    kind reads its target."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """Fields of the kind; in a file they stand beside `kind`."""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_a_kind(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        separate = given.get("kind", "draft_model") == "draft_model"
        of_kind = {*_OF_SEPARATE} if separate else {*given} - {*cls.__dataclass_fields__}
        others = {name: value for name, value in given.items() if name in of_kind}
        known = {name: value for name, value in given.items() if name not in others}
        return {**known, "settings": {**others, **known.get("settings", {})}}

    @model_validator(mode="after")
    def _kind_takes_them(self) -> Draft:
        if self.kind == "draft_model" and self.init in (None, "scratch"):
            self.architecture.filled()
        build(DRAFTS, {"kind": self.kind, **self.settings}, "")
        return self


@dataclass(frozen=True, config=STRICT)
class Control:
    """Control of distillation: as many extra tokens of cross-entropy training, at the best of several learning
    rates."""

    learning_rates: Annotated[tuple[Rate, ...], AfterValidator(distinct)] = ()


@dataclass(frozen=True, config=STRICT)
class Selection:
    """Decoding of held-out prompts at every evaluation of the distillation, to select a checkpoint or to stop early."""

    prompts: NonNegative = 8
    """Number of prompts; 0: nothing is decoded."""
    prompt_tokens: Positive = 64
    """Tokens of a prompt cut from plain text; a chat's prompt is all before an answer, at most this many tokens."""
    new_tokens: Positive = 64
    k: Annotated[int, Field(ge=1, le=64)] = 5
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], *Grid] | None = None
    """Temperatures to decode at; None: those of `bench`."""
    select: Literal["last", "best"] = "last"
    """Result of the distillation: the draft of the last step, or the one that emits the most tokens per target call
    (mean over the temperatures; the latest of equals)."""
    patience: Positive | None = None
    """Number of evaluations in a row without a better draft after which the distillation stops. None: no limit."""

    @model_validator(mode="after")
    def _has_prompts(self) -> Selection:
        if not self.prompts and (self.select == "best" or self.patience is not None):
            raise ValueError("select=best and patience need prompts to decode, and prompts is 0; set prompts")
        return self


@dataclass(frozen=True, config=STRICT)
class Mesh:
    """Devices that train together. A batch is split over `data` x `fsdp`; -1 on one axis takes all devices that the
    other axes leave. See docs/multi_host.md."""

    data: Axis = 1
    """Number of copies of the weights."""
    fsdp: Axis = 1
    """Number of shards of weights and optimizer state; a layer's shards are gathered when the layer is needed."""
    tensor: Axis = 1
    """Number of shards of every computation, over heads, neurons and vocabulary."""
    draft: Literal["sharded", "replicated"] = "sharded"
    """Placement of the draft: split over `fsdp` and `tensor`, or whole on every device, faster for a small draft."""
    target: Literal["sharded", "replicated"] = "sharded"

    @model_validator(mode="after")
    def _one_remainder(self) -> Mesh:
        if [self.data, self.fsdp, self.tensor].count(-1) > 1:
            raise ValueError("-1 on more than one axis; one axis can take the remaining devices")
        return self


@dataclass(frozen=True, config=STRICT)
class Distributed:
    """Several processes that run the same command, one for each host or GPU. See docs/multi_host.md."""

    enabled: bool = False
    """Connect the processes. TPU pods, SLURM, Kubernetes and Open MPI fill in the other three fields; elsewhere give
    all three."""
    coordinator: Name | None = None
    """Address of process 0, as `host:port`."""
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
    """Name of the run; None: the name of its directory."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's directory only, for `wandb sync`."""


@dataclass(frozen=True, config=STRICT)
class Logging:
    """Destinations of training records besides `log.jsonl`, which every stage has."""

    tensorboard: bool = False
    """Event files in `tensorboard` in the run's directory; needs the extra `tensorboard`."""
    wandb: Wandb | None = None
