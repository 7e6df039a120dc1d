"""Directories of the library speculators (0.9): `config.json` with `speculators_model_type`, and the draft's layers
described as those of llama or qwen3. Streams are numbered as ours: i is what leaves i layers of the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.eagle3 import Eagle3Model
from specjax.drafters.features import EMBEDDING_AND_HEAD, FeatureModel, published_streams
from specjax.drafters.mtp import MTPModel, Options
from specjax.drafters.p_eagle import PEagleModel
from specjax.errors import ModelError
from specjax.formats.form import LAYERS, Form, Format, Reading, TargetName, described, named_by
from specjax.formats.keys import FROM_ANCHOR, RECYCLED, STATE
from specjax.models.config import ModelConfig
from specjax.models.families.base import Tensor, linear, norm
from specjax.models.families.settings import Field

TYPE = "speculators_model_type"
MOST_SLOTS = 1024
"""Largest number of slots of a block, far beyond what a pass can verify."""

# --- fields ---------------------------------------------------------------------------------------------------------


def published(layers: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Streams of an EAGLE-3 draft that names none."""
    return published_streams(target.num_layers)


def hidden_size(layers: ModelConfig, target: ModelConfig) -> int:
    """Size of each stream for a draft that names none."""
    return layers.hidden_size


TARGET_SIZE = Field("target_hidden_size", "feature_size", int, hidden_size)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK = Field("mask_token_id", "mask_token", int, least=0)
# The library's own reader takes a missing norm_before_residual for False, whatever its trainer wrote.
_EAGLE3_FIELDS = (
    TARGET_SIZE,
    Field("eagle_aux_hidden_state_layer_ids", "reads", "ids", published),
    *(Field(name, f"options.{name}", bool, False) for name in NORMS),
)
NORM_WORDS = ("pre", "post")
_MTP_FIELDS = (
    Field("num_nextn_predict_layers", "", int, 1),
    Field(STATE, "options.state", NORM_WORDS, "pre"),
    Field(RECYCLED, "options.recycled", NORM_WORDS, "post"),
)
"""The norms that the library implies without the keys."""
_BOTH_WAYS = Field("sliding_window_non_causal", "causal_window", bool, False, turned=True)
_FROM_ANCHOR = Field(FROM_ANCHOR, "from_root", bool, False)
_BLOCK_FIELDS = (
    TARGET_SIZE,
    Field("aux_hidden_state_layer_ids", "reads", "ids"),
    Field("block_size", "slots", int, 8, least=2, most=MOST_SLOTS),
    MASK,
)
CONVOLVED = (
    Field("conv_kernel_size", "taps", int, 2),
    Field("conv_group_size", "group", int, 16),
    Field("selector_rank", "selector_rank", int, 256),
    Field("selector_top_k", "candidates", int, 16),
)
"""Keys for the sizes of convolutions and selector, with the library's defaults."""
MARKOV = (
    Field("markov_head_type", "markov", ("vanilla", "gated", "rnn"), "vanilla"),
    Field("enable_confidence_head", "confident", bool, True),
    Field("confidence_head_with_markov", "confident_of_markov", bool, True),
)
"""Keys for the dependence of a block's tokens on each other and for confidence."""
_UNSAID = (
    "drafts from before there was such a key mean false by that, and later readers true; name what it was trained "
    f"with, kind={{'kind': 'dspark', {FROM_ANCHOR!r}: True}} or False, or write it there"
)
_DSPARK_FIELDS = (
    *(*_BLOCK_FIELDS, _BOTH_WAYS, dataclasses.replace(_FROM_ANCHOR, absent=None, remedy=_UNSAID)),
    *(Field("markov_rank", "markov_rank", int, 256, least=0), *MARKOV),
)
_DFLASH2_FIELDS = (*_BLOCK_FIELDS, dataclasses.replace(_BOTH_WAYS, absent=True), _FROM_ANCHOR, *CONVOLVED)


def _one_head(reading: Reading) -> None:
    if reading.settings.typed("num_nextn_predict_layers", int, 1) != 1:
        raise reading.error("num_nextn_predict_layers is not 1; only a single head is read")


def convolved(reading: Reading) -> None:
    """Raises `ModelError` for sizes of convolutions and selector that the layers have no use for."""
    size, layers = reading.layers.hidden_size, reading.layers
    most = {"taps": reading.values["slots"], "group": size, "candidates": layers.vocab_size}
    for field in CONVOLVED:
        value = reading.values[field.ours]
        if value > most.get(field.ours, value) or (field.ours == "group" and size % value):
            raise reading.error(f"{field.key}={value}, which layers of {size} have no use for")
    if (layers.norm.placement, layers.residual, layers.residual_multiplier) != ("pre", "sequential", 1):
        raise reading.error("convolutions are read around layers like those of llama and qwen3 alone")


def markov(reading: Reading) -> None:
    """A confidence head reads the token before only if there is one. Raises `ModelError`."""
    values = reading.values
    values["confident_of_markov"] = values["confident_of_markov"] and values["confident"]
    if values["confident_of_markov"] and not values["markov_rank"]:
        raise reading.error("confidence_head_with_markov, and markov_rank is 0")


# --- tensors --------------------------------------------------------------------------------------------------------

