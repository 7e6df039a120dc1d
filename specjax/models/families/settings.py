"""Reader of config.json, with errors that name the file, the setting and its value; tables of its keys; and the
settings that most families share, read and written."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import ModelError
from specjax.models.config import Activation, LayerKind, ModelConfig, Norm
from specjax.models.rotary import Rope

_REQUIRED: Any = object()
_MOST_LAYERS = 10_000
NEUTRAL = {
    **dict.fromkeys(("quantization_config", "sliding_window", "no_rope_layers", "clip_qkv", "num_experts")),
    **dict.fromkeys(
        ("num_local_experts", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    ),
    **dict.fromkeys(("logit_scale", "attention_multiplier", "rope_scaling", "rope_parameters", "n_inner")),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qk_norm", "use_parallel_residual"), False),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "rotary_pct", "logits_scaling"), 1),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), 1),
}
"""Settings that change the computation of some family -> the value at which they change nothing."""
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Our name of a size -> the name of its setting in most families."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A key of config.json, and the field of a spec that it stands for. ``key`` may lie in an object (``object.key``)
    that `Settings.objects` has, and ``ours`` in a part of the spec (``part.field``); an empty ``ours`` stands for no
    field: the key is not read, and written as ``absent``."""

    key: str
    ours: str
    kind: Any = bool
    """Type of the value: bool, int, float (above 0; none is None), ``"ids"`` for numbers of streams, or its possible
    words."""
    absent: Any = None
    """Value without the key, or a function that gives it; None: the key is needed."""
    least: int = 1
    most: int = 2**24
    beyond: int = 0
    """Our number of a stream minus the stored one."""
    turned: bool = False
    """True: the key says the opposite of our field."""
    sparse: bool = False
    """True: ``absent`` is not written."""
    fallback: str = ""
    """Key that is read if there is no ``key``."""
    remedy: str = ""
    """Text of the error if there is no ``key``."""


def write_fields(table: Iterable[Field], spec: Any) -> dict[str, Any]:
    """The keys of ``table`` for the fields of ``spec``, as `Settings.fields` reads them."""
    found: dict[str, Any] = {}
    for field in table:
        value = operator.attrgetter(field.ours)(spec) if field.ours else field.absent
        if field.sparse and (value is None or value == field.absent):
            continue
        *objects, key = field.key.split(".")
        into = found
        for name in objects:
            into = into.setdefault(name, {})
        if field.kind == "ids":
            value = [i - field.beyond for i in value]
        into[key] = value is not field.turned if field.kind is bool else value
    return found


