"""Docstrings and notes of fields stand alone: each opens with a phrase that has a subject (docs/glossary.md has the
words)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENERS = {"Of", "What", "Whether", "Where", "Which", "When", "How", "See", "That", "Those", "These", "As", "So"}
"""First words that leave it to the reader to find the subject."""


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, and strings that follow the field or constant that they describe."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def opens_badly(text: str) -> bool:
    words = text.split()
    return bool(words) and (words[0].strip(",.:;") in OPENERS or words[:2] == ["The", "same"])


def test_every_text_opens_with_a_subject():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / "specjax").rglob("*.py"))
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8")))
        if text and opens_badly(text)
    ]
    assert not found


def test_a_text_without_a_subject_is_found():
    module = ast.parse('class A:\n    x: int\n    """Those of a block of each of ks."""\n')
    assert [opens_badly(text) for _, text in texts(module)] == [True]
    assert not opens_badly("Seconds of a block at each draft length.")
