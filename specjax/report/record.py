"""Header of a file of results: the command that makes it again, the date and the machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.models.files import plain_json, write_atomically


def command() -> str:
    """The command line of this process, as a user types it."""
    program = Path(sys.argv[0])
    return shlex.join(["python", *sys.argv] if program.suffix == ".py" else [program.name, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Processor, cores, memory, and the versions of Python and JAX with its device."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def write(file: Path, found: Mapping[str, Any]) -> None:
    """``found`` as JSON, in place of what was there."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    whole = {"command": command(), "date": date, "machine": machine(), **found}
    write_atomically(file, json.dumps(whole, indent=1, default=plain_json) + "\n")
