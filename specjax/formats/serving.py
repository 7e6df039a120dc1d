"""Drafts as other projects store them, each beside a config.json of llama or qwen3 with keys of its own. EAGLE-3 is
read as its own code, SpecForge, ModelOpt and AngelSlim write it, for SGLang and vLLM to serve; blocks as z-lab,
DeepSpec, SpecForge and ModelOpt write them. The class that config.json names decides what the layers are, whatever
`model_type` was copied from the target. Layers are numbered by their outputs: i is what leaves i + 1 layers of the
target, one less than our stream number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters import eagle3, p_eagle
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.features import ENDS, FeatureModel, LoadedDraft, head_rows, published_streams
from specjax.errors import ModelError
from specjax.formats import speculators
from specjax.formats.envelope import Envelope, TargetName, described, read_layers
from specjax.formats.keys import EXPERTS, HUNYUAN, READS
from specjax.interfaces import Params, TargetInfo
from specjax.models.config import ModelConfig
from specjax.models.families.base import Tensor, linear
from specjax.models.hf import DRAFTER
from specjax.models.weights import tensor_names


@dataclasses.dataclass(frozen=True)
class Form:
    """Stored form of one kind of draft. ``spec(envelope, layers, dtype, target)`` reads it, for a target of ``target``
    layers; ``settings(spec)`` gives its keys, or raises `ModelError` for what they cannot express; None: the form is
    read, and not written."""

    architectures: tuple[str, ...]
    """Names that config.json may call the draft's class by; the first is written."""
    family: str
    """Model family that has the layers of that class."""
    spec: Callable[[Envelope, ModelConfig, str, int], FeatureModel]
    settings: Callable[[Any], dict[str, Any]] | None
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    """Parameters that are the target's, and not written."""
    optional: tuple[str, ...] = ENDS
    """Parameters that a file may hold, or leave to the target."""
    layers: str = "layers.{}"
    tables: bool = False
    """True: d2t and t2d are written for a whole vocabulary, too."""
    described: Callable[[Any], ModelConfig] = lambda spec: spec.config
    """The layers that config.json describes."""
    unread: tuple[str, ...] = EXPERTS
    """Keys that the class ignores."""
    meant: Callable[[Mapping[str, Any]], bool] = lambda settings: True
    """Test that a config.json which names one of the architectures is of this kind."""
    target_layers: bool = False
    """True: `num_target_layers` is written."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of tensor names, see `specjax.formats.stored.Stored.aliases`."""


