"""Comparison of a drafter's predictions with teacher and text, with logits of a few positions at a time. With a
vocabulary of 150,000, logits of 4,096 positions take 2.5 GB, and a loss makes several such arrays of draft and target
each.

Dims: B rows, T predicted positions, C of them at a time, V vocabulary, D/E hidden of draft and target.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from specjax import backend
from specjax.interfaces import FullLogits, NarrowHead, Output, Params, Prediction, TopKLogits
from specjax.models.vocabulary import NEVER, TokenRows

Head = Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Distribution of the target after every position. ``head`` makes logits of ``values``; without a head they are
    logits themselves."""

    values: Any
    head: Head | None = None

    @classmethod
    def of(cls, spec: Any, params: Params, out: Output) -> Teacher:
        """Teacher from a forward pass of the target. If that gives `final`, logits are made where they are needed."""
        if out.final is None:
            return cls(FullLogits(out.logits))
        return cls(out.final, functools.partial(spec.head, params))

    def narrowed(self, head: Head, logsumexp: Float[Array, "B T"]) -> Teacher:
        """The teacher whose ``head`` makes logits of a draft vocabulary alone, and whose logits of all ids have this
        ``logsumexp``."""
        return Teacher((self.values, logsumexp), lambda values: head(values[0]))

    def logsumexp(self, rows: TokenRows | None) -> Float[Array, "B T"]:
        """Logsumexp of the logits at every position, a few positions at a time."""

        def of(values: Any) -> Array:
            logits = self.logits(values).logits
            return jax.nn.logsumexp((logits if rows is None else rows.over(logits)).astype(jnp.float32), axis=-1)

        return mapped(of, self.values, self.chunk)

    def logits(self, values: Any) -> Any:
        """`FullLogits` of ``values`` at some positions (cached logits as they are); no gradient goes through."""
        return values if self.head is None else FullLogits(jax.lax.stop_gradient(self.head(values)))

    @property
    def chunk(self) -> int:
        """Largest number of positions of a row whose logits are made at a time."""
        return 2**31 if self.head is None else chunk_of(self.head, self.values)


@flax.struct.dataclass
class Positions:
    """Everything that is compared at some positions, all with the axes ``[B, T, ...]``."""

    hidden: Float[Array, "B T D"]
    tokens: Int[Array, "B T"]
    """Next tokens of the text."""
    weight: Float[Array, "B T"]
    teacher: Any
    """`Teacher.values` at the target's output row of each position; None without a teacher."""
    references: dict[str, Float[Array, "B T D"]] = dataclasses.field(default_factory=dict)
    """Hidden states of other drafts, by name."""
    more: Any = None
    """Any other values of each position."""


@flax.struct.dataclass
class Narrowed:
    """Facts about all ids, beside logits of a draft vocabulary alone."""

    has_label: Bool[Array, "B C"]
    """True where the text's token is in the draft vocabulary."""
    logsumexp: Float[Array, "B C"]
    """Logsumexp of the teacher's logits of all ids."""


