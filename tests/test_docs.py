"""What the pages show runs: every block of docs/extending.md, the README's Python with tiny directories in place of the
hub's, and the settings that either writes in YAML."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import specjax
from specjax import registry
from specjax.config import load_config
from specjax.errors import ModelError
from specjax.jobs import inputs
from specjax.models import families
from specjax.models.hf import load_model, save_model
from specjax.training.assemble import assemble
from tests.cases import in_proof

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"# (\w+)\.py\n")


def sections(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Heading -> its blocks, each a language and the code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
        if blocks:
            found[part.partition("\n")[0]] = blocks
    return found


EXTENDING = sections(ROOT / "docs/extending.md")
SEAMS = ("drafter", "tree drafter", "trained drafter", "verifier", "controller", "loss", "model family")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder with the files that the page shows, from which they can be imported, and nothing of them left after."""
    files = [(name[1], code) for blocks in EXTENDING.values() for _, code in blocks if (name := FILE.match(code))]
    for name, code in files:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    yield tmp_path
    for name, _ in files:
        sys.modules.pop(name, None)


def test_every_seam_has_its_section_with_a_file_its_use_and_its_yaml():
    assert list(EXTENDING) == [f"A {name}" for name in SEAMS]
    for heading, blocks in EXTENDING.items():
        assert [language for language, _ in blocks] == ["python", "python", "yaml"], heading
        assert FILE.match(blocks[0][1]), heading


@pytest.mark.parametrize("heading", EXTENDING)
def test_the_code_of_a_section_does_what_it_asserts(heading, theirs):
    for language, code in EXTENDING[heading]:
        if language == "python" and not FILE.match(code):
            assert re.search(r"^ *assert |\.assert_", code, re.MULTILINE)
            exec(compile(code, f"docs/extending.md, {heading}", "exec"), {"__name__": "example"})


WITH_YAML = [
    heading for heading, blocks in EXTENDING.items() if blocks[-1][0] == "yaml" and heading != "A model family"
]


@pytest.mark.parametrize("heading", WITH_YAML)
def test_a_config_takes_the_yaml_of_a_section(heading, theirs):
    text = EXTENDING[heading][-1][1]
    (theirs / "run.yaml").write_text(f"target: {{path: somewhere}}\ndata: {{path: python-stdlib}}\n{text}")
    load_config(theirs / "run.yaml")
    (name,) = {*re.findall(r"\"(my_\w+:\w+)\"", text)}
    assert registry.resolve({}, name, "").__name__ == name.partition(":")[2]


def test_the_target_of_a_config_is_of_the_family_that_it_names(theirs, tiny_target):
    text = EXTENDING["A model family"][-1][1]
    (theirs / "run.yaml").write_text(f"{text}data: {{path: python-stdlib}}\n")
    config = load_config(theirs / "run.yaml")
    assert config.target.family is not None
    mine = families.register(config.target.family)
    save_model(dataclasses.replace(tiny_target, family=mine.model_type), str(config.target.path))
    del families.FAMILIES[mine.model_type]
    with pytest.raises(ModelError, match="is not implemented"):
        load_model(str(config.target.path))
    assert inputs.load_target(assemble(config), str(config.target.path)).family == mine.model_type


@pytest.mark.parametrize("page", ["README.md", in_proof("docs/index.md"), in_proof("docs/decoding.md")])
def test_the_python_that_decodes_a_pair_runs(page, tmp_path, monkeypatch, tiny_target, tiny_draft, capsys):
    (code,) = (code for language, code in blocks_of(page) if language == "python")
    names = re.findall(r"load_(?:model|drafter)\(\"([\w./-]+)\"", code)
    for name, model in zip(names, (tiny_target, tiny_draft), strict=True):
        place = tmp_path / name.replace("/", "-")
        save_model(model, place)
        code = code.replace(f'"{name}"', repr(str(place)))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_config_of_a_page_is_one(page, tmp_path):
    (text,) = (code for language, code in blocks_of(page) if language == "yaml")
    (tmp_path / "draft.yaml").write_text(text)
    config = load_config(tmp_path / "draft.yaml")
    assert config.draft.init["kind"] == "layers"


def test_the_readme_is_short_and_shows_the_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 1400
    for command in ("make test", "make demo", "specjax train"):
        assert command in text
    assert "make test\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_pages_that_others_name_are_there():
    """Errors and docstrings send people to them."""
    named = {
        match
        for folder in ("specjax", "configs", "experiments")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".yaml", ".json", ".ipynb")
        for match in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert "docs/extending.md" in named
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in named:
        assert (ROOT / page).is_file(), page
        assert page.removeprefix("docs/") in navigation, page


def blocks_of(page: str) -> list[tuple[str, str]]:
    return [block for blocks in sections(ROOT / page).values() for block in blocks]


def test_the_public_names_are_on_the_page_of_the_api():
    page = (ROOT / "docs/api/index.md").read_text(encoding="utf-8")
    for name in specjax.__all__:
        assert re.search(rf"^::: specjax\.[\w.]+\.{name}$", page, re.MULTILINE), name
