"""Every jitted entry point lowered for an accelerator from abstract weights, bfloat16, widths as those of a model of 8B
and 2 layers: python -m tests.lowering PLATFORM DEVICES ..., on one device or on eight. Prints one JSON line an entry
point."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from specjax import backend
from specjax.controllers.fixed import Fixed
from specjax.decode import programs, scheduler
from specjax.decode.engine import Engine, EngineParams, NoDraft
from specjax.decode.programs import Request, compiled_chunk, compiled_prefill
from specjax.drafters.draft_model import BoundDraftModel, TrainedDraftModel
from specjax.drafters.glide import BoundGlide, GlideModel, TrainedGlide
from specjax.drafters.ngram import NGram
from specjax.interfaces import Batch, Reads, TrainingForm
from specjax.models import cache as cache_lib
from specjax.models.attention.stored import Sliding
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.decode_layout import abstract_layout
from specjax.models.sharding import ROWS as ROWS_AXES
from specjax.models.sharding import spec_of, usable
from specjax.models.transformer import Model
from specjax.testing.toys import neutral_sampling
from specjax.training import evaluate, teacher_cache
from specjax.training.layout import Layout
from specjax.training.losses import ForwardKL
from specjax.training.step import TrainState, Update
from specjax.verifiers.greedy import Greedy
from specjax.verifiers.speculative import Speculative

WIDE = ModelConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8,
    head_dim=128, max_positions=2**16, tie_embeddings=False,
)  # fmt: skip
SMALL = dataclasses.replace(WIDE, num_layers=1)
BATCH, PROMPT, SLOTS, K, WINDOW = 8, 1024, 2048, 4, 512
ROWS, LENGTH = 8, 1024


def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def request() -> Any:
    """Abstract, of full rows."""
    sampling = jax.eval_shape(lambda: neutral_sampling(BATCH, WIDE.vocab_size))
    rows = shape(BATCH)
    return Request(shape(BATCH, PROMPT), rows, rows, sampling, shape(BATCH, 2, dtype=jnp.uint32), shape(BATCH, 8))


def decoding(mesh: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    """(name, jitted function, abstract arguments)."""
    target, params = abstract_layout(Model(WIDE, "bfloat16"), mesh)
    small, own = abstract_layout(Model(SMALL, "bfloat16"), mesh)
    drafts = {
        "plain": (NoDraft(), {}),
        "ngram": (NGram(K), {}),
        "draft": (BoundDraftModel(small, K), own),
        "glide": (BoundGlide(GlideModel(small, (1,)), K), own),
    }
    for name, (drafter, draft_params) in drafts.items():
        greedy = name in ("plain", "draft")
        extras = () if greedy else ("penalties", "top_k", "top_p", "min_p")
        verifier = Greedy() if greedy else Speculative()
        engine = Engine(target, drafter, verifier, greedy, controller=Fixed(), extras=extras)
        weights = EngineParams(params, draft_params)
        for piece in (None, 512) if name == "plain" else (512,):
            prefill = compiled_prefill(target, drafter, SLOTS, False, Fixed(), piece)
            yield f"prefill {name} {piece or ''}".strip(), prefill, (weights, request())
        state = jax.eval_shape(compiled_prefill(target, drafter, SLOTS, False, Fixed(), 512), weights, request())
        state = state if mesh is None else as_it_lies(state, mesh)
        yield f"chunk {name}", compiled_chunk(engine), (weights, state, shape())
        if name == "draft":
            yield "grow", jax.jit(lambda state: programs.grow(state, 2 * SLOTS)), (state,)
            yield "insert", scheduler._inserted, (state, state, shape(BATCH))


def small_caches(mesh: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    """Layers that hold no more than their window, in 8 bits, and that have slid."""
    kinds = tuple(LayerKind(WIDE.layers[0].rope, window) for window in (WINDOW, None))
    model = dataclasses.replace(Model(dataclasses.replace(WIDE, layers=kinds), "bfloat16"), cache_dtype="int8")
    target, params = abstract_layout(model, mesh)
    weights = EngineParams(params, {})
    engine = Engine(target, NoDraft(), Greedy(), True, controller=Fixed())
    prefill = compiled_prefill(target, NoDraft(), SLOTS, False, Fixed(), 64)
    yield "prefill small caches", prefill, (weights, request())
    state = jax.eval_shape(prefill, weights, request())
    assert any(isinstance(layer, Sliding) for layer in state.cache.layers)
    state = state if mesh is None else as_it_lies(state, mesh)
    yield "chunk small caches", compiled_chunk(engine), (weights, state, shape())
    yield "slide", jax.jit(programs.slide), (state,)


def as_it_lies(state: Any, mesh: Mesh) -> Any:
    """Caches by rows and heads, all else whole on every device."""

    def placed(x: Any, *axes: Any) -> Any:
        sharding = NamedSharding(mesh, spec_of(x.shape, mesh, *axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def of(x: Any) -> Any:
        if not cache_lib.is_cache(x):
            return placed(x)
        axes = ROWS_AXES, "tensor"
        return dataclasses.replace(x, layers=jax.tree.map(lambda leaf: placed(leaf, *axes[: leaf.ndim]), x.layers))

    return jax.tree.map(of, state, is_leaf=cache_lib.is_cache)


def training(mesh: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    layout = Layout(mesh)
    form = TrainingForm(remat=True, dtype="bfloat16")
    teacher, rows = Model(WIDE, "bfloat16"), layout.rows()

    def of_batch(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows)

    ids = of_batch(ROWS, LENGTH)
    batch: Any = Batch(ids, ids, of_batch(ROWS, LENGTH, dtype=jnp.float32), ids, ids)
    target, placed = abstract(teacher, layout.of_target, teacher), layout.model(teacher)
    optimizer = optax.adamw(1e-4)
    drafts = {"draft": TrainedDraftModel(Model(SMALL)), "glide": TrainedGlide(GlideModel(Model(SMALL), (1,)))}
    for name, drafter in drafts.items():
        own = abstract(Model(SMALL), layout.of_draft, drafter)
        state = jax.eval_shape(lambda params: TrainState(params, optimizer.init(params)), own)
        if mesh is not None:
            lies = layout.of_draft(state, drafter)
            state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, lies)
        update = Update(drafter, ForwardKL(), optimizer, teacher, ROWS, form=form, layout=layout)
        yield f"training step {name}", update.jitted(state), (state, target, batch, {})
        of_target = _static(evaluate._target_output, placed, getattr(drafter, "reads", Reads()))
        out = jax.eval_shape(of_target, target, batch)
        yield (
            f"evaluation {name}",
            _static(evaluate._sums, drafter.in_training(layout.form()), placed, None),
            (own, target, out, batch),
        )
    yield "teacher's pass", _static(evaluate._target_output, placed, Reads()), (target, batch)
    best = jax.jit(lambda t, b, n: teacher_cache._best(placed, None, t, b, n, 64))
    yield "teacher's best", best, (target, batch, shape(ROWS))


def abstract(model: Model, place: Any, who: Any) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    lies = place(shapes, who)
    if lies is None:
        return shapes
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, lies)


def _static(jitted: Any, *first: Any) -> Any:
    return jax.jit(lambda *rest: jitted(*first, *rest))


def main() -> None:
    machines = iter(sys.argv[1:])
    for platform, devices in zip(machines, machines, strict=True):
        lower(platform, int(devices))


def lower(platform: str, devices: int) -> None:
    axes = {"data": 2, "tensor": 4}
    mesh = None if devices == 1 else usable(jax.make_mesh(tuple(axes.values()), tuple(axes)))
    trained = None if devices == 1 else usable(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor")))
    with backend.lowering_for(platform):
        for name, jitted, arguments in (*decoding(mesh), *small_caches(mesh), *training(trained)):
            exported = jax.export.export(jitted, platforms=[platform])(*arguments)
            text = exported.mlir_module()
            calls = sorted(set(re.findall(r"custom_call @(\w+)", text)))
            entry = {
                "platform": platform,
                "name": name,
                "devices": exported.nr_devices,
                "custom_calls": calls,
                "size": len(text),
            }
            print(json.dumps(entry), flush=True)
        programs.free_programs()
        jax.clear_caches()


if __name__ == "__main__":
    main()
