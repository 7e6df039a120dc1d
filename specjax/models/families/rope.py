"""Rotary settings of config.json in both spellings: transformers 5 writes ``rope_parameters``; older versions write
``rope_theta`` and ``rope_scaling``. If both are present the old dict replaces the whole new one, as in transformers."""

from __future__ import annotations

import math
from typing import Any

from specjax.models.config import ModelConfig
from specjax.models.families.settings import Settings
from specjax.models.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongRope, Rope, Scaling, YarnScaling


def read_rope(
    settings: Settings,
    *,
    theta: float = 10_000.0,
    partial: float | None = None,
    old_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    interleaved: bool = False,
    max_positions: int = 2048,
    aliases: dict[str, str] | None = None,
    original: int | None = None,
) -> Rope:
    """Rotary embedding of a model. ``theta``, ``partial``, ``max_positions``, ``original``: this family's defaults
    (``partial`` None: a head is always rotated whole). ``old_names``: names of base and share at the top level.
    ``aliases``: more names of a type of scaling."""
    key = "rope_scaling" if settings.values.get("rope_scaling") else "rope_parameters"
    settings.read.update(("rope_scaling", "rope_parameters"))
    positions = settings.number("max_position_embeddings", int, max_positions)
    original = settings.number("original_max_position_embeddings", int, original)
    theta = settings.number(old_names[0], float, theta)
    if partial is None:
        settings.only({"partial_rotary_factor": 1})
    else:
        partial = settings.number(old_names[1], float, partial)
    return read_one(settings.inner(key), theta, partial, interleaved, positions, original, aliases or {})


def read_one(
    rope: Settings,
    theta: float,
    partial: float | None = None,
    interleaved: bool = False,
    max_positions: int = 2048,
    original: int | None = None,
    aliases: dict[str, str] | None = None,
) -> Rope:
    """Rotary embedding of one dict of settings. The arguments replace settings that it leaves out; ``original`` also
    replaces one that it has."""
    theta = rope.number("rope_theta", float, theta)
    if partial is None:
        rope.only({"partial_rotary_factor": 1})
    else:
        partial = rope.number("partial_rotary_factor", float, partial)
    key = "rope_type" if rope.values.get("rope_type") is not None else "type"
    rope.read.update(("rope_type", "type"))
    kinds = {"default": None, **{kind: kind for kind in _READERS}, **(aliases or {})}
    kind = rope.choice(key, kinds, "default")
    inside = rope.number("original_max_position_embeddings", int, max_positions) if kind in _STRETCHED else None
    scaling = None if kind is None else _READERS[kind](rope, max_positions, original or inside)
    rope.only_read()
    return Rope(theta, 1.0 if partial is None else partial, interleaved, scaling)


def _read_llama3(rope: Settings, max_positions: int, original: int) -> Scaling:
    numbers = (rope.number(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return Llama3Scaling(*numbers, original_positions=original)


def _read_yarn(rope: Settings, max_positions: int, original: int) -> Scaling:
    factor = rope.number("factor", float, max_positions / original)
    mscale, all_dims = (rope.number(key, float, None) for key in ("mscale", "mscale_all_dim"))

    def default(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    inferred = default(mscale) / default(all_dims) if mscale and all_dims else default()
    return YarnScaling(
        factor,
        original,
        rope.number("attention_factor", float, inferred),
        rope.number("beta_fast", float, 32.0),
        rope.number("beta_slow", float, 1.0),
        rope.flag("truncate", True),
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _read_longrope(rope: Settings, max_positions: int, original: int) -> Scaling:
    factor = rope.number("factor", float, max_positions / original)
    inferred = longrope_attention_factor(factor, original)
    short, long = rope.numbers("short_factor", float), rope.numbers("long_factor", float)
    return LongRope(short, long, original, rope.number("attention_factor", float, inferred))


_READERS = {
    "linear": lambda rope, max_positions, original: LinearScaling(rope.number("factor", float)),
    "dynamic": lambda rope, max_positions, original: DynamicScaling(rope.number("factor", float), max_positions),
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}
_STRETCHED = ("llama3", "yarn", "longrope")
"""Types of scaling whose settings say over how many positions the model was first trained."""


def write_rope(
    config: ModelConfig, old_names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"), whole: float | None = 1
) -> dict:
    """Settings, in both spellings, of the model's one rotary embedding, or of a default one if no layer rotates.
    ``whole``: the share that is not written, because a family without that setting has it; None: every share is
    written."""
    if len(config.ropes) > 1:
        raise ValueError(f"its layers have {len(config.ropes)} rotary embeddings, expected one")
    rope = config.ropes[0] if config.ropes else Rope()
    old: dict[str, Any] = {old_names[0]: rope.theta}
    if rope.partial != whole:
        old[old_names[1]] = rope.partial
    if rope.scaling is not None:
        old["rope_scaling"] = written(rope, whole)
    return {**old, "rope_parameters": written(rope, whole)}


def written(rope: Rope, whole: float | None = 1) -> dict[str, Any]:
    settings = {"rope_theta": rope.theta, **_scaling(rope.scaling)}
    return settings if rope.partial == whole else {**settings, "partial_rotary_factor": rope.partial}


def _scaling(scaling: Scaling | None) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                "original_max_position_embeddings": scaling.original_positions,
            }
        case LongRope():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "attention_factor": scaling.attention_factor,
                "original_max_position_embeddings": scaling.original_positions,
            }
