"""A draft that attends to its target's own keys and values (GLIDE, 2402.02082). It is a small transformer. Each layer
reads one layer of the target, which has computed keys and values of the verified tokens, and its own keys and values of
the block alone. So the draft has no prompt to read, no cache to hold, and nothing to roll back.

A block's root is the newest token, which the target has not consumed. The draft reads the target's slots before the
root, and its own keys and values of the root and of the tokens drafted since. Training does the same with every
position as a root: at depth j, position t ends a block of j + 1 tokens whose root is at t - j. It reads the target's
positions before t - j and the block's own t - j .. t, each as it was computed at its depth, and predicts what the
target predicts at t.

Dims: B rows, T positions, K tokens of a block, S target positions or slots, D depths, G key-value heads, C head
features.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key

from specjax.drafters.base import ModelDrafter, StatelessDrafter, heads_of
from specjax.drafters.block_kv import BlockKV, TargetAndBlockKV, by_depth
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import (
    PLAIN,
    Batch,
    Bound,
    Context,
    Draft,
    Output,
    Params,
    Prediction,
    Reads,
    Target,
    TargetView,
    Trainable,
    TrainingForm,
)
from specjax.models import hf
from specjax.models.attention.sight import AttentionMask
from specjax.models.attention.stored import LayerKV
from specjax.models.config import ModelConfig
from specjax.models.decode_layout import LaidOut
from specjax.models.families import Settings, family_of
from specjax.models.files import draft_of, read_json, resolve, verify_manifest, write_json
from specjax.models.sharding import sharding_of
from specjax.models.training import block_of, gathered, placed
from specjax.models.transformer import Model
from specjax.models.vocabulary import DraftVocabulary
from specjax.models.weights import narrowest, opened, read_params, write_params

MODEL_TYPE = "specjax_glide"
"""`model_type` in config.json, so that no other library takes the draft for a model of its own."""


@dataclasses.dataclass(frozen=True)
class GlideModel:
    """A draft's forward pass, a function of its parameters. ``model``: a static spec of the weights; ``reads``: for
    each of its layers, the layer of the target that it reads."""

    model: Model
    reads: tuple[int, ...]

    def blocks(self, batch: int, fed: int, depths: int) -> tuple[BlockKV, ...]:
        """Empty blocks, one for each layer."""
        config = self.model.config
        return (BlockKV.empty(config, batch, fed, depths, self.model.dtype),) * config.num_layers

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        readings: Sequence[TargetAndBlockKV],
        form: TrainingForm = PLAIN,
    ) -> tuple[Float[Array, "B T D"], tuple[BlockKV, ...]]:
        """Input of the head, and each layer's block with the keys and values of ``tokens`` added."""
        x, blocks = self.through(params, tokens, positions, readings, form)
        return self.model.module(params).norm(x), blocks

    def through(
        self,
        params: Params,
        tokens: Array,
        positions: Array,
        readings: Sequence[TargetAndBlockKV],
        form: TrainingForm = PLAIN,
    ) -> tuple[Float[Array, "B T D"], tuple[BlockKV, ...]]:
        """Output of the last layer, before the final norm, and each layer's block as in `__call__`."""
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
            x, own = run(placed(x, form.sharding), self.model.layer(params, i), tables[kind], reading)
            blocks.append(own)
        return x, tuple(blocks)


@dataclasses.dataclass(frozen=True)
class BoundGlide(StatelessDrafter):
    """The bound form, which the engine runs."""

    glide: GlideModel
    k: int

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.glide.reads)

    @property
    def max_positions(self) -> int:
        return self.glide.model.config.max_positions

    @property
    def model_config(self) -> ModelConfig:
        return self.glide.model.config

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """A proposal made with one pass a token, the root's first. The last proposed token is never fed, and the
        block's keys and values are dropped."""

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
    """A proposal for every row; ``head`` makes logits of the last layer's output."""
    assert target.lengths is not None
    root = (context.lengths - 1)[:, None]
    newest = root_of(context)
    layers = [LayerKV(*layer) for layer in target.keys_values]
    verified = AttentionMask(target.lengths[:, None] - 1)

    def feed(blocks, newest, depth):
        positions = root + depth
        each = zip(layers, glide.model.config.windows, blocks, strict=True)
        readings = [
            TargetAndBlockKV(layer, verified.within(window, positions), own, depth) for layer, window, own in each
        ]
        x, blocks = glide.through(params, newest, positions, readings)
        return head(x), blocks

    return one_by_one(feed, glide.blocks(len(root), 1, k), newest, context, k)[0]


