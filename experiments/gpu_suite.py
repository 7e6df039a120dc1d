"""What is asked of specjax on an accelerator, in one command; `device_queue.sh` runs what fits in eight minutes:

    python experiments/gpu_suite.py [--size 8B|1B|tiny] [--only PART ...] [--budget SECONDS] [--results FILE]

Parts, in order of worth: `step` (a block over its passes made in turn, a pass of the draft over one of the target),
`speculation` (a draft that agrees with probability .8, k = 5, about a twentieth of the target, over plain decoding),
`quantised` (int8 and int4 over the dtype), `verification` (a block over a token), `kv_cache` (a cache of 8 bits over
one of the dtype), `plain` (autoregressive decoding over the bytes it reads), `graphs` (decoding whose loops are CUDA
graphs), `kernels` (the library's attention beside the plain one), `distillation` (a step with a draft of half a
billion, over the FLOP/s of this device), `long` (decoding at 32k in batch 8, a step over 32k tokens), `peer` (assisted
generation of transformers on torch with the same saved weights, on the same device; needs torch, and on a GPU
XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both have memory).

Random weights (`synthetic.py`), and tokens are checked before and while they are timed. A ratio is the median over
turns, each with prompts of its own, with the least and the largest beside it. What does not fit, in memory or in the
budget, is said and passed over. On a CPU `--size tiny` runs all parts in two minutes, to see that they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import tempfile
import time
import traceback
import unittest.mock
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
from specjax.decode.programs import free_programs
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.interfaces import Batch, TrainingForm
from specjax.models import products
from specjax.models.attention import flash
from specjax.models.attention.sight import AttentionMask
from specjax.models.hf import LoadedModel, save_model
from specjax.models.kernels import counted
from specjax.models.transformer import Model
from specjax.report import record
from specjax.runtime.compile_cache import count_compiles, programs_kept
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, Update, microbatch_rows

K, AGREEMENT, TURNS = 5, 0.8, 5


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

    def prompts(self, batch: int, length: int | None = None, turn: int = 0) -> list[list[int]]:
        """Prompts of a turn; those of another turn begin with other tokens, and so a draft fails at other places."""
        count, first = TARGETS[self.size].vocab_size, turn * batch
        return [[((first + i) * 17 + j) % count for j in range(length or self.scale.prompt)] for i in range(batch)]

    def continued(self, prompts: list[list[int]], found: Any) -> None:
        """Raise `AssertionError` unless every t was continued with t + 1."""
        count = TARGETS[self.size].vocab_size
        for prompt, tokens in zip(prompts, found.tokens, strict=True):
            assert list(tokens) == [(prompt[-1] + 1 + i) % count for i in range(len(tokens))], list(tokens)[:16]

    # --- decoding -------------------------------------------------------------------------------------------------

    def decoders(self, agreement: float = AGREEMENT) -> dict[str, Decoder]:
        draft = Agreeing(DRAFTS[self.size], self.dtype, K, agreement)
        return {"plain": Decoder(self.target), "speculative": Decoder(self.target, draft, controller="fixed")}

    def check(self) -> None:
        """Both continue t with t + 1, or nothing here is worth timing. Raises `AssertionError`."""
        for decoder in self.decoders(0.5).values():
            self.continued(self.prompts(2), decoder.generate(self.prompts(2), max_new_tokens=16, ignore_eos=True))

    def seconds_a_token(
        self, decoders: Mapping[str, Decoder], batch: int, length: int | None = None, turns: int = TURNS
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Seconds of a token in each turn, of the blocks alone, as the generation of many tokens takes longer than that
        of one; and the results of each turn. ``length``: tokens of a prompt."""
        seconds: dict[str, list[float]] = {name: [] for name in decoders}
        results: dict[str, list[Any]] = {name: [] for name in decoders}
        for turn in range(turns + 1):
            prompts = self.prompts(batch, length, turn)
            for name, decoder in decoders.items():
                times = []
                for new in (1, self.scale.new):
                    start = time.perf_counter()
                    found = decoder.generate(prompts, max_new_tokens=new, ignore_eos=True)
                    times.append(time.perf_counter() - start)
                    self.continued(prompts, found)
                if turn:  # the first one compiles
                    seconds[name].append((times[1] - times[0]) / (self.scale.new - 1))
                    results[name].append(found)
        return {name: np.array(times) for name, times in seconds.items()}, results

    def plain(self) -> Iterator[tuple[str, Any]]:
        seconds, _ = self.seconds_a_token({"plain": Decoder(self.target)}, 1)
        slots = 512 if self.scale.new + self.scale.prompt > 256 else 256
        storage = storage_of(self.target.layout().params, self.target.layout().spec.init_cache(1, 16))
        least = pass_work(self.target.config, 1, 1, slots, storage).num_bytes / self.device.bandwidth
        yield "tokens/s, batch 1", spread(1 / seconds["plain"])
        yield "bytes over measured bandwidth (asked: .85)", spread(least / seconds["plain"])

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
            passes = Passes(self.target.layout(), batch, slots, (1, 8))
            for _ in range(TURNS):
                passes.turn()
            ratio = np.divide(passes.seconds[8], passes.seconds[1])
            asked = 1.2 if batch == 1 else 1.28
            yield f"8 tokens over 1, batch {batch}, {slots:,} slots (asked: {asked})", spread(ratio)

    def kv_cache(self) -> Iterator[tuple[str, Any]]:
        (batch, slots), layout = self.scale.contexts[-1], self.target.layout()
        small = dataclasses.replace(layout, spec=dataclasses.replace(layout.spec, cache_dtype="int8"))
        both = [Passes(kind, batch, slots, (1, 8)) for kind in (layout, small)]
        for _ in range(TURNS):
            for passes in both:
                passes.turn()
        for tokens, asked in ((1, " (asked: 1.1)"), (8, "")):
            ratio = np.divide(both[0].seconds[tokens], both[1].seconds[tokens])
            name = f"cache in int8 over {self.dtype}, {tokens} token(s), batch {batch}, {slots:,} slots{asked}"
            yield name, spread(ratio)

    def step(self) -> Iterator[tuple[str, Any]]:
        decoder = self.decoders()["speculative"]
        engine, params = decoder.engine(True)
        run = decoder._run(self.prompts(1), self.scale.new, 0, True, sampling={})
        state = decoder._prefill(run, run.batch.slots[-1])
        timer = costs.StepTimer([engine], params, [state], iterations=20)
        for _ in range(TURNS):
            timer.turn()
        found = timer.costs()[0]
        yield "block over its passes in turn (asked: 1.05)", spread([turn.overhead for turn in found])
        passes = [turn.draft / K / turn.target for turn in found]
        yield f"a draft pass over one of the target over {K + 1} tokens (asked: {1 / 12:.3f})", spread(passes)

    def speculation(self) -> Iterator[tuple[str, Any]]:
        decoders = self.decoders()
        for batch in self.scale.batches:
            seconds, results = self.seconds_a_token(decoders, batch)
            kept = [
                sum(s.emitted for s in result.stats) / sum(s.blocks for s in result.stats)
                for result in results["speculative"]
            ]
            expected = (1 - AGREEMENT ** (K + 1)) / (1 - AGREEMENT)
            yield f"tokens a call, batch {batch} (expected: {expected:.2f})", spread(kept)
            asked = 2.5 if batch == 1 else 1.9
            yield f"over plain, batch {batch} (asked: {asked})", spread(seconds["plain"] / seconds["speculative"])

    def quantised(self) -> Iterator[tuple[str, Any]]:
        for scheme, asked in (("int8", 1.5), ("int4", 1.7)):
            target = successor(TARGETS[self.size], self.dtype, scheme)
            target.free_originals()
            decoders = {"plain": Decoder(self.target), scheme: Decoder(target)}
            seconds, _ = self.seconds_a_token(decoders, 1)
            yield f"{scheme} over {self.dtype}, batch 1 (asked: {asked})", spread(seconds["plain"] / seconds[scheme])
            share = self.bytes_of(target) / self.bytes_of(self.target)
            yield f"{scheme}, bytes of all weights over {self.dtype}", share

    def graphs(self) -> Iterator[tuple[str, Any]]:
        """Loops as CUDA graphs, over loops that the host drives. A process has one kind: each is timed by itself, and
        programs are made anew."""
        found: dict[str, Any] = {}
        for name, options in (("driven", {}), ("graphs", GRAPHS), ("driven again", {})):
            free_programs()
            with unittest.mock.patch.object(backend, "compiler_options", return_value=options):
                found[name], _ = self.seconds_a_token(self.decoders(), 1)
        for kind in ("plain", "speculative"):
            driven = (found["driven"][kind] + found["driven again"][kind]) / 2
            yield f"{kind}: loops as CUDA graphs over driven ones", spread(driven / found["graphs"][kind])

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
        """The longest rows: decoding behind prompts of 32k, over the bytes it reads, and a step of training."""
        length, batch = self.scale.long, 8
        found, _ = self.seconds_a_token({"plain": Decoder(self.target)}, batch, length - self.scale.new, turns=2)
        yield f"tokens/s at {length:,}, batch {batch}", spread(batch / found["plain"])
        storage = storage_of(self.target.layout().params, self.target.layout().spec.init_cache(1, 16))
        least = pass_work(self.target.config, batch, 1, length, storage).num_bytes / self.device.bandwidth
        yield f"bytes over measured bandwidth at {length:,}, batch {batch}", spread(least / found["plain"])
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


