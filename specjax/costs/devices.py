"""Peak rates of a device: bytes a second from its memory, FLOP a second. They are measured for the device that is here,
and come from datasheets for others."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from omegaconf import OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass

from specjax import backend
from specjax.config import loading
from specjax.config.fields import STRICT
from specjax.costs.timer import median_seconds, stream_bandwidth
from specjax.errors import ConfigError
from specjax.models.hf import LoadedModel
from specjax.models.kernels import counted

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class Peaks:
    """A device as a YAML file describes it."""

    bandwidth: _Rate
    """Bytes a second from memory."""
    flops: Annotated[Mapping[str, _Rate], Field(min_length=1)]
    """FLOP a second by dtype of the products: `bfloat16`, `float32`, ..."""
    memory: _Rate
    """Bytes of memory."""
    backend: Literal["cpu", "cuda", "rocm", "tpu"] = "cuda"
    """Platform that XLA compiles for; defaults depend on it."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device and the rates that bound a pass on it."""

    name: str
    bandwidth: float
    """Bytes a second from memory."""
    flops: float
    """FLOP a second in products of ``dtype``."""
    dtype: str
    measured: bool
    """True if measured here, False if from a datasheet."""
    memory: float | None = None
    """Bytes of memory, where known."""
    backend: str | None = None
    """Platform that XLA compiles for; None: the one here."""

    @property
    def ridge(self) -> float:
        """FLOP a byte above which arithmetic bounds a pass, and memory below (roofline model, Williams, Waterman and
        Patterson 2009)."""
        return self.flops / self.bandwidth


@functools.cache
def presets() -> Mapping[str, Peaks]:
    """Devices that come with specjax, by name."""
    raw: Any = OmegaConf.create((resources.files("specjax.costs") / "devices.yaml").read_text(encoding="utf-8"))
    return {name: loading.validate(f"preset {name}", peaks, Peaks, {}) for name, peaks in raw.items()}


def device_of(name: str, dtype: str | None = None) -> Device:
    """The device of a preset, or of a YAML file of `Peaks` (a name that ends in .yaml).

    Args:
        name: name of a preset, or path of a file.
        dtype: dtype of weights and products; None: bfloat16, or the first that the device lists.

    Returns:
        The device, marked as not measured.

    Raises:
        ConfigError: the name is neither, the file does not validate, or it gives no FLOP/s in ``dtype``.
    """
    if name.endswith((".yaml", ".yml")):
        title, peaks = Path(name).stem, loading.validate(name, loading.read(name, [], Peaks), Peaks, {})
    elif name in presets():
        title, peaks = name, presets()[name]
    else:
        near = [preset for preset in presets() if name and preset.startswith(name.lower())]
        near = near or difflib.get_close_matches(name.lower(), presets(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"--device {name}: unknown; {hint}presets are {', '.join(presets())}; or give a FILE.yaml with bandwidth, "
            "flops and memory"
        )
    chosen = dtype or ("bfloat16" if "bfloat16" in peaks.flops else next(iter(peaks.flops)))
    if chosen not in peaks.flops:
        raise ConfigError(
            f"--device {name}: flops has no {chosen}, only {', '.join(peaks.flops)}; set target.dtype to one of them"
        )
    return Device(
        title, peaks.bandwidth, peaks.flops[chosen], chosen, measured=False, memory=peaks.memory, backend=peaks.backend
    )


def this_device(target: LoadedModel) -> Device:
    """The device that is here, measured: its stream bandwidth over as many bytes as a pass of the target reads, and
    the rate of a large product in the dtype of the target's weights."""
    layout = target.layout()
    read = counted(layout.params)[1]
    dtype, device = str(target.dtype), jax.devices()[0]
    flops = matmul_flops(dtype)
    stats = device.memory_stats() or {}
    return Device(device.device_kind, stream_bandwidth(read), flops, dtype, True, stats.get("bytes_limit"))


def matmul_flops(dtype: str, side: int | None = None) -> float:
    """FLOP a second of one product of two square matrices of random numbers: a GPU multiplies ones with less power, and
    so at a higher clock."""
    side = side or (2048 if backend.is_host(jax.devices()[0]) else 8192)
    a = jax.random.normal(jax.random.key(0), (side, side), dtype) / jnp.asarray(side**0.5, dtype)
    return 2 * side**3 / median_seconds(lambda: a @ a, 5)
