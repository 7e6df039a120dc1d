from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = Path("experiments/notebooks/quickstart.ipynb")


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(ROOT / NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def code(notebook) -> list[ast.Module]:
    """Of the code cells, with what IPython makes of magics."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [ast.parse(TransformerManager().transform_cell(source)) for source in sources]


def test_the_notebook_is_valid_and_holds_no_outputs(notebook):
    nbformat.validate(notebook)
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")


def test_what_the_notebook_imports_from_specjax_is_there(code):
    imports = [node for cell in code for node in ast.walk(cell) if isinstance(node, ast.ImportFrom) and node.module]
    imports = [node for node in imports if str(node.module).startswith("specjax")]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


def test_the_badges_open_this_notebook(notebook):
    for text in ((ROOT / "README.md").read_text(encoding="utf-8"), notebook.cells[0].source):
        assert f"(https://colab.research.google.com/github/specjax/specjax/blob/main/{NOTEBOOK})" in text


@pytest.mark.proof
def test_the_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    """From its own folder, in a tree that looks like the repository, on whose code alone it depends."""
    for name in ("configs", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / NOTEBOOK.parent
    folder.mkdir(parents=True)
    # The kernel's own backend for plots; one device, as a reader has.
    env = {name: value for name, value in os.environ.items() if name not in ("MPLBACKEND", "XLA_FLAGS")}
    env |= {"SPECJAX_QUICKSTART": "small", "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=env)

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    streams = [out for outs in outputs.values() for out in outs if out.output_type == "stream"]
    warned = "".join(out.text for out in streams if out.name == "stderr").splitlines()
    assert all(line.startswith("note: memory: draft-distill: ") for line in warned), warned
    assert len(warned) == 1
    printed = {cell: "".join(out.text for out in outs if out.output_type == "stream") for cell, outs in outputs.items()}
    shown = {cell: [out.data for out in outs if "data" in out] for cell, outs in outputs.items()}
    pages = [data["text/html"] for cell in ("decode", "colours") for data in shown[cell]]
    assert len(pages) == 3
    assert all("<b>" in page and "passes of the target" in page for page in pages)
    (table,) = [data["text/markdown"] for data in shown["compare"]]
    rows = re.findall(r"^\| ([a-z][a-z -]+) \|.* (\d+\.\d\d) \| [\d,]+ / [\d,]+ \| \d+ \|", table, re.MULTILINE)
    assert [name for name, _ in rows] == ["autoregressive", "n-gram lookup", "cut draft", "distilled draft"]
    assert rows[0][1] == "1.00"
    assert [data for data in shown["plot"] if "image/png" in data]
    assert "greedy identity: pass, " in printed["certificate"]
    (out,) = (tmp_path / "runs").iterdir()
    assert f"the distilled draft: {out / 'draft'}\n" in printed["certificate"]
    assert (out / "draft/model.safetensors").exists()


def first_cell(notebook, folder: Path, clone: Callable) -> dict:
    """Runs it in ``folder`` up to where it installs; ``clone`` stands for `subprocess.run`."""
    source = notebook.cells[1].source.partition("\ntry:\n")[0]
    before = Path.cwd()
    names: dict = {}
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "run", clone)
            exec(compile(source, "install", "exec"), names)
    finally:
        os.chdir(before)
    return names


def test_a_clone_that_cannot_be_made_is_one_line_that_offers_the_upload(notebook, tmp_path):
    with pytest.raises(SystemExit) as told:
        first_cell(notebook, tmp_path, lambda *_, **__: subprocess.CompletedProcess([], 128))
    message = str(told.value.code)
    assert "\n" not in message
    for said in ("cannot be cloned", str(tmp_path), "specjax.zip", "run this cell again"):
        assert said in message


def test_an_uploaded_archive_is_unpacked_and_used(notebook, tmp_path):
    target = tmp_path / "made/specjax-1.0/models/demo-target"
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    shutil.make_archive(str(tmp_path / "specjax"), "zip", tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
    names = first_cell(notebook, tmp_path, lambda *_, **__: pytest.fail("nothing is cloned"))
    assert names["root"] == tmp_path / "specjax-1.0"
