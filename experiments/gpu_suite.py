"""What is asked of specjax on an accelerator, in one command, a quarter of an hour on an H100, most of it compiling:

    python experiments/gpu_suite.py [--size 8B|1B|tiny] [--only PART ...] [--results FILE]

Parts: `kernels` (the library's attention beside the plain one), `plain` (autoregressive decoding over the bytes it
reads), `verification` (a block over a token), `step` (a block
over its passes made in turn), `speculation` (a draft that agrees with probability .8, k = 5, about a twentieth of the
target, over plain decoding), `quantised` (int8 and int4 over the dtype), `distillation` (a step with a draft of half a
billion, over the FLOP/s of this device), `long` (decoding at 32k in batch 8, a step over 32k tokens), `peer` (assisted
generation of transformers on torch with the same saved weights, on the same device; needs torch, and on a GPU
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both have memory). Random weights (`synthetic.py`), and greedy tokens are
checked before anything is timed. Medians of loops in turn. What does not fit is said and passed over. On a CPU `--size
tiny` runs all parts in two minutes, to see that they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer_transformers import Transformers
from roofline import Passes
from synthetic import DRAFTS, TARGETS, Agreeing, successor

from specjax import backend
from specjax.config import Stage
from specjax.costs import timer as costs
from specjax.costs.devices import this_device
from specjax.costs.roofline import pass_work, storage_of, work_of_weights
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.interfaces import Batch, TrainingForm
from specjax.models import products
from specjax.models.attention import flash
from specjax.models.attention.sight import AttentionMask
from specjax.models.hf import LoadedModel, save_model
from specjax.models.kernels import counted
from specjax.models.transformer import Model
from specjax.report import record
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, Update, microbatch_rows

K, AGREEMENT, TURNS = 5, 0.8, 3


@dataclasses.dataclass(frozen=True)
class Scale:
    """How long everything is."""

    new: int
    prompt: int
    contexts: tuple[tuple[int, int], ...]
    """Rows and slots of verification."""
    batches: tuple[int, ...]
    long: int
    train: tuple[int, int]
    """Rows and tokens of a batch."""


SCALES = {
    "8B": Scale(256, 128, ((1, 8192), (16, 4096)), (1, 16), 2**15, (2, 4096)),
    "1B": Scale(256, 128, ((1, 8192), (16, 4096)), (1, 16), 2**15, (4, 4096)),
    "tiny": Scale(96, 32, ((1, 512), (4, 256)), (1, 4), 1024, (2, 256)),
}


@dataclasses.dataclass
class Suite:
    """The target of all parts, loaded once."""

    size: str
    dtype: str

    @functools.cached_property
    def target(self) -> LoadedModel:
        target = successor(TARGETS[self.size], self.dtype)
        target.free_originals()
        return target

    @functools.cached_property
    def device(self) -> Any:
        return this_device(self.target)

    @property
    def scale(self) -> Scale:
        return SCALES[self.size]

    def prompts(self, batch: int, length: int | None = None) -> list[list[int]]:
        count = TARGETS[self.size].vocab_size
        return [[(i * 17 + j) % count for j in range(length or self.scale.prompt)] for i in range(batch)]

    # --- decoding -------------------------------------------------------------------------------------------------

    def decoders(self, agreement: float = AGREEMENT) -> dict[str, Decoder]:
        draft = Agreeing(DRAFTS[self.size], self.dtype, K, agreement)
        return {"plain": Decoder(self.target), "speculative": Decoder(self.target, draft, controller="fixed")}

    def check(self) -> None:
        """Both continue t with t + 1, or nothing here is worth timing. Raises `AssertionError`."""
        count = TARGETS[self.size].vocab_size
        for decoder in self.decoders(0.5).values():
            found = decoder.generate(self.prompts(2), max_new_tokens=16, ignore_eos=True)
            for prompt, tokens in zip(self.prompts(2), found.tokens, strict=True):
                assert list(tokens) == [(prompt[-1] + 1 + i) % count for i in range(16)], tokens

    def seconds_a_token(self, decoders: Mapping[str, Decoder], batch: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Of the blocks alone, as the generation of many tokens takes longer than that of one."""
        prompts, found = self.prompts(batch), {name: [] for name in decoders}
        results = {}
        for turn in range(TURNS + 1):
            for name, decoder in decoders.items():
                times = []
                for new in (1, self.scale.new):
                    start = time.perf_counter()
                    results[name] = decoder.generate(prompts, max_new_tokens=new, ignore_eos=True)
                    times.append(time.perf_counter() - start)
                if turn:  # the first one compiles
                    found[name].append((times[1] - times[0]) / (self.scale.new - 1))
        return {name: float(np.median(times)) for name, times in found.items()}, results

    def plain(self) -> Iterator[tuple[str, Any]]:
        seconds, _ = self.seconds_a_token({"plain": Decoder(self.target)}, 1)
        slots = 512 if self.scale.new + self.scale.prompt > 256 else 256
        storage = storage_of(self.target.layout().params, self.target.layout().spec.init_cache(1, 16))
        least = pass_work(self.target.config, 1, 1, slots, storage).num_bytes / self.device.bandwidth
        yield "tokens/s, batch 1", 1 / seconds["plain"]
        yield "bytes over measured bandwidth (asked: .85)", least / seconds["plain"]

    def kernels(self) -> Iterator[tuple[str, Any]]:
        """Largest difference from plain attention in float32, over the largest value: bfloat16 holds 1/256."""
        rows, length, heads, kv_heads, features = 2, 1024, 8, 2, 128
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (
            jax.random.normal(key, (rows, length, count, features), "bfloat16")
            for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
        )
        at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        documents = at // 300
        for name, segments, window in (("causal", None, None), ("window", None, 100), ("documents", documents, None)):
            sight = AttentionMask(at[:1], segments=None if segments is None else (segments, segments)).within(
                window, at, at
            )
            call = flash.Call(features**-0.5)
            found = flash.whole_rows(q, k, v, sight, call)
            if found is None:
                yield f"{name}: no kernel on this device", "-"
                continue
            turned = (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 3, 1))
            keys, values = (x.astype(jnp.float32).reshape(rows * kv_heads, *x.shape[2:]) for x in turned)
            plain = products.attend(q.astype(jnp.float32), keys, values, sight.all(length), call.scale, None)
            yield f"{name}: difference from plain", float(jnp.abs(found - plain).max() / jnp.abs(plain).max())

    def verification(self) -> Iterator[tuple[str, Any]]:
        for batch, slots in self.scale.contexts:
            passes = Passes(self.target, batch, slots, (1, 8))
            for _ in range(TURNS):
                passes.turn()
            found = passes.medians()
            asked = 1.2 if batch == 1 else 1.3
            yield f"8 tokens over 1, batch {batch}, {slots:,} slots (asked: {asked})", found[8] / found[1]

    def step(self) -> Iterator[tuple[str, Any]]:
        decoder = self.decoders()["speculative"]
        engine, params = decoder.engine(True)
        run = decoder._run(self.prompts(1), self.scale.new, 0, True, sampling={})
        state = decoder._prefill(run, run.batch.slots[-1])
        timer = costs.StepTimer([engine], params, [state], iterations=20)
        for _ in range(TURNS):
            timer.turn()
        found = costs.median(timer.costs()[0])
        yield "block over its passes in turn (asked: 1.05)", found.overhead
        yield "a draft pass over one of the target", found.draft / K / found.target

    def speculation(self) -> Iterator[tuple[str, Any]]:
        decoders = self.decoders()
        for batch in self.scale.batches:
            seconds, results = self.seconds_a_token(decoders, batch)
            stats = results["speculative"].stats
            kept = sum(s.emitted for s in stats) / sum(s.blocks for s in stats)
            yield f"tokens a call, batch {batch}", kept
            asked = 2.4 if batch == 1 else 1.8
            yield f"over plain, batch {batch} (asked: {asked})", seconds["plain"] / seconds["speculative"]

    def quantised(self) -> Iterator[tuple[str, Any]]:
        seconds, _ = self.seconds_a_token({"plain": Decoder(self.target)}, 1)
        for scheme, asked in (("int8", 1.6), ("int4", 2.0)):
            target = successor(TARGETS[self.size], self.dtype, scheme)
            target.free_originals()
            own, _ = self.seconds_a_token({"plain": Decoder(target)}, 1)
            ratio = seconds["plain"] / own["plain"]
            yield f"{scheme} over {self.dtype}, batch 1 (asked: {asked})", ratio
            yield (
                f"{scheme}, bytes of all weights over {self.dtype}",
                self.bytes_of(target) / self.bytes_of(self.target),
            )

    @staticmethod
    def bytes_of(target: LoadedModel) -> int:
        return counted(target.layout().params)[1]

    # --- training -------------------------------------------------------------------------------------------------

    def distillation(self) -> Iterator[tuple[str, Any]]:
        rows, length = self.scale.train
        seconds, flops = self.trained(rows, length)
        yield f"tokens/s, {rows} rows of {length:,}", rows * length / seconds
        yield "of the measured FLOP/s, both models (asked: .4)", flops / seconds / self.device.flops

    def trained(self, rows: int, length: int) -> tuple[float, float]:
        """(seconds of a step, FLOP of its products)."""
        model, optimizer = Model(DRAFTS[self.size]), make_optimizer(Stage("forward_kl", 100))
        teacher = successor(TARGETS[self.size], self.dtype)
        own = jax.jit(model.init)(jax.random.key(2))
        state = TrainState(own, optimizer.init(own))
        form = TrainingForm(backend.remat(), dtype=self.dtype)
        micro = microbatch_rows(rows, length)
        update = Update(TrainedDraftModel(model), ForwardKL(), optimizer, teacher.spec, micro, form=form).jitted()
        ids = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, length)), jnp.int32)
        batch = Batch(ids, jnp.roll(ids, -1, axis=1), jnp.ones((rows, length), jnp.float32))
        times = []
        for _ in range(TURNS + 1):
            start = time.perf_counter()
            state, found = update(state, teacher.params, batch)
            jax.block_until_ready((state, found))
            times.append(time.perf_counter() - start)
        assert bool(found["sound"])
        products = work_of_weights(teacher.params, 1).flops + 3 * work_of_weights(own, 1).flops
        return float(np.median(times[1:])), products * rows * length

    def long(self) -> Iterator[tuple[str, Any]]:
        length, new = self.scale.long, 64
        decoder = Decoder(self.target, controller="fixed")
        start = time.perf_counter()
        result = decoder.generate(self.prompts(8, length - new), max_new_tokens=new, ignore_eos=True)
        yield f"decoded at {length:,} in batch 8, seconds with compiling", time.perf_counter() - start
        assert all(len(tokens) == new for tokens in result.tokens)
        seconds, _ = self.trained(1, length)
        yield f"seconds of a step over {length:,} tokens", seconds

    # --- beside others --------------------------------------------------------------------------------------------

    def peer(self) -> Iterator[tuple[str, Any]]:
        """Both with a draft that is always right, k = 5."""
        config = dataclasses.replace(DRAFTS[self.size], tie_embeddings=False)
        draft, new = successor(config, self.dtype), self.scale.new
        device = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
        with tempfile.TemporaryDirectory() as directory:
            places = [Path(directory) / name for name in ("target", "draft")]
            for model, place in zip((self.target, draft), places, strict=True):
                save_model(model, place)
            theirs = Transformers(places[0], places[1], new, self.dtype, device)
        ours, prompts = Decoder(self.target, DraftModel(draft, K), controller="fixed"), self.prompts(1 + TURNS)
        seconds = []
        for turn, prompt in enumerate(prompts):
            start = time.perf_counter()
            tokens = theirs.decode(prompt, 0.0, K, 0)
            between = time.perf_counter()
            found = ours.generate([prompt], max_new_tokens=new, ignore_eos=True).tokens[0]
            assert list(found) == tokens, "not the same tokens"
            if turn:  # the first one compiles
                seconds.append((between - start, time.perf_counter() - between))
        slow, fast = np.median(seconds, axis=0)
        yield "tokens/s of transformers, assisted", new / slow
        yield "specjax over transformers, assisted (asked: 3)", slow / fast


