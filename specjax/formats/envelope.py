"""Reading of a draft's config.json, key by key with its type, and of the layers that it describes. A key that nothing
has asked for is refused by name, unless `specjax.formats.keys` lists it as one that changes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import ModelError
from specjax.formats.keys import ASKED, AT, INERT
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


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The JSON object of ``file``; ``read`` collects the keys that were asked for."""

    values: Mapping[str, Any]
    file: Path
    read: set[str] = dataclasses.field(default_factory=set)

    def value(self, name: str, default: Any = None) -> Any:
        """Value of a key of any type; null counts as absent."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Value of a key of type ``kind``. Raises `ModelError` for another type, or if it is missing without a
        default."""
        value = self.value(name, default)
        if type(value) is not kind:
            raise ModelError(f"{self.file}: {name}={value!r}, expected {kind.__name__}")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = 2**24) -> int:
        """A whole number. Raises `ModelError` unless it lies between ``least`` and ``most``."""
        value = self.get(name, int, default)
        if not least <= value <= most:
            limit = f"least {least}" if value < least else f"most {most}"
            raise ModelError(f"{self.file}: {name}={value}, expected at {limit}")
        return value

    def positive(self, name: str, default: float) -> float:
        """A positive number. Raises `ModelError` unless it is the default or a finite number above 0."""
        value = self.value(name, default)
        if type(value) not in (int, float) or not (0 < value < math.inf or value == default):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a finite number above 0")
        return float(value)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names; empty if absent. Raises `ModelError` for anything else."""
        value = self.value(name, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of names")
        return tuple(value)

    def ids(self, name: str, beyond: int = 0, absent: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The target's streams: the stored numbers plus ``beyond``, or ``absent`` without the key. Raises
        `ModelError`."""
        value = self.value(name)
        if value is None and absent is not None:
            return absent
        if not isinstance(value, list) or not value or not all(type(i) is int and i + beyond >= 0 for i in value):
            raise ModelError(f"{self.file}: {name}={value!r}, expected a list of layers")
        return tuple(i + beyond for i in value)

    def only_read(self, *known: str, at: Mapping[str, Any] | None = None) -> None:
        """Raises `ModelError` for a key that nothing has asked for and that is not ``known``. Keys that change nothing
        pass: those of `INERT` with any value, those of `AT` and ``at`` with the value named there."""
        plain = {**AT, **(at or {})}
        for name in sorted(self.values.keys() - self.read - INERT - set(known)):
            value = self.values[name]
            if value is None or (name in plain and _same(value, plain[name])):
                continue
            if name in ASKED:
                raise ModelError(f"{self.file}: {ASKED[name]}: the draft says it itself; leave it out")
            if name in plain:
                raise ModelError(f"{self.file}: {name}={value!r} is not implemented; only {plain[name]!r} is")
            raise ModelError(
                f"{self.file}: {name}={value!r} is not read; remove it if it changes nothing of what the draft computes"
            )


def _same(value: Any, plain: Any) -> bool:
    """True if the values are equal; a bool equals no number."""
    return value == plain and isinstance(value, bool) == isinstance(plain, bool)


# --- the layers -----------------------------------------------------------------------------------------------------


def read_layers(
    values: Mapping[str, Any], file: Path, family: str | None = None, unread: Collection[str] = ()
) -> tuple[ModelConfig, set[str]]:
    """(the layers that ``values`` describe, the keys that describe them). Where the class named in config.json decides
    the layers, ``family`` is their model family, whatever `model_type` says, and ``unread`` are keys that do not
    describe them. Raises `ModelError`."""
    told = {name: value for name, value in _of_text(values).items() if name not in unread}
    found = _windowed(family_of(family or told.get("model_type"), file))
    settings = Settings(told, file)
    layers = found.read_config(settings)
    try:
        described(layers, dataclasses.replace(layers, tie_embeddings=False))
    except ModelError:
        raise ModelError(
            f"{file}: model_type={found.model_type!r}: its layers are none of Llama, Qwen 2 and Qwen 3, and a draft's "
            "are; use a draft of one of those"
        ) from None
    return layers, settings.read | NEUTRAL.keys() | {"layer_types", "partial_rotary_factor", *unread}


def _of_text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """``values`` without rotary positions of several axes: in a text all axes are equal, as in the plain embedding."""
    plain = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name)
        if isinstance(rope, dict) and any(key.startswith("mrope_") or rope[key] == "mrope" for key in rope):
            plain[name] = {k: x for k, x in rope.items() if not k.startswith("mrope_") and x != "mrope"}
    return plain


def described(config: ModelConfig, layers: ModelConfig) -> dict[str, Any]:
    """``layers`` as config.json describes them, in the model family of layers like ``config``. Raises `ModelError` for
    layers that are none of llama, qwen2 and qwen3."""
    family = layers_of(config)
    return {"model_type": family.model_type, **hf.described(_windowed(family), layers)}


def layers_of(config: ModelConfig) -> Family:
    """The model family that describes layers like ``config``."""
    if config.qkv_bias and not config.o_bias:
        return family_of("qwen2", "draft")
    return family_of("qwen3" if config.qk_norm == "head" else "llama", "draft")


def _windowed(family: Family) -> Family:
    """``family``, with windows added if it is llama: drafts use Llama's layers with a window, which Llama itself
    lacks."""
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


@dataclasses.dataclass(frozen=True)
class TargetName:
    """Facts about a draft's target that are written beside it."""

    name: str
    layers: int
