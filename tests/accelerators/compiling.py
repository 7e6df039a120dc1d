"""Programs compiled for accelerators that are not here, and what their compiled text says: python -m
tests.accelerators.compiling MACHINE DEVICES [NAME ...] prints one JSON line a program. ``--texts DIR`` keeps the texts.

XLA's compilers need no device, only its description and the plugin's wheels (`make compiled` installs them). Nothing is
tuned or timed here. What XLA decides before it tunes is what a device gets: which products it makes, what it fuses,
what it writes out or copies, and the memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = ""
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a program from there could not be read back without its device
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no TPU whose metadata could be asked for
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # and none that two processes would share

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from specjax import backend
from specjax.drafters.base import StatelessDrafter
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.draft_model import BoundDraftModel
from specjax.drafters.eagle3 import Eagle3Model
from specjax.drafters.glide import BoundGlide, GlideModel
from specjax.drafters.ngram import NGram
from specjax.interfaces import Context, Draft, Params, TargetView
from specjax.models import cache as cache_lib
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import abstract_layout, stored_kernels
from specjax.models.kernels.quantised import SCHEMES
from specjax.models.sharding import usable
from specjax.models.transformer import Model
from tests.accelerators.abstract import ALL_EXTRAS, WIDE, Decoding, training
from tests.accelerators.hlo import FREE, Computation, Instruction, Program, Shape

K = 5
NARROW = ModelConfig(
    vocab_size=128_256, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16, num_kv_heads=8,
    head_dim=64, max_positions=2**16, tie_embeddings=True,
)  # fmt: skip
"""Two layers of a draft of a twentieth of the target's weights."""
STUDENT = dataclasses.replace(NARROW, num_layers=1, num_heads=8, head_dim=128)
"""A draft in training, which can also read the target's keys and values."""


# --- machines -------------------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """An accelerator to compile for: ``platform`` as `specjax.backend` names it, and bytes of a device's memory."""

    platform: str
    memory: float
    devices: Callable[[int], list[Any]]


def _gpus(count: int) -> list[Any]:
    description = (Path(__file__).parent / "h100.txtpb").read_text()
    xla_bridge.discover_pjrt_plugins()
    named = {"platform": "cuda", "target_config": description, "topology": f"1x1x{count}"}
    return list(topologies.get_topology_desc(**named).devices)


def _tpus(kind: str, count: int) -> list[Any]:
    bounds = (2, 2, 1) if count <= 4 else (2, 4, 1)
    name = f"{kind}:{bounds[0]}x{bounds[1]}"
    return list(topologies.get_topology_desc(name, "tpu", chips_per_host_bounds=bounds).devices)[:count]


MACHINES = {
    "h100": Machine("cuda", 80e9, _gpus),
    "v5e": Machine("tpu", 16e9, functools.partial(_tpus, "v5e")),
    "v6e": Machine("tpu", 32e9, functools.partial(_tpus, "v6e")),
}


