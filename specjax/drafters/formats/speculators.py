"""Directories of the library speculators (0.9): `config.json` with `speculators_model_type`, the draft's layers
described as those of llama or qwen3. Its layers are numbered as ours are: i is what leaves i layers of the target."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from specjax.drafters import eagle3, mtp, p_eagle
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.features import ENDS, FeatureModel, Kept, LoadedDraft, head_rows
from specjax.drafters.formats.stored import Stored
from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Settings, family_of
from specjax.models.families.base import Tensor, linear, norm
from specjax.models.weights import WEIGHTS
from specjax.types import Params

TYPE = "speculators_model_type"
_log = logging.getLogger(__name__)
_CAPTURED = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Form:
    """Of one kind. ``spec(settings, layers, dtype)`` and ``settings(spec)`` are each other's inverse; ``tensors``: our
    parameters -> stored ones, beside those of the layers."""

    algorithm: str
    architecture: str
    spec: Callable[[Envelope, ModelConfig, str], FeatureModel]
    settings: Callable[[Any], dict[str, Any]]
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    """Parameters that are the target's, and not stored."""
    layers: str = "layers.{}"
    """What the tensors of a layer are called."""
    described: Callable[[Any], ModelConfig] = lambda spec: spec.config
    """The layers that `transformer_layer_config` describes."""


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A config.json, whose keys are asked for by their type."""

    values: Mapping[str, Any]
    file: Path

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Raises `ModelError` where it is of another type, or missing and without a default."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not kind:
            raise ModelError(f"{self.file}: {name}={value!r}, expected {kind.__name__}")
        return value

    def number(self, name: str, default: float) -> float:
        """Raises `ModelError` where it is none."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a number")
        return float(value)

    def ids(self, name: str, beyond: int = 0) -> tuple[int, ...]:
        """Streams of the target, which are ``beyond`` what is stored."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of layers")
        return tuple(i + beyond for i in value)


def _eagle_options(envelope: Envelope) -> eagle3.Options:
    # Without it, the library's own reader says no, whatever its trainer wrote.
    defaults = {"norm_before_residual": False}
    fields = dataclasses.fields(eagle3.Options)
    return eagle3.Options(**{f.name: envelope.get(f.name, bool, defaults.get(f.name, f.default)) for f in fields})


def _eagle3_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    size, reads = envelope.get("target_hidden_size", int, layers.hidden_size), envelope.ids(_CAPTURED)
    return eagle3.Eagle3Model(layers, reads, size, dtype, options=_eagle_options(envelope))


def _eagle3_settings(spec: eagle3.Eagle3Model) -> dict[str, Any]:
    return {**_sizes(spec), _CAPTURED: list(spec.reads), **dataclasses.asdict(spec.options)}


def _sizes(spec: FeatureModel) -> dict[str, Any]:
    return {"target_hidden_size": spec.feature_size, "draft_vocab_size": head_rows(spec)}


def _p_eagle_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    size, reads = envelope.get("target_hidden_size", int, layers.hidden_size), envelope.ids(_CAPTURED)
    mask = envelope.get("mask_token_id", int)
    return p_eagle.PEagleModel(layers, reads, size, dtype, options=_eagle_options(envelope), mask_token=mask)


def _p_eagle_settings(spec: p_eagle.PEagleModel) -> dict[str, Any]:
    return {**_eagle3_settings(spec), "mask_token_id": spec.mask_token}


def _mtp_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    """Described are the target's layers, all of them; the draft's is one like them."""
    if envelope.get("num_nextn_predict_layers", int, 1) != 1:
        raise ModelError(f"{envelope.file}: num_nextn_predict_layers is not 1; only a single head is read")
    options = mtp.Options(*(envelope.get(name, str, default) for name, default in _MTP_OPTIONS.items()))
    one = dataclasses.replace(layers, num_layers=1, layers=layers.layers[-1:])
    return mtp.MTPModel(one, (layers.num_layers,), layers.hidden_size, dtype, options=options)


def _mtp_settings(spec: mtp.MTPModel) -> dict[str, Any]:
    values = zip(_MTP_OPTIONS, dataclasses.astuple(spec.options), strict=True)
    return {"num_nextn_predict_layers": 1, **dict(values)}


def _dflash_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    return _blocks(envelope, layers, dtype, from_root=envelope.get("sample_from_anchor", bool, False))


def _dspark_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    rank, from_root = envelope.get("markov_rank", int, 256), envelope.get("sample_from_anchor", bool, True)
    return _blocks(envelope, layers, dtype, from_root=from_root, **markov(envelope, rank))


def markov(envelope: Envelope, rank: int) -> dict[str, Any]:
    """How tokens of a block depend on each other, and what it says of its own acceptance."""
    kind = envelope.get("markov_head_type", str, "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise ModelError(f"{envelope.file}: markov_head_type={kind!r}, known are vanilla, gated, rnn")
    confident = envelope.get("enable_confidence_head", bool, True)
    behind = confident and envelope.get("confidence_head_with_markov", bool, True)
    if behind and not rank:
        raise ModelError(f"{envelope.file}: confidence_head_with_markov, and markov_rank is 0")
    return {"markov_rank": rank, "markov": kind, "confident": confident, "confident_of_markov": behind}


def _dflash2_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    windows = {"causal_window": not envelope.get(_BOTH_WAYS, bool, True)}
    from_root = envelope.get("sample_from_anchor", bool, False)
    return _blocks(envelope, layers, dtype, from_root=from_root, **windows, **convolved(envelope, layers))


CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
"""Sizes of convolutions and selector, and what the library has without them."""


def convolved(envelope: Envelope, layers: ModelConfig) -> dict[str, Any]:
    """Convolutions and selector."""
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
    """The other way round."""
    return dict(zip(CONVOLVED, (spec.taps, spec.group, spec.selector_rank, spec.candidates), strict=True))


def _blocks(envelope: Envelope, layers: ModelConfig, dtype: str, **more: Any) -> FeatureModel:
    return DFlashModel(
        layers,
        envelope.ids(_INJECTED),
        envelope.get("target_hidden_size", int, layers.hidden_size),
        dtype,
        slots=envelope.get("block_size", int, 8),
        mask_token=envelope.get("mask_token_id", int),
        **{"causal_window": not envelope.get(_BOTH_WAYS, bool, False), **more},
    )


def _dflash_settings(spec: DFlashModel) -> dict[str, Any]:
    return {
        **_sizes(spec),
        _INJECTED: list(spec.reads),
        "block_size": spec.slots,
        "mask_token_id": spec.mask_token,
        "sample_from_anchor": spec.from_root,
        _BOTH_WAYS: not spec.causal_window,
    }


def _dspark_settings(spec: DFlashModel) -> dict[str, Any]:
    return {**_dflash_settings(spec), **markov_settings(spec)}


def markov_settings(spec: DFlashModel) -> dict[str, Any]:
    """As `markov` reads them."""
    confidence = {"enable_confidence_head": spec.confident, "confidence_head_with_markov": spec.confident_of_markov}
    return {"markov_rank": spec.markov_rank, "markov_head_type": spec.markov, **confidence}


def _dflash2_settings(spec: DFlashModel) -> dict[str, Any]:
    return {**_dflash_settings(spec), **convolved_settings(spec)}


_BOTH_WAYS = "sliding_window_non_causal"
_INJECTED = "aux_hidden_state_layer_ids"
_MTP_OPTIONS = {"specjax_state": "pre", "specjax_recycled": "post"}
"""Our keys, and what the library does without them."""
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
_PEAGLE = {**_EAGLE3, "mask_hidden": Tensor("mask_hidden")}
FORMS = {
    "eagle3": Form("eagle3", "Eagle3DraftModel", _eagle3_spec, _eagle3_settings, _EAGLE3),
    "p_eagle": Form("peagle", "PEagleDraftModel", _p_eagle_spec, _p_eagle_settings, _PEAGLE),
    "dflash": Form("dflash", "DFlashSpeculator", _dflash_spec, _dflash_settings, _DFLASH, ENDS),
    "dflash2": Form("dflash2", "DFlash2DraftModel", _dflash2_spec, _dflash2_settings, _DFLASH, ENDS),
    "dspark": Form("dspark", "DSparkSpeculator", _dspark_spec, _dspark_settings, _DFLASH, ENDS),
    "mtp": Form(
        *("mtp", "MTPDraftModel", _mtp_spec, _mtp_settings, _MTP, ENDS, "mtp_layers.{}"),
        described=lambda spec: dataclasses.replace(spec.config, num_layers=spec.reads[0]),
    ),
}
KINDS = FORMS
"""What is stored of each kind."""
_BY_ALGORITHM = {form.algorithm: kind for kind, form in FORMS.items()}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    """See `specjax.drafters.formats.kind_of`."""
    if TYPE not in settings:
        return None
    if settings[TYPE] not in _BY_ALGORITHM:
        raise ModelError(f"config.json: {TYPE}={settings[TYPE]!r} is not read; known are {', '.join(_BY_ALGORITHM)}")
    return _BY_ALGORITHM[settings[TYPE]]


def read(
    found: Path, settings: Mapping[str, Any], kind: str, target: Any, check_finite: bool
) -> tuple[FeatureModel, Params]:
    """The draft's spec and weights. Raises `ModelError`."""
    file, described = found / "config.json", settings.get("transformer_layer_config")
    if not isinstance(described, dict):
        raise ModelError(f"{file}: needs `transformer_layer_config`, what the draft's layers are")
    layers = family_of(described.get("model_type"), file).read_config(Settings(described, file))
    spec = FORMS[kind].spec(Envelope(settings, file), layers, str(target.dtype))
    spec = dataclasses.replace(spec, kept=kept_ids(found, settings, layers.vocab_size))
    return spec, stored(spec, FORMS[kind]).read(found, spec.dtype, check_finite)


