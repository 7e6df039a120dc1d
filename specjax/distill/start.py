"""The weights that a draft begins with, kept beside what is trained of them: singular vectors and least squares end in
other last bits on another processor, and a run that goes on there must go on from what it began with. A run that goes
on makes none: it has the trained ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors
from safetensors import safe_open

from specjax import config as config_lib
from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.distill.init import Initial, abstract_draft
from specjax.drafters.features import Kept, TrainedFeatureDraft
from specjax.models.hf import LoadedModel
from specjax.runtime import fingerprint, store
from specjax.runtime.distributed import by_first, whole
from specjax.types import Params

FILE = "draft-start.safetensors"
_MADE_FROM = "made_from"
_IDS = "the ids that it can propose"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""numpy's names, by those of the file's header."""


@dataclasses.dataclass(frozen=True)
class FirstWeights:
    """Weights that a stage begins with, made when they are asked for, and once: a stage that goes on asks for none.
    ``shapes``: those of its arrays. ``made_from``: names what decides them, so that they need not be made to be told
    from others; None: nothing does but their digest."""

    shapes: Params
    make: Callable[[], Params]
    made_from: str | None = None

    @classmethod
    def of(cls, params: Params) -> FirstWeights:
        """Weights that are there."""
        return params if isinstance(params, FirstWeights) else cls(_shapes(params), lambda: params)

    @functools.cached_property
    def params(self) -> Params:
        """The weights."""
        return self.make()

    def digest(self, known: Mapping[str, Any]) -> str:
        """SHA-256 of the weights. ``known``: the record of the stage, which has it if they are made from the same."""
        if self.made_from is not None and known.get("initial_made_from") == self.made_from:
            return known["initial_params"]
        return fingerprint.digest(self.params)


def _shapes(params: Params) -> Params:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def kept_start(
    config: RunConfig, make: Callable[[], Initial], target: LoadedModel, rows: Rows, first: Path
) -> tuple[Any, FirstWeights]:
    """The draft in training, and the weights that the run in ``config.out`` began with. Kept are weights that are
    computed, before the directory ``first`` of the first stage is there; they are read again for the same target, rows,
    draft and seed, and only ``make`` makes them. All processes call it, and have the same weights after it."""
    file = Path(config.out) / FILE
    if _read_from_elsewhere(config.draft.init):
        initial = make()
        return initial.drafter, FirstWeights.of(initial.params)
    draft = {name: value for name, value in dataclasses.asdict(config.draft).items() if name != "pretrain"}
    made_from = [*fingerprint.of_model(target), rows.digest, repr(draft), config.seed]
    # Ids may be counted in what these say.
    made_from += [repr(stage.data) for stage in (config.draft.pretrain, config.distill) if stage.data != "text"]
    key = fingerprint.of_record({_MADE_FROM: made_from})
    known = by_first(lambda: (store.record_of(file) or {}).get(_MADE_FROM) == key)
    planned = _planned(config, target, file) if known else None
    if planned is None:
        drafter, params = make()
        planned = Initial(drafter, _shapes(params))
        if not known and not by_first(first.exists):
            content = _named(drafter, whole(params))
            by_first(lambda: store.write(file, safetensors.save(content), {_MADE_FROM: key}))
            known = True
        if not known or not _holds(file, planned):
            return drafter, FirstWeights.of(params)
    return planned.drafter, FirstWeights(planned.params, lambda: _read(file, planned.params), key)


def _read_from_elsewhere(init: Any) -> bool:
    """Whether a start is read from a model, not computed."""
    if isinstance(init, Mapping):
        return init.get("kind") in ("checkpoint", "layers")
    return init is not None and init not in config_lib.INIT_WORDS


def _planned(config: RunConfig, target: LoadedModel, file: Path) -> Initial | None:
    """The draft that ``file`` holds weights of, with shapes in their place; None: its kind does not say, or the file is
    of another version."""
    planned = abstract_draft(config, target)
    if planned is None:
        return None
    drafter = planned.drafter
    if _chooses_ids(drafter):
        with safe_open(file, "numpy") as found:
            if _IDS not in found.keys():  # noqa: SIM118 (it is no mapping)
                return None
            drafter = drafter.with_ids(Kept(found.get_tensor(_IDS), drafter.model.kept.size))
    planned = Initial(drafter, planned.params)
    return planned if _holds(file, planned) else None


def _chooses_ids(drafter: Any) -> bool:
    return isinstance(drafter, TrainedFeatureDraft) and drafter.model.kept is not None


def _named(drafter: Any, params: Params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(path): np.ascontiguousarray(leaf) for path, leaf in leaves}
    return {**named, _IDS: drafter.model.kept.ids} if _chooses_ids(drafter) else named


def _holds(file: Path, planned: Initial) -> bool:
    """Whether ``file`` has each of these arrays; what another version wrote may not."""

    def has(found: Any, path: tuple, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path)
        if name not in names:
            return False
        stored = found.get_slice(name)
        return tuple(stored.get_shape()) == leaf.shape and _DTYPES.get(stored.get_dtype()) == leaf.dtype.name

    with safe_open(file, "numpy") as found:
        names = set(found.keys())
        return all(has(found, *pair) for pair in jax.tree_util.tree_leaves_with_path(planned.params))


def _read(file: Path, like: Params) -> Params:
    found = safetensors.load_file(file)
    return jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(found[jax.tree_util.keystr(path)]), like)
