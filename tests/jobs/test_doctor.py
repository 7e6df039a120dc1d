from __future__ import annotations

import io
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from specjax.jobs import doctor as job


def told() -> tuple[bool, str]:
    file = io.StringIO()
    whole = job.doctor(Console(file=file, width=120, markup=False))
    return whole, file.getvalue()


def test_it_names_versions_devices_and_what_extras_miss(monkeypatch):
    def installed(name: str) -> str:
        if name in ("wandb", "tensorboardX"):
            raise PackageNotFoundError(name)
        return "3.0" if name == "pyarrow" else version(name)

    monkeypatch.setattr(job, "version", installed)
    whole, text = told()
    assert whole
    for said in (f"jax {version('jax')}", "device 0 cpu (cpu)", "packages all there"):
        assert said in " ".join(text.split())
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "missing: wandb; pip install 'specjax[wandb]'" in lines["extra wandb"]
    assert "missing: tensorboardX; " in lines["extra tensorboard"]
    assert "missing: pyarrow 3.0 (needs >=20); " in lines["extra parquet"]


def test_what_specjax_itself_needs_is_named_and_fails(monkeypatch):
    def installed(name: str) -> str:
        if name == "optax":
            raise PackageNotFoundError(name)
        return "0.1.0" if name == "grain" else version(name)

    monkeypatch.setattr(job, "version", installed)
    whole, text = told()
    assert not whole
    assert "missing: optax, grain 0.1.0 (needs >=0.2.18); pip install specjax" in text