def write(partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: str) -> dict[str, Any]:
    """The weights; returns config.json. Raises `ModelError` for layers that are none of llama, qwen2 and qwen3."""
    spec, form = draft.spec, FORMS[kind]
    family = layers_of(spec.config)
    described = {"model_type": family.model_type, **hf.described(family, form.described(spec))}
    stored(spec, form).write(partial, draft.params, dtype, tables_of(spec))
    return {
        TYPE: form.algorithm,
        "architectures": [form.architecture],
        "dtype": dtype,
        "transformer_layer_config": described,
        **form.settings(spec),
        "speculators_config": {
            "algorithm": form.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def layers_of(config: ModelConfig) -> Family:
    """The family that describes them."""
    if config.qkv_bias and not config.o_bias:
        return family_of("qwen2", "draft")
    return family_of("qwen3" if config.qk_norm == "head" else "llama", "draft")


def stored(spec: FeatureModel, form: Any) -> Stored:
    """Where its weights are in a directory of this form."""
    old = "model.layers.{}"
    layers = {
        ours: dataclasses.replace(tensor, name=form.layers + tensor.name.removeprefix(old))
        for ours, tensor in layers_of(spec.config).tensors.items()
        if ours.startswith("layers.{}")
    }
    # Of a head of fewer ids the target has no copy.
    left_out = tuple(name for name in form.left_out if name != "head" or spec.kept is None)
    head = linear("head", "lm_head") if spec.kept is not None else {}
    return Stored(spec, {**layers, **head, **form.tensors}, left_out, others=("^d2t$", "^t2d$"))


def tables_of(spec: FeatureModel) -> dict[str, np.ndarray] | None:
    """What says which ids it can propose; None: all."""
    if spec.kept is None:
        return None
    return {"d2t": spec.kept.ids.astype(np.int64) - np.arange(len(spec.kept.ids)), "t2d": spec.kept.mask}


def kept_ids(found: Path, settings: Mapping[str, Any], size: int) -> Kept | None:
    """The ids that a draft of fewer can propose: ``d2t`` says by how much each is beyond its place among them, ``t2d``
    which they are. Raises `ModelError` where they disagree."""
    count, file = settings.get("draft_vocab_size") or size, found / WEIGHTS
    tensors = _tables(file)
    if "d2t" not in tensors:
        if count != size:
            raise ModelError(f"{file}: draft_vocab_size={count} of {size} ids, and no d2t that says which")
        return None
    offsets = tensors["d2t"]
    try:
        kept = Kept(np.arange(len(offsets)) + offsets, size)
    except ValueError as error:
        raise ModelError(f"{file}: d2t: {error}; they are offsets, id j + d2t[j] for j") from None
    if len(kept.ids) != count:
        raise ModelError(f"{file}: d2t has {len(kept.ids)} ids, and draft_vocab_size is {count}")
    if "t2d" in tensors and not np.array_equal(tensors["t2d"].astype(bool), kept.mask):
        raise ModelError(f"{file}: d2t and t2d name different ids")
    return None if count == size else kept


def _tables(file: Path) -> dict[str, np.ndarray]:
    if not file.exists():
        return {}
    with safe_open(file, framework="np") as stored:
        return {name: stored.get_tensor(name) for name in ("d2t", "t2d") if name in stored.keys()}  # noqa: SIM118