# --- programs -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Branches(StatelessDrafter):
    """Drafter of a tree of seven tokens, two continuations of each, which costs nothing itself."""

    k: int = 3
    kind: str = "branches"

    @property
    def max_depth(self) -> int:
        return 3

    @property
    def num_nodes(self) -> int:
        return 7

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        batch = len(context.lengths)
        number = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32)[None], (batch, 7))
        root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        return Draft(root + number, number >= 0, None, number // 2, max_depth=3), state


LEFT_OUT = {
    ("cuda", 1): {"training step glide", "prefill in pieces", "n-gram, int8"},
    ("cuda", 8): {"training step glide"},
    ("tpu", 1): {
        *("prefill in pieces", "draft model, 1 layer", "draft model, 16 rows", "draft model, 16 rows, sampled"),
        *("draft model, 16 rows, int8 cache", "n-gram, int8", "dflash", "training step draft", "training step glide"),
    },
    ("tpu", 8): {"draft model, 16 rows", "training step glide"},
}
"""Programs that a compiler takes long for, and in which it shows nothing that others do not."""


def decoding(mesh: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    """(name, jitted function, abstract arguments). A batch is of one row unless its name says otherwise."""
    wide = Model(WIDE, "bfloat16")
    long = {"batch": 16, "prompt": 2048, "slots": 4096, "mesh": mesh}
    one = {"batch": 1, "prompt": 128, "slots": 512, "mesh": mesh}
    narrow = abstract_layout(Model(NARROW, "bfloat16"), mesh)
    draft = (BoundDraftModel(narrow[0], K), narrow[1])
    target = abstract_layout(wide, mesh)
    yield "prefill", *Decoding(*target, **long).prefill()
    if mesh is not None:
        yield "plain, 16 rows", *Decoding(*target, **long).chunk()
        yield "draft model, 16 rows", *Decoding(*target, *draft, **long).chunk()
        return
    yield "prefill in pieces", *Decoding(*target, **long).prefill(512)
    yield "plain", *Decoding(*target, **one).chunk()
    shallow = abstract_layout(Model(dataclasses.replace(WIDE, num_layers=1), "bfloat16"))
    yield "plain, 1 layer", *Decoding(*shallow, **one).chunk()
    yield "plain, 16 rows", *Decoding(*target, **long).chunk()
    yield "draft model", *Decoding(*target, *draft, **one).chunk()
    less = abstract_layout(Model(dataclasses.replace(NARROW, num_layers=1), "bfloat16"))
    yield "draft model, 1 layer", *Decoding(*target, BoundDraftModel(less[0], K), less[1], **one).chunk()
    yield "draft model, 16 rows", *Decoding(*target, *draft, **long).chunk()
    sampled = Decoding(*target, *draft, greedy=False, extras=ALL_EXTRAS, **long)
    yield "draft model, 16 rows, sampled", *sampled.chunk()
    for scheme in SCHEMES:
        few = abstract_layout(wide, scheme=SCHEMES[scheme])
        yield f"plain, {scheme}", *Decoding(*few, **one).chunk()
        yield f"n-gram, {scheme}", *Decoding(*few, NGram(K), {}, **one).chunk()
    small = abstract_layout(dataclasses.replace(wide, cache_dtype="int8"))
    yield "plain, 16 rows, int8 cache", *Decoding(*small, **long).chunk()
    yield "draft model, 16 rows, int8 cache", *Decoding(*small, *draft, **long).chunk()
    yield "tree, 16 rows", *Decoding(*target, Branches(), {}, **long).chunk()
    for name, (drafter, own) in _readers().items():
        yield name, *Decoding(*target, drafter, own, **one).chunk()


def _readers() -> dict[str, tuple[Any, Params]]:
    """Drafts that read the target, of one layer as wide as its own."""
    single = dataclasses.replace(WIDE, num_layers=1)
    spec, own = abstract_layout(Model(single, "bfloat16"))
    found: dict[str, tuple[Any, Params]] = {"glide": (BoundGlide(GlideModel(spec, (1,)), K), own)}
    for model in (
        Eagle3Model(single, (0, 1, 2), WIDE.hidden_size, "bfloat16"),
        DFlashModel(single, (0, 1, 2), WIDE.hidden_size, "bfloat16", slots=K + 1),
    ):
        weights = jax.eval_shape(lambda spec=model: stored_kernels(spec, spec.init(jax.random.key(0))))
        found[model.kind] = model.decoding(K), weights
    return found


def every_program(mesh: Mesh | None, trained: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    """Programs of decoding and training; one is made only when it is asked for."""
    yield from decoding(mesh)
    yield from (program for program in training(trained, STUDENT) if program[0].startswith("training step"))


# --- what the compiled text says ------------------------------------------------------------------------------------


def reading(program: Program, compiled: Any, arguments: tuple, decodes: bool, platform: str) -> dict[str, Any]:
    """Figures of a compiled program, of one block if it ``decodes``, and then the instructions that write or read a
    weight or a cache as they should not."""
    loop = _decoding_loop(program) if decodes else None
    body = program.entry if loop is None else program.body(loop)
    run = list(program.run(body))
    found: dict[str, Any] = {
        "temporaries": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "instructions": sum(times for _, _, times in run),
    }
    if platform == "tpu":
        found["cycles"] = sum(x.cycles * times for _, x, times in run)
    elif decodes:
        # A loop whose rounds XLA does not know asks the host before each of them.
        found["host syncs"] = 1 + sum(inner.trip_count is None for inner in program.loops(body))
    if decodes:
        weights, caches = _forms(arguments[0]), _forms(_caches(arguments[1]))
        before = (x for x in program.entry.instructions.values() if x.opcode not in FREE)
        written = [x for c, x, _ in run if _writes(program, c, x, weights | caches)]
        written += [x for x in before if _writes(program, program.entry, x, weights)]
        found["written"] = sorted({f"{x.name} {_text(x)}" for x in written})
        found["read badly"] = sorted({_badly(program, c, x, weights) for c, x, _ in run} - {""})
    return found


def _text(instruction: Instruction) -> str:
    return ", ".join(f"{x.dtype}{list(x.dims)}" for x in instruction.results)


def _decoding_loop(program: Program) -> Instruction | None:
    """The loop over blocks: of the entry's loops the one that runs most."""
    loops = [x for x in program.entry.instructions.values() if x.opcode == "while"]
    return max(loops, key=lambda x: sum(1 for _ in program.run(program.body(x))), default=None)


def _caches(state: Any) -> list[Any]:
    """Keys and values of all caches, without scales."""
    found = [x for x in jax.tree.leaves(state, is_leaf=cache_lib.is_cache) if cache_lib.is_cache(x)]
    return [leaf for cache in found for leaf in jax.tree.leaves(cache.layers) if leaf.ndim == 4]


LEAST = 2**19
"""Fewest elements of an array that counts as a weight or a cache."""
Forms = frozenset[tuple[int, ...]]


def _forms(tree: Any) -> Forms:
    """Sizes of the matrices in a tree on one device, ascending: as they are and with folded axes, rows and heads of a
    cache, or groups and inputs of a quantised weight."""
    found = set()
    for x in jax.tree.leaves(tree):
        if x.dtype == jnp.float32:  # a scale or a norm
            continue
        dims = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        if len(dims) > 1 and math.prod(dims) >= LEAST:
            folded = {2: dims, 3: (dims[0] * dims[-1], *dims[1:-1]), 4: (math.prod(dims[:2]), *dims[2:])}[len(dims)]
            found |= {_sorted(dims), _sorted(folded)}
    return frozenset(found)


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(d for d in dims if d > 1))


def _writes(program: Program, computation: Computation, x: Instruction, forms: Forms) -> bool:
    """True if an instruction writes a weight or a cache to the main memory, whole or a large part of what it reads of
    it, without a product or a sum."""
    if program.writes_in_place(x):
        return False
    far = [shape for shape in _made(x) if not shape.space]
    if any(_is_one_of(shape, forms) for shape in far):
        return True
    if sum(shape.size for shape in far) <= 2 * LEAST or program.opcodes(x) & {*PRODUCTS, "reduce"}:
        return False
    return any(_is_one_of(shape, forms) for shape in computation.shapes_read(x))


def _made(x: Instruction) -> tuple[Shape, ...]:
    """Arrays that an instruction writes. Of what goes on beside other work, results also name what is read."""
    if x.opcode == "copy-start":
        destination, source = x.results[:2]
        return () if source.space else (destination,)  # what was changed in a nearer memory goes back
    return x.results[1:2] if x.opcode.endswith("-start") else x.results


def _is_one_of(shape: Shape, forms: Forms) -> bool:
    return _sorted(shape.dims) in forms


PRODUCTS = frozenset({"dot", "convolution", "custom-call"})
READERS = frozenset({*PRODUCTS, "gather", "dynamic-slice", "copy-start", "slice-start"})
"""Opcodes that multiply with a weight, or take rows of it, or move it to a nearer memory."""


def _badly(program: Program, computation: Computation, x: Instruction, weights: Forms) -> str:
    """An instruction that reads a weight without a product or taking rows of it; empty: none."""
    read = [s for s in computation.shapes_read(x) if not s.space and _is_one_of(s, weights)]
    if not read or program.opcodes(x) & READERS or program.writes_in_place(x):
        return ""
    return f"{x.name} {_text(x)} <- {read[0].dtype}{list(read[0].dims)}"


# --- main -----------------------------------------------------------------------------------------------------------


def compile_for(machine: str, devices: int, only: list[str], texts: Path | None) -> Iterator[dict[str, Any]]:
    """Readings of all programs."""
    kind = MACHINES[machine]
    found = kind.devices(devices)
    mesh = trained = None
    default: Any = jax.sharding.SingleDeviceSharding(found[0])
    if devices > 1:
        mesh = usable(Mesh(np.array(found).reshape(2, 4), ("data", "tensor")))
        trained = usable(Mesh(np.array(found).reshape(2, 2, 2), ("data", "fsdp", "tensor")))
    with backend.lowering_for(kind.platform, kind.memory):
        for name, jitted, arguments in every_program(mesh, trained):
            if name not in only if only else name in LEFT_OUT[kind.platform, devices]:
                continue
            over = trained if name.startswith("training") else mesh
            lies = default if over is None else jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec())
            began = time.perf_counter()
            compiled = jitted.lower(*jax.tree.map(functools.partial(_placed, lies=lies), arguments)).compile()
            seconds = round(time.perf_counter() - began, 1)
            text = compiled.as_text()
            if texts is not None:
                texts.mkdir(parents=True, exist_ok=True)
                (texts / f"{machine}_{devices}_{name.replace(', ', '-').replace(' ', '_')}.txt").write_text(text)
            decodes = not name.startswith(("training", "prefill"))
            figures = reading(Program(text), compiled, arguments, decodes, kind.platform)
            yield {"name": name, "seconds": seconds, **figures}


def _placed(x: Any, lies: Any) -> Any:
    return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", choices=[*MACHINES])
    parser.add_argument("devices", type=int, choices=[1, 8])
    parser.add_argument("only", nargs="*")
    parser.add_argument("--texts", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for entry in compile_for(args.machine, args.devices, args.only, args.texts):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
