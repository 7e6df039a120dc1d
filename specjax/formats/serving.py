"""Drafts as other projects store them, each beside a config.json of llama or qwen3 with keys of its own. EAGLE-3 is
read as its own code, SpecForge, ModelOpt and AngelSlim write it, for SGLang and vLLM to serve; blocks as z-lab,
DeepSpec, SpecForge and ModelOpt write them. The class that config.json names decides what the layers are, whatever
`model_type` was copied from the target. Layers are numbered by their outputs: i is what leaves i + 1 layers of the
target, one less than our stream number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.eagle3 import Eagle3Model, Options
from specjax.drafters.features import EMBEDDING_AND_HEAD, FeatureModel
from specjax.drafters.p_eagle import PEagleModel
from specjax.errors import ModelError
from specjax.formats import own, speculators
from specjax.formats.form import Form, Format, Reading, TargetName
from specjax.formats.keys import EXPERTS, HUNYUAN, READS
from specjax.formats.speculators import (
    BLOCK_TENSORS,
    CONVOLVED,
    EAGLE3_TENSORS,
    MARKOV,
    MASK,
    TARGET_SIZE,
    Limits,
    unnormed,
)
from specjax.models.config import ModelConfig
from specjax.models.families.settings import Field
from specjax.models.hf import DRAFTER


def _format(name: str, *more: tuple[str, Form], embeddings: bool = False, **kinds: Form) -> Format:
    """A form whose drafts config.json names by their class. ``kinds``: those that are read and written; ``more``: those
    that are only read, each with its kind; ``embeddings``: True if a draft can read the target's embeddings."""

    def find(settings: Mapping[str, Any]) -> tuple[str, Form] | None:
        named = settings.get("architectures") or ()
        if speculators.TYPE in settings or not isinstance(named, (list, tuple)):
            return None
        for kind, form in (*kinds.items(), *more):
            if any(name in form.names for name in named) and form.meant(settings):
                return kind, form
        return None

    def around(form: Form, spec: FeatureModel, dtype: str, target: TargetName) -> dict[str, Any]:
        if 0 in spec.reads and not embeddings:
            raise ModelError(f"{name}: has no number for the target's embeddings, which this draft reads (stream 0)")
        return {"architectures": [form.names[0]], "dtype": dtype}

    refusal = f"{name}: cannot say {{}} of this draft; the form specjax can (--format specjax)"
    return Format(kinds, find, around, refusal)


def _named_in(own: str, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """``fields`` with their keys in the object ``own``."""
    return tuple(dataclasses.replace(field, key=f"{own}.{field.key}") for field in fields)


def _windowed(spec: FeatureModel) -> bool:
    return any(spec.config.windows)


_SEVERAL: Limits = {"several layers": lambda spec: spec.config.num_layers > 1}
_FEWER: Limits = {"fewer ids": lambda spec: spec.vocabulary is not None}
_NO_NORMS: Limits = {"layers without norms of queries and keys (draft.qk_norm: true trains one with them)": unnormed}

# --- EAGLE-3, P-EAGLE -----------------------------------------------------------------------------------------------

_CAPTURED = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")
_MODELOPT = {
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), True),
    **dict.fromkeys(("use_mtp_layernorm", "has_lm_head"), False),
    "parallel_draft_step": 1,
}
"""Keys that ModelOpt writes, each with the value at which a draft is that of the paper."""
_MASKS = ("ptd_token_id", "mask_token_id")


def _eagle3(reading: Reading) -> None:
    if any(name.startswith("midlayer.") for name in reading.stored):
        # `num_hidden_layers` may be copied from the target.
        reading.layers = dataclasses.replace(reading.layers, num_layers=1, layers=reading.layers.layers[:1])
    _eagle(reading)
    if reading.values["options.norm_before_residual"]:
        raise reading.error("norm_before_residual=True, which drafts of this form have no norms for")


