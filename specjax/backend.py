"""Everything that depends on the kind of device, in one place: how weights are laid out for decoding, how
programs are compiled, how the host keeps memory. Nothing here changes a result beyond the order of a sum."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys

import jax
import jax.numpy as jnp

from specjax.models.transformer import Model
from specjax.types import Params


def decode_layout(spec, params: Params) -> tuple:
    """(spec, params) laid out for decoding.

    Projections that read the same input become one kernel. A tied head is untied into its own copy, laid out as the
    other kernels are. On CPU kernels are transposed, see `Linear`: XLA's matrix product packs the kernel anew in every
    call, which costs twice the reading of it, and `few_rows_product` does not (2-3x for 2 to 8 tokens; for one token it
    is as fast as the best matrix-vector product).
    """
    if not isinstance(spec, Model):
        return spec, params
    if spec.config.tie_embeddings:
        spec = Model(dataclasses.replace(spec.config, tie_embeddings=False))
        params = {**params, "head": {"kernel": jnp.array(params["embedding"].T)}}
    spec, params = _fused(spec, params)
    if jax.default_backend() == "cpu":
        params = jax.tree_util.tree_map_with_path(_transposed, params)
    return spec, params


def _fused(spec: Model, params: Params) -> tuple[Model, Params]:
    def fuse(layer: Params, fused: str, names: tuple[str, ...]) -> Params:
        rest = {name: value for name, value in layer.items() if name not in names}
        return {**rest, fused: jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *(layer[name] for name in names))}

    def block(layer: Params) -> Params:
        fused = {"attention": fuse(layer["attention"], "qkv_proj", ("q_proj", "k_proj", "v_proj"))}
        if spec.config.gated and "mlp" in layer:  # experts stay as they are
            fused["mlp"] = fuse(layer["mlp"], "gate_up_proj", ("gate_proj", "up_proj"))
        return {**layer, **fused}

    params = {**params, "layers": {i: block(layer) for i, layer in params["layers"].items()}}
    return Model(dataclasses.replace(spec.config, fused_projections=True)), params


def _transposed(path, leaf):
    if path[-1].key != "kernel" or leaf.ndim != 2 or leaf.dtype != jnp.float32:
        return leaf
    return jnp.array(leaf.T[..., None])


def compiler_options(*, decoding: bool = False) -> dict[str, str | bool | int]:
    """Options of every program that runs long, on the default backend. On x86 LLVM prefers 256-bit vectors; a training
    step gains 1.2x from 512-bit ones on a CPU that has them, others ignore the wish. ``decoding``: sums may be added in
    any order (infinities and NaN keep their meaning), without which `few_rows_product` is not vectorised."""
    if jax.default_backend() != "cpu":
        return {}
    options: dict[str, str | bool | int] = {"xla_cpu_prefer_vector_width": 512}
    return options | ({"xla_cpu_enable_fast_math": True} if decoding else {})


def keep_freed_memory() -> None:
    """A training step on CPU allocates and frees its temporaries every time; glibc hands large ones back to the kernel,
    which clears their pages anew. This keeps them in the heap of the process: 1.1-1.2x a step, for the same peak."""
    if jax.default_backend() != "cpu" or sys.platform != "linux":
        return
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # a C library without mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)
