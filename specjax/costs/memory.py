"""Peak memory of a job on each device, computed before anything is loaded: weights, optimizer and caches from their
shapes, and the intermediate arrays of a pass from the widest of them.

The shapes are those that the programs are compiled for. XLA chooses how many arrays of a kind exist at once; the counts
here are those of its memory-saving schedules (docs/large.md compares).

Dims: B rows, T tokens of a row fed at a time, S slots of a cache, V vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from specjax import backend
from specjax.decode import programs
from specjax.decode.engine import Engine
from specjax.decode.request import padded_sizes, request_shapes
from specjax.errors import ConfigError
from specjax.interfaces import Params
from specjax.models.config import ModelConfig
from specjax.runtime.log import note

_WIDTHS_OF_LOGITS = 8
"""Number of arrays as large as a block's logits that sampling holds at a time."""
_CHUNKS_OF_LOGITS = 4
"""Number of arrays as large as a chunk's logits that training holds: teacher, draft, and the gradient of each."""
_CHUNKS_OF_EVALUATION = 3
"""Number of arrays as large as a chunk's logits that evaluation holds: teacher, draft, and their comparison."""
_STREAMS_OF_A_DEPTH = 4
"""Number of arrays as large as the residual stream that evaluation holds for every depth but one: the head's input,
keys and values of that depth, and the stand-in for features of the target."""
_ARRAYS_OF_BACKWARD = 2.3
"""Bytes that the backward pass through a layer makes, over those of the forward pass."""
_LAYERS_GATHERED = 1.25
"""Bytes of weights and gradients that are gathered at a time, of a draft stored in pieces, over those of its layers."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on each device at the peak of a program, by their use."""

    what: str
    """Name of the program: `distillation`, `decoding 8 rows of 2,048 tokens`."""
    devices: int
    parts: Mapping[str, int]
    evaluation: int = 0
    """Peak bytes of an evaluation between two steps of a stage, weights and optimizer included; 0: no evaluation."""

    @property
    def total(self) -> int:
        """Bytes of all parts together, or of the evaluation if it takes more."""
        return max(sum(self.parts.values()), self.evaluation)

    def __str__(self) -> str:
        each = " on each device" if self.devices > 1 else ""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)
        evaluation = f"; evaluation {gib(self.evaluation)}" if self.evaluation else ""
        return f"{self.what}: {gib(self.total)}{each} ({parts}{evaluation})"

    def to_json(self) -> dict[str, Any]:
        """Figures by name."""
        figures = {"total": self.total, "bytes": dict(self.parts), "evaluation": self.evaluation}
        return {"what": self.what, "devices": self.devices, **figures}


