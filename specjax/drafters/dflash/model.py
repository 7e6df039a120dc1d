"""The forward pass of a block, and what its tokens are drawn from.

Dims: B rows, T positions, A blocks, N slots of each, K tokens of it, R what is read of the tokens before, H hidden, W
ids that the draft can propose, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specjax.drafters.dflash.convolution import ConvolvedBlock
from specjax.drafters.dflash.heads import Markov, Selector, Sequential
from specjax.drafters.features import FeatureModel, embedding_and_head, head_rows, of_hidden
from specjax.models.attention.blocks import attend_to_both
from specjax.models.attention.memory import Attended
from specjax.models.attention.sight import Sight
from specjax.models.attention.stored import Layer
from specjax.models.layers import Linear, make_norm
from specjax.models.rotary import rotary_table
from specjax.models.training import gathered
from specjax.models.transformer import Block
from specjax.types import PLAIN, Output, Params, TrainingForm


class Net(nnx.Module):
    """The weights."""

    def __init__(self, spec: DFlashModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        size, ids = config.hidden_size, config.vocab_size
        self.embedding, self.head = embedding_and_head(spec, rngs)
        self.fc = Linear(len(spec.reads) * spec.feature_size, size, rngs=rngs, dtype=dtype)
        self.hidden_norm = make_norm(config, size, dtype=dtype)
        self.layers = nnx.List([self._layer(spec, i, rngs) for i in range(config.num_layers)])
        self.norm = make_norm(config, size, dtype=dtype)
        if spec.markov_rank:
            kind, rank = spec.markov, spec.markov_rank
            self.markov = Markov(kind, ids, head_rows(spec), rank, size, rngs=rngs, dtype=dtype)
        if spec.candidates:
            self.selector = Selector(ids, spec.selector_rank, spec.candidates, size, rngs=rngs, dtype=dtype)
        if spec.confident:
            self.confidence = Linear(size + spec.confident_rank, 1, True, rngs=rngs, dtype=dtype)

    @staticmethod
    def _layer(spec: DFlashModel, i: int, rngs: nnx.Rngs) -> Block:
        config, kind, dtype = spec.config, spec.config.layer(i), spec.dtype
        if not spec.taps:
            return Block(config, kind, rngs=rngs, dtype=dtype)
        return ConvolvedBlock(config, kind, (spec.slots, spec.taps, spec.group), rngs=rngs, dtype=dtype)

    @property
    def sequence(self) -> Markov | Selector | None:
        """How a token depends on the one before; None: not at all."""
        return getattr(self, "markov", getattr(self, "selector", None))


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


@dataclasses.dataclass(frozen=True)
class DFlashModel(FeatureModel):
    """See `FeatureModel`. ``slots``: of a block, the root's among them; ``mask_token``: an id whose embedding the
    others begin with; ``from_root``: slot s predicts the token behind its own, not its own, so that a block has one
    more; ``window_at_root``: layers with a window see as much before the root from every slot, and not from each slot
    its own; ``causal_window``: in those, a slot sees none behind it.

    ``markov_rank`` (`Markov`) or ``candidates`` of ``selector_rank`` (`Selector`): how a token depends on the one
    before it; both 0: not at all. ``taps`` in groups of ``group`` channels: of `Convolution`; 0: there is none.
    ``confident``: it says how likely a token is to be kept; ``confident_of_markov``: by the token before it, too.
    """

    slots: int = 8
    mask_token: int = 0
    from_root: bool = False
    window_at_root: bool = True
    causal_window: bool = True
    markov_rank: int = 0
    markov: Sequential = "vanilla"
    candidates: int = 0
    selector_rank: int = 0
    taps: int = 0
    group: int = 16
    confident: bool = False
    confident_of_markov: bool = False
    net: ClassVar[Any] = Net

    @property
    def most(self) -> int:
        return self.slots - (not self.from_root)

    @property
    def rank(self) -> int:
        """Numbers that are read of the token before, beside those that confidence reads."""
        return self.markov_rank or self.selector_rank

    @property
    def confident_rank(self) -> int:
        """Those that confidence reads."""
        return self.markov_rank if self.confident_of_markov else 0

    # --- the block --------------------------------------------------------------------------------------------------

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

    def embedded(self, module: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        x, multiplier = super().embedded(module, tokens), self.config.embedding_multiplier
        return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)

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

    # --- its tokens, in sequence ------------------------------------------------------------------------------------

    def before_first(self, module: Any, roots: Int[Array, "B A"], final: Float[Array, "B A N H"]) -> Array:
        """The state of what is drawn in sequence: it has read the slot of the root where that predicts nothing."""
        state = jnp.zeros((*roots.shape, self.markov_rank), final.dtype)
        if not self.markov_rank or self.from_root:
            return state
        return module.markov(state, roots, final[:, :, 0])[0]

    def read(
        self, module: Any, state: Array, before: Int[Array, "B T"], hidden: Float[Array, "B T H"]
    ) -> tuple[Array, Float[Array, "B T R"]]:
        """(state, what is read of the tokens ``before``) at slots ``hidden``."""
        sequence = module.sequence
        if sequence is None:
            return state, hidden[..., :0]
        state, read = sequence(state, before, hidden)
        if self.confident_of_markov:
            read = jnp.concatenate([read, sequence.embedded(before).astype(read.dtype)], axis=-1)
        return state, read

    def unary(self, module: Any, hidden: Float[Array, "B T H"]) -> Float[Array, "B T W"]:
        """What a slot says of its token by itself."""
        return self.scaled(module.head(hidden, wide=True))

    def logits(
        self, module: Any, unary: Float[Array, "B T W"], read: Float[Array, "B T R"], taught: bool = False
    ) -> Float[Array, "B T V"]:
        """Over the target's vocabulary; ``taught``: those that training compares."""
        sequence = module.sequence
        if sequence is not None:
            make = sequence.taught if taught else sequence.proposed
            unary = make(unary, read[..., : self.rank])
        return self.over_all(unary)

    def confidence(
        self, module: Any, hidden: Float[Array, "B T H"], read: Float[Array, "B T R"]
    ) -> Float[Array, "B T"]:
        """The logit of the chance that a token is kept if those before it are."""
        behind = read[..., self.rank :]
        return module.confidence(jnp.concatenate([hidden, behind.astype(hidden.dtype)], axis=-1), wide=True)[..., 0]