@dataclasses.dataclass(frozen=True)
class Settings:
    """One JSON object. ``within``: text before its keys in errors. ``read``: the keys that were read so far."""

    values: Mapping[str, Any]
    where: Path | str
    within: str = ""
    read: set[str] = dataclasses.field(default_factory=set)
    objects: dict[str, Settings] = dataclasses.field(default_factory=dict)
    """Objects inside, for keys of `fields`."""

    def get(self, key: str, absent: Any = None) -> Any:
        self.read.add(key)
        return self.values.get(key, absent)

    def number(self, key: str, kind: type, default: int | float | None = _REQUIRED, least: int | None = None) -> Any:
        """Value of a setting: a positive ``kind`` (int or float), or one of at least ``least``; null and absent mean
        ``default``."""
        value = self.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.where}: {self.within}{key} is missing; it is needed to build the model")
            return default
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not number or not (value > 0 if least is None else least <= value) or not value < math.inf:
            expected = f"a positive {kind.__name__}" if least is None else f"{kind.__name__} >= {least}"
            raise self.bad(key, expected)
        return kind(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def numbers(self, key: str, kind: type) -> tuple:
        values = self.get(key)
        if not isinstance(values, list) or any(isinstance(x, bool) or not isinstance(x, (int, kind)) for x in values):
            raise self.bad(key, f"a list of {kind.__name__}")
        return tuple(map(kind, values))

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise self.refused(key, value, f"known are {', '.join(choices)}")
        return choices[value]

    def value(self, key: str, default: Any = None) -> Any:
        """Value of a setting of any type; null counts as absent."""
        value = self.get(key)
        return default if value is None else value

    def typed(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of exactly the type ``kind``. Raises `ModelError` for another, or if it is missing without a
        default."""
        value = self.value(key, default)
        if type(value) is not kind:
            raise self.unlike(key, value, kind.__name__)
        return value

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = 2**24) -> int:
        """A whole number. Raises `ModelError` unless it lies between ``least`` and ``most``."""
        value = self.typed(key, int, default)
        if not least <= value <= most:
            raise self.unlike(key, value, f"at least {least}" if value < least else f"at most {most}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A positive number. Raises `ModelError` unless it is the default or a finite number above 0."""
        value = self.value(key, default)
        if type(value) not in (int, float) or not (0 < value < math.inf or value == default):
            raise self.unlike(key, value, "a finite number above 0")
        return float(value)

    def word(self, key: str, words: Sequence[str], default: str) -> str:
        """One of ``words``. Raises `ModelError` for any other."""
        value = self.typed(key, str, default)
        if value not in words:
            known = (", " if len(words) > 2 else " and ").join(words)
            raise ModelError(f"{self.where}: {self.within}{key}={value!r}, known are {known}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; empty if absent. Raises `ModelError` for anything else."""
        value = self.value(key, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.unlike(key, value, "a list of names")
        return tuple(value)

    def ids(self, key: str, beyond: int = 0, absent: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Numbers of streams: the stored ones plus ``beyond``, or ``absent`` without the key. Raises `ModelError`."""
        value = self.value(key)
        if value is None and absent is not None:
            return absent
        if not isinstance(value, list) or not value or not all(type(i) is int and i + beyond >= 0 for i in value):
            raise self.unlike(key, value, "a list of layers")
        return tuple(i + beyond for i in value)

    def fields(self, table: Iterable[Field], *context: Any) -> dict[str, Any]:
        """Our fields of a table, by name. ``context``: arguments of functions that give the value of an absent key.
        Raises `ModelError`."""
        return {field.ours: self._field(field, context) for field in table if field.ours}

    def _field(self, field: Field, context: Sequence[Any]) -> Any:
        found, key = self._at(field.key)
        if found.value(key) is None and field.remedy:
            raise ModelError(f"{self.where}: {key} is missing: {field.remedy}")
        if found.value(key) is None and field.fallback:
            found, key = self._at(field.fallback)
        absent: Any = field.absent
        if callable(absent):
            absent = absent(*context) if found.value(key) is None else None
        if field.kind == "ids":
            return found.ids(key, field.beyond, absent)
        if field.kind is int:
            return found.count(key, absent, field.least, field.most)
        if field.kind is float:
            return found.positive(key, absent) or None
        if field.kind is bool:
            return found.typed(key, bool, absent) is not field.turned
        return found.word(key, field.kind, absent)

    def _at(self, key: str) -> tuple[Settings, str]:
        *within, last = key.split(".")
        return (self.objects[within[0]] if within else self), last

    def unlike(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {self.within}{key}={value!r}, expected {expected}")

    def inner(self, key: str) -> Settings:
        """The object under ``key``; null and absent mean an empty one."""
        value = self.get(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Settings(value, self.where, f"{self.within}{key}.")

    def bad(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.where}: {self.within}{key}={self.values.get(key)!r} should be {expected}")

    def refused(self, key: str, value: Any, remedy: str) -> ModelError:
        return ModelError(f"{self.where}: {self.within}{key}={value!r} is not implemented; {remedy}")

    def only(self, allowed: Mapping[str, Any]) -> None:
        """Refuse all values of these settings except the implemented one; null and absent count as that one."""
        for key, implemented in allowed.items():
            found = self.get(key)
            if found is not None and found != implemented:
                remedy = "use a model without it" if implemented is None else f"only {implemented!r} is"
                raise self.refused(key, found, remedy)

    def only_read(self) -> None:
        """Refuse every setting that was not read."""
        self.only(dict.fromkeys(sorted(self.values.keys() - self.read)))


def read_decoder(
    settings: Settings,
    *,
    layers: Sequence[LayerKind],
    norm: Norm,
    max_positions: int,
    tie: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    attention_bias: bool | None = None,
    **fields: Any,
) -> ModelConfig:
    """Config from the settings that most families share, with this family's defaults for absent ones (``kv_heads``
    None: as many as heads; ``head_dim`` None: hidden_size / heads; ``attention_bias`` None: there is no such setting).
    Settings that were not read must change nothing."""
    layer_count(settings)
    sizes = {ours: settings.number(theirs, int) for ours, theirs in SIZES.items()}
    if "num_key_value_heads" not in settings.values and kv_heads is not None:
        fields["num_kv_heads"] = kv_heads
    else:
        fields["num_kv_heads"] = settings.number("num_key_value_heads", int, sizes["num_heads"])
    fields["head_dim"] = settings.number("head_dim", int, head_dim) or _head_dim(settings, sizes)
    if attention_bias is not None:
        fields["qkv_bias"] = fields["o_bias"] = settings.flag("attention_bias", attention_bias)
    fields["max_positions"] = settings.number("max_position_embeddings", int, max_positions)
    return build(
        settings,
        **sizes,
        **fields,
        layers=same_or_each(layers),
        norm=norm,
        tie_embeddings=settings.flag("tie_word_embeddings", tie),
        activation=settings.choice(activation[0], ACTIVATIONS, activation[1]),
    )


def _head_dim(settings: Settings, sizes: Mapping[str, int]) -> int:
    if sizes["hidden_size"] % sizes["num_heads"]:
        raise ModelError(
            f"{settings.where}: hidden_size={sizes['hidden_size']} is not a multiple of "
            f"num_attention_heads={sizes['num_heads']}; set head_dim"
        )
    return sizes["hidden_size"] // sizes["num_heads"]


def build(settings: Settings, **fields: Any) -> ModelConfig:
    """Config of these ``fields``. First refuses settings that nothing has read and that would change the
    computation."""
    inactive_window = settings.values.get("use_sliding_window") is False
    unread = {key: value for key, value in NEUTRAL.items() if key not in settings.read}
    if inactive_window:
        unread.pop("sliding_window", None)
    settings.only(unread)
    if "layer_types" not in settings.read:
        settings.only({"layer_types": ["full_attention"] * len(settings.values.get("layer_types") or [])})
    try:
        return ModelConfig(**fields)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{settings.where}: {_as_the_file_names_it(str(error))}") from None


def _as_the_file_names_it(text: str) -> str:
    names = SIZES | {"num_kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings"}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda ours: names[ours[0]], text)


def same_or_each(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    return tuple(kinds[:1]) if len(set(kinds)) == 1 else tuple(kinds)


def read_window(settings: Settings, absent: int | None = None) -> int | None:
    """Value of ``sliding_window``: null means no window, absent means ``absent``."""
    if "sliding_window" not in settings.values:
        return absent
    return settings.number("sliding_window", int, None)


def read_switched_window(settings: Settings, absent: int | None = None) -> int | None:
    """`read_window` for families where it is inactive without ``use_sliding_window``."""
    window = read_window(settings, absent)
    return window if settings.flag("use_sliding_window", False) else None


def sliding_layers(
    settings: Settings, rope: Rope | None, window: int | None, sliding: Sequence[bool]
) -> list[LayerKind]:
    """One kind for each layer; ``layer_types`` decides if it is given, else ``sliding`` does."""
    types = settings.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != len(sliding) or any(kind not in known for kind in types):
            raise settings.bad("layer_types", f"{len(sliding)} of {' and '.join(known)}, one a layer")
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and window is None:
        raise ModelError(
            f"{settings.where}: layer_types has sliding_attention, and there is no window; give sliding_window (and "
            "use_sliding_window: true, where there is such a switch)"
        )
    return [LayerKind(rope, window if slides else None) for slides in sliding]


def layer_count(settings: Settings) -> int:
    count = settings.number("num_hidden_layers", int)
    if count > _MOST_LAYERS:  # checked before anything is made for each layer
        raise settings.bad("num_hidden_layers", f"at most {_MOST_LAYERS:,}")
    return count


def write_decoder(config: ModelConfig, eps: str = "rms_norm_eps", activation: str = "hidden_act") -> dict[str, Any]:
    """Settings that `read_decoder` reads; ``eps`` and ``activation`` are the names of two of them."""
    return {
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        eps: config.norm.eps,
        activation: written_activation(config),
        "tie_word_embeddings": config.tie_embeddings,
    }


def written_activation(config: ModelConfig) -> str:
    return "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation


def write_layers(config: ModelConfig) -> dict[str, Any]:
    """``layer_types``, and the one window that the sliding layers share."""
    kinds = [config.layer(i) for i in range(config.num_layers)]
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    types = ["full_attention" if kind.window is None else "sliding_attention" for kind in kinds]
    return {"layer_types": types, "sliding_window": window}
