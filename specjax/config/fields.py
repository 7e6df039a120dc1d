"""Types of single config fields: bounds, names in a registry, and checks that a bound cannot express."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from specjax.registry import OUTSIDE, build, resolve


def _kinds(table: Mapping[str, str]) -> dict[str, Any]:
    return {"anyOf": [{"enum": [*sorted(table)]}, {"type": "string", "pattern": OUTSIDE}]}


def kind_in(table: Mapping[str, str]) -> Any:
    """Type of a name in a registry. A name in the table is accepted without importing its class."""

    def known(kind: str) -> str:
        if kind not in table:
            resolve(table, kind, "")
        return kind

    return Annotated[str, AfterValidator(known), Field(json_schema_extra=_kinds(table))]


def buildable(table: Mapping[str, str]) -> Any:
    """Type of a kind in a registry at its defaults, or of a mapping ``{kind: ..., field: value}``."""

    def known(spec: Any) -> Any:
        if spec is not None:
            build(table, spec, "")
        return spec

    kinds = _kinds(table)
    fields: dict[str, Any] = {"type": "object", "required": ["kind"], "properties": {"kind": kinds}}
    return Annotated[Any, AfterValidator(known), Field(json_schema_extra={"anyOf": [kinds, fields]})]


def path_or(table: Mapping[str, str]) -> Any:
    """Type of a text, or of a mapping ``{kind: ..., field: value}`` of a registered kind."""

    def known(spec: Any) -> Any:
        if isinstance(spec, str):
            if not spec:
                raise ValueError("found an empty text; give a path, or null")
        elif spec is not None:
            build(table, spec, "")
        return spec

    kinds = {"type": "object", "required": ["kind"], "properties": {"kind": _kinds(table)}}
    text = {"type": "string", "minLength": 1}
    return Annotated[Any, AfterValidator(known), Field(json_schema_extra={"anyOf": [text, kinds, {"type": "null"}]})]


def distinct(values: tuple) -> tuple:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} repeats a value; give each once")
    return values


def ascending(steps: tuple[int, int]) -> tuple[int, int]:
    if steps[0] > steps[1]:
        raise ValueError(f"{list(steps)} ends before it begins; give the first and the last step")
    return steps


def _no_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 devices; give their number, or -1 for all that remain")
    return value


STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
Grid = (Field(min_length=1), AfterValidator(distinct))
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Directory = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""Directory to write to; `~` is the user's home, as in a shell."""
Axis = Annotated[int, Field(ge=-1), AfterValidator(_no_zero)]
