"""A config.json of a draft, whose keys are asked for by their type, and the layers that it describes. What nothing has
asked for is refused by name: it may change what the draft computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import ModelError
from specjax.models import hf
from specjax.models.config import ModelConfig
from specjax.models.families import Family, Settings, family_of
from specjax.models.families.settings import (
    NEUTRAL,
    layer_count,
    read_window,
    same_or_each,
    sliding_layers,
    write_layers,
)

INERT = {
    *("_name_or_path", "name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "version"),
    *("transformers_version", "speculators_version", "use_cache", "initializer_range", "attention_dropout", "id2label"),
    *("label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    *("chunk_size_feed_forward", "is_decoder", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("finetuning_task", "task_specific_params", "tokenizer_class", "has_no_defaults_at_init", "embed_requires_grad"),
    *("use_sliding_window", "max_window_layers", hf.DRAFTER),
}
"""Keys that change nothing of what a draft computes, or that what reads the layers has its own rules for."""


@dataclasses.dataclass(frozen=True)
class Envelope:
    """One JSON object; ``read`` collects what has been asked for."""

    values: Mapping[str, Any]
    file: Path
    read: set[str] = dataclasses.field(default_factory=set)

    def value(self, name: str, default: Any = None) -> Any:
        """null is as good as absent."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Raises `ModelError` where it is of another type, or missing and without a default."""
        value = self.value(name, default)
        if type(value) is not kind:
            raise ModelError(f"{self.file}: {name}={value!r}, expected {kind.__name__}")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = 2**24) -> int:
        """Raises `ModelError` where it is no whole number of ``least`` to ``most``."""
        value = self.get(name, int, default)
        if not least <= value <= most:
            limit = f"least {least}" if value < least else f"most {most}"
            raise ModelError(f"{self.file}: {name}={value}, expected at {limit}")
        return value

    def positive(self, name: str, default: float) -> float:
        """Raises `ModelError` where it is neither the default nor a finite number above 0."""
        value = self.value(name, default)
        if type(value) not in (int, float) or not (0 < value < math.inf or value == default):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a finite number above 0")
        return float(value)

    def names(self, name: str) -> tuple[str, ...]:
        """Raises `ModelError` where they are none."""
        value = self.value(name, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of names")
        return tuple(value)

    def ids(self, name: str, beyond: int = 0, absent: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Streams of the target, which are ``beyond`` what is stored."""
        value = self.value(name)
        if value is None and absent is not None:
            return absent
        if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of layers")
        return tuple(i + beyond for i in value)

    def only_read(self, *known: str) -> None:
        """Raises `ModelError` for a key that nothing has asked for and that is not ``known``."""
        for name in sorted(self.values.keys() - self.read - INERT - set(known)):
            if self.values[name] is not None:
                raise ModelError(
                    f"{self.file}: {name}={self.values[name]!r} is not read; remove it if it changes nothing of what "
                    "the draft computes"
                )


# --- the layers -----------------------------------------------------------------------------------------------------


def read_layers(values: Mapping[str, Any], file: Path) -> tuple[ModelConfig, set[str]]:
    """(the layers that ``values`` describe, the keys that say so). Raises `ModelError`."""
    family = _windowed(family_of(values.get("model_type"), file))
    settings = Settings(dict(values), file)
    layers = family.read_config(settings)
    return layers, settings.read | NEUTRAL.keys() | {"layer_types", "partial_rotary_factor"}


def described(config: ModelConfig, layers: ModelConfig) -> dict[str, Any]:
    """``layers`` as config.json describes them, as the family that has layers like ``config``. Raises `ModelError` for
    layers that are none of llama, qwen2 and qwen3."""
    family = layers_of(config)
    return {"model_type": family.model_type, **hf.described(_windowed(family), layers)}


def layers_of(config: ModelConfig) -> Family:
    """The family that describes them."""
    if config.qkv_bias and not config.o_bias:
        return family_of("qwen2", "draft")
    return family_of("qwen3" if config.qk_norm == "head" else "llama", "draft")


def _windowed(family: Family) -> Family:
    """Drafts have layers like Llama's with a window, which Llama itself has not."""
    if family.model_type != "llama":
        return family

    def read(settings: Settings) -> ModelConfig:
        kinds = sliding_layers(settings, None, read_window(settings), [False] * layer_count(settings))
        windows = [kind.window for kind in kinds]
        plain = {name: x for name, x in settings.values.items() if name not in ("layer_types", "sliding_window")}
        config = family.read_config(Settings(plain, settings.where, settings.within, settings.read))
        layers = [dataclasses.replace(config.layer(i), window=window) for i, window in enumerate(windows)]
        return dataclasses.replace(config, layers=same_or_each(layers))

    def write(config: ModelConfig) -> dict[str, Any]:
        said = family.write_config(config)
        return {**said, **write_layers(config)} if any(config.windows) else said

    return dataclasses.replace(family, read_config=read, write_config=write)
