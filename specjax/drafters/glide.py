"""A draft that attends to its target's own keys and values (GLIDE, 2402.02082): a small transformer whose layers read
a layer of the target each, what the target has computed of the verified tokens, and their own keys and values of the
block alone. So it has no prompt to read, no cache to keep, and nothing to roll back.

A block's root is the newest token, which the target has not consumed: the draft reads the target's slots before it,
its own of the root, and of what it has drafted since. In training the same, with every position as a root: at depth j
position t ends a block of j + 1 tokens whose root is at t - j, so it reads the target's positions before t - j and its
own of t - j .. t, each as it was computed at its depth; it predicts what the target predicts at t.

Dims: B rows, T positions, K tokens of a block, S target positions or slots, D depths, G key-value heads, C head
features.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key
from pydantic import Field

from specjax.drafters.base import StatelessDrafter, TrainedDrafter, stored_start
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.errors import ConfigError, ModelError
from specjax.models import hf
from specjax.models.attention.blocks import attend_to_both
from specjax.models.attention.sight import Sight
from specjax.models.attention.stored import Layer
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import LaidOut
from specjax.models.families import Settings, family_of
from specjax.models.files import read_json, verify_manifest, write_json
from specjax.models.sharding import sharding_of
from specjax.models.training import block_of, gathered, placed
from specjax.models.transformer import Model
from specjax.models.weights import narrowest, read_params, write_params
from specjax.types import (
    PLAIN,
    Batch,
    Bound,
    Context,
    Documents,
    Draft,
    Output,
    Params,
    Prediction,
    Reads,
    TargetView,
    TrainingForm,
)

if TYPE_CHECKING:
    from specjax.config import RunConfig
    from specjax.data.rows import Rows
    from specjax.distill.init import Initial

MODEL_TYPE = "specjax_glide"
"""In config.json: no other library takes it for a model of its own."""


class Own(NamedTuple):
    """Keys and values of a block's tokens in one layer, by depth; for every position that is the newest of a block."""

    keys: Float[Array, "B T D G C"]
    values: Float[Array, "B T D G C"]


@flax.struct.dataclass
class Reading:
    """What the tokens of one depth attend to in a layer: what they have ``sight`` of in the target's, and their block
    up to themselves."""

    target: Layer
    sight: Sight
    own: Own
    depth: int | Int[Array, ""]

    def attend(
        self,
        q: Float[Array, "B T H C"],
        k: Float[Array, "B T G C"],
        v: Float[Array, "B T G C"],
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "B T H C"], Own]:
        """See `specjax.models.attention.memory.Attended`: the block, with their own keys and values."""
        own = Own(*(_put(old, new, self.depth) for old, new in zip(self.own, (k, v), strict=True)))
        reached = jnp.arange(own.keys.shape[2], dtype=jnp.int32) <= self.depth
        return attend_to_both(q, self.target, self.sight, own, reached, scale, soft_cap), own


def _put(own: Float[Array, "B T D G C"], new: Float[Array, "B T G C"], depth: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(own, new[:, :, None].astype(own.dtype), depth, axis=2)


@dataclasses.dataclass(frozen=True)
class GlideModel:
    """A forward pass, a function of its parameters. ``model``: a static spec of the weights; ``reads``: the target's
    layer that each of its layers reads."""

    model: Model
    reads: tuple[int, ...]

    def blocks(self, batch: int, fed: int, depths: int) -> tuple[Own, ...]:
        """Empty blocks of every layer."""
        config = self.model.config
        zeros = jnp.zeros((batch, fed, depths, config.num_kv_heads, config.head_dim), self.model.dtype)
        return (Own(zeros, zeros),) * config.num_layers

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        readings: Sequence[Reading],
        form: TrainingForm = PLAIN,
    ) -> tuple[Float[Array, "B T D"], tuple[Own, ...]]:
        """The input of the head, and the layers' blocks with the keys and values of ``tokens``."""
        x, blocks = self.through(params, tokens, positions, readings, form)
        return self.model.module(params).norm(x), blocks

    def through(
        self, params: Params, tokens: Array, positions: Array, readings: Sequence[Reading], form: TrainingForm = PLAIN
    ) -> tuple[Float[Array, "B T D"], tuple[Own, ...]]:
        """What leaves the last layer in place of the input of the head."""
        config = self.model.config
        params = gathered(params, form.sharding)
        module = self.model.module(params)
        x, tables = module.embedded(tokens, positions), module.rotary(positions, tokens.shape[1])
        blocks = []
        for i, reading in enumerate(readings):
            kind = config.layer(i)

            def block(x, layer, table, reading, kind=kind):
                x, own, _ = block_of(config, kind, layer)(x, table, reading)
                return placed(x, form.sharding), own

            run = jax.checkpoint(block) if form.remat else block
            x, own = run(placed(x, form.sharding), params["layers"][i], tables[kind], reading)
            blocks.append(own)
        return x, tuple(blocks)


