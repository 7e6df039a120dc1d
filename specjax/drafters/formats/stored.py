"""The weights of a draft in a safetensors file: some of its parameters, by the names of a form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array

from specjax.drafters.features import ENDS, FeatureModel
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.families import Family, family_of
from specjax.models.families.base import Tensor
from specjax.models.weights import WEIGHTS, read_params, write_params
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class Stored:
    """The parameters of a draft that its directory holds. ``tensors``: their names there; ``weights``: the file."""

    spec: FeatureModel
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    weights: str = WEIGHTS
    others: tuple[str, ...] = ()
    """Patterns of names that are not its weights."""

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    def init(self, key: Array) -> Params:
        return {name: value for name, value in self.spec.init(key).items() if name not in self.left_out}

    def read(self, directory: Path, dtype: str, check_finite: bool) -> Params:
        """Raises `ModelError` unless the file holds them all, and nothing else."""
        return read_params(directory, self._family, self, dtype, check_finite=check_finite, weights=self.weights)

    def write(self, directory: Path, params: Params, dtype: str, more: Mapping[str, np.ndarray] | None = None) -> None:
        """``more``: tensors that are no weights."""
        write_params(directory, params, self._family, self, dtype, hf.MAX_SHARD_BYTES, self.weights, more)

    @property
    def _family(self) -> Family:
        ends = {f"{name}{'.kernel' * (name == 'head')}": Tensor(name) for name in ENDS}
        return dataclasses.replace(
            family_of("llama", "draft"), tensors={**ends, **self.tensors}, prefix="", others=self.others
        )
