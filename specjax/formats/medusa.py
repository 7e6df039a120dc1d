"""Directories of Medusa's own code, version 1 (2401.10774): `medusa_lm_head.safetensors`, or the published `.pt`, and
the numbers of heads and of their layers. Sizes are the target's. A file without projections of the heads' own has the
older form, in which the target's is used. Both files are written: Medusa's own loader reads the second alone, and
expects projections in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.features import FeatureModel, LoadedDraft
from specjax.drafters.medusa import MedusaModel
from specjax.errors import ModelError
from specjax.formats.form import OF_TORCH, Form, Format, Reading, TargetName, tensors_of
from specjax.formats.torch_file import write_tensors
from specjax.models.families.base import Tensor
from specjax.models.families.settings import Field

WEIGHTS = "medusa_lm_head.safetensors"
_HEADS = "medusa_num_heads"
_SIZES = ("hidden_size", "vocab_size")


def _of_the_target(reading: Reading) -> None:
    target, values = reading.target, reading.values
    for name in _SIZES:
        expected = reading.settings.count(name, getattr(target, name))
        if expected != getattr(target, name):
            raise ModelError(f"medusa: reads a target of {name}={expected}, and this one has {getattr(target, name)}")
    # The heads are counted: published configs say two where there are five.
    values["heads"] = len({name.partition(".")[0] for name in reading.stored})
    values["own_heads"] = f"0.{values['blocks']}.weight" in reading.stored
    values["reads"] = (target.num_layers,)


def _tensors(spec: MedusaModel) -> dict[str, Tensor]:
    return {
        "heads.{}.blocks.{}.kernel": Tensor("{}.{}.linear.weight", transpose=True),
        "heads.{}.blocks.{}.bias": Tensor("{}.{}.linear.bias"),
        "heads.{}.head.kernel": Tensor(f"{{}}.{spec.blocks}.weight", transpose=True),
    }


def _for_its_own_loader(directory: Path, draft: LoadedDraft, dtype: str) -> None:
    spec: Any = draft.spec
    with tensors_of(directory, WEIGHTS) as stored:
        tensors = {name: tensor.value() for name, tensor in stored.items()}
    if "head" in draft.params:
        # For a head without a projection of its own, Medusa's loader would make one of random numbers.
        projection = np.asarray(draft.params["head"]["kernel"].T.astype(dtype))
        tensors |= {f"{i}.{spec.blocks}.weight": projection for i in range(spec.heads)}
    write_tensors(directory / OF_TORCH[WEIGHTS], tensors)


def _around(form: Form, spec: FeatureModel, dtype: str, target: TargetName) -> dict[str, Any]:
    sizes = {name: getattr(spec.config, name) for name in _SIZES}
    named = {"architectures": ["MedusaModel"], "model_type": "medusa", "version": "1"}
    return {**named, "base_model_name_or_path": target.name, **sizes}


_FORM = Form(
    ("medusa",),
    MedusaModel,
    (Field(_HEADS, "heads", int), Field("medusa_num_layers", "blocks", int, 1, most=64)),
    _tensors,
    left_out=("head",),
    layers=None,
    settle=_of_the_target,
    vocabulary=False,
    known=("base_model_name_or_path",),
    weights=WEIGHTS,
    also=_for_its_own_loader,
)


def _find(settings: Mapping[str, Any]) -> tuple[str, Form] | None:
    return ("medusa", _FORM) if _HEADS in settings else None


FORMAT = Format({"medusa": _FORM}, _find, _around)
