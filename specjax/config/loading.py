"""Turns YAML and ``a.b=v`` overrides into a validated dataclass, or into one-line problems, for any schema.

A *field* is a dotted path. OmegaConf merges and interpolates. Pydantic validates strictly and coerces nothing: it takes
no string for a number and no fraction for a count.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import io
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from specjax.errors import ConfigError

T = TypeVar("T")


def read(path: str | Path, overrides: Sequence[str], schema: type) -> DictConfig:
    """Read a file and merge the overrides into it (`merged`); interpolations stay unresolved."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a config is a YAML file") from None
    try:
        raw = OmegaConf.load(io.StringIO(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {headline(error)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: not a mapping in YAML ({headline(error)})") from None
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"{path}: a list at the top, expected a mapping from field to value")
    if not raw:
        raise ConfigError(f"{path}: empty, expected a mapping from field to value")
    # Overrides are merged with each other first: a kind may be set after the fields that belong to it.
    together, ones = OmegaConf.create(), []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise ConfigError(f"override {override!r}: expected field=value, as in distill.steps=200")
        with _named(override):
            ones.append(OmegaConf.from_dotlist([override]))
            together = merged(together, ones[-1], schema)
    raw = _less_replaced(raw, together, schema)
    for override, one in zip(overrides, ones, strict=True):
        with _named(override):
            OmegaConf.merge(raw, one)  # one at a time, so that an error names its override
    raw = typing.cast(DictConfig, OmegaConf.merge(raw, together))
    for field, text in _strings("", unresolved(raw)):
        if _calls_resolver(text):
            raise ConfigError(
                f"{path}: {field}: {text!r} calls a resolver; only fields of the file can be interpolated, "
                "as in ${data.path}, so that the file says everything about its run"
            )
    return raw


@contextlib.contextmanager
def _named(override: str) -> Iterator[None]:
    """Turn an error of the block into a `ConfigError` that names the override."""
    try:
        yield
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: not valid YAML: {_one_line(error)}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {override!r}: {headline(error)}") from None
    except TypeError:
        raise ConfigError(
            f"override {override!r}: a list is overridden as a whole, as in bench.ks=[3,5]; a section by its fields"
        ) from None


def merged(raw: DictConfig, changes: DictConfig, schema: type) -> DictConfig:
    """``changes`` merged over ``raw``, field by field. A mapping is replaced whole by an empty one, and by one of
    another ``kind``, which has other fields. A section of ``schema`` is never replaced: its fields are the same for
    every kind."""
    return typing.cast(DictConfig, OmegaConf.merge(_less_replaced(raw, changes, schema), changes))


def _less_replaced(raw: DictConfig, changes: DictConfig, schema: type) -> DictConfig:
    """``raw`` without the mappings that ``changes`` replaces whole."""
    raw, sections = copy.deepcopy(raw), sections_of(schema)
    for field in _replaced("", unresolved(raw), unresolved(changes)):
        if field not in sections:
            OmegaConf.update(raw, field, None, merge=False)
    return raw


def _replaced(field: str, old: Any, new: Any) -> Iterator[str]:
    """Fields, outer ones first, whose mapping in ``new`` is empty or of another kind than in ``old``."""
    if isinstance(old, dict) and isinstance(new, dict):
        emptied = bool(field and old and not new)
        if emptied or old.get("kind", new.get("kind")) != new.get("kind", old.get("kind")):
            yield field
        for key in old.keys() & new.keys():
            yield from _replaced(f"{field}.{key}" if field else str(key), old[key], new[key])


def validate(path: str | Path, raw: DictConfig, schema: type[T], sources: Mapping[str, str]) -> T:
    """``raw``, resolved, as an instance of the dataclass ``schema``. ``sources``: overridden field -> origin of its
    value, in words. Raises `ConfigError` with one line for each problem."""
    try:
        values = OmegaConf.to_container(raw, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: {error.full_key or 'config'}: {headline(error)}; "
            "what is interpolated has to stand in the file or an override, a default does not"
        ) from None
    try:
        # As JSON: strict mode then still takes lists for tuples and mappings for sections, and nothing else.
        return TypeAdapter(schema).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        found: list[dict[str, Any]] = [dict(problem) for problem in error.errors()]
        # A default that depends on a wrong field is no problem of its own.
        found = [problem for problem in found if problem["type"] != "default_factory_not_called"]
        # Pydantic also calls a list with wrong items too short.
        inner = {problem["loc"][:-1] for problem in found}
        found = [problem for problem in found if problem["type"] != "too_short" or problem["loc"] not in inner]
        problems = [_problem(problem, schema, sources) for problem in found]
    raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))


