"""Programs of decoding and training from abstract weights: nothing is loaded or computed, so a model of 8B is as cheap
as a toy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from specjax.controllers.fixed import Fixed
from specjax.decode.engine import Engine, EngineParams, NoDraft
from specjax.decode.programs import Request, compiled_chunk, compiled_prefill
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.drafters.glide import GlideModel, TrainedGlide
from specjax.interfaces import Batch, Reads, TrainingForm
from specjax.models import cache as cache_lib
from specjax.models.config import ModelConfig
from specjax.models.sharding import ROWS as ROWS_AXES
from specjax.models.sharding import spec_of
from specjax.models.transformer import Model
from specjax.testing.toys import neutral_sampling
from specjax.training import evaluate, teacher_cache
from specjax.training.layout import Layout
from specjax.training.losses import ForwardKL
from specjax.training.step import TrainState, Update
from specjax.verifiers.greedy import Greedy
from specjax.verifiers.speculative import Speculative

WIDE = ModelConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_layers=2, num_heads=32, num_kv_heads=8,
    head_dim=128, max_positions=2**16, tie_embeddings=False,
)  # fmt: skip
"""Two layers with the sizes of a model of 8B."""
ALL_EXTRAS = ("penalties", "top_k", "top_p", "min_p")


def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A target with its drafter, and the sizes of a batch. ``extras``: what rows ask for beside a temperature; without
    ``greedy`` alone."""

    target: Any
    params: Any
    drafter: Any = dataclasses.field(default_factory=NoDraft)
    draft_params: Any = dataclasses.field(default_factory=dict)
    batch: int = 8
    prompt: int = 1024
    slots: int = 2048
    greedy: bool = True
    extras: tuple[str, ...] = ()
    mesh: Mesh | None = None

    @property
    def weights(self) -> EngineParams:
        return EngineParams(self.params, self.draft_params)

    def request(self) -> Any:
        """A request of full rows."""
        rows = shape(self.batch)
        sampling = jax.eval_shape(lambda: neutral_sampling(self.batch, self.target.config.vocab_size))
        prompt, seeds = shape(self.batch, self.prompt), shape(self.batch, 2, dtype=jnp.uint32)
        return Request(prompt, rows, rows, sampling, seeds, shape(self.batch, 8))

    def prefill(self, piece: int | None = None) -> tuple[Any, tuple]:
        """(jitted function, its arguments)."""
        jitted = compiled_prefill(self.target, self.drafter, self.slots, False, Fixed(), piece)
        return jitted, (self.weights, self.request())

    def state(self, piece: int | None = 512) -> Any:
        """The state that `prefill` leaves."""
        jitted, arguments = self.prefill(piece)
        state = jax.eval_shape(jitted, *arguments)
        return state if self.mesh is None else as_it_lies(state, self.mesh)

    def chunk(self, piece: int | None = 512) -> tuple[Any, tuple]:
        """(jitted function, its arguments)."""
        verifier = Greedy() if self.greedy else Speculative()
        engine = Engine(
            self.target, self.drafter, verifier, self.greedy, controller=Fixed(),
            extras=() if self.greedy else self.extras,
        )  # fmt: skip
        return compiled_chunk(engine), (self.weights, self.state(piece), shape())


def as_it_lies(state: Any, mesh: Mesh) -> Any:
    """Caches by rows and heads, all else whole on every device."""

    def placed(x: Any, *axes: Any) -> Any:
        sharding = NamedSharding(mesh, spec_of(x.shape, mesh, *axes))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def of(x: Any) -> Any:
        if not cache_lib.is_cache(x):
            return placed(x)
        axes = ROWS_AXES, "tensor"
        return dataclasses.replace(x, layers=jax.tree.map(lambda leaf: placed(leaf, *axes[: leaf.ndim]), x.layers))

    return jax.tree.map(of, state, is_leaf=cache_lib.is_cache)


ROWS, LENGTH = 8, 1024


def training(mesh: Mesh | None, student: ModelConfig) -> Iterator[tuple[str, Any, tuple]]:
    """(name, jitted function, its arguments) of steps of training with a draft of these sizes, and of what they are
    measured by."""
    layout = Layout(mesh)
    form = TrainingForm(remat=True, dtype="bfloat16")
    teacher, rows = Model(WIDE, "bfloat16"), layout.rows()

    def of_batch(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows)

    ids = of_batch(ROWS, LENGTH)
    batch: Any = Batch(ids, ids, of_batch(ROWS, LENGTH, dtype=jnp.float32), ids, ids)
    target, placed = abstract(teacher, layout.of_target, teacher), layout.model(teacher)
    optimizer = optax.adamw(1e-4)
    drafts = {"draft": TrainedDraftModel(Model(student)), "glide": TrainedGlide(GlideModel(Model(student), (1,)))}
    for name, drafter in drafts.items():
        own = abstract(Model(student), layout.of_draft, drafter)
        state = jax.eval_shape(lambda params: TrainState(params, optimizer.init(params)), own)
        if mesh is not None:
            lies = layout.of_draft(state, drafter)
            state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, lies)
        update = Update(drafter, ForwardKL(), optimizer, teacher, ROWS, form=form, layout=layout)
        yield f"training step {name}", update.jitted(state), (state, target, batch, {})
        of_target = _static(evaluate._target_output, placed, getattr(drafter, "reads", Reads()))
        out = jax.eval_shape(of_target, target, batch)
        yield (
            f"evaluation {name}",
            _static(evaluate._sums, drafter.in_training(layout.form()), placed, None),
            (own, target, out, batch),
        )
    yield "teacher's pass", _static(evaluate._target_output, placed, Reads()), (target, batch)
    best = jax.jit(lambda t, b, n: teacher_cache._best(placed, None, t, b, n, 64))
    yield "teacher's best", best, (target, batch, shape(ROWS))


def abstract(model: Model, place: Any, who: Any) -> Any:
    """Shapes of a model's weights, and where ``place`` lays them."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    lies = place(shapes, who)
    if lies is None:
        return shapes
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, lies)


def _static(jitted: Any, *first: Any) -> Any:
    return jax.jit(lambda *rest: jitted(*first, *rest))
