"""Imports point one way, and functions stay short (docs/index.md says why)."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specjax import interfaces

PACKAGE = Path(__file__).parents[1] / "specjax"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = (
    *("errors", "registry", "interfaces", "metrics", "backend", "config", "models", "runtime", "proposal", "sampling"),
    *("data", "verifiers", "controllers", "drafters", "decode", "formats", "training", "costs", "evaluation"),
    *("report", "jobs", "cli", "__init__", "__main__", "testing"),
)
"""The rooms from the ground up, folders and single files: each imports from itself and from those before it."""
ALONE = ("errors", "registry", "metrics", "backend")
"""Files that import nothing of ours but errors."""
NAMES_NONE = {"decode": ("drafters", "verifiers", "controllers")}
"""Rooms that know what stands in others by their seams alone: no module of it but its ``base``."""
LONGEST, MOST_PARAMETERS, MOST_FILES = 70, 8, 16
EXCEPTIONS = {
    "cli.commands.generate": "each option of the command is a parameter: that is how typer declares them",
    "cli.commands.export": "likewise",
    "evaluation.references.sampling_logits": "the parameters of a generation, each by its name",
    "models.families.settings.read_decoder": "what a family says of itself, each by its name",
    "formats.__init__.save": "what a directory says of a draft, each by its name",
    "decode.decoder.Decoder.generate": "the arguments of the public contract",
    "decode.decoder.Decoder.stream": "the arguments of the public contract",
}


def imports(file: Path) -> set[str]:
    """Modules of ours that a file imports when it runs, in its functions too, without the package's own name."""
    skipped: set[ast.AST] = set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(ast.walk(node))
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specjax":
            for name in node.names:
                inner = f"{node.module}.{name.name}".removeprefix("specjax.")
                found.add(inner if inner in MODULES else (node.module or "").removeprefix("specjax").lstrip("."))
        elif isinstance(node, ast.Import):
            found |= {n.name.removeprefix("specjax.") for n in node.names if n.name.startswith("specjax.")}
    return found


def module(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module(file): file for file in FILES}
IMPORTS = {name: {n or "__init__" for n in imports(file)} - {name} for name, file in MODULES.items()}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_every_room_has_its_place():
    assert sorted({room(name) for name in MODULES}) == sorted(ORDER)


def test_imports_point_one_way():
    floors = {name: floor for floor, name in enumerate(ORDER)}
    up = {f"{name} imports {m}" for name in MODULES for m in IMPORTS[name] if floors[room(m)] > floors[room(name)]}
    assert not up


def test_no_modules_import_each_other():
    """However many are between them."""
    waiting = {name: set(found) for name, found in IMPORTS.items()}
    while free := {name for name, found in waiting.items() if not found & waiting.keys()}:
        for name in free:
            del waiting[name]
    assert not waiting


@pytest.mark.parametrize("name", ALONE)
def test_what_everything_rests_on_imports_nothing(name):
    assert IMPORTS[name] <= {"errors"}


@pytest.mark.parametrize("name", NAMES_NONE)
def test_a_room_knows_others_by_their_seams(name):
    others = {m for own in MODULES if room(own) == name for m in IMPORTS[own] if room(m) in NAMES_NONE[name]}
    assert others <= {f"{other}.base" for other in NAMES_NONE[name]}


def members() -> set[str]:
    """Names that the abstract bases declare."""
    bases = [x for x in vars(interfaces).values() if isinstance(x, type) and x.__module__.startswith("specjax")]
    bases = [x for x in bases if not dataclasses.is_dataclass(x) and x is not interfaces.Target]
    return {name for base in bases for name in (*vars(base), *base.__annotations__) if not name.startswith("_")}


def test_no_member_of_a_base_is_found_by_its_name():
    """Every base says what its members are: nobody asks whether there is one."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            asks = isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr")
            if asks and isinstance(node.args[1], ast.Constant) and node.args[1].value in members():
                found.add(f"{file.name}:{node.lineno}: {node.args[1].value}")
    assert not found


REPORTS = (
    "jobs/doctor.py",
    "jobs/bench.py",
    "jobs/numerics.py",
    "runtime/compile_cache.py",
    "evaluation/bench.py",
    "report/record.py",
)
"""What names the machine in a report or a path, and decides nothing of a computation by it."""


def test_what_depends_on_the_kind_of_device_is_decided_in_one_place():
    asking = {
        file.relative_to(PACKAGE).as_posix()
        for file in FILES
        if re.search(r"default_backend|\bplatform\b", file.read_text(encoding="utf-8"))
    }
    assert "backend.py" in asking
    assert asking <= {"backend.py", *REPORTS}


def functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    waiting: list[tuple[str, ast.AST]] = [(module, ast.parse(file.read_text(encoding="utf-8")))]
    while waiting:
        name, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
            if isinstance(child, ast.FunctionDef):
                yield inner, child
            waiting.append((inner, child))


def test_functions_are_short_and_take_few_parameters():
    found = {}
    for file in FILES:
        for name, node in functions(file):
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([a for a in arguments if a not in ("self", "cls")])
            lines = (node.end_lineno or 0) - node.lineno + 1
            if (lines > LONGEST or count > MOST_PARAMETERS) and name not in EXCEPTIONS:
                found[name] = f"{lines} lines, {count} parameters"
    assert not found


def test_folders_are_small():
    folders = {file.parent for file in FILES if file.parent.name != "families"}
    crowded = {str(f.relative_to(PACKAGE)): n for f in folders if (n := len(list(f.glob("*.py")))) > MOST_FILES + 1}
    assert not crowded
