"""What `specjax plan --memory` says beside what XLA counts for the compiled programs: a step of distillation, and the
prefill and the blocks of a generation, of targets of 1, 8 and 32 billion parameters on 1 and on 8 devices. From
abstract weights: nothing is run, and nothing allocated.

    python experiments/memory_plan.py [--targets 1B 8B 32B] [--devices 1 8] [--sizes fitted|other] \
        [--results FILE]    (8 minutes on 2 cores)

In float32, since XLA for CPU makes bfloat16 products in float32, and with the schedule that saves memory, as those for
accelerators do.
"""

from __future__ import annotations

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]
)

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record
from jax.sharding import Mesh, NamedSharding

from specjax.controllers.fixed import Fixed
from specjax.decode.engine import Engine, EngineParams
from specjax.decode.programs import compiled_chunk, compiled_prefill, free_programs
from specjax.decode.request import padded_sizes, request_shapes
from specjax.distill.losses import ForwardKL
from specjax.distill.step import TrainState, Update
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.drafters.glide import BoundGlide, GlideModel, TrainedGlide
from specjax.models import cache as cache_lib
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import abstract_layout
from specjax.models.sharding import ROWS, spec_of, usable
from specjax.models.transformer import Model
from specjax.planning import memory
from specjax.planning.memory import Split, TrainingShape, bytes_on_device, gib
from specjax.runtime.layout import Layout
from specjax.types import Batch, TrainingForm
from specjax.verifiers.speculative import Speculative

TARGETS = {
    "1B": ModelConfig(128_256, 2048, 8192, 16, 32, 8, 64, max_positions=2**17, tie_embeddings=True),
    "8B": ModelConfig(128_256, 4096, 14336, 32, 32, 8, 128, max_positions=2**17, tie_embeddings=False),
    "32B": ModelConfig(152_064, 5120, 25600, 64, 64, 8, 128, max_positions=2**17, tie_embeddings=False),
}
HALF = ModelConfig(128_256, 1024, 3072, 28, 16, 8, 128, max_positions=2**17, tie_embeddings=True)
"""As a draft of half a billion parameters."""
NEW, K = 1000, 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of a generation and the tokens of its prompts, rows of a batch and its tokens."""

    decoded: int
    prompt: int
    trained: int
    length: int


SIZES = {"fitted": Sizes(8, 1024, 8, 2048), "other": Sizes(2, 8000, 2, 4096)}
"""The counts of arrays in `specjax.planning.memory` were chosen at the first; the second were not looked at before."""


def counted(compiled: Any) -> int:
    """Bytes on a device at the peak: the state that a program is given is where it leaves the next."""
    found = compiled.memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + found.temp_size_in_bytes + outputs


def decoding(config: ModelConfig, sizes: Sizes, devices: int) -> Iterator[tuple[str, memory.Footprint, int]]:
    """With a draft of one layer that reads its target."""
    mesh = usable(jax.make_mesh((1, devices), ("data", "tensor"))) if devices > 1 else None
    target, params = abstract_layout(Model(config), mesh)
    small, own = abstract_layout(Model(dataclasses.replace(config, num_layers=1)), mesh)
    drafter = BoundGlide(GlideModel(small, (1,)), K)
    engine = Engine(target, drafter, Speculative(), False, controller=Fixed())
    weights = EngineParams(params, own)
    rows, width, (*_, slots) = padded_sizes(target, K, sizes.decoded, sizes.prompt, NEW)
    request = request_shapes(rows, width, config.vocab_size)
    prefill = compiled_prefill(target, drafter, slots, False, Fixed())
    state = jax.eval_shape(prefill, weights, request)
    state = state if mesh is None else as_it_lies(state, mesh)
    steps: Any = jax.ShapeDtypeStruct((), jnp.int32)
    peak = counted(prefill.lower(weights, request).compile())
    peak = max(peak, counted(compiled_chunk(engine).lower(weights, state, steps).compile()))
    held = {"target": bytes_on_device(params), "draft": bytes_on_device(own)}
    split = Split(tensor=devices)
    yield "decoding", memory.decoding(engine, held, sizes.decoded, sizes.prompt, NEW, split), peak
    free_programs()


def as_it_lies(state: Any, mesh: Mesh) -> Any:
    """Caches by rows and heads, all else whole on every device."""

    def placed(x: Any, *axes: Any) -> Any:
        sharding = NamedSharding(mesh, spec_of(x.shape, mesh, *axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def of(x: Any) -> Any:
        if not cache_lib.is_cache(x):
            return placed(x)
        return dataclasses.replace(x, layers=jax.tree.map(lambda leaf: placed(leaf, ROWS, "tensor"), x.layers))

    return jax.tree.map(of, state, is_leaf=cache_lib.is_cache)


def training(config: ModelConfig, sizes: Sizes, devices: int) -> Iterator[tuple[str, memory.Footprint, int]]:
    """A draft of half a billion parameters, and one of a layer that reads its target."""
    mesh = usable(jax.make_mesh((1, devices, 1), ("data", "fsdp", "tensor"))) if devices > 1 else None
    layout, teacher, optimizer = Layout(mesh), Model(config), optax.adamw(1e-4)
    target = placed(jax.eval_shape(teacher.init, jax.random.key(0)), layout.of_target, teacher)
    half = Model(dataclasses.replace(HALF, vocab_size=config.vocab_size))
    one = Model(dataclasses.replace(config, num_layers=1))
    drafts = {"distillation, draft of 0.5B": TrainedDraftModel(half)}
    drafts |= {"distillation, glide of a layer": TrainedGlide(GlideModel(one, (1,)))}
    rows = layout.rows()

    def ids(dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((sizes.trained, sizes.length), dtype, sharding=rows)

    batch = Batch(ids(), ids(), ids(jnp.float32), ids(), ids())
    for name, drafter in drafts.items():
        model = half if isinstance(drafter, TrainedDraftModel) else one
        own = placed(jax.eval_shape(model.init, jax.random.key(0)), layout.of_draft, drafter)
        state = placed(jax.eval_shape(lambda p: TrainState(p, optimizer.init(p)), own), layout.of_draft, drafter)
        update = Update(drafter, ForwardKL(), optimizer, teacher, sizes.trained, form=TrainingForm(True), layout=layout)
        peak = counted(update.jitted(state).lower(state, target, batch, {}).compile())
        depths = getattr(drafter, "depths", 1)
        shape = TrainingShape(
            model.config, own, state, config, target, sizes.trained, 1, sizes.length, 4, 4, depths, remat=True
        )
        yield name, memory.training(name, shape, Split(rows=devices, fsdp=devices)), peak


def placed(tree: Any, place: Any, who: Any) -> Any:
    lies = place(tree, who)
    if lies is None:
        return tree
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, lies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 8], choices=[1, 2, 4, 8])
    parser.add_argument("--sizes", default="fitted", choices=[*SIZES])
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    found = {}
    print(f"{'target':<8}{'devices':<9}{'program':<34}{'planned':>12}{'counted':>12}{'error':>8}")
    for name in args.targets:
        for devices in args.devices:
            for make in (decoding, training):
                for program, plan, peak in make(TARGETS[name], SIZES[args.sizes], devices):
                    error = plan.total / peak - 1
                    shown = f"{name:<8}{devices:<9}{program:<34}{gib(plan.total):>12}{gib(peak):>12}{error:>8.1%}"
                    print(shown, flush=True)
                    found[f"{name}, {devices} devices, {program}"] = {
                        "planned": plan.to_json(),
                        "counted": peak,
                        "error": error,
                    }
    if args.results:
        record.write(args.results, found)


if __name__ == "__main__":
    main()
