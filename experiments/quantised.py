"""Weights in few bits: what they take, what they change of target and draft, and how fast both decode.

    python experiments/quantised.py configs/demo.yaml [--results FILE]     (5 minutes on 2 cores)

Targets as stored, in int8 and in int4, and as stored with a KV cache in int8: bytes that a pass reads, nats a token on
held-out text (through the cache, where it is what differs), the share of positions whose best token is that of the
target as stored, tokens/s of plain decoding. Drafts of the target as stored: a separate
one as stored and in few bits, and the target's own weights in int8 and int4: alpha at temperature 1 under teacher
forcing, tokens a target call and tokens/s at k = 3, greedy and at temperature 1, block verification. Timed in turns,
batch 1; medians over prompts, ratios of the same prompts to plain decoding of the target as stored.
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
import record
from rich.console import Console
from rich.table import Table

from specjax.config import load_config
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel, TrainedDraftModel
from specjax.evaluation.evaluate import evaluate
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.models.hf import LoadedModel, load_model, quantize_model
from specjax.models.kernels import counted
from specjax.runtime.compile_cache import keep_programs

SCHEMES = ("int8", "int4")
K, NEW_TOKENS, BATCH = 3, 160, 4


def read_bytes(model: LoadedModel) -> int:
    """Bytes that a pass over one token reads: the embedding is only looked up."""
    params = model.layout().params
    return counted({name: value for name, value in params.items() if name != "embedding"})[1]


def read(model: LoadedModel, stored: LoadedModel, rows: Any, count: int) -> dict[str, float]:
    """Held-out text through a cache of the model's: nats a token, and beside the target as stored the probability that
    its token is accepted at temperature 1, and the share of positions with the same best token."""

    def logits_of(one: LoadedModel) -> Any:
        def run(params: Any, tokens: Any) -> Any:
            at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            out = one.spec(params, tokens, at, cache=one.spec.init_cache(1, tokens.shape[1]))
            return jax.nn.log_softmax(out.logits.astype(jnp.float32), axis=-1)[0, :-1]

        return jax.jit(run)

    sums, passes = np.zeros(3), (logits_of(model), logits_of(stored))
    for i in range(count):
        tokens = jnp.asarray(rows[i].tokens)[None]
        q, p = (np.asarray(run(of.params, tokens)) for run, of in zip(passes, (model, stored), strict=True))
        nats = -np.take_along_axis(q, np.asarray(tokens[0, 1:, None]), axis=-1).mean()
        sums += nats, np.minimum(np.exp(p), np.exp(q)).sum(-1).mean(), (p.argmax(-1) == q.argmax(-1)).mean()
    return dict(zip(("nll", "alpha", "same_best"), (sums / count).tolist(), strict=True))


@dataclasses.dataclass
class Timed:
    """A decoder in its turns."""

    decoder: Decoder
    seconds: list[float] = dataclasses.field(default_factory=list)
    emitted: int = 0
    calls: int = 0

    def turn(self, prompt: list[int], temperature: float, seed: int) -> None:
        start = time.perf_counter()
        found = self.decoder.generate(
            [prompt], max_new_tokens=NEW_TOKENS, temperature=temperature, seed=seed, ignore_eos=True
        )
        self.seconds.append(time.perf_counter() - start)
        self.emitted, self.calls = self.emitted + found.stats[0].emitted, self.calls + found.stats[0].blocks


def raced(decoders: dict[str, Decoder], prompts: list[list[int]], temperature: float) -> dict[str, Timed]:
    """All of them on each prompt in turn; the first prompt compiles."""
    timed = {name: Timed(decoder) for name, decoder in decoders.items()}
    for seed, prompt in enumerate(prompts):
        for name, one in timed.items():
            one.turn(prompt, temperature, seed)
            if seed == 0:
                timed[name] = Timed(one.decoder)
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--draft", default="models/demo-drafts/separate")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--results", type=Path)
    args = parser.parse_intermixed_args()
    keep_programs()
    config = load_config(args.config, args.overrides)
    prepared = inputs.prepare(config)
    stored, rows = prepared.target, prepared.held_out_rows
    targets = {"as stored": stored} | {name: quantize_model(stored, name) for name in SCHEMES}
    targets["int8 cache"] = dataclasses.replace(stored, spec=dataclasses.replace(stored.spec, cache_dtype="int8"))
    draft = load_model(args.draft, str(stored.dtype))
    drafts = {"separate": draft} | {f"separate {name}": quantize_model(draft, name) for name in SCHEMES}
    drafts |= {f"itself in {name}": targets[name] for name in SCHEMES}
    prompts = held_out_prompts(prepared.corpus.held_out, stored, config.bench.prompt_tokens, 1 + args.prompts)

    found: dict[str, Any] = {"k": K, "new_tokens": NEW_TOKENS, "targets": {}, "drafts": {}}
    plain = {name: Decoder(model) for name, model in targets.items()}
    speeds = raced(plain, prompts, 0.0)
    for name, model in targets.items():
        found["targets"][name] = {
            "bytes": read_bytes(model),
            **read(model, stored, rows, args.positions // rows.length),
            "tokens_per_s": NEW_TOKENS / float(np.median(speeds[name].seconds)),
            "over_stored": ratio(speeds["as stored"], speeds[name]),
        }
    decoders = {"plain": plain["as stored"]}
    decoders |= {name: Decoder(stored, DraftModel(model, K), "block", "fixed") for name, model in drafts.items()}
    races = {temperature: raced(decoders, prompts, temperature) for temperature in (0.0, 1.0)}
    for name, model in drafts.items():
        measured = evaluate(TrainedDraftModel(model.spec), model.params, stored, rows, args.positions, BATCH)
        found["drafts"][name] = {"bytes": read_bytes(model), "alpha": measured.alpha}
        for temperature, race in races.items():
            found["drafts"][name][f"T={temperature:g}"] = {
                "tokens_a_call": race[name].emitted / race[name].calls,
                "tokens_per_s": NEW_TOKENS / float(np.median(race[name].seconds)),
                "over_plain": ratio(race["plain"], race[name]),
            }
    show(found)
    if args.results is not None:
        record.write(args.results, found)


def ratio(base: Timed, other: Timed) -> float:
    """Median over prompts of how many times as fast the other is."""
    return float(np.median(np.asarray(base.seconds) / np.asarray(other.seconds)))


def show(found: dict[str, Any]) -> None:
    console = Console()
    table = Table("target", "MB", "nats a token", "alpha with the stored", "same best", "tokens/s", "over stored")
    for name, row in found["targets"].items():
        figures = (f"{row['nll']:.4f}", f"{row['alpha']:.4f}", f"{row['same_best']:.4f}")
        table.add_row(
            name, f"{row['bytes'] / 1e6:.1f}", *figures, f"{row['tokens_per_s']:.0f}", f"{row['over_stored']:.2f}"
        )
    console.print(table)
    table = Table("draft", "MB", "alpha", "T", "tokens a call", "tokens/s", "over plain")
    for name, row in found["drafts"].items():
        for temperature in ("T=0", "T=1"):
            of = row[temperature]
            first = (name, f"{row['bytes'] / 1e6:.1f}", f"{row['alpha']:.4f}") if temperature == "T=0" else ("", "", "")
            speed = (f"{of['tokens_a_call']:.3f}", f"{of['tokens_per_s']:.0f}", f"{of['over_plain']:.2f}")
            table.add_row(*first, temperature[2:], *speed)
    console.print(table)
    console.print(f"[dim]{jax.devices()[0].device_kind}, k = {found['k']}, {found['new_tokens']} new tokens")


if __name__ == "__main__":
    main()
