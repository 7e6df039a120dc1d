"""Training of DFlash, DSpark and DFlash2, on blocks that begin at random roots of a row.

Dims: B rows, T positions, A anchors, N slots of a block, C positions at a time, D input features of a prediction, H
hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.features import TrainedFeatureDraft
from specjax.interfaces import Batch, Output, Params, Prediction
from specjax.models.attention.stored import LayerKV


@flax.struct.dataclass
class _Nothing:
    """Stand-in for a `KVSource` where only keys and values are asked for: attention gives zeros."""

    def attend(self, q, k, v, scale: float | None = None, soft_cap: float | None = None) -> tuple[Array, tuple[()]]:
        return jnp.zeros_like(q), ()


@dataclasses.dataclass(frozen=True)
class TrainedDFlash(TrainedFeatureDraft):
    """A DFlash draft in training. ``anchors``: number of blocks of a row; None: one at every position; ``every``: True
    for one at every position, ``anchors`` of them at a time; ``gamma``: number of depths over which a depth's weight
    falls by a factor e; ``depths``: number of depths that are predicted; None: all; ``confidence``: weight of the
    confidence head's error beside the loss."""

    anchors: int | None = 64
    every: bool = False
    gamma: float = 4.0
    depths: int | None = None
    confidence: float = 1.0
    samples_anchors: ClassVar[bool] = True

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One prediction a depth, at all anchors. It counts only if all that it reads and predicts lies in the anchor's
        document."""
        assert target_out is not None
        model: Any = self.model
        roots, counts = self._roots(batch)
        final = self._slots(params, batch, target_out, roots)
        module, text = model.module(params), jnp.asarray(batch.tokens)
        state = model.before_first(module, jnp.take_along_axis(text, roots, axis=1), final)
        depths = model.most if self.depths is None else self.depths
        shares = [math.exp(-depth / self.gamma) for depth in range(depths)]
        logits = functools.partial(self._logits, params)
        more: dict[str, Any] = {"in_vocabulary": model.in_vocabulary}
        if model.candidates:
            more["loss_logits"] = functools.partial(self._logits, params, loss_logits=True)
        if model.confident:
            more |= {"confidence": functools.partial(self._confidence, params), "confidence_share": self.confidence}
        for depth, share in enumerate(shares):
            rows = roots + depth
            weight = counts * self._weight(batch, roots, rows)
            hidden = final[:, :, model.slot_of(depth)]
            before = jnp.take_along_axis(text, rows, axis=1, mode="clip")
            state, read = model.read(module, state, before, hidden)
            made_of = jnp.concatenate([hidden, read], axis=-1)
            yield Prediction(made_of, logits, weight, rows, share / sum(shares), **more)

    def _logits(
        self, params: Params, made_of: Float[Array, "B C D"], loss_logits: bool = False
    ) -> Float[Array, "B C V"]:
        model: Any = self.model
        hidden, read = jnp.split(made_of, (model.config.hidden_size,), axis=-1)
        module = model.module(params)
        return model.logits(module, model.unary(module, hidden), read, loss_logits)

    def _confidence(self, params: Params, made_of: Float[Array, "B C D"]) -> Float[Array, "B C"]:
        model: Any = self.model
        hidden, read = jnp.split(made_of, (model.config.hidden_size,), axis=-1)
        return model.confidence(model.module(params), hidden, read)

    def _roots(self, batch: Batch) -> tuple[Int[Array, "B A"], Float[Array, "B A"]]:
        """Positions of the roots, and 1.0 for each that counts: a document's first token has nothing before it. The
        row's text and the step determine random roots. With a block at ``every`` position, the roots are those of the
        part ``batch.number``."""
        tokens = jnp.asarray(batch.tokens)
        counts = (batch.token_positions > 0) & (jnp.asarray(batch.weight) > 0)
        numbers = None if batch.number is None else jnp.asarray(batch.number)
        if self.anchors is None or self.every:
            length, parts = tokens.shape[1], 1 if numbers is None else self.parts(tokens.shape[1])
            first = 0 if numbers is None else -(-length // parts) * numbers[:, None]
            roots = first + jnp.arange(-(-length // parts), dtype=jnp.int32)[None]
            roots = jnp.broadcast_to(roots, (len(tokens), roots.shape[1]))
            # The last part may be shorter: a root beyond the row's end does not count.
            counts = jnp.take_along_axis(counts, roots, axis=1, mode="fill", fill_value=False)
            return jnp.minimum(roots, length - 1), counts.astype(jnp.float32)

        def drawn(row: Int[Array, " T"], number: Int[Array, ""]) -> Float[Array, " T"]:
            salt = jnp.sum(row.astype(jnp.uint32) * jnp.arange(1, len(row) + 1, dtype=jnp.uint32))
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), salt), number)
            return jax.random.uniform(key, row.shape, jnp.float32)

        numbers = jnp.zeros(len(tokens), jnp.int32) if numbers is None else numbers
        order = jax.vmap(drawn)(tokens, numbers) - jnp.where(counts, 0.0, 1.0)
        _, roots = jax.lax.top_k(order, min(self.anchors, tokens.shape[1]))
        return roots, jnp.take_along_axis(counts, roots, axis=1).astype(jnp.float32)

    @staticmethod
    def _weight(batch: Batch, roots: Int[Array, "B A"], rows: Int[Array, "B A"]) -> Float[Array, "B A"]:
        """Weight of the predictions of the target's positions ``rows``."""
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
        """Input of the head, at all slots of all blocks."""
        model: Any = self.model
        injected, positions = model.injected(params, target_out), batch.token_positions
        nothing = [_Nothing()] * model.config.num_layers
        layers = [LayerKV.of(*fed) for _, fed in model.keys_values(params, injected, positions, nothing)]
        segments = None
        if batch.documents is not None:
            of_keys = batch.documents.segments
            of_queries = jnp.repeat(jnp.take_along_axis(of_keys, roots, axis=1), model.slots, axis=1)
            segments = of_queries, of_keys
        kv = model.blocks(layers, model.sights(roots, segments))
        at = jnp.take_along_axis(positions, roots, axis=1)
        return model(params, jnp.take_along_axis(jnp.asarray(batch.tokens), roots, axis=1), at, kv, self.form)

    def passes(self, length: int) -> int:
        model: Any = self.model
        return -(-(self.anchors or length) * model.slots // length)

    def parts(self, length: int) -> int:
        return -(-length // (self.anchors or length)) if self.every else 1

    def unrolled(self, depths: int) -> Any:
        """This draft with a block at every position, so that each position is predicted at every depth; None: its
        blocks are shorter."""
        fewer = depths <= (self.model.most or depths)
        return dataclasses.replace(self, depths=depths, every=True) if fewer else None
