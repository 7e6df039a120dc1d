"""DFlash (2602.06036): a block of mask tokens behind the root, filled in one pass. Slot 0 is the root, the others hold
a mask; they see each other, and in every layer the target's features of all tokens before the root, which are injected
as keys and values. The root's own features do not exist yet.

DSpark (2607.05147) adds a head that conditions each token on the one before it: the block is still made in one pass,
and then drawn in sequence, so that the distribution of a draft token is what it was drawn from.

In decoding, the draft's cache holds the injected keys and values of verified tokens and nothing of a block. In
training, blocks begin at random roots of a row (anchors), which are chosen by the row's text.

Dims: B rows, T positions, N slots of a block, K tokens of it, A anchors, R rank, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from specjax.drafters import features as features_lib
from specjax.drafters.features import (
    BoundFeatures,
    FeatureDraft,
    FeatureDrafter,
    FeatureModel,
    TrainedFeatureDraft,
    embedding_and_head,
    of_hidden,
)
from specjax.drafters.one_by_one import one_by_one, root_of
from specjax.drafters.token_rows import with_a_token_before
from specjax.models.attention.blocks import attend_to_both
from specjax.models.attention.memory import Attended, memories
from specjax.models.attention.sight import Sight
from specjax.models.attention.stored import Layer
from specjax.models.cache import KVCache
from specjax.models.layers import Linear, make_norm
from specjax.models.rotary import rotary_table
from specjax.models.training import gathered
from specjax.models.transformer import Block
from specjax.types import (
    PLAIN,
    Batch,
    Context,
    Draft,
    Outcome,
    Output,
    Params,
    Prediction,
    TargetView,
    TrainingForm,
)

if TYPE_CHECKING:
    from specjax.config import RunConfig

Sequential = Literal["vanilla", "gated", "rnn"]


class Markov(nnx.Module):
    """What the token before says about the next one: a bias of low rank, gated by the slot or with a state."""

    def __init__(self, spec: DFlashModel, *, rngs: nnx.Rngs):
        config, rank, size = spec.config, spec.markov_rank, spec.config.hidden_size
        linear = functools.partial(Linear, rngs=rngs, dtype=spec.dtype)
        self.w1 = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, rank), spec.dtype) * 0.02)
        self.w2 = linear(rank, features_lib.head_rows(spec))
        self.w2.kernel[...] = jnp.zeros_like(self.w2.kernel[...])  # at first it says nothing
        self.gate_proj = linear(size + rank, rank, True) if spec.markov == "gated" else None
        self.joint_proj = linear(2 * rank + size, 3 * rank, True) if spec.markov == "rnn" else None

    def __call__(
        self, state: Float[Array, "B T R"], before: Int[Array, "B T"], hidden: Float[Array, "B T H"]
    ) -> tuple[Array, Array]:
        """(state, what `w2` makes a bias of) for the token after ``before``, at slots ``hidden``."""
        read = self.w1[...][before].astype(hidden.dtype)
        if self.gate_proj is not None:
            return state, read * jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, read], axis=-1)))
        if self.joint_proj is None:
            return state, read
        joint = self.joint_proj(jnp.concatenate([state, read, hidden], axis=-1))
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        return state, jnp.tanh(out)


class Net(nnx.Module):
    """The weights."""

    def __init__(self, spec: DFlashModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        self.embedding, self.head = embedding_and_head(spec, rngs)
        self.fc = Linear(len(spec.reads) * spec.feature_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.hidden_norm = make_norm(config, config.hidden_size, dtype=dtype)
        blocks = [Block(config, config.layer(i), rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        if spec.markov_rank:
            self.markov = Markov(spec, rngs=rngs)


@flax.struct.dataclass
class Blocks:
    """The slots of each of A blocks see the injected keys and values that they have ``sight`` of, and each other."""

    injected: Layer
    sight: Sight
    slots: int = flax.struct.field(pytree_node=False)
    causal: bool = flax.struct.field(pytree_node=False, default=False)

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, tuple[()]]:
        """See `specjax.models.attention.memory.Attended`."""
        batch, fed = k.shape[:2]

        def of_block(x: Float[Array, "B T G C"]) -> Float[Array, "B T N G C"]:
            apart = x.reshape(batch, -1, 1, self.slots, *x.shape[2:])
            each = jnp.broadcast_to(apart, (*apart.shape[:2], self.slots, *apart.shape[3:]))
            return each.reshape(batch, fed, self.slots, *x.shape[2:])

        slot = jnp.arange(self.slots, dtype=jnp.int32)
        reached = slot[None] <= jnp.tile(slot, fed // self.slots)[:, None] if self.causal else slot >= 0
        own = of_block(k), of_block(v)
        return attend_to_both(q, self.injected, self.sight, own, reached, scale, soft_cap), ()


@flax.struct.dataclass
class _Nothing:
    """In place of what is attended to where only keys and values are asked for."""

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, tuple[()]]:
        return jnp.zeros_like(q), ()


@dataclasses.dataclass(frozen=True)
class DFlashModel(FeatureModel):
    """See `FeatureModel`. ``slots``: of a block, the root's among them; ``mask_token``: an id whose embedding the
    others begin with; ``from_root``: slot s predicts the token behind its own, not its own, so that a block has one
    more; ``window_at_root``: layers with a window see as much before the root from every slot, and not from each slot
    its own; ``causal_window``: in those, a slot sees none behind it. ``markov_rank`` 0: tokens are drawn
    independently."""

    slots: int = 8
    mask_token: int = 0
    from_root: bool = False
    window_at_root: bool = True
    causal_window: bool = True
    markov_rank: int = 0
    markov: Sequential = "vanilla"
    net: ClassVar[Any] = Net

    @property
    def most(self) -> int:
        return self.slots - (not self.from_root)

    def injected(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        """What is read of verified tokens, the same in every layer."""
        module = self.module(params)
        return module.hidden_norm(module.fc(jnp.concatenate(of_hidden(target_out, self.dtype), axis=-1)))

    def keys_values(
        self, params: Params, injected: Float[Array, "B T H"], positions: Int[Array, "B T"], memory: Sequence[Attended]
    ) -> list[tuple[Any, tuple[Array, Array]]]:
        """Each layer's (what its memory keeps, keys and values) of what is injected."""
        module, found = self.module(params), []
        for i, block in enumerate(module.layers):
            rope = self.config.layer(i).rope
            table = None if rope is None else rotary_table(positions, rope, self.config.head_dim, self.dtype, None)
            found.append(block.attention(injected, table, memory[i])[1:])
        return found

    def __call__(
        self,
        params: Params,
        roots: Int[Array, "B A"],
        positions: Int[Array, "B A"],
        memory: Sequence[Attended],
        form: TrainingForm = PLAIN,
    ) -> Float[Array, "B A N H"]:
        """What the head reads, of all slots of the blocks that begin with ``roots``."""
        module = self.module(gathered(params, form.sharding))
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, None]
        tokens = jnp.where(slot == 0, roots[..., None], self.mask_token).reshape(len(roots), -1)
        x = self.embedded(module, tokens)
        positions = (positions[..., None] + slot).reshape(len(roots), -1)
        for i, block in enumerate(module.layers):
            x, _ = self.run_block(block, i, x, positions, memory[i], form)
        return module.norm(x).reshape(*roots.shape, self.slots, -1)

    def before_first(self, module: Any, roots: Int[Array, "B A"], final: Float[Array, "B A N H"]) -> Array:
        """The state of what is drawn in sequence: it has read the slot of the root where that predicts nothing."""
        state = jnp.zeros((*roots.shape, self.markov_rank), final.dtype)
        if not self.markov_rank or self.from_root:
            return state
        return module.markov(state, roots, final[:, :, 0])[0]

    def of_place(self, place: int) -> int:
        """The slot that predicts the token at ``place`` 0 .. K-1 of a block."""
        return place + (not self.from_root)

    def sights(self, roots: Int[Array, "B A"], segments: Any = None, places: Any = None) -> list[Sight]:
        """What the slots of these blocks see of what is injected before their roots, by layer. ``places``: of keys,
        where they are not their numbers."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, None]
        last = jnp.broadcast_to(roots[..., None] - 1, (*roots.shape, self.slots)).reshape(len(roots), -1)
        at = last if self.window_at_root else (roots[..., None] + slot).reshape(len(roots), -1)
        return [
            Sight(last, segments=segments).within(self.config.layer(i).window, at, places)
            for i in range(self.config.num_layers)
        ]

    def blocks(self, layers: Sequence[Any], sights: Sequence[Sight]) -> list[Blocks]:
        """What the slots attend to, by layer."""
        windows = [self.config.layer(i).window for i in range(self.config.num_layers)]
        each = zip(layers, sights, windows, strict=True)
        return [
            Blocks(layer, sight, self.slots, self.causal_window and window is not None) for layer, sight, window in each
        ]


@dataclasses.dataclass(frozen=True)
class BoundDFlash(BoundFeatures):
    """What the engine runs; its state is the cache of what is injected, token t in slot t."""

    model: DFlashModel

    def init(self, batch: int, num_slots: int) -> KVCache:
        config, dtype = self.model.config, self.model.dtype
        return KVCache.zeros(config.num_layers, batch, num_slots, config.num_kv_heads, config.head_dim, dtype)

    def extend(
        self,
        params: Params,
        state: KVCache,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> KVCache:
        """With the prompt's tokens; what is written behind them is overwritten."""
        return self._kept(params, state, target_out, jnp.zeros(len(tokens), jnp.int32) if start is None else start)

    def draft(self, params: Params, target: TargetView, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """All slots in one pass, and then the tokens, one after the other where they depend on each other."""
        model, at = self.model, (context.lengths - 1)[:, None]
        root = root_of(context)
        memory = model.blocks(state.fold().layers, model.sights(at))
        slots, module, first = model(params, root, at, memory), model.module(params), model.of_place(0)
        final = slots[:, 0, first : first + self.k]
        logits = module.head(final, wide=True)

        def feed(markov: Array, newest: Int[Array, "B 1"], offset: Int[Array, ""]) -> tuple[Array, Array]:
            raw, hidden = (jax.lax.dynamic_slice_in_dim(x, offset, 1, axis=1) for x in (logits, final))
            if model.markov_rank:
                markov, read = module.markov(markov, newest, hidden)
                raw = raw + module.markov.w2(read, wide=True)
            return model.over_all(raw), markov

        draft = one_by_one(feed, model.before_first(module, root, slots), root, context, self.k)[0]
        return with_a_token_before(draft, context), state

    def commit(self, params: Params, state: KVCache, outcome: Outcome) -> KVCache:
        """With the root and what was kept behind it."""
        return self._kept(params, state, outcome.target_out, outcome.context.lengths - 1)

    def _kept(self, params: Params, cache: KVCache, target_out: Output, start: Int[Array, " B"]) -> KVCache:
        model = self.model
        injected = model.injected(params, target_out)
        slots = start[:, None] + jnp.arange(injected.shape[1], dtype=jnp.int32)[None]
        memory = memories(cache, slots, slots, None, (None,))[None]
        over = [memory.over(layer) for layer in cache.fold().layers]
        return cache.written([layer for layer, _ in model.keys_values(params, injected, slots, over)])


@dataclasses.dataclass(frozen=True)
class DFlash(FeatureDrafter):
    """A draft that fills a block of mask tokens in one pass (DFlash, 2602.06036), of which ``k`` are proposed."""

    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundDFlash


@dataclasses.dataclass(frozen=True)
class DSpark(FeatureDrafter):
    """A `DFlash` draft whose tokens are drawn in sequence, each given the one before (DSpark, 2607.05147)."""

    kind: Literal["dspark"] = "dspark"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Name in the registry, in configs and in results."""
    bound: ClassVar[Any] = BoundDFlash


# --- training -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainedDFlash(TrainedFeatureDraft):
    """In training. ``anchors``: blocks of a row, None: one at every position; ``gamma``: places over which the weight
    of a place falls by e; ``depths``: places that are predicted, None: all."""

    anchors: int | None = 64
    gamma: float = 4.0
    depths: int | None = None
    drafter: ClassVar[Any] = DFlash

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One of all anchors by place. What it reads and predicts lies in the anchor's document, or it does not
        count."""
        assert target_out is not None
        model: Any = self.model
        roots, counts = self._roots(batch)
        final = self._slots(params, batch, target_out, roots)
        module, text = model.module(params), jnp.asarray(batch.tokens)
        markov = model.before_first(module, jnp.take_along_axis(text, roots, axis=1), final)
        places = model.most if self.depths is None else self.depths
        shares = [math.exp(-place / self.gamma) for place in range(places)]
        for place, share in enumerate(shares):
            rows = roots + place
            weight = counts * self._weight(batch, roots, rows)
            hidden = final[:, :, model.of_place(place)]
            if model.markov_rank:
                before = jnp.take_along_axis(text, rows, axis=1, mode="clip")
                markov, read = module.markov(markov, before, hidden)
                hidden = jnp.concatenate([hidden, read], axis=-1)
            yield Prediction(
                hidden, functools.partial(self._logits, params), weight, rows, share / sum(shares), model.proposable
            )

    def _logits(self, params: Params, hidden: Float[Array, "B C D"]) -> Float[Array, "B C V"]:
        model: Any = self.model
        if not model.markov_rank:
            return model.head(params, hidden)
        hidden, read = jnp.split(hidden, (model.config.hidden_size,), axis=-1)
        module = model.module(params)
        return model.over_all(module.head(hidden, wide=True) + module.markov.w2(read, wide=True))

    def _roots(self, batch: Batch) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
        """Random ones, the same whenever the row is met, and whether they count: a document's first token has nothing
        before it."""
        tokens = jnp.asarray(batch.tokens)
        counts = (batch.token_positions > 0) & (jnp.asarray(batch.weight) > 0)
        if self.anchors is None:
            every = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            return jnp.broadcast_to(every, tokens.shape), counts.astype(jnp.float32)

        def drawn(row: Int[Array, " T"]) -> Float[Array, " T"]:
            salt = jnp.sum(row.astype(jnp.uint32) * jnp.arange(1, len(row) + 1, dtype=jnp.uint32))
            return jax.random.uniform(jax.random.fold_in(jax.random.key(0), salt), row.shape, jnp.float32)

        order = jax.vmap(drawn)(tokens) - jnp.where(counts, 0.0, 1.0)
        _, roots = jax.lax.top_k(order, min(self.anchors, tokens.shape[1]))
        return roots, jnp.take_along_axis(counts, roots, axis=1).astype(jnp.float32)

    @staticmethod
    def _weight(batch: Batch, roots: Int[Array, "B A"], rows: Int[Array, "B A"]) -> Float[Array, "B A"]:
        """Of the predictions of the target's ``rows``."""
        weight = jnp.take_along_axis(jnp.asarray(batch.weight), rows, axis=1, mode="clip")
        inside = rows < batch.tokens.shape[1]
        documents = batch.documents
        if documents is not None:
            of_roots, of_rows = (jnp.take_along_axis(documents.segments, x, axis=1, mode="clip") for x in (roots, rows))
            inside &= of_roots == of_rows
        return jnp.where(inside, weight, 0.0)

    def _slots(
        self, params: Params, batch: Batch, target_out: Output, roots: Int[Array, "B A"]
    ) -> Float[Array, "B A N H"]:
        """What the head reads, of all blocks."""
        model: Any = self.model
        injected, positions = model.injected(params, target_out), batch.token_positions
        nothing = [_Nothing()] * model.config.num_layers
        layers = [Layer.of(*fed) for _, fed in model.keys_values(params, injected, positions, nothing)]
        segments = None
        if batch.documents is not None:
            of_keys = batch.documents.segments
            of_queries = jnp.repeat(jnp.take_along_axis(of_keys, roots, axis=1), model.slots, axis=1)
            segments = of_queries, of_keys
        memory = model.blocks(layers, model.sights(roots, segments))
        at = jnp.take_along_axis(positions, roots, axis=1)
        return model(params, jnp.take_along_axis(jnp.asarray(batch.tokens), roots, axis=1), at, memory, self.form)

    def passes(self, length: int) -> int:
        model: Any = self.model
        return -(-(self.anchors or length) * model.slots // length)

    def at_depths(self, depths: int) -> Any:
        """With a block at every position, so that each is met at every place."""
        fewer = depths <= (self.model.most or depths)
        return dataclasses.replace(self, depths=depths, anchors=None) if fewer else None


@dataclasses.dataclass(frozen=True)
class TrainedDSpark(TrainedDFlash):
    """In training."""

    drafter: ClassVar[Any] = DSpark


# --- as a config says it --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DFlashDraft(FeatureDraft):
    """The section `draft` of a config: layers of the target's sizes, with its embedding and head, frozen."""

    block_size: Annotated[int, Field(ge=2, le=64)] = 8
    """Slots of a block, the root's among them."""
    mask_token: Annotated[int, Field(ge=0)] | None = None
    """An id that no text has, whose embedding the slots begin with; None: the last of the vocabulary."""
    reads: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """As of `eagle3`; published drafts capture five or six."""
    layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Of the draft; published drafts have five."""
    sample_from_anchor: bool = False
    """A slot predicts the token behind its own, not its own."""
    anchors: Annotated[int, Field(ge=1)] = 64
    """Blocks of a row of text."""
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Ids that it can propose, the most frequent of the training text; None: all."""
    gamma: Annotated[float, Field(gt=0)] = 4.0
    """Places over which the weight of a place falls by e."""
    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = DFlash
    trained: ClassVar[Any] = TrainedDFlash

    def drafter(self, config: RunConfig, target: Any) -> TrainedDFlash:
        full = target.config
        reads = features_lib.streams(self.reads, config, full)
        layers = features_lib.layers_like(full, self.layers)
        mask = features_lib.mask_token(self.mask_token, full)
        model = DFlashModel(
            layers,
            reads,
            full.hidden_size,
            kept=features_lib.first_ids(self.draft_vocab_size, full),
            slots=self.block_size,
            mask_token=mask,
            from_root=self.sample_from_anchor,
            **self.sequential(),
        )
        return self.trained(model, features_lib.ENDS, anchors=self.anchors, gamma=self.gamma)

    def sequential(self) -> dict[str, Any]:
        """How the tokens of a block depend on each other: fields of `DFlashModel`."""
        return {}

    def first(self, drafter: Any, params: Params, target: Any) -> Params:
        """Layers as the target's, evenly from the first to the last, each of which reads the deepest captured stream,
        and the target's final norm."""
        model, full = drafter.model, target.config
        size, count = model.config.hidden_size, model.config.num_layers
        if features_lib.last_layer(target) is None:
            return params
        chosen = [round((i + 1) * full.num_layers / count) - 1 for i in range(count)]
        layers = {i: features_lib.in_float32(target.params["layers"][layer]) for i, layer in enumerate(chosen)}
        fc = jnp.zeros_like(params["fc"]["kernel"]).at[-size:].set(jnp.eye(size))
        norms = {"hidden_norm": layers[count - 1]["attention_norm"]}
        norms["norm"] = features_lib.in_float32(target.params["norm"])
        # Of each parameter its own array, since each is trained.
        return {**params, "fc": {"kernel": fc}, "layers": layers, **jax.tree.map(jnp.copy, norms)}


@dataclasses.dataclass(frozen=True)
class DSparkDraft(DFlashDraft):
    """The section `draft` of a config: `DFlashDraft` with a head that is drawn in sequence."""

    sample_from_anchor: bool = True
    """A slot predicts the token behind its own, not its own."""
    markov_rank: Annotated[int, Field(ge=1)] = 256
    """Of what the token before adds to the logits."""
    markov_head_type: Sequential = "vanilla"
    """Read as it is, gated by the slot, or with a state along the block."""
    kind: Literal["dspark"] = "dspark"  # pyright: ignore[reportIncompatibleVariableOverride]
    drafter_class: ClassVar[Any] = DSpark
    trained: ClassVar[Any] = TrainedDSpark

    def sequential(self) -> dict[str, Any]:
        return {"markov_rank": self.markov_rank, "markov": self.markov_head_type}
