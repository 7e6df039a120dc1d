"""Everything that depends on the kind of device, in one place: how weights are laid out for decoding, how
programs are compiled, how the host keeps memory. Nothing here changes a result beyond the order of a sum."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from specjax.models.transformer import Model
from specjax.types import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Weights as decoding reads them: one a model (`LoadedModel.layout`), shared by all that decode with it. ``spec``
    and ``params`` run it; ``plain`` is the spec of the weights it was made of."""

    spec: Any
    params: Params
    plain: Any

    @classmethod
    def of(cls, spec: Any, params: Params) -> Layout:
        laid_out, laid_out_params = decode_layout(spec, params)
        return cls(laid_out, laid_out_params, spec)

    def originals(self) -> Params:
        """The weights that it was made of, bit for bit."""
        if not isinstance(self.plain, Model):
            return self.params
        params = jax.tree_util.tree_map_with_path(_turned_back, self.params)
        params = {**params, "layers": {i: _split(self.plain, layer) for i, layer in params["layers"].items()}}
        return {name: value for name, value in params.items() if name != "head" or not self.plain.config.tie_embeddings}


class LaidOut:
    """A model (with ``spec`` and ``params``) that keeps its `Layout`."""

    spec: Any
    params: Params
    _layout: tuple[list[Array] | None, Layout]
    """The arrays that it was made of (None where they were freed), and the layout."""

    def layout(self) -> Layout:
        """The weights as decoding reads them, made once and shared by every `Decoder` of this model; made again after
        ``spec`` or an array of ``params`` was replaced."""
        made_of, layout = self.__dict__.get("_layout", (None, None))
        leaves = jax.tree.leaves(self.params) if self.holds_originals else None
        if layout is None or layout.plain != self.spec or not _same_arrays(made_of, leaves):
            layout = Layout.of(self.spec, self.params)
            self._layout = leaves, layout
        return layout

    def free_originals(self) -> None:
        """Keep nothing but the `layout`, for a model that only decodes: most weights are in memory once, not twice.
        ``params`` are then made from it again whenever they are asked for, bit for bit, and not kept."""
        self._layout = None, self.layout()
        self.__dict__.pop("params", None)

    @property
    def holds_originals(self) -> bool:
        return "params" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name == "params" and "_layout" in self.__dict__:
            return self._layout[1].originals()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _same_arrays(a: list[Array] | None, b: list[Array] | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def decode_layout(spec, params: Params) -> tuple:
    """(spec, params) laid out for decoding.

    Projections that read the same input become one kernel. On CPU a tied head is untied into its own copy, laid out as
    the other kernels are, and kernels are transposed, see `Linear`: XLA's matrix product packs the kernel anew in every
    call, which costs twice the reading of it, and `few_rows_product` does not (2-3x for 2 to 8 tokens; for one token it
    is as fast as the best matrix-vector product). And float32 kernels that are bfloat16 numbers, as those of most
    checkpoints are, are kept in bfloat16: half as much to read, and in float32 products the same numbers (1.4-2x for 1
    to 8 tokens).
    """
    if not isinstance(spec, Model):
        return spec, params
    on_cpu = jax.default_backend() == "cpu"
    if spec.config.tie_embeddings and on_cpu:
        spec = Model(dataclasses.replace(spec.config, tie_embeddings=False))
        params = {**params, "head": {"kernel": jnp.array(params["embedding"].T)}}
    spec, params = _fused(spec, params)
    if on_cpu:
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


def _split(plain: Model, layer: Params) -> Params:
    """A layer with each projection by itself again."""
    config, layer = plain.config, dict(layer)

    def parts(fused: Params, names: tuple[str, ...], sizes: tuple[int, ...]) -> Params:
        ends = list(itertools.accumulate(sizes))[:-1]
        pieces = {leaf: jnp.split(x, ends, axis=-1) for leaf, x in fused.items()}
        return {name: {leaf: found[i] for leaf, found in pieces.items()} for i, name in enumerate(names)}

    if not config.fused_projections:
        attention = dict(layer["attention"])
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        own = parts(attention.pop("qkv_proj"), ("q_proj", "k_proj", "v_proj"), (queries, keys, keys))
        layer["attention"] = attention | own
        if config.gated and "mlp" in layer:
            mlp = dict(layer["mlp"])
            fused = mlp.pop("gate_up_proj")
            half = fused["kernel"].shape[-1] // 2
            layer["mlp"] = mlp | parts(fused, ("gate_proj", "up_proj"), (half, half))
    return layer


def _turned_back(path, leaf):
    turned = path[-1].key == "kernel" and leaf.ndim == 3 and leaf.shape[-1] == 1
    return leaf[..., 0].T.astype(jnp.float32) if turned else leaf


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
