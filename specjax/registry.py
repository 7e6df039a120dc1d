"""Names of kinds and the frozen config classes they stand for, one line each. A class is imported only when it is asked
for, so the tables depend on nothing of ours. A class that is in no table is named by its module:
``package.module:Class``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import numbers
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from specjax.errors import ConfigError

DRAFTERS = {
    "dflash": "specjax.drafters.features:FeatureDrafter",
    "dflash2": "specjax.drafters.features:FeatureDrafter",
    "draft_model": "specjax.drafters.draft_model:DraftModel",
    "dspark": "specjax.drafters.features:FeatureDrafter",
    "eagle3": "specjax.drafters.features:FeatureDrafter",
    "early_exit": "specjax.drafters.features:FeatureDrafter",
    "glide": "specjax.drafters.glide:Glide",
    "hybrid": "specjax.drafters.hybrid:Hybrid",
    "medusa": "specjax.drafters.features:FeatureDrafter",
    "mtp": "specjax.drafters.features:FeatureDrafter",
    "ngram": "specjax.drafters.ngram:NGram",
    "p_eagle": "specjax.drafters.features:FeatureDrafter",
}
CONTROLLERS = {
    "adaptive": "specjax.controllers.adaptive:Adaptive",
    "confidence": "specjax.controllers.confidence:Confidence",
    "fixed": "specjax.controllers.fixed:Fixed",
}
VERIFIERS = {
    "block": "specjax.verifiers.block:Block",
    "coupled": "specjax.verifiers.coupled:Coupled",
    "greedy": "specjax.verifiers.greedy:Greedy",
    "lenient": "specjax.verifiers.lenient:Lenient",
    "speculative": "specjax.verifiers.speculative:Speculative",
    "top_k": "specjax.verifiers.top_k:TopK",
    "typical": "specjax.verifiers.typical:Typical",
}
DATA = {
    "generated": "specjax.training.sources.generated:Generated",
    "on_policy": "specjax.training.sources.on_policy:OnPolicy",
    "text": "specjax.training.sources.text:Text",
}
LOSSES = {
    "adaspec": "specjax.training.losses:AdaSPEC",
    "cross_entropy": "specjax.training.losses:CrossEntropy",
    "forward_kl": "specjax.training.losses:ForwardKL",
    "jensen_shannon": "specjax.training.losses:JensenShannon",
    "lk_alpha": "specjax.training.losses:LKAlpha",
    "lk_lambda": "specjax.training.losses:LKLambda",
    "reverse_kl": "specjax.training.losses:ReverseKL",
    "sum": "specjax.training.losses:Sum",
    "total_variation": "specjax.training.losses:TotalVariation",
}
DRAFTS = {
    "dflash": "specjax.training.drafts.dflash:DFlashDraft",
    "dflash2": "specjax.training.drafts.dflash:DFlash2Draft",
    "draft_model": "specjax.training.init.first_weights:SeparateModel",
    "dspark": "specjax.training.drafts.dflash:DSparkDraft",
    "eagle3": "specjax.training.drafts.eagle3:Eagle3Draft",
    "early_exit": "specjax.training.drafts.early_exit:EarlyExitDraft",
    "glide": "specjax.training.drafts.glide:GlideDraft",
    "medusa": "specjax.training.drafts.medusa:MedusaDraft",
    "mtp": "specjax.training.drafts.mtp:MTPDraft",
    "p_eagle": "specjax.training.drafts.eagle3:PEagleDraft",
}
INITS = {
    "checkpoint": "specjax.training.init.first_weights:Checkpoint",
    "layers": "specjax.training.init.first_weights:Layers",
    "pruned": "specjax.training.init.first_weights:Pruned",
    "scratch": "specjax.training.init.first_weights:Scratch",
}


LOAD_DRAFTER = "specjax.formats.loading:load_drafter"
"""Reader of a drafter's directory, for kinds that are given a path."""
RETIRED = {
    "budgeted": "{kind: adaptive, total: N}",
    "ladder": "{kind: adaptive, corrects: false}",
    "survival": "{kind: adaptive, per: row, corrects: false}",
}
"""Earlier names of kinds, and what stands for them now."""
BASES = {
    "Controller": CONTROLLERS,
    "DraftKind": DRAFTS,
    "Drafter": DRAFTERS,
    "Init": INITS,
    "Loss": LOSSES,
    "Source": DATA,
    "Verifier": VERIFIERS,
}
"""Class of `specjax.interfaces` that the classes of each table inherit."""
OUTSIDE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""Regular expression of ``package.module:Class``."""


def resolve(table: Mapping[str, str], kind: str, what: str) -> type:
    """The class registered under ``kind``, or the one at ``package.module:Class``. Raises `ConfigError`, naming
    ``what`` was asked for, with the known kinds and the nearest match, or with the reason that the class cannot be
    used."""
    if isinstance(kind, str) and re.match(OUTSIDE, kind):
        return _outside(table, kind, what)
    if kind not in table:
        near = difflib.get_close_matches(str(kind), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = f"; give {RETIRED[kind]} in its place" if kind in RETIRED else hint
        raise _error(what, f"{kind!r} is unknown, known are {', '.join(sorted(table))}{hint}")
    module, _, name = table[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def reader() -> Any:
    """The function at `LOAD_DRAFTER`, which is above the rooms that ask for it."""
    module, _, name = LOAD_DRAFTER.partition(":")
    return getattr(importlib.import_module(module), name)


def _outside(table: Mapping[str, str], kind: str, what: str) -> type:
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise _error(what, f"{kind!r}: no module {error.name!r}; install it, or put its folder on PYTHONPATH") from None
    except AttributeError:
        raise _error(what, f"{kind!r}: {module} has no {name}") from None
    is_dataclass = isinstance(found, type) and dataclasses.is_dataclass(found)
    frozen = is_dataclass and found.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    if not frozen or not isinstance(kind_of(found), str):
        raise _error(what, f"{kind!r} is no frozen dataclass with a field `kind: Literal[...]`; see docs/extending.md")
    base = next((base for base, of in BASES.items() if of is table), None)
    if base is not None and not issubclass(found, getattr(importlib.import_module("specjax.interfaces"), base)):
        raise _error(what, f"{kind!r} does not inherit specjax.interfaces.{base}; see docs/extending.md")
    return found


def _error(field: str, text: str) -> ConfigError:
    """The error of a field; without a name it is the text alone, and who calls knows the name."""
    return ConfigError(f"{field}: {text}" if field else text)


def kind_of(cls: type) -> Any:
    """The kind that a dataclass stands for; None: it has no field `kind`."""
    return next((field.default for field in dataclasses.fields(cls) if field.name == "kind"), None)


def build(table: Mapping[str, str], spec: str | Mapping[str, Any], what: str) -> Any:
    """An instance of the class that a config names: a kind at its defaults, or a mapping ``{kind: ..., field: value}``.
    Raises `ConfigError` naming the field that is missing, unknown or out of range."""
    spec = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        expected = f"a kind or a mapping with one, as in {{kind: {next(iter(table))}}}"
        raise _error(what, f"found {spec!r}, expected {expected}")
    cls = resolve(table, spec["kind"], what)
    # A class from outside is named by its module; results name it by its own kind.
    fields = spec if spec["kind"] in table else {**spec, "kind": kind_of(cls)}
    try:
        return _validated(cls, fields, what)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda problem: problem["type"] != _UNKNOWN)
        if problem["type"] == _UNKNOWN:
            known = [field.name for field in dataclasses.fields(cls)]
            near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            text = f"unknown key of {spec['kind']!r}; {hint}"
        elif problem["type"] == "value_error":  # raised by a field of ours, in our words
            text = str(problem.get("ctx", {})["error"])
        elif problem["type"] in ("missing", "missing_argument"):
            text = f"missing; {spec['kind']!r} needs it{_example(spec['kind'])}"
        else:
            expected = problem["msg"].replace("Input should be ", "")
            text = f"found {reprlib.repr(problem.get('input'))}, expected {expected}"
        raise _error(".".join(filter(None, (what, *map(str, problem["loc"])))), text) from None


def _validated(cls: type, spec: Mapping[str, Any], what: str) -> Any:
    """An instance of ``cls``, checked as strictly as a config's other fields: a string is no number, nor is a bool, and
    a fraction is no whole number."""
    try:
        text = json.dumps(dict(spec))
    except TypeError:  # a Python object such as a model has no JSON; only JSON accepts lists for tuples
        found = _adapter(cls).validate_python(dict(spec), extra="forbid")
        for name, value in spec.items():
            kind = type(getattr(found, name))
            if isinstance(value, (bool, str)) and kind is not type(value):
                field = f"{what}.{name}" if what else name
                raise _error(field, f"found {value!r}, expected a valid {kind.__name__}") from None
        return found
    return _adapter(cls).validate_json(text, strict=True, extra="forbid")


_adapter = functools.cache(TypeAdapter)
_UNKNOWN = "unexpected_keyword_argument"
"""Pydantic's name for a field that a dataclass does not have."""


def _example(kind: str) -> str:
    if kind != "draft_model":
        return ""
    return ", as in {kind: draft_model, model: PATH}, or specjax.DraftModel(specjax.load_model(PATH), k=5) in Python"


def checked(table: Mapping[str, str], instance: Any, what: str) -> Any:
    """``instance`` with its fields checked as a config's are; unchanged if its class is not registered in ``table``.
    Raises `ConfigError` as `build` does."""
    cls = type(instance)
    if table.get(instance.kind) != f"{cls.__module__}:{cls.__qualname__}":
        return instance
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(cls)}
    return build(table, {name: _plain(value) for name, value in fields.items()}, what)


def _plain(value: Any) -> Any:
    """``value``; a numpy scalar becomes Python's."""
    return getattr(value, "item", lambda: value)() if isinstance(value, numbers.Number) else value
