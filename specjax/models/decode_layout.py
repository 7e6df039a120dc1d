"""Weights laid out for decoding: projections of the same input are fused, and kernels are stored as the device
multiplies them best (`specjax.backend` decides). Nothing here changes a result beyond the order of a sum, and the
original weights come back bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh

from specjax import backend
from specjax.interfaces import Params
from specjax.models import kernels
from specjax.models.kernels import Dense, Kernel, Narrow, Transposed
from specjax.models.kernels.quantised import SCHEMES, Quantised, Scheme
from specjax.models.layers import Linear
from specjax.models.sharding import mesh_of, sharding_of
from specjax.models.transformer import Model, param_shapes
from specjax.models.weights import is_bfloat16, quantised

_FUSED = {
    "attention": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "mlp": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Part of a layer -> (fused projection, the projections that it replaces)."""


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeLayout:
    """Weights as decoding reads them: one layout a model (`LaidOut.layout`), shared by all that decode with it.
    ``spec`` and ``params`` run it; ``plain`` is the spec of the original weights."""

    spec: Any
    params: Params
    plain: Any

    @classmethod
    def of(cls, spec: Any, params: Params, fused: bool = True, owned: bool = False) -> DecodeLayout:
        laid_out, laid_out_params = decode_layout(spec, params, fused, owned)
        return cls(laid_out, laid_out_params, spec)

    def originals(self) -> Params:
        """The original weights, bit for bit."""
        if not isinstance(self.plain, Model):
            return self.params
        params = jax.tree.map(kernels.plain, self.params, is_leaf=_is_kernel)
        shards = self.spec.config.fused_shards
        params = {**params, "layers": {i: _split(self.plain, layer, shards) for i, layer in params["layers"].items()}}
        made = {"narrow_head", "head"} if self.plain.config.tie_embeddings else {"narrow_head"}
        return {name: value for name, value in params.items() if name not in made}


class LaidOut:
    """Base of a model (with ``spec`` and ``params``) that owns its `DecodeLayout`."""

    _layout: tuple[list[Array] | None, DecodeLayout]
    """Arrays that the layout was made of (None if they were freed), and the layout."""

    def layout(self) -> DecodeLayout:
        """The weights as decoding reads them, made once and shared by every `Decoder` of this model. They are made
        again after ``spec`` or an array of ``params`` was replaced."""
        made_of, layout = self.__dict__.get("_layout", (None, None))
        leaves = jax.tree.leaves(self.params) if self.holds_originals else None
        if layout is None or layout.plain != self.spec or not same_arrays(made_of, leaves):
            # Fused projections beside their originals would take memory twice.
            layout = DecodeLayout.of(self.spec, self.params, fused=backend.keeps_copies())
            self._layout = leaves, layout
        return layout

    def free_originals(self) -> None:
        """Free the original weights of a model that only decodes, and leave its `layout`. All weights are in memory
        once, except for one layer while the layout is made. From then on each use of ``params`` makes them from the
        layout, bit for bit, and does not store them."""
        if self.holds_originals and not backend.keeps_copies():
            params = self.params
            if isinstance(params, dict) and "layers" in params:
                params = {**params, "layers": {**params["layers"]}}
            for name in ("params", "_layout"):
                self.__dict__.pop(name, None)
            self._layout = None, DecodeLayout.of(self.spec, params, owned=True)
            return
        self._layout = None, self.layout()
        self.__dict__.pop("params", None)

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the devices that the weights lie over, if there are several."""
        return mesh_of(self.params if self.holds_originals else self._layout[1].params)

    def __repr__(self) -> str:
        """One line, whatever the number of weights."""
        weights = self.params if self.holds_originals else self._layout[1].params
        return described(self, weights)

    @property
    def holds_originals(self) -> bool:
        return "params" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name == "params" and "_layout" in self.__dict__:
            return self._layout[1].originals()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def described(model: Any, params: Params) -> str:
    """One line about a model: its class, its name and its number of weights."""
    return f"<{type(model).__name__} {model.name!r}, {kernels.counted(params)[0]:,} weights in memory>"


def same_arrays(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    """True if both hold the very same objects in the same order, so that results made of ``a`` still hold for ``b``."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def decode_layout(spec: Any, params: Params, fused: bool = True, owned: bool = False) -> tuple[Any, Params]:
    """(spec, params) laid out for decoding; a spec that is no `Model`, and a kernel that is no array, stay as they are.

    ``fused``: projections that read the same input become one kernel. ``owned``: the dict of layers is emptied on the
    way, so that they are not in memory twice. Where `backend.transposes_kernels`, a tied head gets a copy of its own,
    laid out as the other kernels are, and float32 kernels become `Transposed`, or `Narrow` if bfloat16 holds all their
    numbers, as in most checkpoints. Beside kernels in few bits, the copy of the head has 8. A draft vocabulary gets a
    head of its own."""
    if not isinstance(spec, Model):
        return spec, params
    mesh = mesh_of(params)
    if mesh is not None:
        spec = dataclasses.replace(spec, mesh=mesh)
        return _over(mesh, spec, params, owned) if fused else (spec, params)
    in_few_bits = kernels.are_quantised(params)
    if spec.vocabulary is not None:
        spec, params = _with_narrow_head(spec, params, in_few_bits)
    elif spec.config.tie_embeddings and (in_few_bits or backend.transposes_kernels()):
        spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, tie_embeddings=False))
        table = params["embedding"]
        head = Quantised.of(table.T, SCHEMES["int8"]) if in_few_bits else _transposed([table], str(table.dtype))[0]
        params = {**params, "head": {"kernel": head}}
    if fused:
        spec, params = _fused(spec, params, owned=owned)
    return spec, stored_kernels(spec, params)


