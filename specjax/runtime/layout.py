"""Where the arrays of a training stage lie: batches over the axes ``data`` and ``fsdp`` of a mesh, draft, optimizer and
target as the table of `specjax.models.sharding` says. Every process builds its own rows of a batch only.

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
from specjax.data.rows import Rows, take
from specjax.errors import ConfigError
from specjax.models.sharding import AXES, place, sharding_of
from specjax.models.training import training_model
from specjax.models.transformer import Model
from specjax.runtime.distributed import whole
from specjax.types import Batch, Params, TrainingForm

_ROW_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True)
class Layout:
    """``mesh`` None: everything on the default device, in one process; an abstract one: shapes only. Whether draft and
    target follow the table or are whole on every device is said by ``draft_sharded`` and ``target_sharded``."""

    mesh: Mesh | AbstractMesh | None = None
    draft_sharded: bool = True
    target_sharded: bool = True

    @property
    def row_shards(self) -> int:
        """Parts that the rows of a batch are split into."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in _ROW_AXES)

    @property
    def described(self) -> str:
        """The mesh in words; it decides in which order a step adds up."""
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
        """Shardings of the draft's parameters, or of a state whose dicts have their keys."""
        return self._of(tree, getattr(drafter, "parameter_sharding", None) if self.draft_sharded else None)

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
        """A model whose activations lie as the rows do."""
        return training_model(spec, self.form()) if isinstance(spec, Model) else spec

    def form(self) -> TrainingForm:
        """A forward pass whose activations lie as the rows do."""
        return TrainingForm(sharding=self.rows())

    def put(self, tree: Any, shardings: Any) -> Any:
        """Copies of the arrays of ``tree`` where ``shardings`` says; what lies there already is not copied."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, shardings)

    def batch(self, rows: Rows, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The rows of these numbers, of which this process reads the ones that its devices get."""
        if self.mesh is None:
            return take(rows, numbers)
        return self._assemble(take(rows, np.asarray(numbers)[self._own(len(numbers))]), len(numbers))

    def place_batch(self, batch: Batch) -> Batch:
        """A batch that every process has all of."""
        if self.mesh is None:
            return batch
        size = len(batch.tokens)
        own = self._own(size)
        return self._assemble(jax.tree.map(lambda x: np.asarray(x)[own], batch), size)

    def _own(self, size: int) -> np.ndarray:
        """Which of ``size`` rows the devices of this process get."""
        sharding = self.rows()
        assert sharding is not None
        pieces = sharding.addressable_devices_indices_map((size,)).values()
        return np.unique(np.concatenate([np.arange(size)[piece] for piece in pieces]))

    def _assemble(self, own: Batch, size: int) -> Batch:
        sharding = self.rows()
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])), own)


ONE_DEVICE = Layout()


def axis_sizes(settings: config.Mesh) -> dict[str, int]:
    """Devices along each axis; of one that takes all that the others leave, as many as are here."""
    sizes = {axis: getattr(settings, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size > 0)
    return {axis: jax.device_count() // given if size == -1 else size for axis, size in sizes.items()}


def make_layout(settings: config.Mesh) -> Layout:
    """The devices of all processes as a mesh. Raises `ConfigError` if they are not as many as the axes say."""
    sizes, devices = axis_sizes(settings), jax.device_count()
    shown = " x ".join(f"{axis}={getattr(settings, axis)}" for axis in AXES)
    used = math.prod(sizes.values())
    # One process may leave devices alone; of several, each would have to know which.
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
    """Length of the part of a path that leads to a dict of parameters: optax's states are tuples around such."""
    keys = [isinstance(key, jax.tree_util.DictKey) for key in path]
    return max((i + 1 for i, is_key in enumerate(keys) if not is_key), default=0)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if isinstance(leaf, jax.Array) and jax.process_count() == 1:
        return jax.device_put(leaf, sharding, may_alias=False)
    value = np.asarray(whole(leaf))
    return place(lambda index: value[index], value.shape, sharding)
