"""Compiled programs kept from one run to the next, in the user's own cache directory: JAX's persistent cache. Turned on
by command lines, never by an import."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

SWITCH = "SPECJAX_COMPILE_CACHE"
_MOST_BYTES = 2 * 10**9
_SECONDS_WORTH_KEEPING = 0.5


def keep_programs(wanted: bool = True) -> Path | None:
    """Load what was compiled before, and keep what takes long to compile; to be called before anything is compiled.

    Returns the directory; None if it is not ``wanted``, `SPECJAX_COMPILE_CACHE=0` is set, the directory cannot be
    used, or JAX was given one already (`JAX_COMPILATION_CACHE_DIR`), which stays. The programs unused for longest are
    removed beyond 2 GB. Whoever can write there can run code as the user, so the directory is private.
    """
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if not wanted or os.environ.get(SWITCH) == "0" or given is not None:
        return None
    try:
        directory = _user_cache() / "specjax" / f"programs-{_machine()}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(directory)
    except (OSError, RuntimeError):  # no home, or a read-only one: compiling takes its time, nothing else
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS_WORTH_KEEPING)
    return directory


def _user_cache() -> Path:
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or default)


def _machine() -> str:
    """Of the processor: a home may be shared by machines that differ, and XLA's programs for CPU are made for one."""
    features = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next(line for line in lines if line.startswith(("flags", "Features")))
    return hashlib.sha256(features.encode()).hexdigest()[:8]


def _remove_oldest(directory: Path) -> None:
    files = sorted(((f.stat().st_atime, f.stat().st_size, f) for f in directory.iterdir()), reverse=True)
    total = 0
    for _, size, file in files:
        total += size
        if total > _MOST_BYTES:
            file.unlink(missing_ok=True)
