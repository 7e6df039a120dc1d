"""What several files of tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import pytest

from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from specjax.testing.toys import ToyModel

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
    """A case of a parametrised test that only `make proof` runs: others of its kind stay in `make test`."""
    return pytest.param(*values, marks=pytest.mark.proof, **options)


@functools.cache
def initialiser(model: Any) -> Any:
    """Its compiled `init`, one for all equal models: compiling it takes longer than most of what a test does."""
    return jax.jit(model.init)


def transformer(seed: int, **changes) -> ToyModel:
    """A small one of random weights, scaled up so that its distributions are not flat."""
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    model = Model(dataclasses.replace(config, **changes))
    params = jax.tree.map(lambda x: x * 3.0, initialiser(model)(jax.random.key(seed)))
    return ToyModel(model, params)