@dataclasses.dataclass(frozen=True)
class BoundGlide(StatelessDrafter):
    """What the engine runs."""

    glide: GlideModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.glide.reads)

    @property
    def max_positions(self) -> int:
        return self.glide.model.config.max_positions

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """One pass a token, the root's first: the last draft is never fed, and what was is forgotten."""

        def head(x: Float[Array, "B 1 D"]) -> Array:
            return self.glide.model.head(params, self.glide.model.module(params).norm(x))

        return blocks_of(self.glide, params, head, target, context, self.k), state


def blocks_of(
    glide: GlideModel,
    params: Params,
    head: Callable[[Float[Array, "B 1 D"]], Array],
    target: TargetView,
    context: Context,
    k: int,
) -> Draft:
    """A block of every row; ``head`` makes logits of what leaves the last layer."""
    assert target.lengths is not None
    root = (context.lengths - 1)[:, None]
    newest = root_of(context)
    layers = [Layer(*layer) for layer in target.keys_values]
    verified = Sight(target.lengths[:, None] - 1)

    def feed(blocks, newest, depth):
        positions = root + depth
        each = zip(layers, glide.model.config.windows, blocks, strict=True)
        readings = [Reading(layer, verified.within(window, positions), own, depth) for layer, window, own in each]
        x, blocks = glide.through(params, newest, positions, readings)
        return head(x), blocks

    return one_by_one(feed, glide.blocks(len(root), 1, k), newest, context, k)[0]


def inside_document(documents: Documents | None, root: Int[Array, " T"]) -> Bool[Array, "#B T"]:
    """Whether the block that ends at each position begins, at ``root``, in the same document."""
    inside = (root >= 0)[None]
    if documents is None:
        return inside
    return inside & (documents.segments == documents.segments[:, jnp.maximum(root, 0)])


@dataclasses.dataclass(frozen=True)
class TrainedGlide(TrainedDrafter):
    """In training. ``depths``: how many tokens of a block are unrolled; ``decay``: what a depth weighs beside the one
    before; ``family``: the Hugging Face model type its weights are named as."""

    serving: ClassVar[str] = (
        "It reads its target's keys and values, so neither vLLM nor transformers can serve it, only specjax "
        "(`specjax.load_drafter`); a separate draft (`kind: draft_model`) they can."
    )
    glide: GlideModel
    family: str = "llama"
    depths: int = 2
    decay: float = 1.0
    form: TrainingForm = PLAIN

    @property
    def config(self) -> ModelConfig:
        """The sizes of what is trained."""
        return self.glide.model.config

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.glide.reads)

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        return self.glide.model.init(key)

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """Depth by depth, see the head of this file. A block's root lies in its own document, or it does not count."""
        assert target_out is not None
        rows, fed = batch.tokens.shape
        positions, place = batch.token_positions, jnp.arange(fed, dtype=jnp.int32)
        layers = [Layer.of(*layer) for layer in target_out.keys_values]
        documents = batch.documents
        segments = None if documents is None else (documents.segments, documents.segments)
        blocks = self.glide.blocks(rows, fed, self.depths)
        shares = [self.decay**depth for depth in range(self.depths)]
        for depth, share in enumerate(shares):
            root = place - depth
            verified = Sight((root - 1)[None], segments=segments)
            each = zip(layers, self.glide.model.config.windows, blocks, strict=True)
            readings = [
                Reading(layer, verified.within(window, positions, positions), own, depth) for layer, window, own in each
            ]
            final, blocks = self.glide(params, jnp.asarray(batch.tokens), positions, readings, self.form)
            weight = jnp.where(inside_document(documents, root), jnp.asarray(batch.weight), 0.0)
            yield Prediction(final, functools.partial(self.glide.model.head, params), weight, None, share / sum(shares))
            # The block that ends at t continues the one that ends at t - 1.
            blocks = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), blocks)

    def at_depths(self, depths: int) -> TrainedGlide:
        return dataclasses.replace(self, depths=depths)

    def in_training(self, form: TrainingForm) -> TrainedGlide:
        if form.scan_layers:
            raise ConfigError("scan_layers: the layers of a glide draft read a layer of the target each; set it false")
        model = dataclasses.replace(self.glide.model, dtype=form.dtype or self.glide.model.dtype)
        return dataclasses.replace(self, glide=dataclasses.replace(self.glide, model=model), form=form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.glide.model.config, mesh)

    def to_drafter(self, params: Params, target: Any, k: int) -> Glide:
        return Glide(LoadedGlide(self.glide.model, params, self.glide.reads, family=self.family), k)

    def save(self, params: Params, target: Any, directory: Path, *, name: str = "draft", card: str | None = None):
        """A directory that `specjax.load_drafter` reads, and neither transformers nor vLLM: they have no such
        forward."""
        save_glide(LoadedGlide(self.glide.model, params, self.glide.reads, name, self.family), directory, card)