def _problem(problem: dict[str, Any], schema: type, sources: Mapping[str, str]) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    origin = [
        source for key, source in sources.items() if f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}.")
    ]
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        text = unknown_key(schema, field)
    elif problem["type"] in ("missing", "missing_argument"):
        text = "missing; it has no default"
    elif problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
    elif problem["type"] == "too_short":
        text = f"found {json.dumps(problem['input'])}, expected a list of at least one value"
    else:
        expected = (
            problem["msg"]
            .replace("Input should be ", "")
            .replace("an object", "a mapping of fields")
            .replace("array", "list")
        )
        text = f"found {json.dumps(problem['input'])}, expected {expected}"
        if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
            text += " (quote it)"
    where = f"{field}: " if field else ""
    return f"{where}{text}" + (f" (from {origin[-1]})" if origin else "")


def unknown_key(schema: type, field: str) -> str:
    """Message for an unknown key, with the nearest known one: in the same section, else of the same name elsewhere."""
    known = known_fields(schema)
    section, _, name = field.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    namesakes = [key for key in known if key.rpartition(".")[2] == name]
    if near := difflib.get_close_matches(name, siblings, n=1):
        hint = ".".join(filter(None, (section, near[0])))
    elif namesakes:
        hint = difflib.get_close_matches(field, namesakes, n=1, cutoff=0.0)[0]
    else:
        return f"unknown key, known here are {', '.join(siblings) or 'none'}"
    return f"unknown key; did you mean {hint!r}?"


def unresolved(raw: DictConfig) -> dict[str, Any]:
    """Settings as written, with interpolations in place."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(raw, resolve=False))


def sources_of(overrides: Sequence[str]) -> dict[str, str]:
    """Overridden field -> origin of its value, in words."""
    return {override.partition("=")[0].strip(): f"the override {override!r}" for override in overrides}


def _fields(section: type) -> dict[str, type | None]:
    """Field -> dataclass of the section that it holds, or None."""
    found: dict[str, type | None] = {}
    for name, hint in typing.get_type_hints(section).items():
        choices = typing.get_args(hint) or (hint,)
        found[name] = next((c for c in choices if dataclasses.is_dataclass(c) and isinstance(c, type)), None)
    return found


def known_fields(section: type, prefix: str = "") -> list[str]:
    """Dotted names of all fields, sections included."""
    known = []
    for name, inner in _fields(section).items():
        known.append(prefix + name)
        if inner is not None:
            known += known_fields(inner, f"{prefix}{name}.")
    return known


def sections_of(schema: type, prefix: str = "") -> set[str]:
    """Dotted names of the fields that are sections."""
    inner = {f"{prefix}{name}": section for name, section in _fields(schema).items() if section is not None}
    return set(inner).union(*(sections_of(section, f"{name}.") for name, section in inner.items()))


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Pairs (field, value) of all values that are not mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value


def _strings(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    for field, leaf in leaves(prefix, value):
        if isinstance(leaf, str):
            yield field, leaf
        elif isinstance(leaf, list):
            for index, item in enumerate(leaf):
                yield from _strings(f"{field}[{index}]", item)


def _calls_resolver(text: str) -> bool:
    """True if a text calls a resolver: inside ``${...}`` a colon stands only between a resolver and its arguments."""
    depth = 0
    for position, character in enumerate(text):
        depth += text.startswith("${", position)
        depth -= character == "}" and depth > 0
        if depth and character == ":":
            return True
    return False


def headline(error: Exception) -> str:
    """First line of an error's message: it says what went wrong. OmegaConf and the system say where in later lines."""
    return str(error).partition("\n")[0]


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
