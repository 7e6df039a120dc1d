"""Passes of a target beside the least time that its bytes and its arithmetic take on this device, both measured here.

    python experiments/roofline.py [--size 8B|1B|tiny | --target MODEL] [--dtype bfloat16] [--quantize int8 int4]
        [--results FILE]

Random weights (`synthetic.py`), or those of a model. Of every batch and context a pass over 1, 2, 4, 8, 16 tokens:
seconds, the share of the roofline that it reaches, and its time over that of a single token, which is what verification
costs. Medians of five loops in turn, each beside the bandwidth of its own turn. Asked of an 8B-shaped target in
bfloat16 on a GPU: 85% at batch 1, a block of 8 within 1.2 of a token at a context of 8,192 and within 1.3 at batch 16
and 4,096. Half a minute for `tiny` on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from synthetic import TARGETS, successor

import specjax
from specjax import backend
from specjax.costs.devices import this_device
from specjax.costs.roofline import pass_work, storage_of
from specjax.costs.timer import Turns, depending, looped, stream_bandwidth
from specjax.models.decode_layout import DecodeLayout
from specjax.models.hf import LoadedModel
from specjax.models.kernels import counted
from specjax.report import record

TOKENS = (1, 2, 4, 8, 16)
SHAPES = {"8B": ((1, 1024), (1, 8192), (16, 4096)), "1B": ((1, 1024), (1, 8192), (16, 4096)), "tiny": ((1, 256),)}
"""Rows and slots."""
_OF_A_MODEL = ((1, 256), (1, 1024))
_TURNS = 5
_READS = 4
"""Reads of the bandwidth in each turn, of which the fastest counts."""


class Passes(Turns):
    """Loops of passes over a cache that is full but for a block, timed in turn."""

    def __init__(self, layout: DecodeLayout, batch: int, slots: int, tokens: tuple[int, ...] = TOKENS, many: int = 20):
        self._params = layout.params
        self.cache = layout.spec.init_cache(batch, slots).fold()
        self._first = jnp.full((batch,), slots - max(tokens), jnp.int32)
        super().__init__({m: self._loop(layout.spec, batch, m, many) for m in tokens})

    def _loop(self, spec: Any, batch: int, m: int, many: int) -> Any:
        def body(params: Any, lengths: jax.Array, cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            at = lengths[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
            out = spec(params, tokens, at, at, cache)
            return out.cache, depending(tokens, out.logits)

        loop, tokens = looped(body, 0), jnp.ones((batch, m), jnp.int32)
        room = jnp.int32(1)

        def seconds(iterations: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready(loop(0, iterations, self._params, self._first, room, (self.cache, tokens)))
            return time.perf_counter() - start

        def run() -> float:
            """Seconds of a pass: what a loop takes once, such as its copy of the cache, is not in the difference."""
            return (seconds(3 * many) - seconds(many)) / (2 * many)

        seconds(1)
        return run


def measure(target: LoadedModel, batch: int, slots: int, device: Any, many: int) -> dict[str, Any]:
    passes = Passes(target.layout(), batch, slots, many=many)
    params, devices = target.layout().params, []
    for _ in range(_TURNS):
        passes.turn()
        devices.append(dataclasses.replace(device, bandwidth=stream_bandwidth(counted(params)[1], _READS)))
    storage, found = storage_of(params, passes.cache), {}
    medians = passes.medians()
    for m, seconds in medians.items():
        work = pass_work(target.config, batch, m, slots, storage)
        shares = [work.least_seconds(own) / x for own, x in zip(devices, passes.seconds[m], strict=True)]
        found[str(m)] = {
            "seconds": seconds,
            "roofline": float(np.median(shares)),
            "over_a_token": seconds / medians[1],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=[*TARGETS])
    parser.add_argument("--target", help="Directory, hub id or GGUF file of a model, in place of random weights.")
    parser.add_argument("--dtype", default=backend.default_dtype())
    parser.add_argument("--quantize", nargs="*", default=[], choices=["int8", "int4"])
    parser.add_argument("--many", type=int, default=20, help="Passes of a loop.")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for scheme in (None, *args.quantize):
        if args.target is None:
            target, what, shapes = successor(TARGETS[args.size], args.dtype, scheme), args.size, SHAPES[args.size]
        else:
            target, shapes = specjax.load_model(args.target, args.dtype), _OF_A_MODEL
            what = target.name
            target = target if scheme is None else specjax.quantize_model(target, scheme)
        target.free_originals()
        device = this_device(target)
        if scheme is None:
            print(
                f"{device.name}: {device.bandwidth / 1e9:.0f} GB/s, {device.flops / 1e12:.2f} TFLOP/s in {device.dtype}"
            )
            found["device"] = {"bandwidth": device.bandwidth, "flops": device.flops, "dtype": device.dtype}
        for batch, slots in shapes:
            name = f"{what} {scheme or args.dtype}, batch {batch}, {slots:,} slots"
            found[name] = measure(target, batch, slots, device, args.many)
            shown = ", ".join(
                f"{m}: {1e3 * x['seconds']:.3f} ms ({x['roofline']:.0%}, {x['over_a_token']:.2f}x)"
                for m, x in found[name].items()
            )
            print(f"{name}: {shown}", flush=True)
        del target
    if args.results is not None:
        record.write(args.results, found)


if __name__ == "__main__":
    main()
