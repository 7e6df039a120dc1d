"""Directories of the library speculators (0.9): `config.json` with `speculators_model_type`, the draft's layers described
as those of llama or qwen3. Its layers are numbered as ours are: i is what leaves i layers of the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.drafters import eagle3
from specjax.drafters.features import ENDS, FeatureModel
from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Settings, family_of
from specjax.models.families.base import Tensor, linear, norm

TYPE = "speculators_model_type"
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

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of layers")
        return tuple(value)


def _eagle3_spec(envelope: Envelope, layers: ModelConfig, dtype: str) -> FeatureModel:
    size = envelope.get("target_hidden_size", int, layers.hidden_size)
    # Without it, the library's own reader says no, whatever its trainer wrote.
    defaults = {"norm_before_residual": False}
    options = {
        f.name: envelope.get(f.name, bool, defaults.get(f.name, f.default)) for f in dataclasses.fields(eagle3.Options)
    }
    reads = envelope.ids(_CAPTURED)
    return eagle3.Eagle3Model(layers, reads, size, dtype, eagle3.Options(**options))


def _eagle3_settings(spec: eagle3.Eagle3Model) -> dict[str, Any]:
    return {"target_hidden_size": spec.feature_size, _CAPTURED: list(spec.reads), **dataclasses.asdict(spec.options)}


FORMS = {
    "eagle3": Form(
        "eagle3",
        "Eagle3DraftModel",
        _eagle3_spec,
        _eagle3_settings,
        {
            "embedding": Tensor("embed_tokens.weight"),
            **linear("fc", "fc"),
            **norm("input_norm", "input_norm"),
            **norm("fc_norms.{}", "fc_norm.{}"),
            **norm("layers.{}.hidden_norm", "layers.{}.hidden_norm"),
            **norm("norm", "norm"),
            **linear("head", "lm_head"),
        },
    ),
}
LEFT_OUT = {kind: form.left_out for kind, form in FORMS.items()}


def kind_of(settings: Mapping[str, Any]) -> str | None:
    return str(settings[TYPE]) if TYPE in settings else None


def spec_of(kind: str, settings: Mapping[str, Any], file: Path, dtype: str) -> FeatureModel:
    """What config.json describes. Raises `ModelError`."""
    described = settings.get("transformer_layer_config")
    if not isinstance(described, dict):
        raise ModelError(f"{file}: needs `transformer_layer_config`, what the draft's layers are")
    layers = family_of(described.get("model_type"), file).read_config(Settings(described, file))
    spec = FORMS[kind].spec(Envelope(settings, file), layers, dtype)
    return spec


def settings_of(kind: str, spec: FeatureModel, dtype: str, target: str) -> dict[str, Any]:
    """config.json of ``spec``. Raises `ModelError` for layers that neither llama nor qwen3 describes."""
    form, family = FORMS[kind], _layers(spec.config)
    return {
        TYPE: form.algorithm,
        "architectures": [form.architecture],
        "dtype": dtype,
        "transformer_layer_config": {"model_type": family.model_type, **hf.described(family, spec.config)},
        "draft_vocab_size": spec.config.vocab_size,
        **form.settings(spec),
        "speculators_config": {
            "algorithm": form.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def _layers(config: ModelConfig) -> Family:
    return family_of("qwen3" if config.qk_norm == "head" else "llama", "draft")


def family_of_draft(kind: str, spec: FeatureModel) -> Family:
    """Where each weight is stored."""
    form, family = FORMS[kind], _layers(spec.config)
    old = "model.layers.{}"
    layers = {
        ours: dataclasses.replace(tensor, name=form.layers + tensor.name.removeprefix(old))
        for ours, tensor in family.tensors.items()
        if ours.startswith("layers.{}")
    }
    ends = {f"{name}{'.kernel' * (name == 'head')}": Tensor(name) for name in ENDS}
    return dataclasses.replace(family, tensors={**ends, **layers, **form.tensors}, prefix="")
