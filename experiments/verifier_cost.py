"""What a verifier costs at the vocabularies of today's models, and which share of a step that is.

    python experiments/verifier_cost.py [--vocab 32000 128000] [--batch 8] [-k 7] [--hidden 512] [--layers 8]

Each verifier alone in one program over given logits, all in turns, medians; beside it the target's pass over the block
and the draft's k passes, of a random Llama-shaped model (the draft: an eighth of its width, a quarter of its layers).
Of the compiled program: host transfers (exit status 1 if there is one), and temporaries in units of p and q together
(float32 [B, K + 1, V] and [B, K, V]).
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax import backend, registry, sampling
from specjax.evaluation.costs import median_seconds
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import decode_layout
from specjax.models.transformer import Model
from specjax.types import Draft

TURNS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_000])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--verifiers", nargs="+", default=["speculative", "block", "coupled"])
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    table = Table(title=f"verifiers at B = {args.batch}, K = {args.k} on {device}; target of hidden {args.hidden}, "
                  f"{args.layers} layers")  # fmt: skip
    for name in (
        "V",
        "verifier",
        "ms",
        "over p and q read once",
        "temporaries / (p + q)",
        "host transfers",
        "share of a step",
    ):
        table.add_column(name, justify="right")
    sound = True
    for vocab in args.vocab:
        programs = {kind: verifier_program(kind, args.batch, args.k, vocab) for kind in args.verifiers}
        compiled = {kind: run.lower(*inputs).compile() for kind, (run, inputs) in programs.items()}
        passes = [model_pass(args.hidden, args.layers, vocab, args.batch, args.k + 1)]
        passes.append(model_pass(args.hidden // 8, max(1, args.layers // 4), vocab, args.batch, 1))
        times: dict[str, list[float]] = {}
        for _ in range(TURNS):
            for kind, (_, inputs) in programs.items():
                times.setdefault(kind, []).append(median_seconds(functools.partial(compiled[kind], *inputs), 3))
            for name, run in zip(("target", "draft"), passes, strict=True):
                times.setdefault(name, []).append(median_seconds(run, 3))
        seconds = {name: float(np.median(values)) for name, values in times.items()}
        given = 4 * args.batch * vocab * (2 * args.k + 1)
        floor = read_seconds(given)
        for kind in args.verifiers:
            memory, text = compiled[kind].memory_analysis(), compiled[kind].as_text()
            assert memory is not None  # every backend that we know tells
            assert text is not None
            transfers = sum(text.count(word) for word in ("infeed", "outfeed", "xla_python", "callback"))
            extra = memory.temp_size_in_bytes / given
            share = seconds[kind] / (seconds[kind] + seconds["target"] + args.k * seconds["draft"])
            sound &= transfers == 0
            table.add_row(f"{vocab:,}", kind, f"{1e3 * seconds[kind]:.2f}", f"{seconds[kind] / floor:.1f}x",
                          f"{extra:.2f}", str(transfers), f"{share:.1%}")  # fmt: skip
    Console().print(table)
    return 0 if sound else 1


def verifier_program(kind: str, batch: int, k: int, vocab: int):
    """(jitted verifier, its inputs): p and q from random logits, related so that blocks are accepted in part."""
    verifier = registry.build(registry.VERIFIERS, kind, "--verifiers")
    keys = jax.random.split(jax.random.key(0), 3)
    p_logits = 3 * jax.random.normal(keys[0], (batch, k + 1, vocab))
    q_logits = p_logits[:, :k] + jax.random.normal(keys[1], (batch, k, vocab))
    tokens = jax.random.categorical(keys[2], q_logits).astype(jnp.int32)
    seeds, lengths = jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2), jnp.full(batch, 64, jnp.int32)
    draft = Draft(tokens, jnp.ones(tokens.shape, bool), q_logits)

    def run(draft, p_logits, seeds):
        """With the noise, which is made anew in every block."""
        if verifier.noise == "coupled":
            return verifier(draft, p_logits, sampling.coupled_noise(seeds, lengths, k, vocab))
        return verifier(draft, p_logits, sampling.fresh_noise(seeds, lengths, k))

    return jax.jit(run, compiler_options=backend.compiler_options(decoding=True)), (draft, p_logits, seeds)


def model_pass(hidden: int, layers: int, vocab: int, batch: int, fed: int):
    """One cached pass of ``fed`` tokens a row, over 256 slots."""
    heads = max(1, hidden // 64)
    config = ModelConfig(vocab, hidden, 3 * hidden, layers, heads, max(1, heads // 4), max(16, hidden // heads), 512)
    model, params = Model(config), jax.jit(Model(config).init)(jax.random.key(0))
    model, params = decode_layout(model, params)
    cache = model.init_cache(batch, 256)
    tokens = jnp.zeros((batch, fed), jnp.int32)
    slots = jnp.broadcast_to(jnp.arange(100, 100 + fed, dtype=jnp.int32)[None], (batch, fed))
    run = jax.jit(lambda params, cache: model(params, tokens, slots, slots, cache).logits,
                  compiler_options=backend.compiler_options(decoding=True))  # fmt: skip
    return lambda: run(params, cache)


def read_seconds(num_bytes: int) -> float:
    """Time to read as many bytes once, by a sum on the device."""
    data = jnp.ones((num_bytes // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    return median_seconds(lambda: total(data), 9)


if __name__ == "__main__":
    sys.exit(main())
