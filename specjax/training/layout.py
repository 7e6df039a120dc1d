"""Placement of a training stage's arrays on devices. Batches are split over the axes ``data`` and ``fsdp`` of a mesh;
draft, optimizer and target follow the table of `specjax.models.sharding`. Every process builds its own rows only.

Dims: B rows of a batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax import config
from specjax.errors import ConfigError
from specjax.interfaces import Batch, Params, TrainingForm
from specjax.models.sharding import AXES, place, sharding_of
from specjax.models.training import training_model
from specjax.models.transformer import Model
from specjax.models.weights import committed
from specjax.runtime.distributed import whole

_ROW_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Placement over a mesh. ``mesh``: None for the default device, in one process; an abstract one for shapes only.
    ``draft_sharded``, ``target_sharded``: True if the model follows the table, False if every device has all of it."""

    mesh: Mesh | AbstractMesh | None = None
    draft_sharded: bool = True
    target_sharded: bool = True

    @property
    def row_shards(self) -> int:
        """Number of parts that the rows of a batch are split into."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in _ROW_AXES)

    @property
    def described(self) -> str:
        """The mesh in words; it decides the order in which a step adds numbers up."""
        sizes = dict.fromkeys(AXES, 1) if self.mesh is None else dict(self.mesh.shape)
        axes = " x ".join(f"{axis}={sizes[axis]}" for axis in AXES)
        return axes if self.draft_sharded else f"{axes} with the draft replicated"

    def check_rows(self, rows: int, what: str) -> None:
        if rows % self.row_shards:
            raise ConfigError(
                f"{what}={rows} is not a multiple of the {self.row_shards} shards of mesh.data x mesh.fsdp"
            )

    def rows(self) -> NamedSharding | None:
        """Sharding of every array of a batch."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(_ROW_AXES))

    def everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def of_draft(self, tree: Any, drafter: Any) -> Any:
        """Shardings of the draft's parameters, or of a training state with the same keys."""
        return self._of(tree, drafter.parameter_sharding if self.draft_sharded else None)

    def of_target(self, params: Params, spec: Any) -> Any:
        def by_table(path: tuple, sizes: tuple[int, ...], mesh: Mesh) -> NamedSharding:
            return sharding_of(path, sizes, spec.config, mesh)

        return self._of(params, by_table if self.target_sharded and isinstance(spec, Model) else None)

    def _of(self, tree: Any, rule: Callable[..., NamedSharding | None] | None) -> Any:
        if self.mesh is None:
            return None

        def sharding(path, leaf) -> NamedSharding | None:
            if rule is None:
                return self.everywhere()
            names = tuple(key.key for key in path[_outside(path) :])
            return rule(names, leaf.shape, self.mesh) or self.everywhere()

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def model(self, spec: Any) -> Any:
        """The model with activations split like the rows of a batch."""
        return training_model(spec, self.form()) if isinstance(spec, Model) else spec

    def form(self) -> TrainingForm:
        """Form of a forward pass with activations split like the rows of a batch."""
        return TrainingForm(sharding=self.rows())

    def put(self, tree: Any, shardings: Any) -> Any:
        """The arrays of ``tree``, copied to ``shardings`` unless they are there already; without a mesh, `committed` to
        the device they lie on."""
        return committed(tree) if self.mesh is None else jax.tree.map(_put, tree, shardings)

    def batch(self, rows: Any, numbers: Sequence[int] | np.ndarray) -> Batch:
        """Batch of the ``rows`` (`specjax.data.rows.Rows`) with these numbers. This process reads only the rows of its
        devices."""
        own = np.asarray(numbers) if self.mesh is None else np.asarray(numbers)[self._own(len(numbers))]
        found = Batch.of_rows(rows[int(number)] for number in own)
        return found if self.mesh is None else self._assemble(found, len(numbers))

    def place_batch(self, batch: Batch) -> Batch:
        """Place a batch that every process has whole."""
        if self.mesh is None:
            return batch
        size = len(batch.tokens)
        own = self._own(size)
        return self._assemble(jax.tree.map(lambda x: np.asarray(x)[own], batch), size)

    def _own(self, size: int) -> np.ndarray:
        """Numbers, below ``size``, of the rows that the devices of this process get."""
        sharding = self.rows()
        assert sharding is not None
        pieces = sharding.addressable_devices_indices_map((size,)).values()
        return np.unique(np.concatenate([np.arange(size)[piece] for piece in pieces]))

    def _assemble(self, own: Batch, size: int) -> Batch:
        sharding = self.rows()
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])), own)


ONE_DEVICE = Layout()


def axis_sizes(settings: config.Mesh) -> dict[str, int]:
    """Number of devices along each axis; -1 becomes the number that the other axes leave."""
    sizes = {axis: getattr(settings, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    return {axis: jax.device_count() // given if size == -1 else size for axis, size in sizes.items()}


def abstract_layout(settings: config.Mesh) -> Layout:
    """Layout over a mesh of devices that need not be there, for shapes only."""
    sizes = axis_sizes(settings)
    if math.prod(sizes.values()) == 1:
        return ONE_DEVICE
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Layout(mesh, settings.draft == "sharded", settings.target == "sharded")


def make_layout(settings: config.Mesh) -> Layout:
    """Layout over a mesh of all processes' devices. Raises `ConfigError` if their number does not fit the axes."""
    sizes, devices = axis_sizes(settings), jax.device_count()
    shown = " x ".join(f"{axis}={getattr(settings, axis)}" for axis in AXES)
    used = math.prod(sizes.values())
    # A single process may leave devices unused; several would have to agree on which.
    if not 0 < used <= devices or (used < devices and (-1 in dataclasses.astuple(settings) or jax.process_count() > 1)):
        raise ConfigError(
            f"mesh: {shown} does not fit the {devices} devices of {jax.process_count()} processes; "
            "-1 on one axis takes all that the others leave"
        )
    if used == 1 and jax.process_count() == 1:
        return ONE_DEVICE
    types = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(tuple(sizes.values()), AXES, types, devices=jax.devices()[:used])
    return Layout(mesh, settings.draft == "sharded", settings.target == "sharded")


def _outside(path: tuple) -> int:
    """Length of the part of a path that leads to a dict of parameters: optax's states are tuples around such dicts."""
    keys = [isinstance(key, jax.tree_util.DictKey) for key in path]
    return max((i + 1 for i, is_key in enumerate(keys) if not is_key), default=0)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if isinstance(leaf, jax.Array) and jax.process_count() == 1:
        return jax.device_put(leaf, sharding, may_alias=False)
    value = np.asarray(whole(leaf))
    return place(lambda index: value[index], value.shape, sharding)
