"""Placement of each parameter on a mesh of devices, from one table, and loading it there, a piece a device.

The axis ``tensor`` splits the computation: vocabulary, heads, neurons, experts (columns, then rows: 1909.08053).
``fsdp`` splits the storage (1910.02054). A parameter is whole on every device over ``data``, and where a size does not
divide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.errors import ModelError
from specjax.models.config import ModelConfig

Index = tuple[slice, ...]
"""A piece of an array: one slice for each dimension, with start and stop."""

AXES = ("data", "fsdp", "tensor")
MESH_AXIS = {
    **dict.fromkeys(("vocabulary", "heads", "kv_heads", "neurons", "experts"), "tensor"),
    "hidden": "fsdp",
}
"""Kind of a dimension -> the axis of the mesh that splits it."""
PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"^embedding$", ("vocabulary", "hidden")),
    (r"^position_embedding$", (None, "hidden")),
    (r"^head\.kernel$", ("hidden", "vocabulary")),
    (r"\.q_proj\.kernel$", ("hidden", "heads")),
    (r"\.[kv]_proj\.kernel$", ("hidden", "kv_heads")),
    (r"\.o_proj\.kernel$", ("heads", "hidden")),
    (r"\.q_proj\.bias$", ("heads",)),
    (r"\.[kv]_proj\.bias$", ("kv_heads",)),
    (r"\.mlp\.(gate|up)_proj\.kernel$", ("hidden", "neurons")),
    (r"\.mlp\.down_proj\.kernel$", ("neurons", "hidden")),
    (r"\.mlp\.(gate|up)_proj\.bias$", ("neurons",)),
    (r"\.experts\.router\.kernel$", ("hidden", "experts")),
    (r"\.experts\.(gate|up)_proj\.kernel$", ("experts", "hidden", None)),
    (r"\.experts\.down_proj\.kernel$", ("experts", None, "hidden")),
)
"""Path of a parameter -> the kinds of its dimensions. All others (norms, and biases of outputs that devices sum) are
whole everywhere."""


def usable(mesh: Mesh) -> Mesh:
    """``mesh`` with automatic axes: XLA chooses how activations are split. Raises `ModelError` for an axis that the
    table does not know."""
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ModelError(f"mesh: axis {unknown[0]!r} is unknown; name its axes from {', '.join(AXES)}")
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def sharding_of(
    path: tuple[Any, ...], shape: tuple[int, ...], config: ModelConfig, mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """Sharding of the parameter at ``path`` of `Model.init`."""
    name = ".".join(map(str, path))
    counted = next((counted for pattern, counted in PARAMETERS if re.search(pattern, name)), (None,) * len(shape))
    counts = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}  # a head stays on one device
    axes = []
    for what, size in zip(counted, shape, strict=True):
        axis = None if what is None else MESH_AXIS[what]
        divides = axis in mesh.shape and counts.get(what or "", size) % mesh.shape[axis] == 0
        axes.append(axis if divides else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


ROWS = ("data", "fsdp")
"""Axes of the mesh that split the rows of a batch."""


def mesh_of(params: Any) -> Mesh | None:
    """Mesh of several devices that the arrays lie over; None: they lie on one device, or are no arrays yet."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def constrained(x: jax.Array, mesh: Mesh | None, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """``x`` with its first dimensions split over these axes of the mesh; a dimension that does not divide is whole on
    every device. ``mesh`` None: unchanged."""
    return (
        x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(x.shape, mesh, *axes)))
    )


def spec_of(shape: Sequence[int], mesh: Mesh, *axes: str | tuple[str, ...] | None) -> PartitionSpec:
    """Partition of the first dimensions over these axes; a dimension is whole where it does not divide, or where the
    mesh has no such axis."""
    chosen = []
    for size, axis in zip(shape, axes, strict=False):
        names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis or ()) if name in mesh.shape)
        divides = names and size % math.prod(mesh.shape[name] for name in names) == 0
        chosen.append(names if divides else None)
    return PartitionSpec(*chosen)


def beside(params: Any, mesh: Mesh | None) -> Any:
    """``params`` with arrays of one device copied whole to every device of ``mesh``; arrays of several devices are
    unchanged."""
    if mesh is None:
        return params
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(x: Any) -> Any:
        several = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
        return x if several else jax.device_put(x, everywhere)

    return jax.tree.map(placed, params)


def place(read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Array of ``shape`` made of the pieces that ``read`` returns; each piece is read once, and only if a device of
    this process holds it."""
    # JAX must own the copies: a borrowed numpy buffer cannot be donated to a training step, and on CPU `device_put`
    # borrows even if it is told not to. Without waiting for each copy, the host would hold the next tensor as well.
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, holders in devices.items():
        value = read(tuple(slice(*pair) for pair in bounds))
        pieces += [jnp.copy(jax.device_put(value, device)).block_until_ready() for device in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
