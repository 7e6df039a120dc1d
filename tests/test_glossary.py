"""Code and pages keep to the words of docs/glossary.md: one word for each thing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.test_plain_words import texts

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"


def banned() -> list[str]:
    """Phrases of the first column of the glossary's second table."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [phrase.strip() for row in rows[1:] for phrase in row.split(",")]


def words() -> list[str]:
    """Words of the first column of the glossary's first table."""
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Words that are not used")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [word.strip() for row in rows[1:] for word in row.split(",")]


def found_in(text: str, phrases: list[str]) -> list[str]:
    return [phrase for phrase in phrases if re.search(rf"\b{re.escape(phrase)}\b", text, flags=re.IGNORECASE)]


def written() -> dict[str, str]:
    """Pages, templates, and every docstring and note of the package, by where they stand."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "specjax").rglob("*.jinja")]
    prose = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages if page != GLOSSARY}
    for file in (ROOT / "specjax").rglob("*.py"):
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            prose[f"{file.relative_to(ROOT)}:{line}"] = " ".join(text.split())
    return prose


def test_one_word_stands_for_one_thing():
    phrases = banned()
    assert len(phrases) >= 8
    assert {where: wrong for where, text in written().items() if (wrong := found_in(text, phrases))} == {}


def test_a_second_word_is_found():
    assert found_in("Alpha at the first Place of a block.", banned()) == ["place of a block"]
    assert not found_in("Alpha at depth 1 of a block.", banned())


def test_every_word_of_the_glossary_is_used():
    prose = " ".join(written().values())
    assert [word for word in words() if not found_in(prose, [word])] == []
