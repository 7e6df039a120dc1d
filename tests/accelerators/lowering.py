"""Every jitted entry point lowered for an accelerator from abstract weights, bfloat16, widths as those of a model of 8B
and 2 layers: python -m tests.accelerators.lowering PLATFORM DEVICES ..., on one device or on eight. Prints one JSON
line an entry point."""

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
from jax.sharding import Mesh

from specjax import backend
from specjax.decode import programs, scheduler
from specjax.decode.engine import NoDraft
from specjax.drafters.draft_model import BoundDraftModel
from specjax.drafters.glide import BoundGlide, GlideModel
from specjax.drafters.ngram import NGram
from specjax.models.attention.stored import Sliding
from specjax.models.config import LayerKind
from specjax.models.decode_layout import abstract_layout
from specjax.models.sharding import usable
from specjax.models.transformer import Model
from tests.accelerators.abstract import ALL_EXTRAS, WIDE, Decoding, shape, training

SMALL = dataclasses.replace(WIDE, num_layers=1)
K, WINDOW = 4, 512


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
        run = Decoding(target, params, drafter, draft_params, greedy=greedy, extras=ALL_EXTRAS, mesh=mesh)
        for piece in (None, 512) if name == "plain" else (512,):
            yield f"prefill {name} {piece or ''}".strip(), *run.prefill(piece)
        yield f"chunk {name}", *run.chunk()
        if name == "draft":
            state = run.state()
            yield "grow", jax.jit(lambda state, slots=2 * run.slots: programs.grow(state, slots)), (state,)
            yield "insert", scheduler._inserted, (state, state, shape(run.batch))


def small_caches(mesh: Mesh | None) -> Iterator[tuple[str, Any, tuple]]:
    """Layers that hold no more than their window, in 8 bits, and that have slid."""
    kinds = tuple(LayerKind(WIDE.layers[0].rope, window) for window in (WINDOW, None))
    model = dataclasses.replace(Model(dataclasses.replace(WIDE, layers=kinds), "bfloat16"), cache_dtype="int8")
    run = Decoding(*abstract_layout(model, mesh), mesh=mesh)
    yield "prefill small caches", *run.prefill(64)
    state = run.state(64)
    assert any(isinstance(layer, Sliding) for layer in state.cache.layers)
    yield "chunk small caches", *run.chunk(64)
    yield "slide", jax.jit(programs.slide), (state,)


CUDNN = "__cudnn$fmha"
ITS_CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"{CUDNN}{masked}Softmax{backward}")
    for masked in ("", "ScaleBias")
    for backward in ("", "Backward")
]


def with_cudnn() -> None:
    """Tell JAX of a cuDNN: whether its attention is used is then asked of the arrays alone. It is not called."""
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91200


def main() -> None:
    with_cudnn()
    machines = iter(sys.argv[1:])
    for platform, devices in zip(machines, machines, strict=True):
        lower(platform, int(devices))


def lower(platform: str, devices: int) -> None:
    axes = {"data": 2, "tensor": 4}
    mesh = None if devices == 1 else usable(jax.make_mesh(tuple(axes.values()), tuple(axes)))
    trained = None if devices == 1 else usable(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor")))
    with backend.lowering_for(platform):
        for name, jitted, arguments in (*decoding(mesh), *small_caches(mesh), *training(trained, SMALL)):
            exported = jax.export.export(jitted, platforms=[platform], disabled_checks=ITS_CALLS)(*arguments)
            text = exported.mlir_module()
            calls = sorted(set(re.findall(r"custom_call @([\w$]+)", text)))
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