EAGLE3_TENSORS: dict[str, Tensor] = {
    **linear("fc", "fc"),
    **norm("input_norm", "input_norm"),
    **norm("fc_norms.{}", "fc_norm.{}"),
    **norm("layers.{}.hidden_norm", "layers.{}.hidden_norm"),
    **norm("norm", "norm"),
    "mask_hidden": Tensor("mask_hidden"),
}


def mtp_tensors(head: str) -> dict[str, Tensor]:
    """Tensors of an MTP head whose own module is ``head``."""
    return {
        **norm("token_norm", f"{head}.token_layernorm"),
        **norm("hidden_norm", f"{head}.hidden_layernorm"),
        **linear("fc", f"{head}.input_proj"),
        **norm("norm", f"{head}.final_layernorm"),
    }


def _convolution(name: str) -> dict[str, Tensor]:
    ours = theirs = f"layers.{{}}.{name}"
    return {
        f"{ours}.base": Tensor(f"{theirs}.base_kernel"),
        **linear(f"{ours}.projection", f"{theirs}.kernel_projection"),
    }


BLOCK_TENSORS: dict[str, Tensor] = {
    **linear("fc", "fc"),
    **norm("hidden_norm", "hidden_norm"),
    **norm("norm", "norm"),
    "markov.w1": Tensor("markov_head.markov_w1.weight"),
    **linear("markov.w2", "markov_head.markov_w2"),
    **linear("markov.gate_proj", "markov_head.gate_proj"),
    **linear("markov.joint_proj", "markov_head.joint_proj"),
    **linear("confidence", "confidence_head.proj"),
    "selector.predecessor": Tensor("candidate_selector.predecessor_codebook"),
    "selector.successor": Tensor("candidate_selector.successor_codebook"),
    **linear("selector.hidden_projection", "candidate_selector.hidden_projection"),
    **_convolution("attention_conv"),
    **_convolution("mlp_conv"),
}

# --- forms ----------------------------------------------------------------------------------------------------------


def _other_layers(spec: FeatureModel) -> bool:
    try:
        described(spec.config)
    except ModelError:
        return True
    return False


def unnormed(spec: FeatureModel) -> bool:
    """True if queries and keys are not normed."""
    return spec.config.qk_norm != "head"


Limits = Mapping[str, Callable[[Any], Any]]
_LAYERS: Limits = {
    "layers that are none of Llama, Qwen 2 and Qwen 3, or logits that are scaled or capped": _other_layers
}
_BLOCK_LIMITS: Limits = {
    **_LAYERS,
    "layers without norms of queries and keys, which all of its own have (draft.qk_norm: true)": unnormed,
    "windows that are counted from each slot": lambda spec: any(spec.config.windows) and not spec.window_at_root,
}
_MTP_LIMITS: Limits = {
    **_LAYERS,
    "the norms of its state ({0.options.state}) and of what it recycles ({0.options.recycled})": (
        lambda spec: spec.options != Options()
    ),
    "a head whose layer is not Qwen 3's": unnormed,
}


def _form(name: str, architecture: str, spec: type, fields: Any, tensors: Any, limits: Limits, **more: Any) -> Form:
    how: dict[str, Any] = {"layers": LAYERS, "limits": limits, "known": (TYPE,), "says_rows": True, **more}
    return Form((name, architecture), spec, fields, tensors, **how)


def _eagle(name: str, architecture: str, spec: type, fields: Any) -> Form:
    return _form(name, architecture, spec, fields, EAGLE3_TENSORS, _LAYERS)


def _blocks(name: str, architecture: str, fields: Any, settle: Any = None) -> Form:
    how = {"left_out": EMBEDDING_AND_HEAD, "settle": settle}
    return _form(name, architecture, DFlashModel, fields, BLOCK_TENSORS, _BLOCK_LIMITS, **how)


KINDS = {
    "eagle3": _eagle("eagle3", "Eagle3DraftModel", Eagle3Model, _EAGLE3_FIELDS),
    "p_eagle": _eagle("peagle", "PEagleDraftModel", PEagleModel, (*_EAGLE3_FIELDS, MASK)),
    "dflash": _blocks("dflash", "DFlashSpeculator", (*_BLOCK_FIELDS, _BOTH_WAYS, _FROM_ANCHOR)),
    "dflash2": _blocks("dflash2", "DFlash2DraftModel", _DFLASH2_FIELDS, convolved),
    "dspark": _blocks("dspark", "DSparkSpeculator", _DSPARK_FIELDS, markov),
    "mtp": _form(
        *("mtp", "MTPDraftModel", MTPModel, _MTP_FIELDS, mtp_tensors("mtp_layers.0"), _MTP_LIMITS),
        left_out=EMBEDDING_AND_HEAD,
        of_target=True,
        layer="mtp_layers.{}",
        settle=_one_head,
        says_rows=False,
    ),
}


def _around(form: Form, spec: FeatureModel, dtype: str, target: TargetName) -> dict[str, Any]:
    return {
        TYPE: form.names[0],
        "architectures": [form.names[1]],
        "dtype": dtype,
        "speculators_config": {
            "algorithm": form.names[0],
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.most or 3}],
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
    }


FORMAT = Format(
    KINDS,
    named_by(TYPE, KINDS, strict=True),
    _around,
    "speculators: has no words for {}; specjax's own form has (--format specjax)",
)
