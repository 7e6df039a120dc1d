"""What several files of tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import pytest

from specjax.interfaces import Batch, Params
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.testing.toys import ToyModel
from specjax.training import teacher

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
}
"""Sampling parameters that leave the model's distribution as it is."""


def in_proof(*values: Any, **options: Any) -> Any:
    """A case of a parametrised test that only `make proof` runs: others of its kind stay in `make test`. It runs in
    unoptimised code as they do, where a test marked ``proof`` runs in the code that users run."""
    return pytest.param(*values, marks=pytest.mark.more, **options)


@functools.partial(jax.jit, static_argnums=0)
def _initial(model: Model, key: jax.Array) -> Params:
    return jax.tree.map(lambda x: x * 3.0, model.init(key))


def transformer(seed: int, **changes) -> ToyModel:
    """A small one of random weights, scaled up so that its distributions are not flat."""
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    model = Model(dataclasses.replace(config, **changes))
    return ToyModel(model, _initial(model, jax.random.key(seed)))


# One program of equal ones, here and below: op by op it takes as long as all the rest of a test.
target_output = jax.jit(teacher.target_output, static_argnums=(0, 3))


class Predicted(NamedTuple):
    """A prediction at a depth of a block, in training: `specjax.interfaces.Prediction`."""

    target_rows: jax.Array
    logits: jax.Array
    weight: jax.Array
    share: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 2))
def _predicted(trained: Any, params: Params, spec: Any, target_params: Params, batch: Batch) -> list[Predicted]:
    out = teacher.target_output(spec, target_params, batch, trained.reads)
    found = trained.predictions(params, batch, out)
    return [Predicted(p.target_rows, p.logits, p.weight, p.share) for p in found]


def predicted(trained: Any, params: Params, target: LoadedModel, batch: Batch) -> list[Predicted]:
    """What a draft that reads its target predicts in training."""
    return _predicted(trained, params, target.spec, target.params, batch)