@flax.struct.dataclass
class Matched:
    """Predictions at some positions beside teacher, text and other drafts."""

    draft_logits: Float[Array, "B C V"]
    teacher: FullLogits | TopKLogits | None
    tokens: Int[Array, "B C"]
    weight: Float[Array, "B C"]
    references: dict[str, Float[Array, "B C V"]] = dataclasses.field(default_factory=dict)
    in_vocabulary: Bool[Array, " V"] | None = None
    """True for the ids of the draft vocabulary; None: it has all ids."""
    loss_logits: Float[Array, "B C V"] | None = None
    """Logits that a loss compares in place of ``draft_logits``; None: it compares ``draft_logits``."""
    narrow: Narrowed | None = None
    """Set if all logits here are those of a draft vocabulary alone, and ``tokens`` places in it."""
    confidence: Float[Array, "B C"] | None = None
    """Logit of the chance that the token is accepted, as the draft predicts it."""

    @property
    def label_in_vocabulary(self) -> Bool[Array, "B C"] | None:
        """True where the text's token is in the draft vocabulary; None: everywhere."""
        if self.narrow is not None:
            return self.narrow.has_label
        return None if self.in_vocabulary is None else self.in_vocabulary[self.tokens]

    def over_draft_vocabulary(self, labels: bool) -> Matched:
        """Predictions as a loss compares them: with the teacher's distribution over the draft vocabulary. For a loss
        that compares with the text's tokens alone (``labels``), only tokens of the draft vocabulary have a weight."""
        if self.loss_logits is not None:
            return dataclasses.replace(self, draft_logits=self.loss_logits, loss_logits=None).over_draft_vocabulary(
                labels
            )
        if self.narrow is not None and labels:
            return dataclasses.replace(self, weight=jnp.where(self.narrow.has_label, self.weight, 0.0))
        if self.in_vocabulary is None:
            return self
        assert isinstance(self.teacher, FullLogits | None)  # a draft of fewer ids reads its target's forward pass
        teacher, weight = self.teacher, self.weight
        if teacher is not None:
            seen = self.in_vocabulary.reshape([1] * (teacher.logits.ndim - 1) + [-1])
            teacher = FullLogits(jnp.where(seen, teacher.logits, NEVER))
        if labels:
            weight = jnp.where(self.in_vocabulary[self.tokens], weight, 0.0)
        return dataclasses.replace(self, teacher=teacher, weight=weight)


