"""Weights laid out for decoding: projections of the same input are fused, and kernels are stored as the device
multiplies them best (`specjax.backend` decides). Nothing here changes a result beyond the order of a sum, and the
original weights come back bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
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
        numbers = range(self.plain.config.num_layers)
        params = {**self.params, "layers": {i: self.spec.layer(self.params, i) for i in numbers}}
        params = jax.tree.map(self._original, params, is_leaf=_is_kernel)
        shards = self.spec.config.fused_shards
        params = {**params, "layers": {i: _split(self.plain, layer, shards) for i, layer in params["layers"].items()}}
        made = {"narrow_head", "head"} if self.plain.config.tie_embeddings else {"narrow_head"}
        return {name: value for name, value in params.items() if name not in made}

    def _original(self, leaf: Any) -> Any:
        value = kernels.plain(leaf)
        narrowed = isinstance(value, jax.Array) and value.dtype == jnp.bfloat16
        return value.astype(self.plain.dtype) if narrowed else value


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
        if self.holds_originals and not (backend.keeps_copies() and "_layout" in self.__dict__):
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
    way, so that they are not in memory twice. Where `backend.transposes_kernels`, kernels that multiply in float32
    become `Transposed`, or `Narrow` if bfloat16 holds all their numbers, as in most checkpoints, and so does a tied
    head, which is one array with the embedding. Beside kernels in few bits it is a copy of 8. A draft vocabulary gets
    a head of its own."""
    if not isinstance(spec, Model):
        return spec, params
    mesh = mesh_of(params)
    if mesh is not None:
        spec = dataclasses.replace(spec, mesh=mesh)
        return _over(mesh, spec, params, owned) if fused else (spec, params)
    in_few_bits = kernels.are_quantised(params)
    if spec.vocabulary is not None:
        spec, params = _with_narrow_head(spec, params, in_few_bits)
    elif spec.config.tie_embeddings and in_few_bits:
        spec = _untied(spec)
        params = {**params, "head": {"kernel": Quantised.of(params["embedding"].T, SCHEMES["int8"])}}
    if fused:
        spec, params = _fused(spec, params, owned=owned)
    owned |= fused  # fused layers are a dict of our own
    shared = spec.vocabulary is None and spec.config.tie_embeddings and _turns(spec, params["embedding"])
    if not shared:
        return _looped(spec, stored_kernels(spec, params, owned))
    return _looped(_untied(spec), stored_kernels(spec, params, owned, params["embedding"]))


def _looped(spec: Model, params: Params) -> tuple[Model, Params]:
    """The spec and parameters of a model that runs its layers as a loop, where they allow it: equal layers without a
    window, whose matrices are all `Transposed` or `Narrow`."""
    config = spec.config
    layers = [params["layers"][i] for i in range(config.num_layers)]
    uniform = len(set(map(config.layer, range(config.num_layers)))) == 1 and not any(spec.windows)
    if not (uniform and backend.scans_layers(len(layers))):
        return spec, params
    forms = [jax.tree.map(lambda x: (x.shape, x.dtype), layer) for layer in layers]
    leaves = jax.tree.leaves(layers[0], is_leaf=_is_kernel)
    # Experts, and kernels of other forms, would be copied before they are read.
    read_in_place = all(isinstance(x, Transposed) or (not _is_kernel(x) and x.ndim == 1) for x in leaves)
    if not read_in_place or any(form != forms[0] for form in forms):
        return spec, params
    del leaves  # no array may outlive its turn in `kernels.together`
    params["layers"].clear()
    return dataclasses.replace(spec, looped=True), {**params, "layers": {0: kernels.together(layers)}}


def _untied(spec: Model) -> Model:
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, tie_embeddings=False))


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