def _with_narrow_head(spec: Model, params: Params, in_few_bits: bool) -> tuple[Model, Params]:
    """The spec and parameters with a head for the draft vocabulary alone, unless the whole head is stored in few
    bits."""
    assert spec.vocabulary is not None
    narrowed = None if spec.config.narrow_head else spec.narrowed(params, spec.vocabulary.ids)
    if narrowed is None:
        return spec, params
    kernel = narrowed["embedding"].T if spec.config.tie_embeddings else narrowed["head"]["kernel"]
    head = Quantised.of(kernel, SCHEMES["int8"]) if in_few_bits else kernel
    config = dataclasses.replace(spec.config, narrow_head=len(spec.vocabulary.ids))
    return dataclasses.replace(spec, config=config), {**params, "narrow_head": {"kernel": head}}


def abstract_layout(spec: Model, mesh: Mesh | None = None, scheme: Scheme | None = None) -> tuple[Model, Params]:
    """(spec, shapes) of the layout of a model whose weights are not loaded, to compile programs and to count memory.
    ``scheme``: how kernels are quantised."""
    params = param_shapes(spec)
    if mesh is not None:

        def placed(path: Any, leaf: Any) -> Any:
            sharding = sharding_of(tuple(key.key for key in path), leaf.shape, spec.config, mesh)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return decode_layout(spec, jax.tree_util.tree_map_with_path(placed, params))
    found: list[Model] = []

    def laid_out(params: Params) -> Params:
        named = jax.tree_util.tree_map_with_path(
            lambda path, leaf: quantised(tuple(key.key for key in path), leaf, scheme), params
        )
        layout, own = decode_layout(spec, named)
        found.append(layout)
        return own

    params = jax.eval_shape(laid_out, params)
    return found[0], params


def _over(mesh: Mesh, spec: Model, params: Params, owned: bool = False) -> tuple[Model, Params]:
    """(spec, params) over several devices: kernels stay arrays, and are fused device by device. Fused across the axis
    that splits them, they would make every pass move its results between devices."""
    config, shards = spec.config, mesh.shape.get("tensor", 1)
    counts = (config.num_heads, config.num_kv_heads, config.intermediate_size)
    if any(count % shards for count in counts) or any(map(_is_kernel, jax.tree.leaves(params, is_leaf=_is_kernel))):
        return spec, params
    return _fused(spec, params, shards, owned)


