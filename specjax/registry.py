"""Names of kinds and the frozen config classes they stand for, one line each; imported only when asked for, so the
table depends on nothing of ours. A class that is in no table is named by where it is: ``package.module:Class``."""

from __future__ import annotations

import dataclasses
import difflib
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
    "dflash": "specjax.drafters.dflash.drafting:DFlash",
    "dflash2": "specjax.drafters.dflash.drafting:DFlash2",
    "draft_model": "specjax.drafters.draft_model:DraftModel",
    "dspark": "specjax.drafters.dflash.drafting:DSpark",
    "eagle3": "specjax.drafters.eagle3:Eagle3",
    "early_exit": "specjax.drafters.early_exit:EarlyExit",
    "glide": "specjax.drafters.glide:Glide",
    "medusa": "specjax.drafters.medusa:Medusa",
    "mtp": "specjax.drafters.mtp:MTP",
    "ngram": "specjax.drafters.ngram:NGram",
    "p_eagle": "specjax.drafters.p_eagle:PEagle",
}
CONTROLLERS = {
    "adaptive": "specjax.controllers.adaptive:Adaptive",
    "budgeted": "specjax.controllers.budgeted:Budgeted",
    "confidence": "specjax.controllers.confidence:Confidence",
    "fixed": "specjax.controllers.fixed:Fixed",
    "ladder": "specjax.controllers.ladder:Ladder",
    "survival": "specjax.controllers.survival:Survival",
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
    "generated": "specjax.distill.sources.generated:Generated",
    "on_policy": "specjax.distill.sources.on_policy:OnPolicy",
    "text": "specjax.distill.sources.text:Text",
}
LOSSES = {
    "adaspec": "specjax.distill.losses:AdaSPEC",
    "cross_entropy": "specjax.distill.losses:CrossEntropy",
    "forward_kl": "specjax.distill.losses:ForwardKL",
    "jensen_shannon": "specjax.distill.losses:JensenShannon",
    "lk_alpha": "specjax.distill.losses:LKAlpha",
    "lk_lambda": "specjax.distill.losses:LKLambda",
    "reverse_kl": "specjax.distill.losses:ReverseKL",
    "sum": "specjax.distill.losses:Sum",
    "total_variation": "specjax.distill.losses:TotalVariation",
}
DRAFTS = {
    "dflash": "specjax.drafters.dflash.kinds:DFlashDraft",
    "dflash2": "specjax.drafters.dflash.kinds:DFlash2Draft",
    "draft_model": "specjax.distill.init:SeparateModel",
    "dspark": "specjax.drafters.dflash.kinds:DSparkDraft",
    "eagle3": "specjax.drafters.eagle3:Eagle3Draft",
    "early_exit": "specjax.drafters.early_exit:EarlyExitDraft",
    "glide": "specjax.drafters.glide:GlideDraft",
    "medusa": "specjax.drafters.medusa:MedusaDraft",
    "mtp": "specjax.drafters.mtp:MTPDraft",
    "p_eagle": "specjax.drafters.p_eagle:PEagleDraft",
}
INITS = {
    "checkpoint": "specjax.distill.init:Checkpoint",
    "layers": "specjax.distill.init:Layers",
    "pruned": "specjax.distill.init:Pruned",
    "scratch": "specjax.distill.init:Scratch",
}


OUTSIDE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""The form of ``package.module:Class``, as a regular expression."""


def resolve(table: Mapping[str, str], kind: str, what: str) -> type:
    """The class registered under ``kind``, or the one at ``package.module:Class``. Raises `ConfigError`, naming
    ``what`` was asked for, with the known kinds and the nearest match, or with what keeps the class from being used."""
    if isinstance(kind, str) and re.match(OUTSIDE, kind):
        return _outside(kind, what)
    if kind not in table:
        near = difflib.get_close_matches(str(kind), table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{what}: {kind!r} is unknown, known are {', '.join(sorted(table))}{hint}")
    module, _, name = table[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def _outside(kind: str, what: str) -> type:
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: {kind!r}: no module {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from None
    except AttributeError:
        raise ConfigError(f"{what}: {kind!r}: {module} has no {name}") from None
    frozen = isinstance(found, type) and dataclasses.is_dataclass(found) and found.__dataclass_params__.frozen
    if not frozen or not isinstance(kind_of(found), str):
        raise ConfigError(
            f"{what}: {kind!r} is no frozen dataclass with a field `kind: Literal[...]`; see docs/extending.md"
        )
    return found


def kind_of(cls: type) -> Any:
    """The kind that a dataclass stands for; None: it says none."""
    return next((field.default for field in dataclasses.fields(cls) if field.name == "kind"), None)


def build(table: Mapping[str, str], spec: str | Mapping[str, Any], what: str) -> Any:
    """An instance of the class that a config names: a kind at its defaults, or a mapping ``{kind: ..., field: value}``.
    Raises `ConfigError` naming the field that is missing, unknown or out of range."""
    spec = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise ConfigError(
            f"{what}: found {spec!r}, expected a kind or a mapping with one, as in {{kind: {next(iter(table))}}}"
        )
    cls = resolve(table, spec["kind"], what)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in spec:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{what}.{name}: unknown key of {spec['kind']!r}; {hint}")
    # A class from outside is asked for by where it is; its own kind is what it is called in results.
    fields = spec if spec["kind"] in table else {**spec, "kind": kind_of(cls)}
    try:
        return _validated(cls, fields, what)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join((what, *map(str, problem["loc"])))
        if problem["type"] == "value_error":  # raised by a field of ours, in our words
            reason = str(problem.get("ctx", {})["error"])
            raise ConfigError(f"{field}: {reason.removeprefix(': ').removeprefix('.')}") from None
        if problem["type"] in ("missing", "missing_argument"):
            raise ConfigError(f"{field}: missing; {spec['kind']!r} needs it{_example(spec['kind'])}") from None
        expected = problem["msg"].replace("Input should be ", "")
        raise ConfigError(f"{field}: found {reprlib.repr(problem.get('input'))}, expected {expected}") from None


def _validated(cls: type, spec: Mapping[str, Any], what: str) -> Any:
    """Strictly, as a config's other fields are: a text is no number, and neither is true or a fraction."""
    try:
        text = json.dumps(dict(spec))
    except TypeError:  # an object of Python's, such as a model, has no JSON, and JSON alone takes lists for tuples
        found = TypeAdapter(cls).validate_python(dict(spec))
        for name, value in spec.items():
            kind = type(getattr(found, name))
            if isinstance(value, (bool, str)) and kind is not type(value):
                raise ConfigError(f"{what}.{name}: found {value!r}, expected a valid {kind.__name__}") from None
        return found
    return TypeAdapter(cls).validate_json(text, strict=True)


def _example(kind: str) -> str:
    if kind != "draft_model":
        return ""
    return ", as in {kind: draft_model, model: PATH}, or specjax.DraftModel(specjax.load_model(PATH), k=5) in Python"


def checked(table: Mapping[str, str], instance: Any, what: str) -> Any:
    """An instance of a registered class with its fields checked as a config's are; one of another class as it is.
    Raises `ConfigError` as `build` does."""
    cls = type(instance)
    if table.get(instance.kind) != f"{cls.__module__}:{cls.__qualname__}":
        return instance
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(cls)}
    return build(table, {name: _plain(value) for name, value in fields.items()}, what)


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's."""
    return getattr(value, "item", lambda: value)() if isinstance(value, numbers.Number) else value
