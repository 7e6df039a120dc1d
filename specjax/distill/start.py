"""The weights that a draft begins with, kept beside what is trained of them: singular vectors and least squares end in
other last bits on another processor, and a run that goes on there must go on from what it began with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from specjax.config import RunConfig
from specjax.data.rows import Rows
from specjax.distill.init import Initial
from specjax.models.hf import LoadedModel
from specjax.runtime import fingerprint, store
from specjax.runtime.distributed import by_first, whole
from specjax.types import Params

FILE = "draft-start.safetensors"
_MADE_FROM = "made_from"


def kept_start(config: RunConfig, initial: Initial, target: LoadedModel, rows: Rows, first: Path) -> Initial:
    """``initial`` as the run in ``config.out`` began. Kept are weights that are made of the target, before the
    directory ``first`` of the first stage is there; they are read again for the same target, rows, draft and seed. All
    processes call it, and have the same weights after it."""
    file, init = Path(config.out) / FILE, config.draft.init
    if init not in (None, "target") and not (isinstance(init, Mapping) and init.get("kind") == "pruned"):
        return initial  # read from where the config says, or drawn
    draft = {name: value for name, value in dataclasses.asdict(config.draft).items() if name != "pretrain"}
    made_from = [*fingerprint.of_model(target), rows.digest, repr(draft), config.seed]
    key = fingerprint.of_record({_MADE_FROM: made_from})
    params = whole(initial.params)
    known = by_first(lambda: (store.record_of(file) or {}).get(_MADE_FROM) == key)
    if not known and not by_first(first.exists):
        by_first(lambda: store.write(file, safetensors.save(_named(params)), {_MADE_FROM: key}))
        known = True
    return Initial(initial.drafter, _read(file, initial.params)) if known else initial


def _named(params: Params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.ascontiguousarray(leaf) for path, leaf in leaves}


def _read(file: Path, like: Params) -> Params:
    """What is not as in ``like``, of another version, stays as there: the stages say that it changed."""
    found = safetensors.load_file(file)

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        kept = found.get(jax.tree_util.keystr(path))
        if kept is None or (kept.shape, kept.dtype) != (leaf.shape, leaf.dtype):
            return leaf
        return jnp.asarray(kept)

    return jax.tree_util.tree_map_with_path(one, like)