def _fused(spec: Model, params: Params, shards: int = 1, owned: bool = False) -> tuple[Model, Params]:
    def joined(*values: Any) -> Any:
        if shards == 1 or any(map(_is_kernel, values)):
            return kernels.join(values)
        lies = values[0].sharding
        if isinstance(values[0], jax.ShapeDtypeStruct):
            shape = jax.eval_shape(functools.partial(kernels.join, shards=shards), values)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=lies)
        return jax.jit(functools.partial(kernels.join, shards=shards), out_shardings=lies)(values)

    def fuse(part: Params, fused: str, names: tuple[str, ...]) -> Params:
        rest = {name: value for name, value in part.items() if name not in names}
        return {**rest, fused: jax.tree.map(joined, *(part[n] for n in names), is_leaf=_is_kernel)}

    def block(layer: Params) -> Params:
        fused = {"attention": fuse(layer["attention"], *_FUSED["attention"])}
        if spec.config.gated and "mlp" in layer:  # experts stay as they are
            fused["mlp"] = fuse(layer["mlp"], *_FUSED["mlp"])
        return {**layer, **fused}

    layers = params["layers"]
    # An owned layer is freed before the next one is made.
    params = {**params, "layers": {i: block(layers.pop(i) if owned else layers[i]) for i in list(layers)}}
    config = dataclasses.replace(spec.config, fused_projections=True, fused_shards=shards)
    return dataclasses.replace(spec, config=config), params


def _split(plain: Model, layer: Params, shards: int) -> Params:
    """``layer`` with each projection by itself again."""
    config, layer = plain.config, dict(layer)
    if config.fused_projections:
        return layer
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"attention": (queries, keys, keys), "mlp": (config.intermediate_size,) * 2}
    for part, (fused, names) in _FUSED.items():
        if fused in layer.get(part, {}):
            rest = dict(layer[part])
            pieces = {leaf: kernels.split(x, sizes[part], shards) for leaf, x in rest.pop(fused).items()}
            own = {name: {leaf: found[i] for leaf, found in pieces.items()} for i, name in enumerate(names)}
            layer[part] = rest | own
    return layer


def stored_kernels(spec: Any, params: Params) -> Params:
    """``params`` with an object that multiplies in place of every array that a `Linear` of ``spec.module(params)``
    has."""
    linears = {path for path, part in nnx.iter_modules(spec.module(params)) if isinstance(part, Linear)}

    def is_ours(path, leaf) -> bool:
        *module, name = (key.key for key in path)
        return tuple(module) in linears and name == "kernel" and not _is_kernel(leaf)

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_kernel)
    turning = {path: leaf for path, leaf in leaves if is_ours(path, leaf) and _turns(leaf)}
    # All kernels are narrow, or none: all drafts of one training then have at most two programs.
    known = not any(isinstance(leaf, Tracer) for leaf in turning.values())
    narrow = known and all(map(is_bfloat16, turning.values()))
    # A layer at a time: one program transposes all layers that are equal.
    parts: dict[Any, list[Any]] = {}
    for path in turning:
        parts.setdefault(path[:2] if path[0].key == "layers" else None, []).append(path)
    turned = {}
    for paths in parts.values():
        found = _transposed([turning[path] for path in paths], "bfloat16" if narrow else "float32")
        turned |= zip(paths, map(Narrow if narrow else Transposed, found), strict=True)

    def stored(path, leaf):
        if not is_ours(path, leaf):
            return leaf
        return turned[path] if path in turned else Dense(leaf)

    return jax.tree_util.tree_map_with_path(stored, params, is_leaf=_is_kernel)


@functools.partial(jax.jit, static_argnums=1)
def _transposed(matrices: list[Array], dtype: str) -> list[Array]:
    return [matrix.T.astype(dtype) for matrix in matrices]


def _turns(leaf: Any) -> bool:
    return backend.transposes_kernels() and leaf.dtype == jnp.float32


def _is_kernel(x: Any) -> bool:
    return isinstance(x, Kernel)
