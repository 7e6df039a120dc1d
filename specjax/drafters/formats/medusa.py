"""Directories of Medusa's own code, version 1 (2401.10774): `medusa_lm_head.safetensors`, or `.pt` as it was published,
and the numbers of heads and of their layers. Sizes are the target's. A file without projections of the heads' own is of
its older form, in which they are the target's. Both files are written: Medusa's own loader reads the second alone, and
expects projections in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters.features import FeatureModel, LoadedDraft, layers_like
from specjax.drafters.formats.envelope import Envelope
from specjax.drafters.formats.stored import Stored
from specjax.drafters.formats.torch_file import write_tensors
from specjax.drafters.medusa import MedusaModel
from specjax.errors import ModelError
from specjax.models.families.base import Tensor
from specjax.models.weights import INDEX, read_tensors, tensor_names
from specjax.types import Params

WEIGHTS, PUBLISHED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_HEADS, _BLOCKS = "medusa_num_heads", "medusa_num_layers"


@dataclasses.dataclass(frozen=True)
class Form:
    left_out: tuple[str, ...] = ("head",)


KINDS = {"medusa": Form()}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """See `specjax.drafters.formats.kind_of`."""
    return "medusa" if _HEADS in settings else None


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: Any, check_finite: bool
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
    # Published configs say two where there are five.
    heads = len({name.partition(".")[0] for name in names})
    options = {"heads": heads, "blocks": blocks, "own_heads": f"0.{blocks}.weight" in names}
    spec = MedusaModel(layers_like(full), (full.num_layers,), full.hidden_size, str(target.dtype), **options)
    return spec, _stored(spec).read(found, spec.dtype, check_finite)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: Any) -> dict[str, Any]:
    """The weights, also as `PUBLISHED`, which is where Medusa's own loader looks; returns config.json."""
    spec: Any = draft.spec
    _stored(spec).write(partial, draft.params, dtype)
    tensors = read_tensors(partial, tensor_names(partial, WEIGHTS), WEIGHTS)
    if "head" in draft.params:
        # A head without a projection of its own would begin there as one of random numbers.
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
