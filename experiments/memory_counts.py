"""What large shapes take beside their weights: XLA's own count of the temporaries of compiled programs, nothing run and
nothing allocated.

    python experiments/memory_counts.py [--results FILE]     (2 minutes on 2 cores)

A step of distillation, vocabulary 152,000, one row of 4,096 tokens: a teacher of 2 layers of 1,024, 16 heads, a draft
of 512 that keeps its head as it is; and the same with a draft as wide as its teacher that shares the teacher's
embedding and head. Then the prefill of a prompt of 32,768 tokens in pieces of 2,048, of two layers of 4,096 with 32
heads.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import record

from specjax import registry
from specjax.decode.engine import EngineParams, NoDraft
from specjax.decode.programs import Request, compiled_prefill
from specjax.distill.init import SharedEnds
from specjax.distill.step import TrainState, Update
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.models.config import ModelConfig
from specjax.models.transformer import Model
from specjax.testing.toys import neutral_sampling
from specjax.types import Batch, Params, TrainingForm

GIB = 2**30
VOCAB, LENGTH = 152_064, 4096
TEACHER = ModelConfig(
    vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_layers=2, num_heads=16, num_kv_heads=16,
    head_dim=64, max_positions=2**16, tie_embeddings=False,
)  # fmt: skip
DRAFT = dataclasses.replace(TEACHER, hidden_size=512, intermediate_size=1536, num_layers=1, num_heads=8, num_kv_heads=8)


@dataclasses.dataclass(frozen=True)
class BesideFrozen:
    """A target whose parameters come with ``frozen`` ones of a draft."""

    model: Model

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def __call__(self, params: Params, *args: Any, **options: Any) -> Any:
        return self.model(params["target"], *args, **options)

    def head(self, params: Params, final: jax.Array) -> jax.Array:
        return self.model.head(params["target"], final)


@dataclasses.dataclass(frozen=True)
class FrozenHead(TrainedDraftModel):
    """A draft whose head stays as it is."""

    def complete(self, params: Params, target_params: Params) -> Params:
        return {**params, "head": target_params["frozen"]}


def shapes_of(model: Model) -> Params:
    return jax.eval_shape(model.init, jax.random.key(0))


def training_step(form: TrainingForm) -> dict[str, tuple[Any, Any, Any, Params]]:
    """(drafter, target, its parameters, the draft's) of each step."""
    teacher, draft = Model(TEACHER), Model(DRAFT)
    own = shapes_of(draft)
    frozen = {"target": shapes_of(teacher), "frozen": own.pop("head")}
    wide = Model(dataclasses.replace(TEACHER, num_layers=1))
    shared = SharedEnds(wide, shared=("embedding", "head"))
    wide_own = {name: x for name, x in shapes_of(wide).items() if name not in shared.shared}
    return {
        "training, draft of 512, frozen head": (FrozenHead(draft), BesideFrozen(teacher), frozen, own),
        "training, draft of 1,024, shared ends": (shared, teacher, frozen["target"], wide_own),
    }


def training_counts(remat: bool) -> dict[str, Any]:
    found = {}
    loss, optimizer = registry.build(registry.LOSSES, "forward_kl", "loss"), optax.adamw(1e-4)
    ids: Any = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    weight: Any = jax.ShapeDtypeStruct((1, LENGTH), jnp.float32)
    batch = Batch(ids, ids, weight)
    for name, (drafter, spec, target, own) in training_step(TrainingForm(remat)).items():
        update = Update(drafter, loss, optimizer, spec, 1, form=TrainingForm(remat))
        state = jax.eval_shape(lambda params: TrainState(params, optimizer.init(params)), own)
        compiled = update.jitted().lower(state, target, batch).compile()
        gradients = sum(x.size * 4 for x in jax.tree.leaves(own))
        found[name] = {"temporaries": temporaries(compiled), "gradients": gradients}
    return found


PROMPT, PIECE = 2**15, 2**11
LONG = ModelConfig(
    vocab_size=VOCAB, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8,
    head_dim=128, max_positions=2**16, tie_embeddings=False,
)  # fmt: skip


def prefill_counts(pieces: tuple[int, ...]) -> dict[str, Any]:
    """Of a prompt's pass beside its cache, of widths as those of a model of 8B, in pieces of so many tokens."""
    model, found = Model(LONG), {}
    ids: Any = jax.ShapeDtypeStruct((1, PROMPT), jnp.int32)
    request = jax.eval_shape(lambda ids: request_of(ids), ids)
    for piece in pieces:
        prefill = compiled_prefill(model, NoDraft(), PROMPT, piece=piece)
        compiled = prefill.lower(EngineParams(shapes_of(model), {}), request).compile()
        cache = sum(x.size * 4 for x in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, PROMPT))))
        found[f"prompt of {PROMPT:,} in pieces of {piece:,}"] = {"temporaries": temporaries(compiled), "cache": cache}
    return found


def request_of(ids: jax.Array) -> Request:
    """All of them one row's prompt."""
    row = jnp.zeros((1,), jnp.int32)
    stops, seeds = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 2), jnp.uint32)
    return Request(ids, row + PROMPT, row + 1, neutral_sampling(1, VOCAB), seeds, stops)


def temporaries(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    found = training_counts(remat=False) | prefill_counts((PIECE,))
    for name, counts in found.items():
        gradients = counts.get("gradients", 0)
        beside = f", beyond gradients {(counts['temporaries'] - gradients) / GIB:.2f} GiB" if gradients else ""
        print(f"{name:<40} {counts['temporaries'] / GIB:6.2f} GiB{beside}")
    if args.results:
        record.write(args.results, found)


if __name__ == "__main__":
    main()
