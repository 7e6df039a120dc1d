"""Public names say in their docstrings what they are, take, give and raise.

Google's sections (`Args:`, `Returns:`, `Raises:`) for the names of `specjax.__all__`; a field is described by a text
after it or in its class's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import specjax
from specjax import interfaces, registry
from specjax.training.losses import Divergence
from specjax.verifiers.chain import ChainVerifier

MODULES = [
    *(
        "interfaces.model",
        "interfaces.decoding",
        "interfaces.training",
        "proposal",
        "sampling",
        "metrics",
        "registry",
        "errors",
        "drafters.base",
        "drafters.ngram",
    ),
    *("drafters.draft_model", "controllers.fixed", "training.losses"),
    *("verifiers.block", "verifiers.chain", "verifiers.coupled", "verifiers.greedy", "verifiers.lenient"),
    *("verifiers.matching", "verifiers.speculative", "verifiers.top_k", "verifiers.typical"),
    *("decode.decoder", "decode.scheduler", "decode.result", "decode.engine", "decode.programs", "decode.arguments"),
]
ELSEWHERE = {"specjax.drafters.draft_model": "its bound form is the engine's, not the user's"}
PUBLISHED = [
    *registry.VERIFIERS.values(),
    *registry.DRAFTERS.values(),
    *registry.CONTROLLERS.values(),
    *(registry.LOSSES[kind] for kind in ("adaspec", "forward_kl", "jensen_shannon", "lk_alpha", "lk_lambda")),
    "specjax.decode.decoder:Decoder",
]
"""Methods that somebody published, `module:Class`."""
BEGINNINGS = ("What", "Of", "Where", "That")
ARXIV = r"\b\d{4}\.\d{5}\b"


def first_sentence(thing: Any) -> str:
    paragraph = " ".join((thing.__doc__ or "").partition("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return f"{sentence}." if dot else paragraph


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods that the class itself defines, and ``__call__`` where it has a docstring."""
    for name, member in vars(cls).items():
        member = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        shown = not name.startswith("_") or (name == "__call__" and member.__doc__)
        if shown and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"{cls.__name__}.{name}", member


def described() -> Iterator[Any]:
    """Every public class, function and method of `MODULES`, once."""
    for short in MODULES:
        module = importlib.import_module(f"specjax.{short}")
        for name, thing in vars(module).items():
            made_here = getattr(thing, "__module__", None) == module.__name__ and not name.startswith("_")
            if made_here and (inspect.isclass(thing) or inspect.isfunction(inspect.unwrap(thing))):
                yield pytest.param(thing, id=f"{short}.{name}")
                if inspect.isclass(thing) and module.__name__ not in ELSEWHERE:
                    yield from (pytest.param(method, id=f"{short}.{inner}") for inner, method in own_methods(thing))


def public() -> Iterator[tuple[str, Any]]:
    """Names of the package, and the methods of its classes."""
    for name in specjax.__all__:
        thing = getattr(specjax, name)
        yield name, thing
        if inspect.isclass(thing):
            yield from own_methods(thing)


PUBLIC = [pytest.param(thing, id=name) for name, thing in public()]
FUNCTIONS = [pytest.param(thing, id=name) for name, thing in public() if inspect.isfunction(thing)]


def is_said_elsewhere(thing: Any) -> bool:
    """Whether a member without a docstring is one that a protocol, or the base class of its rule, describes."""
    name = getattr(thing.fget if isinstance(thing, property) else thing, "__name__", "")
    bases = [interfaces.Verifier, interfaces.Loss, ChainVerifier, Divergence]
    return not thing.__doc__ and any(getattr(vars(base).get(name), "__doc__", None) for base in bases)


@pytest.mark.parametrize("thing", [*PUBLIC, *described()])
def test_the_first_sentence_stands_alone(thing):
    if is_said_elsewhere(thing):
        return
    sentence = first_sentence(thing)
    assert sentence.endswith(".")
    assert len(sentence.split()) > 1
    assert sentence.split()[0] not in BEGINNINGS


def sections(thing: Any) -> dict[str, str]:
    """The text of each section of a docstring, '' for what stands before them."""
    parts = re.split(r"^(Args|Returns|Raises):\n", inspect.cleandoc(thing.__doc__ or ""), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_parameter_is_described(function):
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    args = sections(function).get("Args", "")
    assert [name for name in parameters if not re.search(rf"^ +{name}: \S", args, flags=re.MULTILINE)] == []


def test_the_parameters_of_a_decoder_are_described():
    args = re.findall(r"^    (\w+): \S", sections(specjax.Decoder)["Args"], flags=re.MULTILINE)
    assert args == list(inspect.signature(specjax.Decoder).parameters)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_described(function):
    gives = inspect.signature(function).return_annotation not in ("None", None, inspect.Signature.empty)
    assert ("Returns" in sections(function)) == gives


def raised(thing: Any) -> set[str]:
    """Names of the exceptions that a function makes and raises; of a class, where an instance is made."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    bodies: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef):
        bodies = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in ("__init__", "__post_init__")]
    made = [n.exc for body in bodies for n in ast.walk(body) if isinstance(n, ast.Raise)]
    return {ast.unparse(call.func) for call in made if isinstance(call, ast.Call)}


def test_errors_are_described():
    untold = {}
    for name, thing in public():
        told = sections(thing).get("Raises", "")
        found = set() if isinstance(thing, property) else raised(thing)
        if missing := {error for error in found if f"{error}: " not in told}:
            untold[name] = missing
    assert untold == {}


def fields_described(cls: type) -> set[str]:
    """Fields with a text after them, in the class or a base of it."""
    found = set()
    for base in cls.__mro__[:-1]:
        [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.add(ast.unparse(field.target))
    return found


@pytest.mark.parametrize("name", [n for n in specjax.__all__ if dataclasses.is_dataclass(getattr(specjax, n))])
def test_every_field_is_described(name):
    cls = getattr(specjax, name)
    assert {field.name for field in dataclasses.fields(cls)} - fields_described(cls) == set()


@pytest.mark.parametrize("where", PUBLISHED)
def test_a_published_method_names_its_paper(where):
    module, _, name = where.partition(":")
    cls = getattr(importlib.import_module(module), name)
    assert re.search(ARXIV, cls.__doc__ or "")
    if hasattr(cls, "reference"):
        assert cls.reference in cls.__doc__
