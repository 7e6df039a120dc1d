"""Directories of the library speculators (0.9): `config.json` with `speculators_model_type`, and the draft's layers
described as those of llama or qwen3. Streams are numbered as ours: i is what leaves i layers of the target."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters import eagle3, mtp, p_eagle
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.features import ENDS, FeatureModel, Kept, LoadedDraft, head_rows, published_streams
from specjax.errors import ModelError
from specjax.formats.envelope import Envelope, TargetName, described, layers_of, read_layers
from specjax.formats.keys import FROM_ANCHOR
from specjax.formats.stored import Stored
from specjax.interfaces import Params, TargetInfo
from specjax.models.config import ModelConfig
from specjax.models.families.base import Tensor, linear, norm
from specjax.models.weights import read_tensors

TYPE = "speculators_model_type"
_log = logging.getLogger(__name__)
_CAPTURED = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Form:
    """Stored form of one kind of draft. ``spec(settings, layers, dtype, target)``, for a target of ``target`` layers,
    and ``settings(spec)`` are each other's inverse; ``tensors``: our parameters -> stored ones, beside those of the
    layers."""

    algorithm: str
    architecture: str
    spec: Callable[[Envelope, ModelConfig, str, int], FeatureModel]
    settings: Callable[[Any], dict[str, Any]]
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    """Parameters that are the target's, and not stored."""
    layers: str = "layers.{}"
    """Pattern of a layer's name in the names of its tensors."""
    described: Callable[[Any], ModelConfig] = lambda spec: spec.config
    """The layers that `transformer_layer_config` describes."""
    unsaid: Callable[[Any], str | None] = lambda spec: None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The part of a draft that this form cannot express; None: it expresses all."""


def _eagle_options(envelope: Envelope) -> eagle3.Options:
    # The library's own reader takes a missing norm_before_residual for False, whatever its trainer wrote.
    defaults = {"norm_before_residual": False}
    fields = dataclasses.fields(eagle3.Options)
    said = {f.name: envelope.get(f.name, bool, defaults.get(f.name, f.default)) for f in fields}
    try:
        return eagle3.Options(**said)
    except ValueError as error:
        raise ModelError(f"{envelope.file}: {error}") from None


def _captured(envelope: Envelope, layers: ModelConfig, target: int) -> tuple[int, tuple[int, ...]]:
    """(size of each stream, the streams)."""
    size = envelope.count("target_hidden_size", layers.hidden_size)
    return size, envelope.ids(_CAPTURED, absent=published_streams(target))


def _eagle3_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    size, reads = _captured(envelope, layers, target)
    return eagle3.Eagle3Model(layers, reads, size, dtype, options=_eagle_options(envelope))


def _eagle3_settings(spec: eagle3.Eagle3Model) -> dict[str, Any]:
    return {**_sizes(spec), _CAPTURED: list(spec.reads), **dataclasses.asdict(spec.options)}


def _sizes(spec: FeatureModel) -> dict[str, Any]:
    return {"target_hidden_size": spec.feature_size, "draft_vocab_size": head_rows(spec)}


def _p_eagle_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    (size, reads), mask = _captured(envelope, layers, target), mask_of(envelope, layers)
    return p_eagle.PEagleModel(layers, reads, size, dtype, options=_eagle_options(envelope), mask_token=mask)


def _p_eagle_settings(spec: p_eagle.PEagleModel) -> dict[str, Any]:
    return {**_eagle3_settings(spec), "mask_token_id": spec.mask_token}


def mask_of(envelope: Envelope, layers: ModelConfig) -> int:
    """Id of the mask token, whose embedding stands for tokens that are not there yet. Raises `ModelError`."""
    mask = envelope.count("mask_token_id", least=0)
    if mask >= layers.vocab_size:
        raise ModelError(f"{envelope.file}: mask_token_id={mask}, and the vocabulary has {layers.vocab_size} ids")
    return mask


def _mtp_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    """A head for multi-token prediction. config.json describes all of the target's layers; the draft has one like the
    last."""
    if envelope.get("num_nextn_predict_layers", int, 1) != 1:
        raise ModelError(f"{envelope.file}: num_nextn_predict_layers is not 1; only a single head is read")
    options = mtp.Options(*(envelope.get(name, str, default) for name, default in _MTP_OPTIONS.items()))
    for name, told in zip(_MTP_OPTIONS, dataclasses.astuple(options), strict=True):
        if told not in ("pre", "post"):
            raise ModelError(f"{envelope.file}: {name}={told!r}, known are pre and post")
    one = dataclasses.replace(layers, num_layers=1, layers=layers.layers[-1:])
    return mtp.MTPModel(one, (layers.num_layers,), layers.hidden_size, dtype, options=options)


def _mtp_settings(spec: mtp.MTPModel) -> dict[str, Any]:
    values = zip(_MTP_OPTIONS, dataclasses.astuple(spec.options), strict=True)
    return {"num_nextn_predict_layers": 1, **dict(values)}


def _dflash_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    return _blocks(envelope, layers, dtype, from_root=envelope.get(FROM_ANCHOR, bool, False))


def _dspark_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    rank = envelope.count("markov_rank", 256, least=0)
    if envelope.value(FROM_ANCHOR) is None:
        raise ModelError(
            f"{envelope.file}: {FROM_ANCHOR} is missing: drafts from before there was such a key mean false by that, "
            f"and later readers true; name what it was trained with, kind={{'kind': 'dspark', {FROM_ANCHOR!r}: True}} "
            "or False, or write it there"
        )
    from_root = envelope.get(FROM_ANCHOR, bool)
    return _blocks(envelope, layers, dtype, from_root=from_root, **markov(envelope, rank))


def markov(envelope: Envelope, rank: int) -> dict[str, Any]:
    """Fields of `DFlashModel` about the dependence of a block's tokens on each other and about confidence. Raises
    `ModelError`."""
    kind = envelope.get("markov_head_type", str, "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ModelError(f"{envelope.file}: markov_head_type={kind!r}, known are vanilla, gated, rnn")
    confident = envelope.get("enable_confidence_head", bool, True)
    behind = envelope.get("confidence_head_with_markov", bool, True) and confident
    if behind and not rank:
        raise ModelError(f"{envelope.file}: confidence_head_with_markov, and markov_rank is 0")
    return {"markov_rank": rank, "markov": kind, "confident": confident, "confident_of_markov": behind}


def _dflash2_spec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    windows = {"causal_window": not envelope.get(_BOTH_WAYS, bool, True)}
    from_root = envelope.get(FROM_ANCHOR, bool, False)
    return _blocks(envelope, layers, dtype, from_root=from_root, **windows, **convolved(envelope, layers))


CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
"""Keys for the sizes of convolutions and selector, with the library's defaults."""