@dataclasses.dataclass(frozen=True)
class Matching:
    """One prediction of every position, to be compared a few positions at a time.

    Both compared distributions are over ``rows`` of the vocabulary, as in decoding. Without a teacher the draft's is
    over all its rows. This teaches it not to choose padding, for those who decode it elsewhere.
    """

    positions: Positions
    head: Head
    teacher: Teacher | None = None
    reference_heads: Mapping[str, Head] = dataclasses.field(default_factory=dict)
    rows: TokenRows | None = None
    prediction: Prediction | None = None
    """Prediction that gives ``in_vocabulary``, ``loss_logits`` and ``confidence``."""
    narrow: NarrowHead | None = None
    """Head to compare over the draft vocabulary alone, with a `Teacher.narrowed`; None: over all ids."""

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        teacher: Teacher | None,
        labels: Int[Array, "B T"],
        rows: TokenRows | None = None,
        references: Mapping[str, Prediction] | None = None,
    ) -> Matching:
        """Matching of a prediction with the target's distribution, the text's next token and predictions of other
        drafts, all at the rows that it names. The other drafts predict all rows of the target, in order."""

        def take(values):
            at = prediction.rows
            if at is None:
                return values
            return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1, mode="clip")

        # Looked up in either case: XLA fuses the sum over losses with it, and would else add in another order.
        here = jnp.arange(labels.shape[1], dtype=jnp.int32)
        labels = take(labels) if prediction.rows is not None else jnp.take(labels, here, axis=1, mode="clip")
        others = references or {}
        positions = Positions(
            prediction.hidden,
            labels,
            prediction.weight,
            None if teacher is None else jax.tree.map(take, teacher.values),
            {name: take(other.hidden) for name, other in others.items()},
        )
        heads = {name: other.head for name, other in others.items()}
        return cls(positions, prediction.head, teacher, heads, rows, prediction)

    def at(self, positions: Positions) -> Matched:
        """Predictions and their logits at ``positions``, some or all of its own."""
        if self.narrow is not None:
            return self._narrow_at(positions, self.narrow)
        teacher = None if self.teacher is None else self.teacher.logits(positions.teacher)
        heads = {name: head(positions.references[name]) for name, head in self.reference_heads.items()}
        own: dict[str, Any] = {"draft_logits": self.head(positions.hidden), **self._beside(positions.hidden)}
        if self.rows is not None and teacher is not None:
            over = self.rows.over
            own |= {name: over(own[name]) for name in ("draft_logits", "loss_logits") if name in own}
            heads = {name: over(of_other) for name, of_other in heads.items()}
            teacher = FullLogits(over(teacher.logits)) if isinstance(teacher, FullLogits) else teacher
        if self.prediction is not None and self.prediction.in_vocabulary is not None:
            own["in_vocabulary"] = self.prediction.in_vocabulary[: own["draft_logits"].shape[-1]]
        return Matched(teacher=teacher, tokens=positions.tokens, weight=positions.weight, references=heads, **own)

    def _narrow_at(self, positions: Positions, narrow: NarrowHead) -> Matched:
        """`at` over the draft vocabulary alone."""
        assert self.teacher is not None
        ids, tokens = jnp.asarray(narrow.ids), positions.tokens
        place = jnp.minimum(jnp.searchsorted(ids, tokens), len(narrow.ids) - 1)
        facts = Narrowed(ids[place] == tokens, positions.teacher[1])
        teacher, logits = self.teacher.logits(positions.teacher), narrow.head(positions.hidden)
        return Matched(logits, teacher, place.astype(tokens.dtype), positions.weight, narrow=facts)

    def _beside(self, hidden: Float[Array, "B C D"]) -> dict[str, Array]:
        """Outputs of the prediction beside its logits: ``loss_logits`` and ``confidence``, if it has them."""
        if self.prediction is None:
            return {}
        made = {"loss_logits": self.prediction.loss_logits, "confidence": self.prediction.confidence}
        return {name: make(hidden) for name, make in made.items() if make is not None}

    @property
    def whole(self) -> Matched:
        """Predictions at all positions at once."""
        return self.at(self.positions)

    @property
    def chunk(self) -> int:
        """Largest number of positions of a row whose logits are made at a time."""
        return chunk_of(self.head if self.narrow is None else self.narrow.head, self.positions.hidden)

    def weight(self, labels: bool) -> Float[Array, "B T"]:
        """Weight of each position in a loss; for ``labels`` see `Matched.over_draft_vocabulary`."""
        included = None if self.prediction is None else self.prediction.in_vocabulary
        weight, tokens = self.positions.weight, self.positions.tokens
        return weight if included is None or not labels else jnp.where(included[tokens], weight, 0.0)

    def mapped(self, measure: Callable[[Matched, Positions], Any], more: Any = None) -> Any:
        """Results of ``measure`` at each position, ``[B, T, ...]``. ``more``: other values of each, see `Positions`."""
        return mapped(lambda some: measure(self.at(some), some), self._with(more), self.chunk)

    def summed(self, measure: Callable[[Matched, Positions], tuple[Array, Any]], more: Any = None) -> tuple[Array, Any]:
        """Sum of ``measure`` over chunks of positions: (a number to be differentiated, others that are not)."""
        return summed(lambda some: measure(self.at(some), some), self._with(more), self.chunk)

    def _with(self, more: Any) -> Positions:
        return dataclasses.replace(self.positions, more=more)


# --- chunks of positions --------------------------------------------------------------------------------------------


def chunk_of(head: Head, hidden: Float[Array, "B T D"]) -> int:
    """Largest number of positions of each of B rows whose logits are made at a time."""
    return max(1, backend.logit_tokens(jax.eval_shape(head, hidden).shape[-1]) // len(hidden))


def mapped(fn: Callable[[Any], Any], positions: Any, chunk: int) -> Any:
    """``fn(positions)``, ``chunk`` positions at a time, for a function of each position by itself."""
    length = _length(positions)
    if length <= chunk:
        return fn(positions)
    found = jax.lax.map(fn, _chunks(positions, chunk))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], found)


