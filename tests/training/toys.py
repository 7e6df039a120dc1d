"""A bigram model as target and as trainable draft: the trainer sees the same seams, and it compiles in no time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import config, interfaces
from specjax.interfaces import Batch, Model, Output, Prediction, Trainable
from specjax.models.decode_layout import LaidOut
from specjax.runtime import fingerprint
from specjax.training.layout import ONE_DEVICE
from specjax.training.trainer import StageData, Trainer

VOCAB, LENGTH = 12, 8


def bigram_params(seed: int) -> dict[str, jax.Array]:
    table, bias = jax.random.split(jax.random.key(seed))
    return {"table": 2.0 * jax.random.normal(table, (VOCAB, VOCAB)), "bias": jax.random.normal(bias, (VOCAB,))}


@dataclasses.dataclass(frozen=True)
class BigramTarget(Model):
    config: ClassVar[Any] = None

    def __call__(self, params, tokens, positions, mask=None) -> Output:
        return Output(params["table"][tokens] + params["bias"][None, None], (), None)

    def init_cache(self, batch, num_slots, dtype=None):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class BigramDraft(Trainable):
    """``poison``: a token id whose rows have NaN logits. ``ignored``: one whose rows do not count."""

    poison: int = -1
    ignored: int = -1

    def init_params(self, key, target) -> Any:
        return bigram_params(1)

    def predictions(self, params, batch, target_out) -> Iterator[Prediction]:
        tokens = batch.tokens
        logits = BigramTarget()(params, tokens, None).logits
        logits = jnp.where((tokens == self.poison)[..., None], jnp.nan, logits)
        yield Prediction(logits, lambda x: x, jnp.where(tokens != self.ignored, batch.weight, 0.0))


@dataclasses.dataclass(frozen=True)
class TwoDepths(BigramDraft):
    """A second prediction, from the token before: of what the target predicts at the token itself. In every second row
    it is compared with the target one token later, as if the rows were aligned each in its own way."""

    def predictions(self, params, batch, target_out) -> Iterator[Prediction]:
        (first,) = super().predictions(params, batch, target_out)
        yield first
        place = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.tokens.shape)
        rows = jnp.minimum(place + jnp.arange(len(place), dtype=jnp.int32)[:, None] % 2, place.shape[1] - 1)
        before = jnp.roll(first.hidden, 1, axis=1)
        yield Prediction(before, first.head, jnp.where(place > 0, first.weight, 0.0), rows, share=0.5)


@dataclasses.dataclass
class Target(LaidOut, interfaces.Target):
    spec: Any
    params: Any
    tokenizer: Any = None

    def logits(self, tokens):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Tempered(Model):
    """A bigram target with a config: the same weights are another distribution under another one."""

    config: float

    def __call__(self, params, tokens, positions, mask=None) -> Output:
        out = BigramTarget()(params, tokens, positions, mask)
        return dataclasses.replace(out, logits=out.logits * self.config)

    def init_cache(self, batch, num_slots, dtype=None):
        raise NotImplementedError


def target(seed: int = 0, config: float | None = None) -> Target:
    return Target(BigramTarget() if config is None else Tempered(config), bigram_params(seed))


def windows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, (count, LENGTH + 1)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Rows whose every token is predicted, as they stand in ``windows`` int32 ``[N, T + 1]``."""

    windows: np.ndarray

    @property
    def length(self) -> int:
        return self.windows.shape[1] - 1

    @property
    def digest(self) -> str:
        return fingerprint.digest(self.windows)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Batch:
        window = self.windows[index]
        arrays: list[Any] = [window[:-1], window[1:], np.ones(self.length, np.float32)]
        return Batch(*arrays)


def rows(count: int, seed: int = 0) -> Windows:
    return Windows(windows(count, seed))


def stage(**changes) -> config.Stage:
    settings: dict[str, Any] = {"steps": 12, "batch_size": 4, "eval_every": 6, "eval_positions": 32, "save_every": 5}
    settings["optimizer"] = config.Optimizer(learning_rate=0.1, warmup_steps=2)
    return config.Stage(**settings | changes)


def train_stage(
    directory: Path,
    stage: config.Stage,
    drafter: Any,
    params: Any,
    target: Any,
    train_rows: Any,
    held_out_rows: Any,
    seed: int,
    progress: Any = None,
    sample: Any = None,
    **options: Any,
) -> Any:
    data = StageData(train_rows, held_out_rows, seed, sample)
    return Trainer(directory, stage, drafter, params, target, data, **options).run(progress)


def train(
    directory: Path,
    progress: Any = None,
    drafter: Any = None,
    layout: Any = ONE_DEVICE,
    decoding: Any = None,
    **changes,
) -> Any:
    """12 steps on 40 rows, saved every 5: an epoch is 10 steps."""
    return train_stage(
        directory,
        stage(**changes),
        drafter or BigramDraft(),
        bigram_params(1),
        target(),
        rows(40),
        rows(8, 1),
        3,
        progress,
        layout=layout,
        decoding=decoding,
    )


class Interrupt(Exception):
    pass


def interrupt_after(steps: int):
    def progress(step, record):
        if step == steps:
            raise Interrupt

    return progress


def assert_same(first, second) -> None:
    """Bit for bit."""
    first, second = (jax.tree.map(_numbers, tree) for tree in (first, second))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def _numbers(leaf):
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf
