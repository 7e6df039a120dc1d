"""Memory that loading a model takes beside its parameters: synthetic sharded Llamas, loaded in fresh processes.

    python experiments/load_memory.py            # 2 GB; about 2 minutes and 5 GB of disk on 2 cores

Prints one line a case: the most anonymous memory that the process had (RssAnon of /proc, in which pages of mapped files
do not count, sampled from outside) less the parameters' own bytes, and what that may be: twice the largest tensor and
0.5 GB, in which JAX itself has to fit. Exit status 1 if a case is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from specjax.models.families import family_of, parameters_of
from specjax.models.families.settings import Settings

GB = 10**9
SLACK = 0.5 * GB
SHARD_BYTES = GB // 4
SAMPLE_SECONDS = 0.002
_ITEM = {"float32": 4, "bfloat16": 2}
_CHILD = """
import json, sys
import jax, specjax
path, dtype, devices = sys.argv[1:]
mesh = None if devices == "1" else jax.make_mesh((int(devices),), ("tensor",))
model = specjax.load_model(path, dtype, mesh=mesh, check_finite=True)
shards = [shard.data for leaf in jax.tree.leaves(model.params) for shard in leaf.addressable_shards]
print(json.dumps(sum(piece.nbytes for piece in shards)))
"""


@dataclasses.dataclass(frozen=True)
class Case:
    stored: str
    loaded: str
    devices: int = 1
    experts: int = 0


CASES = (
    Case("float32", "float32"),
    Case("float32", "bfloat16"),
    Case("bfloat16", "float32"),
    Case("float32", "float32", devices=2),
    Case("float32", "float32", experts=8),
)


def write_model(directory: Path, stored: str, experts: int, total_bytes: float) -> int:
    """A directory with about ``total_bytes`` of weights as float32, in ``stored``; returns the most elements that a
    parameter has."""
    directory.mkdir()
    sizes = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    config = {**sizes, "num_key_value_heads": 16, "tie_word_embeddings": False, "model_type": "llama"}
    if experts:
        config |= {"model_type": "mixtral", "num_local_experts": experts, "intermediate_size": 5632 // experts}
    layer, ends = 4 * 2048**2 + 3 * 2048 * 5632, 2 * 32_000 * 2048
    config["num_hidden_layers"] = max(1, round((total_bytes / 4 - ends) / layer))
    (directory / "config.json").write_text(json.dumps(config))
    family = family_of(config["model_type"], directory)
    parameters = parameters_of(family, family.read_config(Settings(config, directory / "config.json")))
    dtype = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
    rng = np.random.default_rng(0)
    shard, weight_map = {}, {}

    def flush() -> None:
        name = f"part-{len(set(weight_map.values()))}.safetensors"
        save_file(shard, directory / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for slot in (slot for parameter in parameters for slot in parameter.slots):
        shard[slot.name] = rng.random(slot.stored_shape, np.float32).astype(dtype)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(math.prod(parameter.shape) for parameter in parameters)


def load(directory: Path, case: Case) -> tuple[int, int]:
    """(most bytes of anonymous memory, bytes of the parameters) of a process that loads it."""
    flags = f"--xla_force_host_platform_device_count={case.devices}"
    command = [sys.executable, "-c", _CHILD, str(directory), case.loaded, str(case.devices)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0
    while child.poll() is None:
        peak = max(peak, anonymous_memory(child.pid))
        time.sleep(SAMPLE_SECONDS)
    out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(child.returncode)
    return peak, json.loads(out)


def anonymous_memory(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="gigabytes of weights, as float32")
    size = parser.parse_args().gb * GB
    print("stored    loaded    devices  experts  parameters  largest  beside them  may be  seconds")
    over = False
    with tempfile.TemporaryDirectory() as scratch:
        largest = {}
        for case in CASES:
            directory = Path(scratch) / f"{case.stored}-{case.experts}"
            if directory not in largest:
                largest[directory] = write_model(directory, case.stored, case.experts, size)
            start = time.perf_counter()
            peak, own = load(directory, case)
            tensor = largest[directory] * max(_ITEM[case.stored], _ITEM[case.loaded])
            beside, limit = peak - own, 2 * tensor + SLACK
            over |= beside > limit
            figures = f"{own / GB:7.2f} GB {tensor / GB:5.2f} GB {beside / GB:9.2f} GB {limit / GB:4.2f} GB"
            mark = "  OVER" if beside > limit else ""
            case_columns = f"{case.stored:9} {case.loaded:9} {case.devices:7} {case.experts:8}"
            print(f"{case_columns} {figures} {time.perf_counter() - start:8.1f}{mark}", flush=True)
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
