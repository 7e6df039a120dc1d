"""`specjax doctor`: list versions and devices of this installation, and the packages that each extra lacks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

PACKAGE = "specjax"
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers", "grain", "numpy")
NO_EXTRAS_OF_USERS = ("dev", "docs", "test")


def doctor(console: Console) -> bool:
    """Print versions, devices with their memory, the compile cache, and the extras. Returns True if no package is
    missing that specjax itself needs."""
    table = Table.grid(padding=(0, 2))
    for name, value in [*_machine(), *_devices(), ("compile cache", _compile_cache())]:
        table.add_row(name, value)
    needed = [*missing(PACKAGE)]
    table.add_row("packages", "all there" if not needed else f"missing: {', '.join(needed)}; pip install {PACKAGE}")
    for extra in sorted(distribution(PACKAGE).metadata.get_all("Provides-Extra") or ()):
        if extra not in NO_EXTRAS_OF_USERS:
            absent = [*missing(PACKAGE, extra)]
            state = f"missing: {', '.join(absent)}; pip install '{PACKAGE}[{extra}]'" if absent else "there"
            table.add_row(f"extra {extra}", state)
    console.print(table)
    return not needed


def missing(package: str, extra: str = "") -> Iterator[str]:
    """Packages that ``package``, or only its ``extra``, needs and that are absent or of an unsuitable version."""
    for text in distribution(package).requires or ():
        needed = Requirement(text)
        of_extra = "extra" in str(needed.marker)
        if of_extra != bool(extra) or (needed.marker is not None and not needed.marker.evaluate({"extra": extra})):
            continue
        try:
            found = version(needed.name)
        except PackageNotFoundError:
            yield needed.name
            continue
        if not needed.specifier.contains(found, prereleases=True):
            yield f"{needed.name} {found} (needs {needed.specifier})"
        for inner in needed.extras:
            yield from missing(needed.name, inner)


def _machine() -> Iterator[tuple[str, str]]:
    yield PACKAGE, f"{version(PACKAGE)}, Python {platform.python_version()}, {platform.platform()}"
    yield "cores", str(os.cpu_count())
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        whole, free = (os.sysconf(name) * page / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
        yield "memory", f"{whole:.1f} GB, {free:.1f} GB free"
    for name in SHOWN:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "missing"


def _devices() -> Iterator[tuple[str, str]]:
    import jax

    for device in jax.devices():
        stats = device.memory_stats() or {}
        memory = f", {stats['bytes_limit'] / 1e9:.1f} GB for JAX" if "bytes_limit" in stats else ""
        yield f"device {device.id}", f"{device.device_kind} ({device.platform}){memory}"


def _compile_cache() -> str:
    from specjax.runtime.compile_cache import SWITCH, keep_programs

    directory = keep_programs()
    if directory is None:
        return f"off ({SWITCH}=0, JAX's own JAX_COMPILATION_CACHE_DIR, or no place to write)"
    files = [file for file in directory.rglob("*") if file.is_file()]
    return f"{directory}: {len(files):,} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
