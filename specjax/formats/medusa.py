"""Directories of Medusa's own code, version 1 (2401.10774): `medusa_lm_head.safetensors`, or the published `.pt`, and
the numbers of heads and of their layers. Sizes are the target's. A file without projections of the heads' own has the
older form, in which the target's is used. Both files are written: Medusa's own loader reads the second alone, and
expects projections in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.features import FeatureModel, LoadedDraft, layers_like
from specjax.drafters.medusa import MedusaModel
from specjax.errors import ModelError
from specjax.formats.envelope import Envelope, TargetName
from specjax.formats.stored import Stored
from specjax.formats.torch_file import write_tensors
from specjax.interfaces import Params, TargetInfo
from specjax.models.families.base import Tensor
from specjax.models.weights import INDEX, read_tensors, tensor_names

WEIGHTS, PUBLISHED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_HEADS, _BLOCKS = "medusa_num_heads", "medusa_num_layers"


@dataclasses.dataclass(frozen=True)
class Form:
    left_out: tuple[str, ...] = ("head",)


KINDS = {"medusa": Form()}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Kind of draft that a config.json describes, see `specjax.formats.kind_of`."""
    return "medusa" if _HEADS in settings else None


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    full, envelope = target.config, Envelope(settings, found / "config.json")
    envelope.count(_HEADS)
    blocks = envelope.count(_BLOCKS, 1, most=64)
    for name in ("hidden_size", "vocab_size"):
        told = envelope.count(name, getattr(full, name))
        if told != getattr(full, name):
            raise ModelError(f"medusa: reads a target of {name}={told}, and this one has {getattr(full, name)}")
    envelope.only_read("base_model_name_or_path")
    if not any((found / name).exists() for name in (WEIGHTS, INDEX)):
        raise ModelError(f"{found}: holds neither {WEIGHTS} nor {PUBLISHED}; fetch it again")
    names = tensor_names(found, WEIGHTS)
    # The heads are counted: published configs say two where there are five.
    heads = len({name.partition(".")[0] for name in names})
    options = {"heads": heads, "blocks": blocks, "own_heads": f"0.{blocks}.weight" in names}
    spec = MedusaModel(layers_like(full), (full.num_layers,), full.hidden_size, str(target.dtype), **options)
    return spec, _stored(spec).read(found, spec.dtype, check_finite)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
    """Write the weights, also to `PUBLISHED`, which Medusa's own loader reads; returns config.json."""
    spec: Any = draft.spec
    _stored(spec).write(partial, draft.params, dtype)
    tensors = read_tensors(partial, tensor_names(partial, WEIGHTS), WEIGHTS)
    if "head" in draft.params:
        # For a head without a projection of its own, Medusa's loader would make one of random numbers.
        projection = np.asarray(draft.params["head"]["kernel"].T.astype(dtype))
        tensors |= {f"{i}.{spec.blocks}.weight": projection for i in range(spec.heads)}
    write_tensors(partial / PUBLISHED, tensors)
    sizes = {"hidden_size": spec.config.hidden_size, "vocab_size": spec.config.vocab_size}
    return {
        _HEADS: spec.heads,
        _BLOCKS: spec.blocks,
        "base_model_name_or_path": target.name,
        "version": "1",
        **sizes,
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
    }


def _stored(spec: MedusaModel) -> Stored:
    tensors = {
        "heads.{}.blocks.{}.kernel": Tensor("{}.{}.linear.weight", transpose=True),
        "heads.{}.blocks.{}.bias": Tensor("{}.{}.linear.bias"),
        "heads.{}.head.kernel": Tensor(f"{{}}.{spec.blocks}.weight", transpose=True),
    }
    return Stored(spec, tensors, KINDS["medusa"].left_out, WEIGHTS)
