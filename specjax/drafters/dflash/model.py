"""The forward pass of a block, and the logits that its tokens are drawn from.

Dims: B rows, T positions, A blocks, N slots of each, K tokens of it, R features of the token before, H hidden, W ids
that the draft can propose, V vocabulary.
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
from specjax.drafters.dflash.drafting import BoundDFlash
from specjax.drafters.dflash.heads import Markov, Selector, Sequential
from specjax.drafters.features import FeatureModel, embedding_and_head, head_rows, of_hidden
from specjax.interfaces import PLAIN, Output, Params, TrainingForm
from specjax.models.attention.blocks import attend
from specjax.models.attention.kv_source import KVSource
from specjax.models.attention.sight import AttentionMask
from specjax.models.attention.stored import LayerKV
from specjax.models.layers import Linear, make_norm
from specjax.models.products import OwnKV
from specjax.models.rotary import rotary_table
from specjax.models.training import gathered
from specjax.models.transformer import Block


class Net(nnx.Module):
    """Weights of the draft."""

    def __init__(self, spec: DFlashModel, *, rngs: nnx.Rngs):
        config, dtype = spec.config, spec.dtype
        size, ids = config.hidden_size, config.vocab_size
        self.embedding, self.head = embedding_and_head(spec, rngs)
        self.fc = Linear(len(spec.reads) * spec.feature_size, size, rngs=rngs, dtype=dtype)
        self.hidden_norm = make_norm(config, size, dtype=dtype)
        self.layers = nnx.List([self._layer(spec, i, rngs) for i in range(config.num_layers)])
        self.norm = make_norm(config, size, dtype=dtype)
        kind, rank = spec.markov, spec.markov_rank
        self.markov = Markov(kind, ids, head_rows(spec), rank, size, rngs=rngs, dtype=dtype) if rank else None
        sizes = spec.selector_rank, spec.candidates, size
        self.selector = Selector(ids, *sizes, rngs=rngs, dtype=dtype) if spec.candidates else None
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
        """The head that makes a token depend on the one before; None: tokens are independent."""
        return self.markov or self.selector


@flax.struct.dataclass
class Blocks:
    """Keys and values of the slots of A blocks: each slot sees the injected keys and values that ``sight`` allows, and
    the slots of its block, with ``causal`` none after itself."""

    injected: LayerKV
    sight: AttentionMask
    slots: int = flax.struct.field(pytree_node=False)
    causal: bool = flax.struct.field(pytree_node=False, default=False)

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, tuple[()]]:
        """Attention output, and nothing to cache, see `specjax.models.attention.kv_source.KVSource`."""
        batch, fed = k.shape[:2]

        def of_block(x: Float[Array, "B T G C"]) -> Float[Array, "B T N G C"]:
            apart = x.reshape(batch, -1, 1, self.slots, *x.shape[2:])
            each = jnp.broadcast_to(apart, (*apart.shape[:2], self.slots, *apart.shape[3:]))
            return each.reshape(batch, fed, self.slots, *x.shape[2:])

        slot = jnp.arange(self.slots, dtype=jnp.int32)
        reached = slot[None] <= jnp.tile(slot, fed // self.slots)[:, None] if self.causal else slot >= 0
        own = OwnKV(of_block(k), of_block(v), reached)
        return attend(q, *self.injected, self.sight, scale, soft_cap, own), ()


@dataclasses.dataclass(frozen=True)
class DFlashModel(FeatureModel):
    """Forward pass of DFlash, DSpark and DFlash2, see `FeatureModel`. ``slots``: slots of a block, the root's included;
    ``mask_token``: id whose embedding the others begin with; ``from_root``: True if slot s predicts the token after its
    own, not its own, so that a block proposes one more; ``window_at_root``: True if windows are counted from the root
    for all slots, False if from each slot; ``causal_window``: True if a slot of a layer with a window sees none after
    it.

    ``markov_rank`` (`Markov`) or ``candidates`` of ``selector_rank`` (`Selector`): sizes of the head that makes a token
    depend on the one before it; both 0: none. ``taps`` in groups of ``group`` channels: sizes of `Convolution`; 0:
    none. ``confident``: True if it predicts how likely a token is to be accepted; ``confident_of_markov``: True if that
    prediction reads the token before, too.
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
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.candidates:
            return "dflash2"
        return "dspark" if self.markov_rank or self.confident else "dflash"

    @property
    def most(self) -> int:
        return self.slots - (not self.from_root)

    def decoding(self, k: int) -> BoundDFlash:
        return BoundDFlash(self, k)

    @property
    def rank(self) -> int:
        """Number of features of the token before that its logits read, beside those that confidence reads."""
        return self.markov_rank or self.selector_rank

    @property
    def confident_rank(self) -> int:
        """Number of features of the token before that confidence reads."""
        return self.markov_rank if self.confident_of_markov else 0

    # --- the block --------------------------------------------------------------------------------------------------

    def injected(self, params: Params, target_out: Output) -> Float[Array, "B T H"]:
        """Features of verified tokens, which every layer reads as keys and values."""
        module = self.module(params)
        return module.hidden_norm(module.fc(jnp.concatenate(of_hidden(target_out, self.dtype), axis=-1)))

    def keys_values(
        self, params: Params, injected: Float[Array, "B T H"], positions: Int[Array, "B T"], kv: Sequence[KVSource]
    ) -> list[tuple[Any, tuple[Array, Array]]]:
        """Each layer's (result of ``kv.attend``, keys and values) of the ``injected`` features."""
        module, found = self.module(params), []
        for i, block in enumerate(module.layers):
            rope = self.config.layer(i).rope
            table = None if rope is None else rotary_table(positions, rope, self.config.head_dim, self.dtype, None)
            found.append(block.attention(injected, table, kv[i])[1:])
        return found

    def __call__(
        self,
        params: Params,
        roots: Int[Array, "B A"],
        positions: Int[Array, "B A"],
        kv: Sequence[KVSource],
        form: TrainingForm = PLAIN,
    ) -> Float[Array, "B A N H"]:
        """Input of the head, at all slots of the blocks that begin with ``roots``."""
        module = self.module(gathered(params, form.sharding))
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, None]
        tokens = jnp.where(slot == 0, roots[..., None], self.mask_token).reshape(len(roots), -1)
        x = self.embedded(module, tokens)
        positions = (positions[..., None] + slot).reshape(len(roots), -1)
        for i, block in enumerate(module.layers):
            x, _ = self.run_block(block, i, x, positions, kv[i], form)
        return module.norm(x).reshape(*roots.shape, self.slots, -1)

    def embedded(self, module: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        x, multiplier = super().embedded(module, tokens), self.config.embedding_multiplier
        return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)

    def slot_of(self, depth: int) -> int:
        """The slot that predicts the token at ``depth``, 0 .. K-1."""
        return depth + (not self.from_root)

    def sights(self, roots: Int[Array, "B A"], segments: Any = None, positions: Any = None) -> list[AttentionMask]:
        """Injected keys that the slots of these blocks see, all before their roots, by layer. ``positions``: those of
        the keys; None: their numbers."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, None]
        last = jnp.broadcast_to(roots[..., None] - 1, (*roots.shape, self.slots)).reshape(len(roots), -1)
        at = last if self.window_at_root else (roots[..., None] + slot).reshape(len(roots), -1)
        return [
            AttentionMask(last, segments=segments).within(self.config.layer(i).window, at, positions)
            for i in range(self.config.num_layers)
        ]

    def blocks(self, layers: Sequence[Any], sights: Sequence[AttentionMask]) -> list[Blocks]:
        """Keys and values that the slots attend to, one for each layer."""
        windows = [self.config.layer(i).window for i in range(self.config.num_layers)]
        each = zip(layers, sights, windows, strict=True)
        return [
            Blocks(layer, sight, self.slots, self.causal_window and window is not None) for layer, sight, window in each
        ]

    # --- its tokens, in sequence ------------------------------------------------------------------------------------

    def before_first(self, module: Any, roots: Int[Array, "B A"], final: Float[Array, "B A N H"]) -> Array:
        """State before the first token is drawn in sequence. It has read the root's slot if that slot predicts
        nothing."""
        state = jnp.zeros((*roots.shape, self.markov_rank), final.dtype)
        if not self.markov_rank or self.from_root:
            return state
        return module.markov(state, roots, final[:, :, 0])[0]

    def read(
        self, module: Any, state: Array, before: Int[Array, "B T"], hidden: Float[Array, "B T H"]
    ) -> tuple[Array, Float[Array, "B T R"]]:
        """(state, features of the tokens ``before``) at slots ``hidden``."""
        sequence = module.sequence
        if sequence is None:
            return state, hidden[..., :0]
        state, read = sequence(state, before, hidden)
        if self.confident_of_markov:
            read = jnp.concatenate([read, sequence.embedded(before).astype(read.dtype)], axis=-1)
        return state, read

    def unary(self, module: Any, hidden: Float[Array, "B T H"]) -> Float[Array, "B T W"]:
        """Logits that a slot gives by itself, whatever the token before."""
        return self.scaled(module.head(hidden, wide=True))

    def logits(
        self, module: Any, unary: Float[Array, "B T W"], read: Float[Array, "B T R"], loss_logits: bool = False
    ) -> Float[Array, "B T V"]:
        """Logits over the target's vocabulary; ``loss_logits``: True for those that training compares."""
        sequence = module.sequence
        if sequence is not None:
            make = sequence.loss_logits if loss_logits else sequence.proposed
            unary = make(unary, read[..., : self.rank])
        return self.over_all(unary)

    def confidence(
        self, module: Any, hidden: Float[Array, "B T H"], read: Float[Array, "B T R"]
    ) -> Float[Array, "B T"]:
        """The logit of the chance that a token is accepted if those before it are."""
        behind = read[..., self.rank :]
        return module.confidence(jnp.concatenate([hidden, behind.astype(hidden.dtype)], axis=-1), wide=True)[..., 0]