def _p_eagle(reading: Reading) -> None:
    """Either of two keys names the mask token, or none if only its trainer was told."""
    _eagle(reading)
    settings = reading.settings
    masks = {settings.value(name) for name in _MASKS} - {None}
    if len(masks) != 1:
        told = " and ".join(f"{name}={settings.value(name)!r}" for name in _MASKS)
        raise reading.error(f"{told}; write the id of the mask token that it was trained with in one")
    one = dataclasses.replace(settings, values={"mask_token_id": masks.pop()})
    reading.values |= one.fields((MASK,))
    settings.typed("parallel_drafting", bool, True)
    rope = reading.layers.layer(0).rope
    if "PEagleDraftModel" in settings.values["architectures"] and rope is not None and rope.scaling is not None:
        raise reading.error("rope_scaling, which its class PEagleDraftModel does not apply; remove it")


def _eagle(reading: Reading) -> None:
    settings = reading.settings
    if settings.value("norm_output") is not None:
        raise reading.error(
            f"norm_output={settings.value('norm_output')!r} is not read: its trainers have meant different norms by "
            "it; convert the draft to the form of speculators, where it has one meaning"
        )
    if reading.own.typed("use_aux_hidden_state", bool, True) is not True:
        raise reading.error("eagle_config.use_aux_hidden_state=False: a draft of the last layer alone")
    reading.values["reads"] = reads = _eagle_streams(reading)
    for key in ("num_aux_hidden_states", "num_eagle_features"):
        count = settings.count(key, len(reads))
        if count != len(reads):
            raise reading.error(f"{key}={count}, and the draft reads {len(reads)} layers of its target")


def _eagle_streams(reading: Reading) -> tuple[int, ...]:
    """Streams that an EAGLE-3 draft reads. Most makers number layers by their outputs, some by their inputs, which
    gives one more. Only a number of an input can equal the target's number of layers. Nobody who numbers inputs begins
    with 0 or 1."""
    settings, outputs = reading.settings, reading.values["reads"]
    if reading.own.value(_CAPTURED) is None:
        return outputs
    inputs = tuple(i - 1 for i in outputs)
    if max(inputs) == reading.target.num_layers:
        return inputs
    if inputs[0] < 2 or DRAFTER in settings.values:
        return outputs
    asked = settings.ids(READS, absent=())
    if asked in (outputs, inputs):
        return asked
    raise reading.error(
        f"{_CAPTURED}={list(inputs)} are layers whose outputs are read, or whose inputs: its makers number them in "
        f"both ways; ask for one, kind={{'kind': KIND, 'reads': {list(outputs)}}} or {list(inputs)}, or write it there "
        f"as {READS}"
    )


def _is_p_eagle(settings: Mapping[str, Any]) -> bool:
    return "PEagleDraftModel" in settings["architectures"] or settings.get("ptd_token_id") is not None


def _is_eagle3(settings: Mapping[str, Any]) -> bool:
    """True for EAGLE-3. Llama's own class counts only with a draft vocabulary."""
    llama = settings["architectures"] == ["LlamaForCausalLM"] and settings.get("draft_vocab_size") is None
    return not llama and not _is_p_eagle(settings)


_EAGLE_FIELDS = (
    TARGET_SIZE,
    *(Field(name, f"options.{name}", bool, False, sparse=True, fallback=f"eagle_config.{name}") for name in _NORMS),
    Field(f"eagle_config.{_CAPTURED}", "reads", "ids", speculators.published, beyond=1),
    Field("eagle_config.use_aux_hidden_state", "", bool, True),
)
_PLAIN = dataclasses.asdict(Options(norm_before_residual=False))
_EAGLE_LIMITS: Limits = {
    **{
        f"{name} (draft.{name}: false trains one without)": (
            lambda spec, name=name: getattr(spec.options, name) != _PLAIN[name]
        )
        for name in _PLAIN
    },
    **_SEVERAL,
    "norms of queries and keys": lambda spec: not unnormed(spec),
    "a window": _windowed,
}
_EAGLE: dict[str, Any] = {
    "optional": EMBEDDING_AND_HEAD,
    "family": "llama",
    "own": "eagle_config",
    "own_needed": False,
    # The last one matters only to a draft of several heads.
    "own_known": (*_NORMS, "parallel_draft_heads_num_layers"),
    "own_at": _MODELOPT,
    "unread": (*EXPERTS, *HUNYUAN),
    "aliases": {"midlayer.": "layers.0."},
}
_EAGLE_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_P_EAGLE_NAMES = ("PEagleDraftModel", *_EAGLE_NAMES)
SGLANG = _format(
    "sglang",
    (
        "p_eagle",
        Form(_P_EAGLE_NAMES, PEagleModel, _EAGLE_FIELDS, EAGLE3_TENSORS, settle=_p_eagle, meant=_is_p_eagle, **_EAGLE),
    ),
    eagle3=Form(
        *(_EAGLE_NAMES, Eagle3Model, _EAGLE_FIELDS, EAGLE3_TENSORS),
        left_out=("embedding",),
        written_layer="midlayer",
        settle=_eagle3,
        limits=_EAGLE_LIMITS,
        meant=_is_eagle3,
        says_rows=True,
        tables=True,
        **_EAGLE,
    ),
)

