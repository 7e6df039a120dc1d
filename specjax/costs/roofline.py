"""Roofline bound of a pass: its arithmetic and its bytes, from the shapes of the model, against the peaks of a device
(roofline model, Williams, Waterman and Patterson 2009). A pass reads every weight once, and the keys and values of
every slot; activations are not counted.

Dims: B rows, m tokens fed to each, S slots of the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from specjax.costs.devices import Device
from specjax.interfaces import Params
from specjax.models.config import ModelConfig
from specjax.models.kernels import counted, leaves_of


@dataclasses.dataclass(frozen=True)
class Work:
    """The arithmetic and the memory traffic of a pass."""

    flops: float
    num_bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> Work:
        return Work(times * self.flops, times * self.num_bytes)

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def bound(self, device: Device) -> Literal["memory", "compute"]:
        """Resource of ``device`` that the pass waits for."""
        return "memory" if self.intensity < device.ridge else "compute"

    def least_seconds(self, device: Device) -> float:
        """Lower bound of the seconds of the pass on ``device``."""
        return max(self.flops / device.flops, self.num_bytes / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Bytes of an element of the weights and of a cache."""

    weights: float
    cache: float

    @classmethod
    def computed(cls, device: Device) -> Storage:
        """Bytes of an element where weights and caches have the dtype of the device's products."""
        size = 2.0 if device.dtype in ("bfloat16", "float16") else 4.0
        return cls(size, size)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass beside the roofline of a device."""

    name: str
    batch: int
    work: Work
    device: Device
    seconds: float | None = None
    """Measured seconds; None: the pass is only computed."""

    @property
    def share(self) -> float | None:
        """Share of the roofline: least over measured seconds; None if not measured."""
        return None if self.seconds is None else self.work.least_seconds(self.device) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Figures by name."""
        return {
            "pass": self.name,
            "batch": self.batch,
            "flops": self.work.flops,
            "bytes": self.work.num_bytes,
            "intensity": self.work.intensity,
            "ridge": self.device.ridge,
            "bound": self.work.bound(self.device),
            "least_seconds": self.work.least_seconds(self.device),
            "seconds": self.seconds,
            "share_of_roofline": self.share,
        }


def pass_work(config: ModelConfig, batch: int, tokens: int, slots: int, storage: Storage) -> Work:
    """Work of one pass of a model over ``tokens`` tokens in each of ``batch`` rows, whose caches have ``slots`` slots.
    In a layer of experts each token multiplies with the experts that it is sent to, and the pass reads as many as its
    tokens can reach."""
    rows, flops, weights, cached = batch * tokens, 0.0, 0.0, 0.0
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        layer = config.layer(i)
        attention = config.hidden_size * (heads + 2 * kv) + heads * config.hidden_size
        used, read = _mlp(config, rows, layer.dense)
        seen = slots if layer.window is None else min(slots, layer.window)
        flops += 2 * rows * (attention + used) + 4 * rows * seen * heads
        weights += attention + read
        cached += 2 * kv * (batch * seen + rows)
    head = config.hidden_size * config.vocab_size
    flops += 2 * rows * head
    return Work(flops, (weights + head) * storage.weights + cached * storage.cache)


def _mlp(config: ModelConfig, rows: int, dense: bool) -> tuple[float, float]:
    """Weights of an MLP: (those that a token multiplies with, those that ``rows`` tokens read)."""
    kernels = (3 if config.gated else 2) * config.hidden_size
    if config.experts is None or dense:
        size = kernels * config.intermediate_size
        return size, size
    experts, size = config.experts, kernels * config.experts.intermediate_size
    router = config.hidden_size * experts.count
    return router + experts.top_k * size, router + min(experts.count, rows * experts.top_k) * size


def work_of_weights(params: Params, rows: int, itemsize: float | None = None) -> Work:
    """Work of a pass of which only the weights are known: each of ``rows`` tokens multiplies with each weight. An
    embedding beside a head of its own is only looked up and not counted. ``itemsize``: bytes of a weight; None: as
    stored."""
    looked_up = params["embedding"] if isinstance(params, dict) and {"embedding", "head"} <= params.keys() else None
    weights, taken = counted(params)
    count = weights - (0 if looked_up is None else looked_up.size)
    num_bytes = taken - (0 if looked_up is None else looked_up.nbytes)
    return Work(2.0 * rows * count, float(num_bytes if itemsize is None else itemsize * count))


def storage_of(params: Params, cache: Any) -> Storage:
    """Bytes of an element as the weights and a cache are stored here."""

    def mean(tree: Any, default: float) -> float:
        size, taken = counted([leaf for leaf in leaves_of(tree) if getattr(leaf, "ndim", 2) > 1])
        return taken / size if size else default

    weights = mean({k: v for k, v in params.items() if k != "embedding"} if isinstance(params, dict) else params, 4.0)
    return Storage(weights, mean(cache, weights))
