"""Decodes over the devices of one or of several processes, the draft whole on every device or split as its target is,
and says which of the two is faster there.

    python experiments/decode_over_mesh.py TARGET [--draft DIR] [-k 5] [--data 1] [--tensor -1] [--batch 4] \\
        [--prompt-tokens 64] [--new-tokens 128] [--draft-over whole split] [--processes N] [--coordinator HOST:PORT] \\
        [--process I] [--results FILE]

Every process runs the same command and loads its own part of the weights. On a TPU pod, under SLURM, Kubernetes and
Open MPI `--processes auto` is all that is needed; elsewhere each is told who it is. The first one prints. Generations
in turn, greedy, medians of five; random prompts, since what is timed does not depend on them but for the acceptance.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import config
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.formats.loading import load_drafter
from specjax.models.hf import load_model
from specjax.report import record
from specjax.runtime import distributed

_TURNS = 5


def decoders_of(args: argparse.Namespace) -> dict[str, Decoder]:
    tensor = jax.device_count() // args.data if args.tensor == -1 else args.tensor
    mesh: Any = jax.make_mesh((args.data, tensor), ("data", "tensor")) if args.data * tensor > 1 else None
    target = load_model(args.target, mesh=mesh)
    target.free_originals()
    found = {"autoregressive": Decoder(target)}
    if args.draft is None:
        return found
    if "whole" in args.draft_over:
        found["draft whole"] = Decoder(target, load_drafter(args.draft, target, args.k), controller="fixed")
    if "split" in args.draft_over and mesh is not None:
        draft = load_model(args.draft, mesh=mesh)
        draft.free_originals()
        found["draft split"] = Decoder(target, DraftModel(draft, k=args.k), controller="fixed")
    return found


def measured(decoders: dict[str, Decoder], args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = next(iter(decoders.values())).target.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocab_size, (args.batch, args.prompt_tokens)).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    results: dict[str, Any] = {}
    for turn in range(_TURNS + 1):
        for name, decoder in decoders.items():
            start = time.perf_counter()
            results[name] = decoder.generate(prompts, max_new_tokens=args.new_tokens, ignore_eos=True)
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    first = results["autoregressive"].tokens
    return {
        name: {
            "tokens_per_s": args.batch * args.new_tokens / float(np.median(seconds[name])),
            "tokens_a_call": sum(s.emitted for s in found.stats) / sum(s.blocks for s in found.stats),
            "same_tokens": found.tokens == first,
        }
        for name, found in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=-1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--draft-over", nargs="+", default=["whole", "split"], choices=["whole", "split"])
    parser.add_argument("--processes", help="How many, or `auto`.")
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.processes is not None:
        count = None if args.processes == "auto" else int(args.processes)
        distributed.start(config.Distributed(True, args.coordinator, count, args.process))
    found = measured(decoders_of(args), args)
    if not distributed.is_first():
        return
    print(f"{jax.device_count()} devices of {jax.process_count()} processes, {jax.devices()[0].device_kind}")
    for name, one in found.items():
        same = "" if one["same_tokens"] else ", other tokens than autoregressively: near-ties in this dtype"
        print(f"{name:<16}{one['tokens_per_s']:10,.1f} tokens/s{one['tokens_a_call']:8.2f} tokens a call{same}")
    drafts = [name for name in found if name != "autoregressive"]
    if len(drafts) > 1:
        print(f"faster here: {max(drafts, key=lambda name: found[name]['tokens_per_s'])}")
    if args.results is not None:
        record.write(args.results, found)


if __name__ == "__main__":
    main()