def abstract_layout(
    spec: Model, mesh: Mesh | None = None, scheme: Scheme | None = None, stored: str | None = None
) -> tuple[Model, Params]:
    """(spec, shapes) of the layout of a model whose weights are not loaded, to compile programs and to count memory.
    ``scheme``: how kernels are quantised. ``stored``: dtype of the weights in memory; None: the one of the spec."""
    params = param_shapes(spec if stored is None else dataclasses.replace(spec, dtype=stored))
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
    if isinstance(params.get("head", {}).get("kernel"), Transposed) and spec.config.tie_embeddings:
        params = {**params, "embedding": params["head"]["kernel"].value}  # one array, see `stored_kernels`
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
    fused = {}
    for i in list(layers):  # an owned layer is freed before the next one is made
        fused[i] = block(layers.pop(i) if owned else layers[i])
        if owned:
            backend.return_memory()
    params = {**params, "layers": fused}
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


def stored_kernels(spec: Any, params: Params, owned: bool = False, table: Array | None = None) -> Params:
    """``params`` with an object that multiplies in place of every array that a `Linear` of ``spec.module(params)``
    has.

    ``owned``: the dict of layers is emptied on the way, so that they are not in memory twice. ``table``: an embedding
    that is the head, too; both are one array then."""
    # Modules refer to each other, and would keep arrays until Python looks for such cycles.
    shapes = jax.tree.map(lambda x: x if _is_kernel(x) else jax.typeof(x), params, is_leaf=_is_kernel)
    linears = {(*path, "kernel") for path, part in nnx.iter_modules(spec.module(shapes)) if isinstance(part, Linear)}

    def arrays(part: Any, within: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
        leaves = jax.tree_util.tree_leaves_with_path(part, is_leaf=_is_kernel)
        named = ((_names(path, within), leaf) for path, leaf in leaves)
        return {path: leaf for path, leaf in named if path in linears and not _is_kernel(leaf)}

    def turning(found: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        return {path: leaf for path, leaf in found.items() if _turns(spec, leaf)}

    # All kernels are narrow, or none: all drafts of one training then have at most two programs.
    narrow = all(map(_is_narrow, [*turning(arrays(params)).values(), *([] if table is None else [table])]))
    kind, dtype = (Narrow, "bfloat16") if narrow else (Transposed, "float32")

    def stored(part: Any, within: tuple[Any, ...] = ()) -> Any:
        own = arrays(part, within)
        turned = turning(own)
        made: dict[tuple[Any, ...], Any] = {path: Dense(leaf) for path, leaf in own.items() if path not in turned}
        if turned:
            # What is still to be computed would hold on to what it is computed from.
            transposed = jax.block_until_ready(_transposed([*turned.values()], dtype))
            made |= zip(turned, map(kind, transposed), strict=True)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: made.get(_names(path, within), leaf), part, is_leaf=_is_kernel
        )

    # A layer at a time: one program transposes all layers that are equal.
    layers = params.get("layers", {})
    found = stored({name: part for name, part in params.items() if name != "layers"})
    if layers:
        found["layers"] = {}
        for i in list(layers):
            found["layers"][i] = stored(layers.pop(i) if owned else layers[i], ("layers", i))
            if owned:
                backend.return_memory()
    if table is None:
        return found
    table = table.astype(jnp.bfloat16) if narrow else table
    return {**found, "embedding": table, "head": {"kernel": kind(table)}}


def _names(path: Sequence[Any], within: tuple[Any, ...]) -> tuple[Any, ...]:
    return *within, *(key.key for key in path)


def _is_narrow(leaf: Any) -> Any:
    """True if bfloat16 is known to hold all numbers of an array, of which a trace knows the type alone."""
    return leaf.dtype == jnp.bfloat16 if isinstance(leaf, Tracer) else is_bfloat16(leaf)


@functools.partial(jax.jit, static_argnums=1)
def _transposed(matrices: list[Array], dtype: str) -> list[Array]:
    return [matrix.T.astype(dtype) for matrix in matrices]


def _turns(spec: Any, leaf: Any) -> bool:
    """True if decoding reads a kernel transposed: one that is multiplied in float32, whatever it is stored in."""
    computed = jnp.dtype(spec.dtype) if leaf.dtype == jnp.bfloat16 else leaf.dtype
    return backend.transposes_kernels() and computed == jnp.float32


def _is_kernel(x: Any) -> bool:
    return isinstance(x, Kernel)
