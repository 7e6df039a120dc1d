"""Several processes that run one job (JAX's multi-controller SPMD): connect them, let only the first one act, and share
its outcome with all. In a single process everything here is free."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from specjax import config, errors

_HEADER, _MESSAGE = 8, 4096


def start(settings: config.Distributed) -> None:
    """Connect to the other processes, if there are any. Call it once, before JAX is asked for its devices.

    Raises `ConfigError` if the processes cannot be found.
    """
    if not settings.enabled:
        return
    try:
        jax.distributed.initialize(settings.coordinator, settings.num_processes, settings.process_id)
    except (ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise errors.ConfigError(
            f"distributed: the processes did not find each other ({reason}); outside of a TPU pod, SLURM, Kubernetes "
            "and Open MPI give distributed.coordinator, num_processes and process_id"
        ) from None


def is_first() -> bool:
    """True in process 0, which writes all that is written once."""
    return jax.process_index() == 0


def on_main_process(action: Callable[[], Any]) -> Any:
    """Call ``action`` in the first process only. Every process waits, and returns its JSON result or raises its
    `SpecjaxError`."""
    if jax.process_count() == 1:
        return action()
    outcome: dict[str, Any] = {}
    if is_first():
        try:
            outcome = {"value": action()}
        except errors.SpecjaxError as error:
            # An error of another module, such as `artifact.Changed`, is known to all by its base.
            kind = next(base for base in type(error).__mro__ if base.__module__ == errors.__name__)
            outcome = {"error": kind.__name__, "message": str(error)}
        except BaseException as error:  # the others must not wait for it
            _from_first({"error": "TrainingError", "message": f"process 0 failed: {type(error).__name__}: {error}"})
            raise
    outcome = _from_first(outcome)
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["message"])
    return outcome["value"]


def waited_for(tree: Any) -> Any:
    """``tree``; with several processes, once its arrays are computed. Over Gloo, collectives of two programs in flight
    can wait for each other for ever, unlike those of one program."""
    return tree if jax.process_count() == 1 else jax.block_until_ready(tree)


def whole(tree: Any) -> Any:
    """``tree`` with numpy arrays, whole, for those that several processes hold parts of. All processes call it."""
    return jax.tree.map(_whole, tree)


def on_one_device(tree: Any) -> Any:
    """``tree`` with arrays on several devices copied, whole, to each process's default device. All processes call
    it."""
    return jax.tree.map(lambda x: x if len(x.sharding.device_set) == 1 else jnp.asarray(np.asarray(_whole(x))), tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return multihost_utils.process_allgather(leaf, tiled=True)


def _from_first(value: Any) -> Any:
    """Broadcast a JSON value, its length first, in messages of one size, so that one small program sends them all."""
    text = json.dumps(value).encode() if is_first() else b""
    text = len(text).to_bytes(_HEADER, "little") + text
    received = b""
    while len(received) < _HEADER + int.from_bytes(received[:_HEADER], "little"):
        piece = text[len(received) : len(received) + _MESSAGE].ljust(_MESSAGE, b"\0")
        received += bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(piece, np.uint8)))
    return json.loads(received[_HEADER:][: int.from_bytes(received[:_HEADER], "little")])