def convolved(envelope: Envelope, layers: ModelConfig) -> dict[str, Any]:
    """Fields of `DFlashModel` about convolutions and selector. Raises `ModelError`."""
    sizes = {name: envelope.get(name, int, default) for name, default in CONVOLVED.items()}
    most = {
        "conv_kernel_size": envelope.get("block_size", int, 8),
        "conv_group_size": layers.hidden_size,
        "selector_top_k": layers.vocab_size,
    }
    for name, value in sizes.items():
        if not 1 <= value <= most.get(name, value) or (name == "conv_group_size" and layers.hidden_size % value):
            raise ModelError(f"{envelope.file}: {name}={value}, which layers of {layers.hidden_size} have no use for")
    if (layers.norm.placement, layers.residual, layers.residual_multiplier) != ("pre", "sequential", 1):
        raise ModelError(f"{envelope.file}: convolutions are read around layers like those of llama and qwen3 alone")
    return dict(zip(("taps", "group", "selector_rank", "candidates"), sizes.values(), strict=True))


def convolved_settings(spec: DFlashModel) -> dict[str, Any]:
    """Keys of config.json that `convolved` reads."""
    return dict(zip(CONVOLVED, (spec.taps, spec.group, spec.selector_rank, spec.candidates), strict=True))


def _blocks(envelope: Envelope, layers: ModelConfig, dtype: str, **more: Any) -> FeatureModel:
    return DFlashModel(
        layers,
        envelope.ids(_INJECTED),
        envelope.count("target_hidden_size", layers.hidden_size),
        dtype,
        slots=envelope.count("block_size", 8, least=2, most=MOST_SLOTS),
        mask_token=mask_of(envelope, layers),
        **{"causal_window": not envelope.get(_BOTH_WAYS, bool, False), **more},
    )


