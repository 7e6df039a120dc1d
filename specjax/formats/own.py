"""The form of drafts that no other library can express: config.json names our kind and its settings. It holds early
exit, and drafts that `specjax.formats.speculators` cannot express, stored as there with keys of ours added. Embedding
and head are not stored if they are the target's."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.early_exit import ExitModel
from specjax.drafters.features import EMBEDDING_AND_HEAD, FeatureModel
from specjax.formats import speculators
from specjax.formats.form import Form, Format, Reading, TargetName, named_by
from specjax.models.families.base import linear, norm
from specjax.models.families.settings import Field

PREFIX = "specjax_"
SCALES = (
    Field("embedding_multiplier", "config.embedding_multiplier", float, 1.0, sparse=True),
    Field("logit_multiplier", "config.logit_multiplier", float, 1.0, sparse=True),
    Field("logit_soft_cap", "config.logit_soft_cap", float, 0.0, sparse=True),  # 0 stands for none
)
_AT_ROOT = Field("window_at_root", "window_at_root", bool, True, sparse=True)


def _with_more(kind: str, form: Form) -> Form:
    more = (*SCALES, _AT_ROOT) if form.spec is DFlashModel else SCALES
    names = (PREFIX + kind, *form.names)
    return dataclasses.replace(
        form,
        names=names,
        fields=(*form.fields, *more),
        limits={},
        known=("target",),
        left_out=(),
        optional=EMBEDDING_AND_HEAD,
        shared=True,
    )


def _one_stream(reading: Reading) -> None:
    reading.values["reads"] = (reading.settings.count("layers"),)


_EARLY_EXIT = Form(
    (PREFIX + "early_exit",),
    ExitModel,
    (
        Field("adapter", "config.intermediate_size", int),
        Field("hidden_size", "feature_size", int, speculators.hidden_size),
    ),
    {
        **norm("adapter_norm", "adapter_norm"),
        **norm("norm", "norm"),
        **linear("adapter.gate_proj", "adapter.gate_proj"),
        **linear("adapter.up_proj", "adapter.up_proj"),
        **linear("adapter.down_proj", "adapter.down_proj"),
    },
    left_out=("head",),
    layers=None,
    settle=_one_stream,
    vocabulary=False,
    known=("target",),
)
KINDS = {"early_exit": _EARLY_EXIT, **{kind: _with_more(kind, form) for kind, form in speculators.KINDS.items()}}


def _around(form: Form, spec: FeatureModel, dtype: str, target: TargetName) -> dict[str, Any]:
    named = {"model_type": form.names[0], "target": target.name}
    return {**named, "layers": spec.reads[0]} if form is _EARLY_EXIT else {**named, "dtype": dtype}


FORMAT = Format(KINDS, named_by("model_type", KINDS), _around)