def summed(fn: Callable[[Positions], tuple[Array, Any]], positions: Positions, chunk: int) -> tuple[Array, Any]:
    """``fn(positions)``, ``chunk`` positions at a time, for a function that sums over positions: (a number, others).
    Gradients of the number reach the arrays that ``fn`` closes over, and ``hidden``; nothing else has a gradient.

    Gradients are computed with the sum, chunk by chunk, so that the backward pass neither needs stored logits nor makes
    them again.
    """
    if _length(positions) <= chunk:
        return fn(positions)
    chunks = _chunks(positions, chunk)
    chunks = dataclasses.replace(chunks, weight=_counting_once(chunks.weight, _length(positions)))
    fn, closed = jax.closure_convert(fn, jax.tree.map(lambda x: x[0], chunks))
    return _summed(fn, tuple(closed), chunks.hidden, dataclasses.replace(chunks, hidden=None))


def _length(positions: Any) -> int:
    return jax.tree.leaves(positions)[0].shape[1]


def _chunks(positions: Any, chunk: int) -> Any:
    """Chunks ``[N, B, C, ...]`` of sizes as equal as can be; the last one is filled up with its last position."""
    length = _length(positions)
    count = -(-length // chunk)
    size = -(-length // count)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2), mode="edge")
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, positions)


def _counting_once(weight: Float[Array, "N B C"], length: int) -> Float[Array, "N B C"]:
    """Weights with 0 for the positions that fill up the last chunk."""
    count, _, size = weight.shape
    real = jnp.arange(count * size, dtype=jnp.int32).reshape(count, 1, size) < length
    return jnp.where(real, weight, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(fn, closed: tuple[Array, ...], hidden: Float[Array, "N B C D"], rest: Positions) -> tuple[Array, Any]:
    def add(total, some):
        return jax.tree.map(jnp.add, total, fn(_with_hidden(*some), *closed)), None

    return jax.lax.scan(add, _zeros(fn, closed, hidden, rest), (hidden, rest))[0]


def _summed_forward(fn, closed, hidden, rest):
    """Forward pass that makes the gradients too. It knows the trained weights, and makes no gradient of others.
    Gradients of all chunks are added up in float32."""
    moves = [x.perturbed for x in closed]
    closed, hidden, rest = jax.tree.map(lambda x: x.value, (closed, hidden, rest))
    trained = [x for x, moved in zip(closed, moves, strict=True) if moved]

    def of(trained, hidden, rest):
        own = iter(trained)
        return fn(_with_hidden(hidden, rest), *(next(own) if m else x for x, m in zip(closed, moves, strict=True)))

    def add(total, some):
        found, (of_trained, of_hidden) = jax.value_and_grad(of, (0, 1), has_aux=True)(trained, *some)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (found, of_trained)), of_hidden

    start = _zeros(fn, closed, hidden, rest), [jnp.zeros(x.shape, jnp.float32) for x in trained]
    (sums, of_trained), of_hidden = jax.lax.scan(add, start, (hidden, rest))
    grads = iter(of_trained)
    of_closed = tuple(next(grads).astype(x.dtype) if m else None for x, m in zip(closed, moves, strict=True))
    return sums, (of_closed, of_hidden)


def _summed_backward(fn, grads, cotangents):
    of_sum = cotangents[0]
    if isinstance(of_sum, SymbolicZero):
        of_sum = jnp.float32(0)
    return *jax.tree.map(lambda x: of_sum.astype(x.dtype) * x, grads), None


_summed.defvjp(_summed_forward, _summed_backward, symbolic_zeros=True)


def _with_hidden(hidden: Array, rest: Positions) -> Positions:
    return dataclasses.replace(rest, hidden=hidden)


def _zeros(fn, closed, hidden, rest) -> Any:
    first = jax.tree.map(lambda x: x[0], (hidden, rest))
    shapes = jax.eval_shape(lambda hidden, rest: fn(_with_hidden(hidden, rest), *closed), *first)
    return jax.tree.map(jnp.zeros_like, shapes)