def _dflash_settings(spec: DFlashModel) -> dict[str, Any]:
    return {
        **_sizes(spec),
        _INJECTED: list(spec.reads),
        "block_size": spec.slots,
        "mask_token_id": spec.mask_token,
        FROM_ANCHOR: spec.from_root,
        _BOTH_WAYS: not spec.causal_window,
    }


def _dspark_settings(spec: DFlashModel) -> dict[str, Any]:
    return {**_dflash_settings(spec), **markov_settings(spec)}


def markov_settings(spec: DFlashModel) -> dict[str, Any]:
    """Keys of config.json that `markov` reads."""
    confidence = {"enable_confidence_head": spec.confident, "confidence_head_with_markov": spec.confident_of_markov}
    return {"markov_rank": spec.markov_rank, "markov_head_type": spec.markov, **confidence}


def _dflash2_settings(spec: DFlashModel) -> dict[str, Any]:
    return {**_dflash_settings(spec), **convolved_settings(spec)}


def _unsaid_of_blocks(spec: DFlashModel) -> str | None:
    if spec.config.qk_norm != "head":
        return "layers without norms of queries and keys, which all of its own have (draft.qk_norm: true)"
    return "windows that are counted from each slot" if any(spec.config.windows) and not spec.window_at_root else None


def _unsaid_of_heads(spec: mtp.MTPModel) -> str | None:
    if spec.options != mtp.Options():
        return f"the norms of its state ({spec.options.state}) and of what it recycles ({spec.options.recycled})"
    return None if spec.config.qk_norm == "head" else "a head whose layer is not Qwen 3's"


MOST_SLOTS = 1024
"""Largest number of slots of a block, far beyond what a pass can verify."""
_BOTH_WAYS = "sliding_window_non_causal"
_INJECTED = "aux_hidden_state_layer_ids"
_MTP_OPTIONS = {"specjax_state": "pre", "specjax_recycled": "post"}
"""Keys of ours, each with the value that the library implies without it."""
_EAGLE3: dict[str, Tensor] = {
    "embedding": Tensor("embed_tokens.weight"),
    **linear("fc", "fc"),
    **norm("input_norm", "input_norm"),
    **norm("fc_norms.{}", "fc_norm.{}"),
    **norm("layers.{}.hidden_norm", "layers.{}.hidden_norm"),
    **norm("norm", "norm"),
    **linear("head", "lm_head"),
}
_HEAD = "mtp_layers.0"
_MTP: dict[str, Tensor] = {
    **norm("token_norm", f"{_HEAD}.token_layernorm"),
    **norm("hidden_norm", f"{_HEAD}.hidden_layernorm"),
    **linear("fc", f"{_HEAD}.input_proj"),
    **norm("norm", f"{_HEAD}.final_layernorm"),
}


def _convolution(name: str) -> dict[str, Tensor]:
    ours = theirs = f"layers.{{}}.{name}"
    return {
        f"{ours}.base": Tensor(f"{theirs}.base_kernel"),
        **linear(f"{ours}.projection", f"{theirs}.kernel_projection"),
    }


