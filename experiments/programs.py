"""How many programs mixed requests compile: prompts, budgets, batch sizes and temperatures all vary.

    python experiments/programs.py [--requests 50]     (2 to 4 minutes on 2 cores)

Prints the count after 1/4, 1/2 and all of the requests, beside the most that requests of these sizes can ever need and
its formula. The model is a toy: shapes decide what is compiled, not weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import specjax
from specjax.decode.request import most_programs
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.runtime.compile_cache import count_compiles

VOCABULARY = 64
ROWS, PROMPT, NEW = 8, 2048, 1024


def toy() -> LoadedModel:
    config = ModelConfig(
        VOCABULARY, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
        max_positions=8192,
    )  # fmt: skip
    return LoadedModel(Model(config), jax.jit(Model(config).init)(jax.random.key(0)), name="toy")


def requests(count: int, seed: int, rows: int = ROWS, prompt: int = PROMPT, new: int = NEW) -> Iterator[dict[str, Any]]:
    """Arguments of `Decoder.generate`, sizes spread evenly in their logarithms."""
    rng = np.random.default_rng(seed)

    def size(most: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    for i in range(count):
        batch = int(rng.integers(1, rows + 1))
        yield {
            "prompts": [rng.integers(0, VOCABULARY, min(size(prompt), prompt)).tolist() for _ in range(batch)],
            "max_new_tokens": [min(size(new), new) for _ in range(batch)],
            "temperature": 0.0 if i % 2 else [float(rng.choice([0.0, 0.7, 1.0])) for _ in range(batch - 1)] + [1.0],
            "top_p": float(rng.uniform(0.5, 1)),
            "seed": i,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50)
    count = parser.parse_args().requests
    target = toy()
    decoder = specjax.Decoder(target, specjax.DraftModel(target, k=3))
    bound, formula = most_programs(target, 3, rows=ROWS, prompt=PROMPT, new=NEW)
    marks = {-(-count // 4), -(-count // 2), count}
    start = time.perf_counter()
    with count_compiles() as compiled:
        for done, request in enumerate(requests(count, seed=0), 1):
            decoder.generate(**request)
            if done in marks:
                print(
                    f"{done:6} requests: {compiled.programs:3} programs, {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    print(f"at most {bound} = {formula}")


if __name__ == "__main__":
    main()
