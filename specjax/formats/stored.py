"""Weights of a draft in a safetensors file: some of its parameters, under the names of a form."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array
from safetensors.numpy import save_file

from specjax.drafters.features import ENDS, FeatureModel
from specjax.errors import ModelError
from specjax.formats import torch_file
from specjax.interfaces import Params
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.families import Family, family_of
from specjax.models.families.base import Tensor
from specjax.models.weights import INDEX, WEIGHTS, read_params, write_params

OF_TORCH = {"pytorch_model.bin": WEIGHTS, "medusa_lm_head.pt": "medusa_lm_head.safetensors"}
"""Files that torch.save wrote -> the safetensors files that are read in their place."""


@contextlib.contextmanager
def as_safetensors(found: Path) -> Iterator[Path]:
    """The directory itself, or a temporary one with the tensors of its torch files."""
    published = [name for name in OF_TORCH if (found / name).exists()]
    if not published or any((found / name).exists() for name in (*OF_TORCH.values(), INDEX)):
        yield found
        return
    with tempfile.TemporaryDirectory() as passing:
        directory = Path(passing)
        for name in published:
            save_file(torch_file.read_tensors(found / name), directory / OF_TORCH[name])
        shutil.copyfile(found / "config.json", directory / "config.json")
        try:
            yield directory
        except ModelError as error:
            text = str(error)
            for name in published:
                text = text.replace(str(directory / OF_TORCH[name]), str(found / name))
            raise ModelError(text.replace(passing, str(found))) from None


@dataclasses.dataclass(frozen=True)
class Stored:
    """The parameters of a draft that its directory holds. ``tensors``: their names there; ``left_out``: those that are
    not stored; ``weights``: name of the file."""

    spec: FeatureModel
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    weights: str = WEIGHTS
    others: tuple[str, ...] = ()
    """Patterns of names that are no weights of the draft."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of names that some files have -> those of ``tensors``."""

    @property
    def config(self) -> ModelConfig:
        return self.spec.config

    def init(self, key: Array) -> Params:
        return {name: value for name, value in self.spec.init(key).items() if name not in self.left_out}

    def read(self, directory: Path, dtype: str, check_finite: bool) -> Params:
        """The stored parameters. Raises `ModelError` unless the file holds them all, and nothing else."""
        return read_params(directory, self._family, self, dtype, check_finite=check_finite, weights=self.weights)

    def write(self, directory: Path, params: Params, dtype: str, more: Mapping[str, np.ndarray] | None = None) -> None:
        """Write the parameters; ``more``: tensors that are no weights."""
        write_params(directory, params, self._family, self, dtype, hf.MAX_SHARD_BYTES, self.weights, more)

    @property
    def _family(self) -> Family:
        ends = {f"{name}{'.kernel' * (name == 'head')}": Tensor(name) for name in ENDS}
        return dataclasses.replace(
            family_of("llama", "draft"),
            tensors={**ends, **self.tensors},
            prefix="",
            others=self.others,
            aliases=self.aliases,
        )