_DFLASH: dict[str, Tensor] = {
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


def _blocks_form(algorithm: str, architecture: str, spec: Any, settings: Any) -> Form:
    return Form(algorithm, architecture, spec, settings, _DFLASH, ENDS, unsaid=_unsaid_of_blocks)


_PEAGLE = {**_EAGLE3, "mask_hidden": Tensor("mask_hidden")}
FORMS = {
    "eagle3": Form("eagle3", "Eagle3DraftModel", _eagle3_spec, _eagle3_settings, _EAGLE3),
    "p_eagle": Form("peagle", "PEagleDraftModel", _p_eagle_spec, _p_eagle_settings, _PEAGLE),
    "dflash": _blocks_form("dflash", "DFlashSpeculator", _dflash_spec, _dflash_settings),
    "dflash2": _blocks_form("dflash2", "DFlash2DraftModel", _dflash2_spec, _dflash2_settings),
    "dspark": _blocks_form("dspark", "DSparkSpeculator", _dspark_spec, _dspark_settings),
    "mtp": Form(
        *("mtp", "MTPDraftModel", _mtp_spec, _mtp_settings, _MTP, ENDS, "mtp_layers.{}"),
        described=lambda spec: dataclasses.replace(spec.config, num_layers=spec.reads[0]),
        unsaid=_unsaid_of_heads,
    ),
}
KINDS = FORMS
"""Stored form of each kind."""
_BY_ALGORITHM = {form.algorithm: kind for kind, form in FORMS.items()}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """Kind of draft that a config.json describes, see `specjax.formats.kind_of`. Raises `ModelError` for an unknown
    one."""
    if TYPE not in settings:
        return None
    if settings[TYPE] not in tuple(_BY_ALGORITHM):
        raise ModelError(f"config.json: {TYPE}={settings[TYPE]!r} is not read; known are {', '.join(_BY_ALGORITHM)}")
    return _BY_ALGORITHM[settings[TYPE]]


def unsaid(spec: FeatureModel, kind: str) -> str | None:
    """The part of a draft that this form cannot express; None: it expresses all."""
    form = FORMS[kind]
    try:
        described(spec.config, form.described(spec))
    except ModelError:
        return "layers that are none of Llama, Qwen 2 and Qwen 3, or logits that are scaled or capped"
    return form.unsaid(spec)


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: TargetInfo, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    envelope = Envelope(settings, found / "config.json")
    spec = spec_of(envelope, kind, target)
    envelope.only_read(TYPE)
    return spec, stored(spec, FORMS[kind]).read(found, spec.dtype, check_finite)


def spec_of(envelope: Envelope, kind: str, target: TargetInfo) -> FeatureModel:
    """The draft's spec. Raises `ModelError`."""
    file, values = envelope.file, envelope.value("transformer_layer_config")
    told = envelope.get("speculators_config", dict, {}).get("algorithm")
    if told not in (None, FORMS[kind].algorithm):
        raise ModelError(f"{file}: speculators_config.algorithm={told!r}, and the draft is {FORMS[kind].algorithm!r}")
    if not isinstance(values, dict):
        raise ModelError(f"{file}: needs `transformer_layer_config`, what the draft's layers are")
    layers, known = read_layers(values, file)
    Envelope(values, file).only_read(*known)
    spec = FORMS[kind].spec(envelope, layers, str(target.dtype), target.config.num_layers)
    return with_kept(spec, envelope)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
    """Write the weights; returns config.json. Raises `ModelError` for a draft that this form cannot express."""
    lost = unsaid(draft.spec, kind)
    if lost is not None:
        raise ModelError(f"speculators: has no words for {lost}; specjax's own form has (--format specjax)")
    return written(partial, draft, kind, dtype, target)


def written(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: TargetName) -> dict[str, Any]:
    """Write the weights as `write` does, without what this form cannot express; returns config.json."""
    spec, form = draft.spec, FORMS[kind]
    stored(spec, form).write(partial, draft.params, dtype, tables_of(spec))
    return {
        TYPE: form.algorithm,
        "architectures": [form.architecture],
        "dtype": dtype,
        "transformer_layer_config": described(spec.config, form.described(spec)),
        **form.settings(spec),
        "speculators_config": {
            "algorithm": form.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.most or 3}],
            "verifier": {"name_or_path": target.name, "architectures": []},
        },
    }


