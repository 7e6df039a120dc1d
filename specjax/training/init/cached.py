"""First weights of a draft, stored beside the trained ones. Singular vectors and least squares end in other last bits
on another processor, and a run that is resumed there must go on from the weights it began with. A resumed run makes no
first weights: it has the trained ones."""

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
from specjax.data.rows import Rows
from specjax.interfaces import Initial, Params
from specjax.models.hf import LoadedModel
from specjax.models.vocabulary import DraftVocabulary
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process, whole
from specjax.training.assemble import Run

FILE = "draft-start.safetensors"
_MADE_FROM = "made_from"
_IDS = "the ids that it can propose"
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
"""numpy's names of dtypes -> their names in the file's header."""


@dataclasses.dataclass(frozen=True)
class FirstWeights:
    """First weights of a stage, made when they are asked for, and once: a resumed stage asks for none. ``shapes``:
    shapes of the arrays. ``made_from``: digest of what decides the weights, which tells them from others before they
    are made; None: only their own digest tells."""

    shapes: Params
    make: Callable[[], Params]
    made_from: str | None = None

    @classmethod
    def of(cls, params: Params) -> FirstWeights:
        """First weights that exist already."""
        return params if isinstance(params, FirstWeights) else cls(_shapes(params), lambda: params)

    @functools.cached_property
    def params(self) -> Params:
        """The weights, made at the first use."""
        return self.make()

    def digest(self, known: Mapping[str, Any]) -> str:
        """SHA-256 of the weights. ``known``: the stage's record, which has it if they are made from the same."""
        if self.made_from is not None and known.get("initial_made_from") == self.made_from:
            return known["initial_params"]
        return fingerprint.digest(self.params)


def _shapes(params: Params) -> Params:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def cached_start(run: Run, target: LoadedModel, rows: Rows) -> tuple[Any, FirstWeights]:
    """The draft in training, and the weights that the run began with. Computed weights are stored while the directory
    of the first stage does not exist yet, and read again for the same target, rows, draft and seed; only
    `Run.first_draft` makes them. All processes call this, and have the same weights after it."""
    config, file = run.config, run.directory(FILE)
    if _read_from_elsewhere(config.draft.init):
        initial = run.first_draft(target, rows)
        return initial.drafter, FirstWeights.of(initial.params)
    draft = {name: value for name, value in dataclasses.asdict(config.draft).items() if name != "pretrain"}
    made_from = [*fingerprint.of_model(target), rows.digest, repr(draft), config.seed]
    # The draft vocabulary may be counted in the data of these stages.
    made_from += [repr(stage.data) for stage in (config.draft.pretrain, config.distill) if stage.data != "text"]
    key = fingerprint.of_json({_MADE_FROM: made_from})
    stored = on_main_process(lambda: (artifact.record_of(file) or {}).get(_MADE_FROM) == key)
    planned = _planned(run.initial, file) if stored else None
    if planned is None:
        drafter, params = run.first_draft(target, rows)
        planned = Initial(drafter, _shapes(params))
        if not stored and not on_main_process(run.directory("draft-pretrain").exists):
            content = {name: np.ascontiguousarray(x) for name, x in _named(drafter, whole(params)).items()}
            on_main_process(lambda: artifact.write(file, safetensors.save(content), {_MADE_FROM: key}))
        elif not stored or not _holds(file, planned):
            return drafter, FirstWeights.of(params)
    return planned.drafter, FirstWeights(planned.params, lambda: _read(file, planned.params), key)


def _read_from_elsewhere(init: Any) -> bool:
    """True if the first weights are read from a model, not computed."""
    if isinstance(init, Mapping):
        return init.get("kind") in ("checkpoint", "layers")
    return init is not None and init not in config_lib.INIT_WORDS


def _planned(planned: Initial | None, file: Path) -> Initial | None:
    """The draft whose weights ``file`` holds, with shapes in their place; None if its kind gives no shapes, or the file
    is of another version."""
    if planned is None or not _holds(file, planned):
        return None
    drafter: Any = planned.drafter
    if drafter.vocabulary is not None:
        with safe_open(file, "numpy") as found:
            drafter = drafter.with_vocabulary(DraftVocabulary(found.get_tensor(_IDS), drafter.vocabulary.size))
    return Initial(drafter, planned.params)


def _named(drafter: Any, params: Params) -> dict[str, Any]:
    """Arrays of the file by their names there, or shapes if ``params`` are shapes."""
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return named if drafter.vocabulary is None else {**named, _IDS: drafter.vocabulary.ids}


def _holds(file: Path, planned: Initial) -> bool:
    """True if ``file`` has each of these arrays; the file of another version may not."""
    with safe_open(file, "numpy") as found:
        slices = {name: found.get_slice(name) for name in found.keys()}  # noqa: SIM118 (it is no mapping)
        stored = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
    wanted = {name: (x.shape, _DTYPES.get(x.dtype.name)) for name, x in _named(*planned).items()}
    return wanted.items() <= stored.items()


def _read(file: Path, like: Params) -> Params:
    found = safetensors.load_file(file)
    return jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(found[jax.tree_util.keystr(path)]), like)