# --- z-lab ----------------------------------------------------------------------------------------------------------


def _blocks(reading: Reading) -> None:
    """Windows are counted from each slot."""
    _same_target(reading)
    reading.values["window_at_root"] = not any(reading.layers.windows)


def _same_target(reading: Reading) -> None:
    """Raises `ModelError` for a draft of a target with another number of layers."""
    layers = reading.target.num_layers
    told = reading.settings.count("num_target_layers", layers)
    if told != layers:
        raise reading.error(f"num_target_layers={told}, and the target has {layers} layers")


def _z_lab(reading: Reading) -> None:
    _blocks(reading)
    values, own = reading.values, reading.own
    for name, told in (("block_size", values["slots"]), ("mask_token_id", values["mask_token"])):
        inside, beside = own.value(name, told), reading.settings.value(name, told)
        if inside != beside:
            raise reading.error(f"{name}={beside}, and {inside} in dflash_config")


def _z_lab_2(reading: Reading) -> None:
    _z_lab(reading)
    speculators.convolved(reading)


def _z_lab_dspark(reading: Reading) -> None:
    """ModelOpt's confidence head has another name than SpecForge's, and always reads the token before."""
    own, values = reading.own, reading.values
    asked = own.typed("enable_confidence_head", bool, bool(own.value("confidence_head_alpha", 0)))
    values["confident"] = own.typed("use_confidence_head", bool, asked)
    of_modelopt = own.value("use_confidence_head") is not None
    values["confident_of_markov"] = own.typed("confidence_head_with_markov", bool, of_modelopt)
    speculators.markov(reading)
    _z_lab(reading)


