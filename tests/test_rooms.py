"""Imports point one way, and functions stay short (docs/index.md and the design say why)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "specjax"
FILES = sorted(PACKAGE.rglob("*.py"))
NEVER = {
    "": ("testing",),  # shipped code
    "types.py": ("*",),
    "metrics.py": ("*",),
    "backend.py": ("*",),
    "proposal.py": ("drafters", "verifiers", "controllers", "decode", "models", "sampling"),
    "models": ("decode", "distill", "evaluation", "jobs", "drafters", "verifiers", "data", "report"),
    "sampling.py": ("decode", "drafters", "verifiers", "distill", "evaluation"),
    "verifiers": ("decode", "drafters", "distill", "evaluation", "jobs"),
    "controllers": ("decode", "drafters", "verifiers", "distill", "evaluation", "jobs"),
    "drafters": ("decode", "verifiers", "evaluation", "jobs"),
    "decode": ("distill", "evaluation", "jobs", "report", "drafters.draft_model", "drafters.ngram", "controllers"),
    "data": ("distill", "evaluation", "jobs", "report"),
    "evaluation": ("distill", "jobs", "report", "planning"),
    "planning": ("distill", "jobs", "report"),
    "distill": ("jobs", "report", "planning"),
    "report": ("jobs", "distill"),
}
"""Of a room (its files): what it does not import; '*': anything of ours."""
LONGEST, MOST_PARAMETERS, MOST_FILES = 70, 8, 16
EXCEPTIONS = {
    "cli.generate": "each option of the command is a parameter: that is how typer declares them",
    "cli.plan": "likewise",
    "cli.export": "likewise",
    "evaluation.references.sampling_logits": "the parameters of a generation, each by its name",
    "models.families.settings.read_decoder": "what a family says of itself, each by its name",
    "drafters.formats.__init__.save": "what a directory says of a draft, each by its name",
    "decode.decoder.Decoder.generate": "the arguments of the public contract",
    "decode.decoder.Decoder.stream": "the arguments of the public contract",
}


def imports(file: Path) -> Iterator[str]:
    """Names of ours that a file imports when it runs, not for types alone, without the package's own."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(ast.walk(node))
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specjax"):
            for name in node.names:
                yield f"{node.module}.{name.name}".removeprefix("specjax.")
        elif isinstance(node, ast.Import):
            yield from (name.name.removeprefix("specjax.") for name in node.names if name.name.startswith("specjax."))


@pytest.mark.parametrize("room", NEVER)
def test_a_room_does_not_import_what_comes_after_it(room):
    files = [file for file in FILES if file.relative_to(PACKAGE).as_posix().startswith(room)]
    assert files
    if room == "":
        files = [file for file in files if file.relative_to(PACKAGE).parts[0] != "testing"]
    found = {
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files
        for name in imports(file)
        for forbidden in NEVER[room]
        if forbidden == "*" or name == forbidden or name.startswith(f"{forbidden}.")
    }
    assert not found


REPORTS = ("jobs/doctor.py", "jobs/bench.py", "jobs/numerics.py", "runtime/compile_cache.py", "evaluation/bench.py")
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
