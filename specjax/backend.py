"""Everything that depends on the kind of device, in one place: how weights are laid out for decoding, how
programs are compiled, how the host keeps memory. Nothing here changes a result beyond the order of a sum."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from specjax.models.transformer import Model
from specjax.types import Params


def decode_layout(spec, params: Params) -> tuple:
    """(spec, params) laid out for decoding.

    Projections that read the same input become one kernel. A tied head is untied into its own copy, laid out as the
    other kernels are. On CPU kernels are transposed, see `Linear`: XLA's matrix product packs the kernel anew in every
    call, which costs twice the reading of it, and `few_rows_product` does not (2-3x for 2 to 8 tokens; for one token it
    is as fast as the best matrix-vector product). And float32 kernels that are bfloat16 numbers, as those of most
    checkpoints are, are kept in bfloat16: half as much to read, and in float32 products the same numbers (1.4-2x for 1
    to 8 tokens).
    """
    if not isinstance(spec, Model):
        return spec, params
    if spec.config.tie_embeddings:
        spec = Model(dataclasses.replace(spec.config, tie_embeddings=False))
        params = {**params, "head": {"kernel": jnp.array(params["embedding"].T)}}
    spec, params = _fused(spec, params)
    if jax.default_backend() == "cpu":
        kernels = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if _is_kernel(path, leaf)]
        # All or none: one draft after another of the same training then has at most two programs.
        known = not any(isinstance(kernel, Tracer) for kernel in kernels)
        dtype = jnp.bfloat16 if known and all(map(_is_bfloat16, kernels)) else jnp.float32
        params = jax.tree_util.tree_map_with_path(functools.partial(_transposed, dtype=dtype), params)
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


def _is_kernel(path, leaf) -> bool:
    return path[-1].key == "kernel" and leaf.ndim == 2 and leaf.dtype == jnp.float32


@jax.jit
def _is_bfloat16(x: Array) -> Array:
    # By its bits: of a number turned into bfloat16 and back, XLA may keep more than bfloat16 holds.
    return jnp.all(jax.lax.bitcast_convert_type(x, jnp.uint32) & 0xFFFF == 0)


def _transposed(path, leaf, dtype):
    return jnp.array(leaf.T[..., None], dtype) if _is_kernel(path, leaf) else leaf


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
