"""A trained drafter from outside the registry, small enough to read: one head for each depth over the target's hidden
state, as in Medusa (2401.10774), but with the root as a second input. In a config:
``draft: {kind: "specjax.testing.heads:Heads"}``.

Dims: B rows, T tokens fed, D the target's hidden, R rank, K heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key
from safetensors.flax import load_file, save_file

from specjax import sampling
from specjax.config import RunConfig
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import (
    Batch,
    Bound,
    BoundDrafter,
    Context,
    Draft,
    Drafter,
    DraftKind,
    Initial,
    Outcome,
    Output,
    Params,
    Prediction,
    Reads,
    Target,
    TargetView,
    Trainable,
)


@dataclasses.dataclass(frozen=True)
class Heads(DraftKind):
    """Section `draft` of a config: ``depth`` heads of ``rank`` features."""

    depth: int = 2
    rank: int = 16
    kind: Literal["toy_heads"] = "toy_heads"

    def draft(self, config: RunConfig, target: Target, rows: Any) -> Initial:
        drafter = TrainedHeads(self.depth, self.rank, target.config.num_layers)
        return Initial(drafter, drafter.init_params(jax.random.key(config.seed), target))

    def load(self, directory: str | os.PathLike, target: Target, k: int, check_finite: bool = True) -> HeadsDrafter:
        try:
            settings = json.loads((Path(directory) / "config.json").read_text())["toy_heads"]
            params = load_file(Path(directory) / "heads.safetensors")
        except (OSError, KeyError, ValueError) as error:
            raise ModelError(f"{directory}: holds no heads ({error}); give what `specjax train` left") from None
        return HeadsDrafter(params, settings["layer"], k)


def hidden_of(
    params: Params, depth: int, hidden: Float[Array, "B T D"], root: Int[Array, "B T"]
) -> Float[Array, "B T R"]:
    """Features of head ``depth`` from the target's states before the tokens ``root``."""
    return jnp.tanh(hidden.astype(jnp.float32) @ params["project"][depth] + params["root"][root])


@dataclasses.dataclass(frozen=True)
class TrainedHeads(Trainable):
    """Heads in training. ``layer``: layer of the target whose output they read, from 1."""

    depth: int
    rank: int
    layer: int

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=(self.layer,))

    def init_params(self, key: Key[Array, ""], target: Target | None) -> Params:
        assert target is not None
        width, vocab_size = target.config.hidden_size, target.vocab_size
        shapes = {
            "project": (self.depth, width, self.rank),
            "root": (vocab_size, self.rank),
            "head": (self.rank, vocab_size),
        }
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        return {name: jax.random.normal(keys[name], shape) * shape[-2] ** -0.5 for name, shape in shapes.items()}

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """Predictions of the heads. The hidden state at t has consumed token t, the root is token t + 1, and head j
        predicts the target's distribution j + 1 tokens after t."""
        assert target_out is not None
        (hidden,) = target_out.hidden
        place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
        for j in range(self.depth):
            rows = jnp.broadcast_to(place + j + 1, batch.tokens.shape)
            inside = rows < batch.tokens.shape[1]
            rows = jnp.minimum(rows, batch.tokens.shape[1] - 1)
            weight = jnp.where(inside, jnp.take_along_axis(jnp.asarray(batch.weight), rows, axis=1), 0.0)
            features = hidden_of(params, j, hidden, jnp.asarray(batch.labels))
            yield Prediction(features, functools.partial(jnp.matmul, b=params["head"]), weight, rows)

    def unrolled(self, depths: int) -> TrainedHeads | None:
        return self if depths <= self.depth else None

    def to_drafter(self, params: Params, target: Target, k: int) -> HeadsDrafter:
        return HeadsDrafter(params, self.layer, k)

    def save(self, params: Params, target: Target, directory: Path, *, name: str = "draft", card: str | None = None):
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(params, partial / "heads.safetensors")
        (partial / "config.json").write_text(json.dumps({"toy_heads": {"layer": self.layer}}))
        (partial / "README.md").write_text(card or "")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadsDrafter(Drafter):
    """Heads with their weights, for decoding."""

    params: Params
    layer: int
    k: int = 2
    kind: Literal["toy_heads"] = "toy_heads"

    def bind(self, target: Target) -> Bound:
        heads = len(self.params["project"])
        if self.k > heads:
            raise ConfigError(f"drafter 'toy_heads': k={self.k} exceeds its {heads} heads; lower k")
        return Bound(BoundHeads(self.k, self.layer, target.config.hidden_size), self.params)


@dataclasses.dataclass(frozen=True)
class BoundHeads(BoundDrafter):
    """Heads in decoding. State: the target's hidden state of the token before the root, ``[B, D]``."""

    k: int
    layer: int
    width: int

    @property
    def reads(self) -> Reads:
        return Reads(hidden_layers=(self.layer,))

    def init(self, batch: int, num_slots: int) -> Float[Array, "B D"]:
        return jnp.zeros((batch, self.width), jnp.float32)

    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        found = jnp.take_along_axis(target_out.hidden[0], last, axis=1)[:, 0].astype(jnp.float32)
        return jnp.where((lengths > 0)[:, None], found, state)

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens, logits = jnp.zeros((len(root), self.k), jnp.int32), []
        for j in range(self.k):
            raw = hidden_of(params, j, state[:, None], root) @ params["head"]
            change = sampling.process if context.noise is None else sampling.transform
            logits.append(change(raw, context, tokens, j)[:, 0])
            drawn = sampling.draw(logits[-1], None if context.noise is None else context.noise.draft(j))
            tokens = tokens.at[:, j].set(drawn)
        drawn_from = None if context.noise is None else jnp.stack(logits, axis=1)
        return Draft(tokens, jnp.ones(tokens.shape, bool), drawn_from), state

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        (hidden,) = outcome.target_out.hidden
        return jnp.take_along_axis(hidden, outcome.verdict.num_accepted[:, None, None], axis=1)[:, 0].astype(
            jnp.float32
        )
