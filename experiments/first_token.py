"""Seconds to the first token of a deep model, cold and with the programs kept by an earlier process, and how long a
step of training takes to compile with its layers unrolled and scanned.

    python experiments/first_token.py [--layers 32] [--hidden 512] [--results FILE]       (2 minutes on 2 cores)

Every figure is of a process of its own, after weights and imports: tracing, lowering, compiling or loading, running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

KINDS: dict[str, str] = {
    "first token, cold": "decode",
    "first token, warm": "decode",
    "training step, unrolled, cold": "unrolled",
    "training step, unrolled, warm": "unrolled",
    "training step, scanned, cold": "scanned",
    "training step, scanned, warm": "scanned",
}


def measured(kind: str, layers: int, hidden: int) -> dict[str, float]:
    """In this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from specjax.config import Stage
    from specjax.decode.decoder import Decoder
    from specjax.distill.losses import CrossEntropy
    from specjax.distill.optimizer import make_optimizer
    from specjax.distill.step import TrainState, Update, microbatch_rows
    from specjax.drafters.draft_model import TrainedDraftModel
    from specjax.evaluation.costs import count_compiles
    from specjax.models.config import ModelConfig
    from specjax.models.hf import LoadedModel
    from specjax.models.transformer import Model
    from specjax.types import Batch, TrainingForm

    jax.config.update("jax_compilation_cache_dir", os.environ["FIRST_TOKEN_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    heads = hidden // 64
    config = ModelConfig(
        32_000, hidden, 11 * hidden // 4, layers, heads, heads // 2, 64, max_positions=4096, tie_embeddings=False
    )
    model = Model(config)
    params = jax.block_until_ready(jax.jit(model.init)(jax.random.key(0)))
    if kind == "decode":
        target = LoadedModel(model, params)
        del params
        target.free_originals()
        decoder = Decoder(target)

        def run() -> Any:
            return decoder.generate([list(range(64))], max_new_tokens=1, ignore_eos=True)
    else:
        optimizer = make_optimizer(Stage("cross_entropy", 100))
        form = TrainingForm(remat=True, scan_layers=kind == "scanned")
        state = TrainState(params, optimizer.init(params))
        ids = jnp.asarray(np.zeros((4, 128)), jnp.int32)
        batch = Batch(ids, ids, jnp.ones(ids.shape, jnp.float32))
        update = Update(
            TrainedDraftModel(model), CrossEntropy(), optimizer, None, microbatch_rows(4, 128), form=form
        ).jitted()

        def run() -> Any:
            return jax.block_until_ready(update(state, None, batch))

    with count_compiles() as count:
        start = time.perf_counter()
        run()
        return {"seconds": time.perf_counter() - start, "compiling": count.seconds, "programs": count.programs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, args.layers, args.hidden)))
        return
    found: dict[str, Any] = {"layers": args.layers, "hidden": args.hidden}
    with tempfile.TemporaryDirectory() as cache:
        for name, kind in KINDS.items():
            command = [sys.executable, __file__, "--one", kind, "--layers", str(args.layers)]
            command += ["--hidden", str(args.hidden)]
            environment = {**os.environ, "FIRST_TOKEN_CACHE": f"{cache}/{kind}"}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{name:<32}{found[name]['seconds']:8.2f} s, of which compiling or loading "
                f"{found[name]['compiling']:.2f} s, {found[name]['programs']} programs",
                flush=True,
            )
    if args.results is not None:
        record.write(args.results, found)


if __name__ == "__main__":
    main()