def stored(spec: FeatureModel, form: Any) -> Stored:
    """Parameters of a draft under their names in a directory of this form."""
    old = "model.layers.{}"
    layers = {
        ours: dataclasses.replace(tensor, name=form.layers + tensor.name.removeprefix(old))
        for ours, tensor in layers_of(spec.config).tensors.items()
        if ours.startswith("layers.{}")
    }
    # A head of a draft vocabulary is always stored: the target has no copy of it.
    left_out = tuple(name for name in form.left_out if name != "head" or spec.kept is None)
    head = linear("head", "lm_head") if spec.kept is not None else {}
    # Tables of ids, and names that the library gives to weights of the target.
    others = ("^d2t$", "^t2d$", r"^verifier_(lm_head|norm)\.weight$")
    return Stored(spec, {**layers, **head, **form.tensors}, left_out, others=others, aliases=form.aliases)


def tables_of(spec: FeatureModel) -> dict[str, np.ndarray] | None:
    """Tables d2t and t2d, which say the draft vocabulary; None: all ids."""
    if spec.kept is None:
        return None
    return {"d2t": spec.kept.ids.astype(np.int64) - np.arange(len(spec.kept.ids)), "t2d": spec.kept.mask}


def with_kept(spec: FeatureModel, envelope: Envelope) -> FeatureModel:
    """``spec`` with the draft vocabulary that the directory names, if it is smaller than the target's. Raises
    `ModelError`."""
    kept = _kept_ids(envelope, spec.config.vocab_size)
    if kept is not None and spec.candidates:
        raise ModelError(f"{envelope.file}: draft_vocab_size={len(kept.ids)}; a dflash2 draft chooses among all ids")
    return dataclasses.replace(spec, kept=kept)


def _kept_ids(envelope: Envelope, size: int) -> Kept | None:
    """The draft vocabulary; None: all ids. ``d2t`` says by how much each of its ids exceeds its index, ``t2d`` is its
    mask over all ids. Raises `ModelError` if they disagree."""
    Envelope({"vocab_size": size}, envelope.file).count("vocab_size")  # checked before arrays of that size are made
    count, directory = envelope.count("draft_vocab_size", size), envelope.file.parent
    tensors = read_tensors(directory, ("d2t", "t2d"))
    for name, kinds in (("d2t", "iu"), ("t2d", "biu")):
        if name in tensors and (tensors[name].ndim != 1 or tensors[name].dtype.kind not in kinds):
            found = f"{tensors[name].dtype}{list(tensors[name].shape)}"
            raise ModelError(f"{directory}: {name} is {found}; expected a row of {'ids' if name == 'd2t' else 'bools'}")
    if "d2t" in tensors:
        offsets = tensors["d2t"].astype(np.int64)
        ids = np.arange(len(offsets)) + offsets
    elif count == size:
        ids = np.arange(size)
    else:
        raise ModelError(f"{directory}: draft_vocab_size={count} of {size} ids, and no d2t that says which")
    try:
        kept = Kept(ids, size)
    except ValueError as error:
        raise ModelError(f"{directory}: d2t: {error}; they are offsets, id j + d2t[j] for j") from None
    if len(kept.ids) != count:
        raise ModelError(f"{directory}: d2t has {len(kept.ids)} ids, and draft_vocab_size is {count}")
    if "t2d" in tensors and not np.array_equal(tensors["t2d"], kept.mask):
        wrong = "d2t and t2d name different ids" if "d2t" in tensors else "t2d leaves ids out, and no d2t says which"
        raise ModelError(f"{directory}: {wrong}")
    return None if count == size else kept