PARTS = ("kernels", "plain", "verification", "step", "speculation", "quantised", "distillation", "long", "peer")


def measured(part: Callable[[], Iterator[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """What it gives, or why it does not."""
    try:
        yield from part()
    except Exception as error:  # memory, a kernel that is missing: the other parts are still asked
        traceback.print_exc()
        yield "not measured", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=[*TARGETS])
    parser.add_argument("--dtype", default=backend.default_dtype())
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    suite, began = Suite(args.size, args.dtype), time.perf_counter()
    suite.check()
    device = suite.device
    shown = f"{device.bandwidth / 1e9:.0f} GB/s, {device.flops / 1e12:.2f} TFLOP/s, measured in {device.dtype}"
    print(f"{device.name}: {shown}; target {args.size}, {counted(suite.target.layout().params)[0] / 1e9:.2f}B weights")
    found: dict[str, Any] = {"size": args.size, "dtype": args.dtype}
    found["device"] = {"bandwidth": device.bandwidth, "flops": device.flops}
    for part in args.only:
        found[part], start = {}, time.perf_counter()
        for name, value in measured(getattr(suite, part)):
            found[part][name] = value
            print(f"{part:<14}{name:<58}{value if isinstance(value, str) else metrics_text(value):>12}", flush=True)
        found[part]["seconds in all"] = time.perf_counter() - start
        if args.results is not None:  # what was measured is kept, whatever ends this
            record.write(args.results, found)
    print(f"{time.perf_counter() - began:.0f} s in all")


def metrics_text(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
