"""Drafts as three other projects store them, each beside a config.json of llama or qwen3 with keys of its own:
SpecForge's EAGLE-3, which SGLang serves, DFlash of z-lab, DSpark of DeepSpec. Their layers are numbered from the output
of the first: i is what leaves i + 1 layers of the target, one less than with us."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters import eagle3
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.features import ENDS, FeatureModel, LoadedDraft, head_rows, published_streams
from specjax.drafters.formats import speculators
from specjax.drafters.formats.envelope import Envelope, described, read_layers
from specjax.errors import ModelError
from specjax.models.config import ModelConfig
from specjax.models.families.base import Tensor, linear
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class Form:
    """Of one kind. ``spec(envelope, layers, dtype, target)``: ``target`` has so many layers; ``settings(spec)``: its
    keys, or `ModelError` for what they cannot say."""

    architecture: str
    spec: Callable[[Envelope, ModelConfig, str, int], FeatureModel]
    settings: Callable[[Any], dict[str, Any]]
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    layers: str = "layers.{}"
    tables: bool = False
    """With d2t and t2d for a whole vocabulary, too."""
    described: Callable[[Any], ModelConfig] = lambda spec: spec.config
    """The layers that config.json describes."""


class Format:
    """See `specjax.drafters.formats.FORMATS`."""

    def __init__(self, **kinds: Form):
        self.KINDS = kinds

    def kind_of(self, settings: Mapping[str, Any]) -> str | None:
        """See `specjax.drafters.formats.kind_of`."""
        named = settings.get("architectures") or ()
        if speculators.TYPE in settings or not isinstance(named, (list, tuple)):
            return None
        return next((kind for kind, form in self.KINDS.items() if form.architecture in named), None)

    def read(
        self, found: Path, settings: Mapping[str, Any], kind: str, target: Any, check_finite: bool
    ) -> tuple[FeatureModel, Params]:
        """The draft's spec and weights. Raises `ModelError`."""
        envelope, form = Envelope(settings, found / "config.json"), self.KINDS[kind]
        layers, known = read_layers(settings, envelope.file)
        layers = dataclasses.replace(layers, tie_embeddings=False)
        spec = form.spec(envelope, layers, str(target.dtype), target.config.num_layers)
        spec = speculators.with_kept(spec, envelope)
        envelope.only_read(*known)
        return spec, speculators.stored(spec, form).read(found, spec.dtype, check_finite)

    def write(self, partial: Path, draft: LoadedDraft, kind: str, dtype: str, target: str) -> dict[str, Any]:
        """The weights; returns config.json. Raises `ModelError` for a draft that this form cannot say."""
        spec, form = draft.spec, self.KINDS[kind]
        own, layers = form.settings(spec), described(spec.config, form.described(spec))
        more = speculators.tables_of(spec)
        if form.tables and more is None:
            size = spec.config.vocab_size
            more = {"d2t": np.zeros(size, np.int64), "t2d": np.ones(size, bool)}
        speculators.stored(spec, form).write(partial, draft.params, dtype, more)
        return {**layers, "architectures": [form.architecture], "dtype": dtype, **own}


def _shifted(reads: tuple[int, ...], what: str) -> list[int]:
    if 0 in reads:
        raise ModelError(f"{what}: has no number for the target's embeddings, which this draft reads (stream 0)")
    return [i - 1 for i in reads]


def _refuse(what: str, said: Mapping[str, bool]) -> None:
    """Raises `ModelError` for the first thing that is so."""
    for name, wrong in said.items():
        if wrong:
            raise ModelError(f"{what}: cannot say {name} of this draft; the form specjax can (--format specjax)")


# --- SpecForge, SGLang ----------------------------------------------------------------------------------------------


def _eagle3(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    own = Envelope(envelope.get("eagle_config", dict, {}), envelope.file)
    reads = own.ids(_CAPTURED, 1, published_streams(target))
    if own.get("use_aux_hidden_state", bool, True) is not True:
        raise ModelError(f"{envelope.file}: eagle_config.use_aux_hidden_state=False: a draft of the last layer alone")
    own.only_read()
    # What it writes as norm_output has meant different things: refused as any key that is not read.
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm"):
        if envelope.get(name, bool, False):
            raise ModelError(f"{envelope.file}: {name}=True, which drafts of this form have no norms for")
    size = envelope.count("target_hidden_size", layers.hidden_size)
    return eagle3.Eagle3Model(layers, reads, size, dtype, options=eagle3.Options(norm_before_residual=False))


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
_MIDLAYER = {
    **speculators.KINDS["eagle3"].tensors,
    "layers.{}.hidden_norm.scale": Tensor("midlayer.hidden_norm.weight"),
}

# --- z-lab, DeepSpec ------------------------------------------------------------------------------------------------


def _blocks(own: Envelope, layers: ModelConfig, dtype: str, slots: int, **more: Any) -> FeatureModel:
    return DFlashModel(
        layers,
        own.ids("target_layer_ids", 1),
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
    if own.count("block_size", slots) != slots:
        raise ModelError(f"{envelope.file}: block_size={slots}, and {own.value('block_size')} in dflash_config")
    spec = _blocks(own, layers, dtype, slots, causal_window=envelope.get("is_causal", bool, True), **more)
    own.only_read()
    return spec


def _same_target(envelope: Envelope, target: int) -> None:
    """Raises `ModelError` for a draft of a target of other layers."""
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


def _z_lab_form(kind: str, architecture: str, spec: Any, settings: Any) -> Form:
    neutral = {"embedding_multiplier": 1.0, "logit_multiplier": 1.0, "logit_soft_cap": None}

    def described(spec: DFlashModel) -> ModelConfig:
        return dataclasses.replace(spec.config, **neutral)  # they are said beside it

    return Form(architecture, spec, settings, speculators.KINDS[kind].tensors, ENDS, described=described)


def _deepspec(envelope: Envelope, layers: ModelConfig, dtype: str, target: int) -> FeatureModel:
    _same_target(envelope, target)
    slots = envelope.count("block_size", least=2, most=speculators.MOST_SLOTS)
    rank = envelope.count("markov_rank", least=0)
    return _blocks(envelope, layers, dtype, slots, from_root=True, **speculators.markov(envelope, rank))


def _deepspec_settings(spec: DFlashModel) -> dict[str, Any]:
    said = {"windows": any(spec.config.windows), "slots that predict their own token": not spec.from_root}
    said |= {"fewer ids": spec.kept is not None}
    _refuse("deepspec", {**said, _NO_NORMS: spec.config.qk_norm != "head"})
    return {
        "target_layer_ids": _shifted(spec.reads, "deepspec"),
        "block_size": spec.slots,
        "mask_token_id": spec.mask_token,
        **speculators.markov_settings(spec),
    }


_WITH_ENDS = {"embedding": Tensor("embed_tokens.weight"), **linear("head", "lm_head")}
sglang = Format(
    eagle3=Form("LlamaForCausalLMEagle3", _eagle3, _eagle3_settings, _MIDLAYER, ("embedding",), "midlayer", True)
)
z_lab = Format(
    dflash=_z_lab_form("dflash", "DFlashDraftModel", _z_lab, _z_lab_settings),
    dflash2=_z_lab_form("dflash2", "DFlash2DraftModel", _z_lab_2, _z_lab_2_settings),
)
deepspec = Format(
    dspark=Form(
        *("Qwen3DSparkModel", _deepspec, _deepspec_settings),
        {**speculators.KINDS["dspark"].tensors, **_WITH_ENDS},
        (),
    )
)