def gib(size: float) -> str:
    """Bytes as text for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**26 else f"{size / 2**20:.1f} MiB"


def bytes_on_device(tree: Any) -> int:
    """Bytes of arrays or shapes on each device: its part of those that a mesh splits, and all of the others. One that
    stands in several places counts once."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if isinstance(sharding, NamedSharding) else leaf.shape
        return math.ceil(math.prod(shape) * _bits(leaf.dtype) / 8)

    return sum(map(of, {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()))


def _bits(dtype: Any) -> int:
    return 4 if dtype in (jnp.int4, jnp.uint4) else 8 * dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Split:
    """Number of parts into which a mesh splits the rows of a batch, the computation, and the stored weights."""

    rows: int = 1
    tensor: int = 1
    fsdp: int = 1

    @property
    def devices(self) -> int:
        return self.rows * self.tensor

    def of(self, size: int) -> int:
        """Part of ``size`` on each device: split by the axis `tensor` if that divides it."""
        return size // self.tensor if size % self.tensor == 0 else size


# --- a pass ---------------------------------------------------------------------------------------------------------


def pass_bytes(config: ModelConfig, tokens: int, itemsize: int, split: Split) -> int:
    """Bytes of the widest layer's intermediate arrays for ``tokens`` tokens on a device, without scores: the residual
    stream, its norm, and either the projections of attention or the neurons of the MLP with those of its gate."""
    return tokens * itemsize * config.widest(split.of)


def score_bytes(config: ModelConfig, rows: int, fed: int, keys: int, split: Split) -> int:
    """Bytes of the attention scores that exist at a time, in float32."""
    whole = rows * split.of(config.num_heads) * fed * keys
    return 4 * min(whole, backend.score_count())


def widest_layer(params: Params) -> int:
    """Bytes of the largest layer of a model, not split."""
    return max((_whole(layer) for layer in params["layers"].values()), default=0) if "layers" in params else 0


def _whole(tree: Any) -> int:
    return sum(math.ceil(math.prod(x.shape) * _bits(x.dtype) / 8) for x in jax.tree.leaves(tree))


# --- decoding -------------------------------------------------------------------------------------------------------


def decoding(
    engine: Engine,
    weights: Mapping[str, int],
    batch: int,
    prompt: int,
    new: int,
    split: Split = Split(),
) -> Footprint:
    """Peak memory of a generation.

    Args:
        engine: static half of an engine; nothing is run.
        weights: bytes of weights on each device, by owner.
        batch: requested rows, which are padded to a power of two.
        prompt: tokens of each prompt.
        new: tokens that each row may add.
        split: how a mesh splits the work.

    Returns:
        Bytes by part; the bytes of the state (caches, counts, tokens) are exact.
    """
    target = engine.target
    config, itemsize = target.config, jnp.dtype(target.dtype).itemsize
    rows, width, buckets = padded_sizes(engine.target, engine.num_nodes, batch, prompt, new)
    slots = buckets[-1]

    def state_of(slots: int, piece: int) -> Any:
        how = engine.target, engine.drafter, slots, engine.logprobs is not None, engine.controller
        first = functools.partial(programs.unread, *how, piece=piece)
        return jax.eval_shape(first, request_shapes(rows, width, config.vocab_size))

    def caches_of(state: Any) -> int:
        return split_state({"target": state.cache, "drafter": state.drafter}, split, rows)

    state = state_of(slots, 1)
    caches = caches_of(state)
    rest = bytes_on_device(dataclasses.replace(state, cache=None, drafter=None))
    own = -(-rows // split.rows)
    fed = programs.prefill_piece(engine.target, rows, width, engine.prefill_chunk)
    prefill = pass_bytes(config, own * fed, itemsize, split) + score_bytes(config, own, fed, buckets[0], split)
    # While a prompt is fed in pieces, layers that cache only their window have room for one piece more.
    prefill += max(0, caches_of(state_of(buckets[0], fed)) - caches)
    block = engine.num_nodes + 1
    logits = _WIDTHS_OF_LOGITS * 4 * rows * block * split.of(config.vocab_size)
    chunk = logits + pass_bytes(config, own * block, itemsize, split)
    chunk += score_bytes(config, own, block, slots, split)
    # A growing cache is there twice, one layer at a time.
    growth = caches // max(1, 2 * config.num_layers) if len(buckets) > 1 else 0
    parts = {**weights, "cache": caches, "state": rest, "activations": max(prefill, chunk, growth)}
    return Footprint(f"decoding {rows} rows of {prompt + new:,} tokens", split.devices, parts)


def split_state(tree: Any, split: Split, rows: int) -> int:
    """Bytes of caches on each device: rows and heads are split where the mesh divides them."""

    def of(leaf: Any) -> int:
        size = math.ceil(leaf.size * _bits(leaf.dtype) / 8)
        if leaf.ndim < 3:
            return size
        size //= split.rows if leaf.shape[0] % split.rows == 0 else 1
        return size // (split.tensor if leaf.shape[1] % split.tensor == 0 else 1)

    return sum(map(of, jax.tree.leaves(tree)))


# --- training -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainingShape:
    """Sizes and settings that decide the memory of a training step: a draft with the sizes of ``draft``, its ``params``
    and ``state`` stored as their shardings say, and a target that runs forward (None: no target does)."""

    draft: ModelConfig
    params: Params
    state: Any
    target: ModelConfig | None
    target_params: Params | None
    rows: int
    """Rows of a microbatch, over all devices."""
    microbatches: int
    length: int
    itemsize: int
    """Bytes of one element of the draft's activations."""
    target_itemsize: int
    depths: int
    """Number of forward passes that the draft is unrolled to."""
    remat: bool
    reads: int = 0
    """Number of values per token that the draft reads from the target's forward pass."""


def training(what: str, shape: TrainingShape, split: Split = Split()) -> Footprint:
    """Peak memory of a training step.

    Args:
        what: name of the stage, for people.
        shape: sizes and settings.
        split: how a mesh splits the work.

    Returns:
        Bytes by part; the bytes of weights and optimizer are exact.
    """
    own, config = bytes_on_device(shape.params), shape.draft
    optimizer = bytes_on_device(shape.state) - own
    target = 0 if shape.target_params is None else bytes_on_device(shape.target_params)
    gradients = own * (1 if shape.microbatches == 1 else 2)
    rows = -(-shape.rows // split.rows)
    tokens = rows * shape.length
    # Held for the backward pass: the stream between layers, and without remat everything else that the layers make.
    one = pass_bytes(config, tokens, shape.itemsize, split)
    stream = tokens * config.hidden_size * shape.itemsize
    kept = shape.depths * config.num_layers * (stream if shape.remat else one)
    scores = score_bytes(config, rows, shape.length, shape.length, split)
    backward = _ARRAYS_OF_BACKWARD * shape.depths * one + scores
    logits = min(tokens, backend.logit_tokens(config.vocab_size)) * split.of(config.vocab_size) * 4
    ends, layers = _trained_ends(shape, split), 0
    if split.fsdp > 1:
        layers = round(_LAYERS_GATHERED * _whole(shape.params.get("layers", {})) / split.tensor)
    cast = own // 2 if shape.itemsize == 2 else 0
    draft = kept + round(max(backward, _CHUNKS_OF_LOGITS * logits)) + ends + layers + cast
    beside = 0
    if shape.target is not None and shape.target_params is not None:
        final = tokens * shape.target.hidden_size * shape.target_itemsize
        beside = pass_bytes(shape.target, tokens, shape.target_itemsize, split) + final
        beside += score_bytes(shape.target, rows, shape.length, shape.length, split)
        if split.fsdp > 1:
            head = shape.target.hidden_size * shape.target.vocab_size * shape.target_itemsize
            beside += (widest_layer(shape.target_params) + head) // split.tensor
    parts = {
        "target": target,
        "draft": own,
        "optimizer": optimizer,
        "gradients": gradients,
        "activations": max(beside, draft),
    }
    return Footprint(what, split.devices, parts)


def evaluation(shape: TrainingShape, split: Split = Split()) -> int:
    """Peak bytes on each device of an evaluation between two steps.

    Args:
        shape: sizes of the stage, with ``depths`` and ``itemsize`` of evaluation; the stage's state stays in memory.
        split: how a mesh splits the work.

    Returns:
        Bytes of weights and optimizer, plus the larger of two: the arrays of the target's forward pass, or those of
        the draft's and of what it reads from the target.
    """
    rows, config = -(-shape.rows // split.rows), shape.draft
    tokens = rows * shape.length
    held, read = bytes_on_device((shape.state, shape.target_params)), 0
    of_target = 0
    if shape.target is not None:
        read = tokens * (shape.reads + shape.target.hidden_size) * shape.target_itemsize
        of_target = read + pass_bytes(shape.target, tokens, shape.target_itemsize, split)
        of_target += score_bytes(shape.target, rows, shape.length, shape.length, split)
    layer = pass_bytes(config, tokens, shape.itemsize, split)
    layer += 2 * score_bytes(config, rows, shape.length, shape.length, split)
    depths = (shape.depths - 1) * _STREAMS_OF_A_DEPTH * tokens * config.hidden_size * shape.itemsize
    logits = min(tokens, backend.logit_tokens(config.vocab_size)) * split.of(config.vocab_size) * 4
    # The states that the draft reads are there twice: as the target leaves them, and side by side as the draft's input.
    return held + max(of_target, 2 * read + depths + max(layer, _CHUNKS_OF_EVALUATION * logits))


def _trained_ends(shape: TrainingShape, split: Split) -> int:
    """Bytes of the gradients of a trained head, which come with the loss, one for each depth. If weights are stored in
    pieces, also those of the whole embedding and head, and of the gradient of each."""
    if "embedding" not in shape.params:
        return 0
    head = 4 * shape.draft.hidden_size * split.of(shape.draft.vocab_size)
    return head * (shape.depths if split.fsdp == 1 else 2 + max(2, shape.depths))


def over(footprints: Sequence[Footprint], limit: float | None) -> Footprint | None:
    """The largest footprint, if it takes more than ``limit`` bytes; None: all fit, or no limit is known."""
    largest = max(footprints, key=lambda found: found.total, default=None)
    return None if largest is None or limit is None or largest.total <= limit else largest


@dataclasses.dataclass(frozen=True)
class Budget:
    """Memory that a config's jobs take, beside the memory of a device."""

    footprints: list[Footprint]
    limit: float | None
    """Bytes of a device's memory; None: unknown."""
    remedy: str | None = None
    """Setting with which all jobs would fit. None: they fit as they are, or no setting that was tried is enough."""

    @property
    def exceeding(self) -> Footprint | None:
        """Largest footprint above the limit; None: all fit."""
        return over(self.footprints, self.limit)

    def to_json(self) -> dict[str, Any]:
        """The budget as a JSON object."""
        found = [footprint.to_json() for footprint in self.footprints]
        return {"memory": found, "limit": self.limit, "fits": self.exceeding is None, "remedy": self.remedy}

    def check(self) -> None:
        """Raise `ConfigError` if a job does not fit, with a setting that would."""
        too_large = self.exceeding
        if too_large is None:
            return
        assert self.limit is not None
        remedy = f"it would with {self.remedy}" if self.remedy else "give more devices (mesh), or a smaller target"
        raise ConfigError(f"memory: {too_large} does not fit {gib(self.limit)}; {remedy}")

    def tell(self) -> None:
        """Print the memory on each device, as a job's first line. Raises as `check`."""
        if self.footprints:
            note(f"memory: {max(self.footprints, key=lambda footprint: footprint.total)}")
        self.check()