class Format:
    """An entry of `specjax.formats.FORMATS`. ``kinds``: forms that are read and written; ``more``: forms that are only
    read, each with its kind."""

    def __init__(self, *more: tuple[str, Form], **kinds: Form):
        self.KINDS = kinds
        self._forms = (*kinds.items(), *more)

    def _form_of(self, settings: Mapping[str, Any]) -> tuple[str, Form] | None:
        named = settings.get("architectures") or ()
        if speculators.TYPE in settings or not isinstance(named, (list, tuple)):
            return None
        for kind, form in self._forms:
            if any(name in form.architectures for name in named) and form.meant(settings):
                return kind, form
        return None

    def kind_of(self, settings: Mapping[str, Any]) -> str | None:
        """Kind of draft that a config.json describes, see `specjax.formats.kind_of`."""
        found = self._form_of(settings)
        return None if found is None else found[0]

    def read(
        self, found: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
    ) -> tuple[FeatureModel, Params]:
        """The draft's spec and weights. Raises `ModelError`."""
        named = self._form_of(settings)
        assert named is not None
        envelope, form = Envelope(settings, found / "config.json"), named[1]
        layers, known = read_layers(settings, envelope.file, form.family, form.unread)
        layers = dataclasses.replace(layers, tie_embeddings=False)
        spec = form.spec(envelope, layers, str(target.dtype), target.config.num_layers)
        spec = speculators.with_kept(spec, envelope)
        envelope.only_read(*known)
        names = tensor_names(found)
        absent = tuple(end for end in form.optional if _ENDS[end] not in names)
        form = dataclasses.replace(form, layers="layers.{}", left_out=absent)
        return spec, speculators.stored(spec, form).read(found, spec.dtype, check_finite)

    def write(self, partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
        """Write the weights; returns config.json. Raises `ModelError` for a draft that this form cannot express."""
        spec, form = draft.spec, self.KINDS[kind]
        assert form.settings is not None
        own, layers = form.settings(spec), described(spec.config, form.described(spec))
        own |= {"num_target_layers": target.layers} if form.target_layers else {}
        more = speculators.tables_of(spec)
        if form.tables and more is None:
            size = spec.config.vocab_size
            more = {"d2t": np.zeros(size, np.int64), "t2d": np.ones(size, bool)}
        named = {
            ours: dataclasses.replace(tensor, name=tensor.name.replace("layers.{}", form.layers))
            for ours, tensor in form.tensors.items()
        }
        form = dataclasses.replace(form, tensors=named)
        speculators.stored(spec, form).write(partial, draft.params, dtype, more)
        return {**layers, "architectures": [form.architectures[0]], "dtype": dtype, **own}


_WITH_ENDS = {"embedding": Tensor("embed_tokens.weight"), **linear("head", "lm_head")}
_ENDS = {"embedding": _WITH_ENDS["embedding"].name, "head": _WITH_ENDS["head.kernel"].name}


def _shifted(reads: tuple[int, ...], what: str) -> list[int]:
    if 0 in reads:
        raise ModelError(f"{what}: has no number for the target's embeddings, which this draft reads (stream 0)")
    return [i - 1 for i in reads]


def _refuse(what: str, said: Mapping[str, bool]) -> None:
    """Raises `ModelError` for the first property in ``said`` that the draft has."""
    for name, wrong in said.items():
        if wrong:
            raise ModelError(f"{what}: cannot say {name} of this draft; the form specjax can (--format specjax)")


# --- EAGLE-3, P-EAGLE -----------------------------------------------------------------------------------------------


def _eagle3(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    layers, options = _one_layer(envelope, layers), _eagle_options(envelope)
    if options.norm_before_residual:
        raise ModelError(f"{envelope.file}: norm_before_residual=True, which drafts of this form have no norms for")
    size, reads = _captured(envelope, layers, target)
    return eagle3.Eagle3Model(layers, reads, size, dtype, options=options)


def _p_eagle(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    """A P-EAGLE draft. Either of two keys names its mask token, or none if only its trainer was told."""
    size, reads = _captured(envelope, layers, target)
    masks = {envelope.value(name) for name in _MASKS} - {None}
    if len(masks) != 1:
        told = " and ".join(f"{name}={envelope.value(name)!r}" for name in _MASKS)
        raise ModelError(f"{envelope.file}: {told}; write the id of the mask token that it was trained with in one")
    mask = speculators.mask_of(Envelope({"mask_token_id": masks.pop()}, envelope.file), layers)
    envelope.get("parallel_drafting", bool, True)
    if "PEagleDraftModel" in envelope.values["architectures"] and layers.layer(0).rope.scaling is not None:
        raise ModelError(f"{envelope.file}: rope_scaling, which its class PEagleDraftModel does not apply; remove it")
    options = _eagle_options(envelope)
    return p_eagle.PEagleModel(layers, reads, size, dtype, options=options, mask_token=mask)


_MASKS = ("ptd_token_id", "mask_token_id")


def _one_layer(envelope: Envelope, layers: ModelConfig) -> ModelConfig:
    """``layers`` cut to one if the file calls it `midlayer`, whatever `num_hidden_layers` was copied from the
    target."""
    names = tensor_names(envelope.file.parent)
    if not any(name.startswith("midlayer.") for name in names):
        return layers
    return dataclasses.replace(layers, num_layers=1, layers=layers.layers[:1])


def _eagle_options(envelope: Envelope) -> eagle3.Options:
    own = envelope.get("eagle_config", dict, {})
    said = {}
    for name in _NORMS:
        nested = Envelope(own, envelope.file).get(name, bool, False)
        said[name] = envelope.get(name, bool, nested)
    if envelope.value("norm_output") is not None:
        raise ModelError(
            f"{envelope.file}: norm_output={envelope.value('norm_output')!r} is not read: its trainers have meant "
            "different norms by it; convert the draft to the form of speculators, where it has one meaning"
        )
    return eagle3.Options(**said)


def _captured(envelope: Envelope, layers: ModelConfig, target: int) -> tuple[int, tuple[int, ...]]:
    """(size of each stream, the streams)."""
    own = Envelope(envelope.get("eagle_config", dict, {}), envelope.file)
    if own.get("use_aux_hidden_state", bool, True) is not True:
        raise ModelError(f"{envelope.file}: eagle_config.use_aux_hidden_state=False: a draft of the last layer alone")
    reads = _eagle_streams(envelope, own, target)
    own.only_read(*_NORMS, *_OF_MODELOPT, at=_MODELOPT)
    for key in ("num_aux_hidden_states", "num_eagle_features"):
        count = envelope.count(key, len(reads))
        if count != len(reads):
            raise ModelError(f"{envelope.file}: {key}={count}, and the draft reads {len(reads)} layers of its target")
    return envelope.count("target_hidden_size", layers.hidden_size), reads


def _eagle_streams(envelope: Envelope, own: Envelope, target: int) -> tuple[int, ...]:
    """Streams that an EAGLE-3 draft reads. Most makers number layers by their outputs, some by their inputs, which
    gives one more. Only a number of an input can equal the target's number of layers. Nobody who numbers inputs begins
    with 0 or 1."""
    outputs = own.ids(_CAPTURED, 1, published_streams(target))
    if own.value(_CAPTURED) is None:
        return outputs
    inputs = tuple(i - 1 for i in outputs)
    if max(inputs) == target:
        return inputs
    if inputs[0] < 2 or DRAFTER in envelope.values:
        return outputs
    asked = envelope.ids(READS, absent=())
    if asked in (outputs, inputs):
        return asked
    raise ModelError(
        f"{envelope.file}: {_CAPTURED}={list(inputs)} are layers whose outputs are read, or whose inputs: its makers "
        f"number them in both ways; ask for one, kind={{'kind': KIND, 'reads': {list(outputs)}}} or {list(inputs)}, or "
        f"write it there as {READS}"
    )


def _eagle3_settings(spec: eagle3.Eagle3Model) -> dict[str, Any]:
    plain = eagle3.Options(norm_before_residual=False)
    options = {name: getattr(spec.options, name) != getattr(plain, name) for name in dataclasses.asdict(plain)}
    said = {f"{name} (draft.{name}: false trains one without)": asked for name, asked in options.items()}
    layers = {"several layers": spec.config.num_layers > 1, "norms of queries and keys": spec.config.qk_norm == "head"}
    _refuse("sglang", {**said, **layers, "a window": any(spec.config.windows)})
    ids = _shifted(spec.reads, "sglang")
    return {
        "draft_vocab_size": head_rows(spec),
        "target_hidden_size": spec.feature_size,
        "eagle_config": {_CAPTURED: ids, "use_aux_hidden_state": True},
    }


_CAPTURED = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")
_MODELOPT = {
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), True),
    **dict.fromkeys(("use_mtp_layernorm", "has_lm_head"), False),
    "parallel_draft_step": 1,
}
"""Keys that ModelOpt writes, each with the value at which a draft is that of the paper."""
_OF_MODELOPT = ("parallel_draft_heads_num_layers",)
"""Keys of ModelOpt that matter only to a draft of several heads."""
_EAGLE3 = {**speculators.KINDS["eagle3"].tensors, **_WITH_ENDS}
_MIDLAYER = {"midlayer.": "layers.0."}


def _is_p_eagle(settings: Mapping[str, Any]) -> bool:
    return "PEagleDraftModel" in settings["architectures"] or settings.get("ptd_token_id") is not None


def _is_eagle3(settings: Mapping[str, Any]) -> bool:
    """True for EAGLE-3. Llama's own class counts only with a draft vocabulary."""
    return settings["architectures"] != ["LlamaForCausalLM"] or settings.get("draft_vocab_size") is not None


_EAGLE_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_COPIED = (*EXPERTS, *HUNYUAN)
sglang = Format(
    (
        "p_eagle",
        Form(
            *(("PEagleDraftModel", *_EAGLE_NAMES), "llama", _p_eagle, None),
            {**speculators.KINDS["p_eagle"].tensors, **_WITH_ENDS},
            ENDS,
            unread=_COPIED,
            meant=_is_p_eagle,
            aliases=_MIDLAYER,
        ),
    ),
    eagle3=Form(
        *(_EAGLE_NAMES, "llama", _eagle3, _eagle3_settings, _EAGLE3, ("embedding",)),
        layers="midlayer",
        tables=True,
        unread=_COPIED,
        meant=lambda settings: _is_eagle3(settings) and not _is_p_eagle(settings),
        aliases=_MIDLAYER,
    ),
)

# --- z-lab, DeepSpec ------------------------------------------------------------------------------------------------


def _blocks(
    own: Envelope, layers: ModelConfig, dtype: str, reads: tuple[int, ...], slots: int, **more: Any
) -> FeatureModel:
    return DFlashModel(
        layers,
        reads,
        layers.hidden_size,
        dtype,
        slots=slots,
        mask_token=speculators.mask_of(own, layers),
        window_at_root=not any(layers.windows),
        **more,
    )


def _z_lab(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    return _z_lab_blocks(envelope, _z_lab_own(envelope), layers, dtype, target)


def _z_lab_2(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    own = _z_lab_own(envelope)
    return _z_lab_blocks(envelope, own, layers, dtype, target, **speculators.convolved(own, layers))


def _z_lab_dspark(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    """A DSpark draft of SpecForge, or of ModelOpt, whose confidence head has another name and always reads the token
    before. Both are trained to predict from the root's slot on."""
    own = _z_lab_own(envelope)
    asked = own.get("enable_confidence_head", bool, bool(own.value("confidence_head_alpha", 0)))
    of_modelopt = own.value("use_confidence_head") is not None
    confident = own.get("use_confidence_head", bool, asked)
    behind = own.get("confidence_head_with_markov", bool, of_modelopt)
    told = {"enable_confidence_head": confident, "confidence_head_with_markov": behind}
    told |= {"markov_head_type": own.value("markov_head_type", "vanilla")}
    heads = speculators.markov(Envelope(told, envelope.file), own.count("markov_rank", 0, least=0))
    return _z_lab_blocks(envelope, own, layers, dtype, target, from_root=True, **heads)


_NO_NORMS = "layers without norms of queries and keys (draft.qk_norm: true trains one with them)"
_SCALES = {"input_embedding_scale": "embedding_multiplier", "output_multiplier": "logit_multiplier"}
_SOFT_CAP = "final_logit_softcapping"


def _z_lab_own(envelope: Envelope) -> Envelope:
    return Envelope(envelope.get("dflash_config", dict), envelope.file)


def _z_lab_blocks(
    envelope: Envelope, own: Envelope, layers: ModelConfig, dtype: str, target: int, **more: Any
) -> FeatureModel:
    scales = {ours: own.positive(theirs, 1.0) for theirs, ours in _SCALES.items()}
    cap = own.positive(_SOFT_CAP, 0.0)
    layers = dataclasses.replace(layers, **scales, logit_soft_cap=cap or None)
    _same_target(envelope, target)
    most = speculators.MOST_SLOTS
    slots = envelope.count("block_size", own.values.get("block_size"), least=2, most=most)
    for name, told in (("block_size", slots), ("mask_token_id", own.value("mask_token_id"))):
        inside, beside = own.value(name, told), envelope.value(name, told)
        if inside != beside:
            raise ModelError(f"{envelope.file}: {name}={beside}, and {inside} in dflash_config")
    reads = own.ids("target_layer_ids", 1, _spread(target, layers.num_layers))
    causal = envelope.get("is_causal", bool, True)
    spec = _blocks(own, layers, dtype, reads, slots, causal_window=causal, **more)
    own.only_read(
        "projector_type", "attention_mode", "swa_window_size", at={**_OF_BLOCKS, "shift_label": spec.from_root}
    )
    return spec


def _spread(target: int, count: int) -> tuple[int, ...]:
    """Streams that z-lab's class reads if none are named, for a draft of ``count`` layers."""
    if count == 1:
        return (target // 2 + 1,)
    return tuple(round(1 + i * (target - 4) / (count - 1)) + 1 for i in range(count))


_OF_BLOCKS = {"use_swa": False, "causal": False, "pure_draft_prefix_len": 0}
"""Keys that SpecForge and ModelOpt write for blocks, each with the value at which a draft is z-lab's."""


def _projector(settings: Mapping[str, Any]) -> Any:
    own = settings.get("dflash_config")
    return own.get("projector_type") if isinstance(own, dict) else None


def _is_dspark(settings: Mapping[str, Any]) -> bool:
    own_class = "DSparkDraftModel" in settings["architectures"]
    return _projector(settings) == "dspark" or (own_class and _projector(settings) is None)


def _same_target(envelope: Envelope, target: int) -> None:
    """Raises `ModelError` for a draft of a target with another number of layers."""
    told = envelope.count("num_target_layers", target)
    if told != target:
        raise ModelError(f"{envelope.file}: num_target_layers={told}, and the target has {target} layers")


def _z_lab_settings(spec: DFlashModel) -> dict[str, Any]:
    said = {"a window that is counted from the root": any(spec.config.windows) and spec.window_at_root}
    said |= {"slots that predict the token behind their own": spec.from_root, "fewer ids": spec.kept is not None}
    said |= {_NO_NORMS: spec.config.qk_norm != "head"}
    _refuse("z-lab", {**said, "tokens that depend on each other": bool(spec.markov_rank)})
    causal = {} if spec.causal_window else {"is_causal": False}
    own = {"target_layer_ids": _shifted(spec.reads, "z-lab"), "mask_token_id": spec.mask_token}
    own |= {theirs: x for theirs, ours in _SCALES.items() if (x := getattr(spec.config, ours)) != 1}
    own |= {} if spec.config.logit_soft_cap is None else {_SOFT_CAP: spec.config.logit_soft_cap}
    return {"block_size": spec.slots, "dflash_config": own, **causal}


def _z_lab_2_settings(spec: DFlashModel) -> dict[str, Any]:
    plain = _z_lab_settings(spec)
    return {**plain, "dflash_config": {**plain["dflash_config"], **speculators.convolved_settings(spec)}}


def _z_lab_form(kind: str, names: tuple[str, ...], spec: Any, settings: Any, meant: Any, **more: Any) -> Form:
    neutral = {"embedding_multiplier": 1.0, "logit_multiplier": 1.0, "logit_soft_cap": None}

    def described(spec: DFlashModel) -> ModelConfig:
        return dataclasses.replace(spec.config, **neutral)  # `dflash_config` says these

    tensors = {**speculators.KINDS[kind].tensors, **_WITH_ENDS}
    how = {"described": described, "meant": meant, "target_layers": True, **more}
    return Form(names, "qwen3", spec, settings, tensors, ENDS, **how)


def _deepspec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    _same_target(envelope, target)
    slots = envelope.count("block_size", least=2, most=speculators.MOST_SLOTS)
    rank, reads = envelope.count("markov_rank", least=0), envelope.ids("target_layer_ids", 1)
    return _blocks(envelope, layers, dtype, reads, slots, from_root=True, **speculators.markov(envelope, rank))


def _deepspec_settings(spec: DFlashModel) -> dict[str, Any]:
    said = {"windows": any(spec.config.windows), "slots that predict their own token": not spec.from_root}
    said |= {"fewer ids": spec.kept is not None}
    _refuse("deepspec", {**said, _NO_NORMS: spec.config.qk_norm != "head"})
    return {
        "target_layer_ids": [i - 1 for i in spec.reads],  # -1: the embeddings
        "block_size": spec.slots,
        "mask_token_id": spec.mask_token,
        "num_anchors": 512,  # that of its recipe: its class requires it, training alone reads it
        **speculators.markov_settings(spec),
    }


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """True for a DFlash draft, which DeepSpec stores in its class of DSpark without that class's heads."""
    return not settings.get("markov_rank") and not settings.get("enable_confidence_head")


def _deepspec_eagle3(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    """An EAGLE-3 draft of DeepSpec with a single layer: each of its layers reads the token, and only our first layer
    does."""
    _same_target(envelope, target)
    for name in ("num_hidden_layers", "draft_num_hidden_layers"):
        if envelope.count(name, 1) != 1:
            raise ModelError(f"{envelope.file}: {name}={envelope.value(name)}; of this class a single layer is read")
    options = eagle3.Options(norm_before_residual=False)
    reads = envelope.ids("target_layer_ids", 1)
    return eagle3.Eagle3Model(layers, reads, layers.hidden_size, dtype, options=options)


def _deepspec_eagle3_settings(spec: eagle3.Eagle3Model) -> dict[str, Any]:
    said = {"its norms": spec.options != eagle3.Options(norm_before_residual=False)}
    said |= {"windows": any(spec.config.windows), "several layers": spec.config.num_layers > 1}
    said |= {"fewer ids": spec.kept is not None}
    said |= {"features of another size": spec.feature_size != spec.config.hidden_size}
    _refuse("deepspec", {**said, _NO_NORMS: spec.config.qk_norm != "head"})
    # Its class requires the last two; training alone reads them.
    return {"target_layer_ids": [i - 1 for i in spec.reads], "ttt_length": 7, "step_loss_decay": 0.8}


_OF_BLOCK = ("DFlashDraftModel", "QwenDFlashDraftModel")
_LOGIT_HEAD = {"logit_head.markov_head.": "markov_head.", "logit_head.confidence_head.": "confidence_head."}
_BARE_HEAD = {f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")}
z_lab = Format(
    (
        "dspark",
        _z_lab_form(
            *("dspark", ("DSparkDraftModel", *_OF_BLOCK), _z_lab_dspark, None),
            _is_dspark,
            aliases={**_LOGIT_HEAD, **_BARE_HEAD, "confidence_proj.": "confidence_head.proj."},
        ),
    ),
    dflash=_z_lab_form(
        *("dflash", _OF_BLOCK, _z_lab, _z_lab_settings), lambda settings: _projector(settings) in (None, "dflash")
    ),
    dflash2=_z_lab_form(*("dflash2", ("DFlash2DraftModel",), _z_lab_2, _z_lab_2_settings), lambda settings: True),
)
_DEEPSPEC: dict[str, Any] = {"optional": (), "target_layers": True}
_DEEPSPEC_BLOCKS = {**speculators.KINDS["dspark"].tensors, **_WITH_ENDS}
deepspec = Format(
    dspark=Form(
        *(("Qwen3DSparkModel",), "qwen3", _deepspec, _deepspec_settings, _DEEPSPEC_BLOCKS, ()),
        meant=lambda settings: not _is_plain(settings),
        **_DEEPSPEC,
    ),
    dflash=Form(
        *(("Qwen3DSparkModel",), "qwen3", _deepspec, _deepspec_settings, _DEEPSPEC_BLOCKS, ()),
        meant=_is_plain,
        **_DEEPSPEC,
    ),
    eagle3=Form(
        *(("Qwen3Eagle3Model",), "qwen3", _deepspec_eagle3, _deepspec_eagle3_settings, _EAGLE3, ()), **_DEEPSPEC
    ),
)