PARTS = (
    *("step", "speculation", "quantised", "verification", "kv_cache", "plain", "graphs"),
    *("kernels", "distillation", "long", "peer"),
)
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
}
"""Options of XLA that make one CUDA graph of a block, or of the whole loop of plain decoding."""


def spread(values: Any) -> dict[str, float]:
    """Median, least and largest of a figure's turns."""
    found = np.asarray(values, float)
    return {"median": float(np.median(found)), "low": float(found.min()), "high": float(found.max())}


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
    parser.add_argument("--budget", type=float, default=float("inf"), help="No part begins after so many seconds.")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    with programs_kept(), count_compiles() as compiled:
        suite = Suite(args.size, args.dtype)
        suite.check()
        device = suite.device
        rates = f"{device.bandwidth / 1e9:.0f} GB/s, {device.flops / 1e12:.2f} TFLOP/s, measured in {device.dtype}"
        weights = f"{counted(suite.target.layout().params)[0] / 1e9:.2f}B weights"
        print(f"{device.name}: {rates}; target {args.size}, {weights}")
        found: dict[str, Any] = {"size": args.size, "dtype": args.dtype}
        found["device"] = {"bandwidth": device.bandwidth, "flops": device.flops}
        for part in args.only:
            found[part], start = {}, time.perf_counter()
            late = start - began > args.budget
            lines = iter([("not measured", "no time was left")]) if late else measured(getattr(suite, part))
            for name, value in lines:
                found[part][name] = value
                print(f"{part:<14}{name:<72}{metrics_text(value)}", flush=True)
                found["seconds"] = {"compiling": compiled.seconds, "all": time.perf_counter() - began}
                if args.results is not None:  # what was measured is kept, whatever ends this
                    record.write(args.results, found)
    print(f"{time.perf_counter() - began:.0f} s in all, {compiled.seconds:.0f} s of them compiling")


def metrics_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return f"{metrics_text(value['median'])} [{metrics_text(value['low'])}, {metrics_text(value['high'])}]"
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
