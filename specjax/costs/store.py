"""Cache of measured costs in the user's cache directory: one file for each device, version of JAX, shape of target and
drafters, dtype and bucket of rows. The cost of a pass depends on the shapes of the weights and not on their values, so
a draft that is trained further keeps its costs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from pydantic import TypeAdapter

from specjax.decode.decoder import Decoder
from specjax.models.files import plain_json, write_atomically
from specjax.runtime.compile_cache import machine, user_cache

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_FORMAT = 3
"""Version of the files; a file of another version is not read."""


def shape_of(decoder: Decoder) -> str:
    """Digest of everything that decides the cost of a decoder's programs: specs, and shapes and dtypes of weights."""
    engine, params = decoder.engine(False)  # the sampled engine, which has the decoder's own rule
    parts = [engine.target, engine.drafter, engine.verifier, decoder.controller]
    leaves = jax.tree_util.tree_leaves_with_path((params.target, params.drafter))
    weights = [f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}" for path, leaf in leaves]
    return hashlib.sha256("\n".join([*map(repr, parts), *weights]).encode()).hexdigest()


def key_of(rows: int, dtype: str, decoders: Mapping[str, Decoder], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Key of the costs of a bucket of rows: everything that they depend on.

    Args:
        rows: rows of the bucket.
        dtype: dtype of the target.
        decoders: decoders by the name of the drafter, each at its longest length; plain decoding among them.
        settings: settings of the measurement, as JSON: lengths, sizes of prompts and generations, sampling.

    Returns:
        A JSON object; costs are read back only under an equal one.
    """
    key = {
        "format": _FORMAT,
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "dtype": dtype,
        "rows": rows,
        "shapes": {name: shape_of(decoder) for name, decoder in decoders.items()},
        "settings": settings,
    }
    return json.loads(json.dumps(key, default=plain_json))


def file_of(key: Mapping[str, Any]) -> Path:
    """File that holds the costs of ``key``."""
    device = "".join(c if c.isalnum() else "-" for c in str(key["device"]).lower())
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return user_cache() / "specjax" / "costs" / f"{device}-jax-{key['jax']}" / f"{digest[:16]}.json"


def read(key: Mapping[str, Any], kind: type[_T]) -> _T | None:
    """Stored costs of ``key``, as the dataclass ``kind``; None if there are none, or none that can be read."""
    try:
        found = json.loads(file_of(key).read_text(encoding="utf-8"))
        return TypeAdapter(kind).validate_python(found["costs"]) if found["key"] == key else None
    except (OSError, RuntimeError):  # not measured yet, or no home directory
        return None
    except (ValueError, KeyError, TypeError):
        _log.warning("%s: damaged; the costs are measured again", file_of(key))
        return None


def write(key: Mapping[str, Any], costs: Any) -> Path | None:
    """Store ``costs``, a dataclass, as JSON, and return their file; None if the directory cannot be written, so that
    the next run measures again."""
    try:
        file = file_of(key)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(
            file, json.dumps({"key": key, "costs": dataclasses.asdict(costs)}, indent=1, default=plain_json) + "\n"
        )
    except (OSError, RuntimeError) as error:
        _log.warning("the costs that were measured are not kept: %s", error)
        return None
    return file
