"""The head for multi-token prediction that comes with a checkpoint of the target, in the target's own directory: that
of MiMo (2505.07608). It was trained to predict one token beyond the target's own. After that token it reads its own
output, for which it was not trained, so ``k`` should be 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from specjax.drafters.features import EMBEDDING_AND_HEAD
from specjax.drafters.mtp import MTPModel
from specjax.formats.form import Form, Format, Reading
from specjax.formats.keys import RECYCLED, STATE
from specjax.formats.speculators import NORM_WORDS, mtp_tensors
from specjax.interfaces import Params
from specjax.models.families.mimo import MIMO, MTP_LAYERS
from specjax.models.families.settings import Field

HEADS = "num_nextn_predict_layers"


def _of_the_target(reading: Reading) -> None:
    told = reading.settings.values[HEADS]
    if told != 1:
        raise reading.error(f"{HEADS}={told!r}; only a single head is read")
    reading.settings.read.update(reading.settings.values)  # the others are the target's


def _token_first(params: Params) -> Params:
    """MiMo's layer reads (state, token), ours (token, state)."""
    state, token = jnp.split(params["fc"]["kernel"], 2)
    return {**params, "fc": {"kernel": jnp.concatenate([token, state])}}


_FORM = Form(
    (MIMO.model_type,),
    MTPModel,
    (Field(STATE, "options.state", NORM_WORDS, "pre"), Field(RECYCLED, "options.recycled", NORM_WORDS, "post")),
    mtp_tensors(MTP_LAYERS.format(0)),
    left_out=EMBEDDING_AND_HEAD,
    family=MIMO.model_type,
    unread=(),
    of_target=True,
    layer=MTP_LAYERS,
    settle=_of_the_target,
    vocabulary=False,
    others=(r"^model\.(layers|embed_tokens|norm)\b", r"^lm_head\.", r"\.rotary_emb\.inv_freq$"),
    finish=_token_first,
)


def _find(settings: Mapping[str, Any]) -> tuple[str, Form] | None:
    return ("mtp", _FORM) if settings.get("model_type") == MIMO.model_type and settings.get(HEADS) else None


FORMAT = Format({}, _find)
"""No kind is written. The head is read here and written in another form, since the rest of the directory is the
target's."""