@dataclasses.dataclass(eq=False, repr=False)
class LoadedGlide(LaidOut):
    """A draft's weights and the target's layers that they read."""

    spec: Model
    params: Params
    reads: tuple[int, ...]
    name: str = "draft"
    family: str = "llama"


@dataclasses.dataclass(frozen=True)
class Glide:
    """A draft that attends to the target's own keys and values of what is verified (GLIDE, 2402.02082), and proposes
    ``k`` tokens one by one."""

    model: Any
    """A `LoadedGlide`, or the directory of one or of the run that left it."""
    k: Annotated[int, Field(ge=1, le=64)] = 5
    """Tokens of a block, 1 to 64."""
    kind: Literal["glide"] = "glide"
    """Name in the registry, in configs and in results."""

    @classmethod
    def load(cls, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> Glide:
        """See `specjax.drafters.loading.load_drafter`.

        Args:
            directory: what `save_glide` wrote, or its hub id.
            target: the `LoadedModel` whose dtype the weights are cast to.
            k: draft tokens a block.
            check_finite: refuse NaN and infinite weights.

        Returns:
            The drafter; its weights are in memory once, as decoding reads them.

        Raises:
            ModelError: for what cannot be read.
        """
        glide = load_glide(directory, str(target.dtype), check_finite)
        glide.free_originals()
        return cls(glide, k)

    def bind(self, target: Any) -> Bound:
        """The draft beside its target.

        Args:
            target: the `LoadedModel` to speculate for.

        Returns:
            What the engine runs, and the draft's weights laid out for decoding.

        Raises:
            ModelError: the draft's layers cannot read the target's, or it cannot be read itself.
        """
        named = isinstance(self.model, (str, os.PathLike))
        glide = load_glide(hf.draft_of(self.model), str(target.dtype)) if named else self.model
        check_readable(glide.spec.config, glide.reads, target.config)
        layout = glide.layout()
        return Bound(BoundGlide(GlideModel(layout.spec, glide.reads), self.k), layout.params)


def check_readable(draft: ModelConfig, reads: Sequence[int], target: ModelConfig) -> None:
    """Raises `ModelError` with the reason unless layer i of ``draft`` can read layer ``reads[i]`` of ``target``."""
    if target.rows_choose_frequencies:
        raise ModelError(
            "glide: the rotary frequencies of this target depend on the length that a row will reach, which a draft is "
            "not told; use a separate draft (kind: draft_model)"
        )
    for name in ("vocab_size", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(draft, name) != getattr(target, name):
            raise ModelError(
                f"glide: {name}={getattr(draft, name)}, and {getattr(target, name)} of the target that it should read; "
                "use the draft's own target, or distill one for this"
            )
    for i, layer in enumerate(reads):
        if layer >= target.num_layers:
            raise ModelError(f"glide: reads layer {layer}, and the target has 0 .. {target.num_layers - 1}")
        own, read = draft.layer(i), target.layer(layer)
        if (own.rope, own.window) != (read.rope, read.window):
            raise ModelError(
                f"glide: layer {i} has {own.rope}, window {own.window}, and layer {layer} of the target, which it "
                f"reads, {read.rope}, window {read.window}; use the draft's own target"
            )


def save_glide(glide: LoadedGlide, directory: str | os.PathLike, card: str | None = None) -> None:
    """Write a directory that `load_glide` reads, in place of what is there. Raises `ModelError`."""
    family = family_of(glide.family, str(directory))
    described = {"model_type": family.model_type, **hf.described(family, glide.spec.config)}
    dtype = narrowest(glide.params) or str(jnp.dtype(glide.spec.dtype))

    def write(partial: Path) -> None:
        write_params(partial, glide.params, family, glide.spec.config, dtype, hf.MAX_SHARD_BYTES)
        settings = {"model_type": MODEL_TYPE, hf.DRAFTER: "glide", "reads": list(glide.reads), "layers": described}
        write_json(partial / "config.json", settings)
        (partial / hf.CARD).write_text(card or f"# {glide.name}\n\nA draft that reads its target.\n", encoding="utf-8")

    hf.write_directory(directory, True, write)


def load_glide(directory: str | os.PathLike, dtype: str = "float32", check_finite: bool = True) -> LoadedGlide:
    """The draft that `save_glide` wrote. Raises `ModelError` for what cannot be read."""
    found = hf.resolve(directory)
    verify_manifest(found, ignored=(hf.CARD,))
    file = found / "config.json"
    settings = read_json(file)
    if settings.get("model_type") != MODEL_TYPE:
        raise ModelError(f"{file}: model_type={settings.get('model_type')!r} is no glide draft ({MODEL_TYPE})")
    reads, layers = settings.get("reads"), settings.get("layers")
    if not isinstance(layers, dict) or not isinstance(reads, list) or not all(type(i) is int for i in reads):
        raise ModelError(f"{file}: needs `reads`, a list of layers, and `layers`, what they are; distill it again")
    family = family_of(layers.get("model_type"), file)
    config = family.read_config(Settings(layers, file))
    if len(reads) != config.num_layers or min(reads, default=0) < 0:
        raise ModelError(f"{file}: reads={reads} for {config.num_layers} layers; distill it again")
    params = read_params(found, family, config, dtype, check_finite=check_finite)
    spec = Model(config, str(params["embedding"].dtype))
    return LoadedGlide(spec, params, tuple(reads), Path(directory).name, family.model_type)


@dataclasses.dataclass(frozen=True)
class GlideDraft:
    """The section `draft` of a config, beside `architecture`, `init` and `pretrain`: heads, head size and rotary
    settings are the target's."""

    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The target's layer that each layer of the draft is cut from and reads, ascending; None: the first, the last, and
    others evenly between them."""
    depths: Annotated[int, Field(ge=1, le=16)] = 2
    """Tokens of a block that training unrolls."""
    depth_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What the loss of a depth weighs beside that of the one before."""
    kind: Literal["glide"] = "glide"

    def draft(self, config: RunConfig, target: Any, rows: Rows) -> Initial:
        from specjax.distill.init import Initial, calibration
        from specjax.distill.prune import check_cuttable, prune

        stored = self._stored(config, target)
        if stored is not None:
            return Initial(self._of(stored), stored.params)
        drafter = self._described(config, target)
        if config.draft.init in ("scratch", {"kind": "scratch"}):
            return Initial(drafter, drafter.init_params(jax.random.split(jax.random.key(config.seed))[1], target))
        check_cuttable(target.config, "set it to scratch, or train a separate draft (kind: draft_model)")
        return Initial(drafter, prune(target, drafter.config, calibration(rows), drafter.glide.reads))

    def drafter(self, config: RunConfig, target: Any) -> TrainedGlide:
        stored = self._stored(config, target)
        return self._described(config, target) if stored is None else self._of(stored)

    def _of(self, stored: LoadedGlide) -> TrainedGlide:
        return TrainedGlide(GlideModel(stored.spec, stored.reads), stored.family, self.depths, self.depth_decay)

    def _stored(self, config: RunConfig, target: Any) -> LoadedGlide | None:
        """The draft whose training is to go on, in float32."""
        path = stored_start(config, frozenset({"depths", "depth_decay"}))
        if path is None:
            return None
        found = load_glide(hf.draft_of(path))
        check_readable(found.spec.config, found.reads, target.config)
        return found

    def _described(self, config: RunConfig, target: Any) -> TrainedGlide:
        from specjax.distill.shape import resized, spread

        full, shape = target.config, config.draft.architecture
        reads = tuple(spread(full.num_layers, shape.num_layers)) if self.reads is None else self.reads
        if len(reads) != shape.num_layers or list(reads) != sorted(set(reads)) or reads[-1] >= full.num_layers:
            raise ConfigError(
                f"draft.reads: {list(reads)} for {shape.num_layers} layers of a draft and {full.num_layers} of its "
                "target; name as many different ones of those, ascending"
            )
        model, family = resized(target, shape, cut=True, layers=reads)
        check_readable(model, reads, full)
        return TrainedGlide(GlideModel(Model(model), reads), family, self.depths, self.depth_decay)

    def load(self, directory: str | os.PathLike, target: Any, k: int, check_finite: bool = True) -> Glide:
        return Glide.load(directory, target, k, check_finite)
