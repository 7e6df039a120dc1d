"""A small transformer trained over a mesh, by this process or, run as a program, by one of several, which decode as
well: python -m tests.training.scale DIRECTORY CASE PORT PROCESS PROCESSES. Rows are masked unevenly, and so are the
shards of a batch. DIRECTORY has the models of `tests.decode.test_mesh`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import config
from specjax.data.rows import Batches
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.interfaces import Batch
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.runtime import distributed, fingerprint
from specjax.training.layout import Layout, make_layout
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import make_optimizer
from specjax.training.sources.on_policy import OnPolicy, draft_sampler
from specjax.training.step import Update, start_state
from specjax.training.teacher_cache import Logits, TeacherCache
from tests.decode import test_mesh
from tests.drafters import test_features
from tests.training import test_on_policy, toys

SHAPE = ModelConfig(
    vocab_size=toys.VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
)
LENGTH, BATCH, MICRO = 12, 8, 4
OPTIMIZER = config.Optimizer(learning_rate=3e-3, warmup_steps=5, clip_norm=1e6, ema=0.9)
FOUR = config.Mesh(data=2, fsdp=2)


@dataclasses.dataclass(frozen=True)
class UnevenRows:
    """Of row i the last i mod 8 predictions count, of 12."""

    count: int = 64
    length: int = LENGTH

    @property
    def digest(self) -> str:
        return fingerprint.digest(self[0])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        row = np.random.default_rng(index).integers(0, SHAPE.vocab_size, self.length + 1).astype(np.int32)
        weight = (np.arange(self.length) >= self.length - index % 8).astype(np.float32)
        positions, segments = np.arange(self.length, dtype=np.int32), np.zeros(self.length, np.int32)
        arrays: list[Any] = [row[:-1], row[1:], weight, positions, segments]
        return Batch(*arrays)


def draft_params(shape: ModelConfig = SHAPE) -> Any:
    return jax.jit(Model(shape).init)(jax.random.key(1))


def transformer_target() -> LoadedModel:
    spec = Model(dataclasses.replace(SHAPE, hidden_size=24))
    params = jax.jit(spec.init)(jax.random.key(0))
    return LoadedModel(spec, {**params, "embedding": 30.0 * params["embedding"]})


@dataclasses.dataclass(frozen=True)
class Case:
    shape: ModelConfig
    target: Callable[[], Any]
    steps: int
    decoding_mesh: str
    """Of `tests.decode.test_mesh`."""


CASES = {
    "short": Case(SHAPE, toys.target, 3, "both"),
    "long": Case(dataclasses.replace(SHAPE, num_layers=2), transformer_target, 50, "tensor"),
}


def stage(steps: int) -> config.Stage:
    return config.Stage(steps=steps, batch_size=BATCH, micro_batch_size=MICRO, optimizer=OPTIMIZER)


class Trained:
    """``losses`` of every step; ``gradient`` of the first, one vector a parameter; the last ``state``."""

    def __init__(self, layout: Layout, case: str | tuple[Any, Any, Any, int]):
        """``case``: one of `CASES`, or (drafter, its parameters, target, steps)."""
        if isinstance(case, str):
            shape, steps = CASES[case].shape, CASES[case].steps
            case = TrainedDraftModel(Model(shape)), draft_params(shape), CASES[case].target(), steps
        drafter, params, teacher, steps = case
        optimizer, ema = make_optimizer(stage(50)), OPTIMIZER.ema
        teacher_params = layout.put(teacher.params, layout.of_target(teacher.params, teacher.spec))
        state = start_state(params, optimizer, True, layout, drafter)
        loss = ForwardKL()
        update = Update(drafter, loss, optimizer, teacher.spec, MICRO, ema=ema, layout=layout).jitted(state)
        batches, self.losses = Batches(UnevenRows(), BATCH, 0), []
        self.gradient: dict[str, Any] = {}
        for step in range(steps):
            self.before = state
            state, metrics = update(state, teacher_params, layout.batch(batches.rows, batches.indices(step)), None)
            self.losses.append(float(metrics["loss"]))
            if step == 0:
                # Of a gradient that is not clipped, Adam's first moment is a tenth after one step.
                moment = optimizer_moment(state)
                leaves = jax.tree_util.tree_leaves_with_path(distributed.whole(moment))
                self.gradient = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        self.state = state


FEATURE_DRAFTS = ("published", "mtp", "p_eagle", "medusa", "dflash", "dflash2", "dspark_confident", "early_exit")
"""One of each kind, as `tests.drafters.test_features` names them."""


def feature_drafts(layout: Layout) -> dict[str, Trained]:
    """Two steps of each."""
    target, found = test_features.target_of(), {}
    for name in FEATURE_DRAFTS:
        drafter, _ = test_features.made(name, target)
        drafter = drafter if name == "early_exit" else drafter.unrolled(2)
        params = drafter.model.init(jax.random.key(1))
        found[name] = Trained(layout, (drafter, params, target, 2))
    return found


def optimizer_moment(state: Any) -> Any:
    [moment] = [s.mu for s in jax.tree.leaves(state.opt, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    return moment


def cached_row(directory: Path, layout: Layout) -> Any:
    """Row 5 with the best logits of a target that lies over ``layout``."""
    target = transformer_target()
    target = dataclasses.replace(target, params=layout.put(target.params, layout.of_target(target.params, target.spec)))
    kept = Logits.of(3, target, UnevenRows())
    return TeacherCache(target, UnevenRows(), np.arange(9), kept, MICRO).at(directory)[5]


def sampled(layout: Layout) -> list[list[int]]:
    """By a draft that lies over ``layout``."""
    model = LoadedModel(Model(SHAPE), draft_params())
    params = layout.put(model.params, layout.of_draft(model.params, TrainedDraftModel(model.spec)))
    settings = OnPolicy(prompt_tokens=3, new_tokens=6, batch_size=2)
    sample: Any = draft_sampler(TrainedDraftModel(model.spec), model)
    return sample(params, [[1, 2, 3], [4, 5, 6]], [7, 8], settings)


def main(directory: Path, case: str, port: int, process: int, processes: int) -> None:
    where = f"localhost:{port}"
    distributed.start(config.Distributed(True, where, processes, process))
    assert jax.process_count() == processes
    assert jax.local_device_count() < jax.device_count() == 4
    # Each is told all rows.
    tokens = test_mesh.tokens_of(directory, CASES[case].decoding_mesh)
    (directory / f"tokens-{process}.json").write_text(json.dumps(tokens))
    trained = Trained(make_layout(FOUR), case)
    if distributed.is_first():
        np.savez(directory / "gradient.npz", **trained.gradient)
        (directory / "losses.json").write_text(json.dumps(trained.losses))
    if case == "long":
        for name, draft in feature_drafts(make_layout(FOUR)).items():
            if distributed.is_first():
                np.savez(directory / f"{name}.npz", losses=draft.losses, **draft.gradient)
        return
    # The whole loop as well: log, fingerprint and checkpoints in one directory, and data that is made for a stage.
    layout = make_layout(config.Mesh(data=-1))
    params = toys.train(directory / "stage", layout=layout, steps=6)
    of_samples = test_on_policy.train(directory / "on-policy", layout=layout)
    cached_row(directory / "teacher", make_layout(FOUR))
    tokens = sampled(make_layout(FOUR))
    if distributed.is_first():
        np.savez(directory / "on-policy.npz", **of_samples)
        (directory / "sampled.json").write_text(json.dumps(tokens))
        np.savez(directory / "bigram.npz", **params)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