def _spread(layers: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Streams that z-lab's class reads if none are named."""
    count = layers.num_layers
    if count == 1:
        return (target.num_layers // 2 + 1,)
    return tuple(round(1 + i * (target.num_layers - 4) / (count - 1)) + 1 for i in range(count))


def _projector(settings: Mapping[str, Any]) -> Any:
    own = settings.get("dflash_config")
    return own.get("projector_type") if isinstance(own, dict) else None


def _is_dspark(settings: Mapping[str, Any]) -> bool:
    own_class = "DSparkDraftModel" in settings["architectures"]
    return _projector(settings) == "dspark" or (own_class and _projector(settings) is None)


_SCALES = dict(zip(("input_embedding_scale", "output_multiplier", "final_logit_softcapping"), own.SCALES, strict=True))
_SLOTS = Field("block_size", "slots", int, least=2, most=speculators.MOST_SLOTS)
_STREAMS = Field("target_layer_ids", "reads", "ids", beyond=1)
_Z_LAB_FIELDS = (
    dataclasses.replace(_SLOTS, fallback="dflash_config.block_size"),
    Field("is_causal", "causal_window", bool, True, sparse=True),
    *_named_in(
        "dflash_config",
        (
            *(dataclasses.replace(_STREAMS, absent=_spread), MASK),
            *(dataclasses.replace(field, key=key) for key, field in _SCALES.items()),
        ),
    ),
)
_Z_LAB_LIMITS: Limits = {
    "a window that is counted from the root": lambda spec: any(spec.config.windows) and spec.window_at_root,
    "slots that predict the token behind their own": lambda spec: spec.from_root,
    **_FEWER,
    **_NO_NORMS,
    "tokens that depend on each other": lambda spec: spec.markov_rank,
}
_OF_BLOCK = ("DFlashDraftModel", "QwenDFlashDraftModel")
_LOGIT_HEAD = {"logit_head.markov_head.": "markov_head.", "logit_head.confidence_head.": "confidence_head."}
_BARE_HEAD = {f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")}


def _z_lab_form(names: tuple[str, ...], settle: Any, fields: tuple[Field, ...] = (), **more: Any) -> Form:
    # Keys that SpecForge and ModelOpt write, each with the value at which a draft is z-lab's.
    at = {"use_swa": False, "causal": False, "pure_draft_prefix_len": 0, "shift_label": "fixed" in more}
    how: dict[str, Any] = {
        "left_out": EMBEDDING_AND_HEAD,
        "optional": EMBEDDING_AND_HEAD,
        "family": "qwen3",
        "target_layers": True,
        **more,
    }
    how |= {"own": "dflash_config", "own_known": ("projector_type", "attention_mode", "swa_window_size"), "own_at": at}
    fields = (*_Z_LAB_FIELDS, *_named_in("dflash_config", fields))
    return Form(names, DFlashModel, fields, BLOCK_TENSORS, settle=settle, limits=_Z_LAB_LIMITS, **how)


Z_LAB = _format(
    "z-lab",
    (
        "dspark",
        _z_lab_form(
            *(("DSparkDraftModel", *_OF_BLOCK), _z_lab_dspark),
            (Field("markov_rank", "markov_rank", int, 0, least=0), MARKOV[0]),
            fixed={"from_root": True},
            meant=_is_dspark,
            aliases={**_LOGIT_HEAD, **_BARE_HEAD, "confidence_proj.": "confidence_head.proj."},
        ),
    ),
    dflash=_z_lab_form(_OF_BLOCK, _z_lab, meant=lambda settings: _projector(settings) in (None, "dflash")),
    dflash2=_z_lab_form(("DFlash2DraftModel",), _z_lab_2, CONVOLVED),
)

# --- DeepSpec -------------------------------------------------------------------------------------------------------


def _deepspec(reading: Reading) -> None:
    _blocks(reading)
    speculators.markov(reading)


def _deepspec_eagle3(reading: Reading) -> None:
    """A draft with a single layer: each of its layers reads the token, and only our first layer does."""
    _same_target(reading)
    for name in ("num_hidden_layers", "draft_num_hidden_layers"):
        if reading.settings.count(name, 1) != 1:
            raise reading.error(f"{name}={reading.settings.value(name)}; of this class a single layer is read")


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """True for a DFlash draft, which DeepSpec stores in its class of DSpark without that class's heads."""
    return not settings.get("markov_rank") and not settings.get("enable_confidence_head")


_DEEPSPEC: dict[str, Any] = {"family": "qwen3", "target_layers": True}
_DEEPSPEC_BLOCKS = Form(
    ("Qwen3DSparkModel",),
    DFlashModel,
    (
        *(_STREAMS, _SLOTS, MASK, Field("markov_rank", "markov_rank", int, least=0), *MARKOV),
        Field("num_anchors", "", int, 512),  # that of its recipe: its class requires it, training alone reads it
    ),
    BLOCK_TENSORS,
    fixed={"from_root": True},
    settle=_deepspec,
    limits={
        "windows": _windowed,
        "slots that predict their own token": lambda spec: not spec.from_root,
        **_FEWER,
        **_NO_NORMS,
    },
    **_DEEPSPEC,
)
DEEPSPEC = _format(
    "deepspec",
    embeddings=True,  # -1
    dspark=dataclasses.replace(_DEEPSPEC_BLOCKS, meant=lambda settings: not _is_plain(settings)),
    dflash=dataclasses.replace(_DEEPSPEC_BLOCKS, meant=_is_plain),
    eagle3=Form(
        ("Qwen3Eagle3Model",),
        Eagle3Model,
        # Its class requires the last two; training alone reads them.
        (_STREAMS, Field("ttt_length", "", int, 7), Field("step_loss_decay", "", float, 0.8)),
        EAGLE3_TENSORS,
        fixed={"options.norm_before_residual": False},
        settle=_deepspec_eagle3,
        limits={
            "its norms": lambda spec: dataclasses.asdict(spec.options) != _PLAIN,
            "windows": _windowed,
            **_SEVERAL,
            **_FEWER,
            "features of another size": lambda spec: spec.feature_size != spec.config.hidden_size,
            **_NO_NORMS,
        },
        **_DEEPSPEC,
    ),
)