@dataclasses.dataclass(frozen=True)
class TrainedGlide(Trainable):
    """A glide draft in training. ``depths``: number of depths of a block that are unrolled; ``decay``: weight of a
    depth relative to the one before; ``family``: Hugging Face model type by which its weights are named."""

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
        """Configuration of the draft's layers."""
        return self.glide.model.config

    @property
    def reads(self) -> Reads:
        return Reads(kv_layers=self.glide.reads)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.glide.model.vocabulary

    def with_vocabulary(self, vocabulary: DraftVocabulary) -> TrainedGlide:
        model = dataclasses.replace(self.glide.model, vocabulary=vocabulary)
        return dataclasses.replace(self, glide=dataclasses.replace(self.glide, model=model))

    def init_params(self, key: Key[Array, ""], target: Target | None) -> Params:
        return self.glide.model.init(key)

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction a depth, see the module's docstring. A position counts only if its block's root lies in the
        same document."""
        assert target_out is not None
        tokens, positions = jnp.asarray(batch.tokens), batch.token_positions
        layers = [LayerKV.of(*layer) for layer in target_out.keys_values]
        documents = batch.documents
        segments = None if documents is None else (documents.segments, documents.segments)
        (rows, fed), heads = tokens.shape, heads_of(self.glide.model, params)
        blocks, last = self.glide.blocks(rows, fed, self.depths), jnp.arange(fed, dtype=jnp.int32) - 1
        for depth, weight, share in by_depth(batch, self.depths, self.decay, before=0):
            verified = AttentionMask((last - depth)[None], segments=segments)
            each = zip(layers, self.glide.model.config.windows, blocks, strict=True)
            readings = [
                TargetAndBlockKV(layer, verified.within(window, positions, positions), own, depth)
                for layer, window, own in each
            ]
            final, blocks = self.glide(params, tokens, positions, readings, self.form)
            yield Prediction(final, weight=weight, share=share, **heads)
            # The block that ends at t continues the one that ends at t - 1.
            blocks = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), blocks)

    def unrolled(self, depths: int) -> TrainedGlide:
        return dataclasses.replace(self, depths=depths)

    def passes(self, length: int) -> int:
        return self.depths

    def in_training(self, form: TrainingForm) -> TrainedGlide:
        if form.scan_layers:
            raise ConfigError("scan_layers: the layers of a glide draft read a layer of the target each; set it false")
        model = dataclasses.replace(self.glide.model, dtype=form.dtype or self.glide.model.dtype)
        return dataclasses.replace(self, glide=dataclasses.replace(self.glide, model=model), form=form)

    def parameter_sharding(
        self, path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> NamedSharding | None:
        return sharding_of(path, shape, self.glide.model.config, mesh)

    def to_drafter(self, params: Params, target: Target, k: int) -> Glide:
        return Glide(LoadedGlide(self.glide.model, params, self.glide.reads, family=self.family), k)

    def save(self, params: Params, target: Target, directory: Path, *, name: str = "draft", card: str | None = None):
        """Write a directory that `specjax.load_drafter` reads. transformers and vLLM cannot read it: they have no such
        forward pass."""
        save_glide(LoadedGlide(self.glide.model, params, self.glide.reads, name, self.family), directory, card)


@dataclasses.dataclass(eq=False, repr=False)
class LoadedGlide(LaidOut):
    """A draft's weights, and for each of its layers the target's layer that it reads."""

    spec: Model
    params: Params
    reads: tuple[int, ...]
    name: str = "draft"
    family: str = "llama"


@dataclasses.dataclass(frozen=True)
class Glide(ModelDrafter):
    """A draft that attends to the target's own keys and values of verified tokens (GLIDE, 2402.02082), and proposes
    ``k`` tokens one by one."""

    model: Any
    """A `LoadedGlide`, or the directory of one, or of the run that left one."""
    kind: Literal["glide"] = "glide"
    """Name in the registry, in configs and in results."""

    def _read(self, target: Target) -> LoadedGlide:
        return load_glide(draft_of(self.model), str(target.dtype))

    def _bound(self, draft: Any, target: Target) -> Bound:
        check_readable(draft.spec.config, draft.reads, target.config)
        layout = draft.layout()
        return Bound(BoundGlide(GlideModel(layout.spec, draft.reads), self.k), layout.params)


def refuse_row_frequencies(kind: str, target: ModelConfig) -> None:
    """Raises `ModelError` if a row's length decides the frequencies that the target's keys are rotated by."""
    if target.rows_choose_frequencies:
        raise ModelError(
            f"{kind}: the rotary frequencies of this target depend on the length that a row will reach, which a draft "
            "is not told; use a separate draft (kind: draft_model)"
        )


def check_readable(draft: ModelConfig, reads: Sequence[int], target: ModelConfig) -> None:
    """Raises `ModelError` with the reason unless layer i of ``draft`` can read layer ``reads[i]`` of ``target``."""
    refuse_row_frequencies("glide", target)
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
    """Write a directory that `load_glide` reads, replacing what is there. Raises `ModelError`."""
    family = family_of(glide.family, str(directory))
    described = {"model_type": family.model_type, **hf.described(family, glide.spec.config)}
    dtype = narrowest(glide.params) or str(jnp.dtype(glide.spec.dtype))

    def write(partial: Path) -> None:
        write_params(partial, glide.params, family, glide.spec.config, dtype, hf.MAX_SHARD_BYTES)
        if glide.spec.vocabulary is not None:
            glide.spec.vocabulary.write(partial)
        settings = {"model_type": MODEL_TYPE, hf.DRAFTER: "glide", "reads": list(glide.reads), "layers": described}
        write_json(partial / "config.json", settings, published=True)
        (partial / hf.CARD).write_text(card or f"# {glide.name}\n\nA draft that reads its target.\n", encoding="utf-8")

    hf.write_directory(directory, True, write)


def load_glide(directory: str | os.PathLike, dtype: str = "float32", check_finite: bool = True) -> LoadedGlide:
    """The draft that `save_glide` wrote. Raises `ModelError` for what cannot be read."""
    found = resolve(directory)
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
    with opened(found) as stored:
        params = read_params(stored, family, config, dtype, check_finite=check_finite)
    spec = Model(config, str(params["embedding"].dtype))
    spec = dataclasses.replace(spec, vocabulary=DraftVocabulary.read(found, spec))
    return LoadedGlide(spec, params, tuple(reads), Path(directory).name, family.model_type)
