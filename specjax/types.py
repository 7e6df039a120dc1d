"""Every protocol and pytree of specjax; imports nothing of ours.

Dims: B rows, P prompt, K draft length, N block nodes (root excluded; N = K for a chain), T tokens fed, S cache slots,
C some of the T, L token buffer, V vocabulary, D hidden.
Axis 0 of every leaf is the row, so that rows can become slots of a server later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt

Params = Any
"""A pytree of weights. Always a traced argument, never closed over: closed-over weights become constants."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """What is read of the target's forward pass. ``hidden_layers``: the residual stream that enters layer i, 0 the
    embedded tokens, after the last layer and before the final norm their number. ``kv_layers``: keys and values as
    attention reads them, after q/k-norm and rotary."""

    hidden_layers: tuple[int, ...] = ()
    kv_layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.hidden_layers or self.kv_layers)


NOTHING = Reads()


def reads_of(drafter: Any) -> Reads:
    """Of a drafter or trainable; one that does not say reads nothing."""
    return getattr(drafter, "reads", NOTHING)


@flax.struct.dataclass
class Output:
    """What a forward pass returns. ``logits[b, i]`` is the distribution of the token after the i-th of the rows asked
    for. ``hidden``, ``keys_values``: of the layers that `Reads` name, in its order; keys and values ``[B, T, G, C]`` of
    the tokens fed. ``final``: what the head reads, after the final norm."""

    logits: Float[Array, "B R V"]
    hidden: tuple[Float[Array, "B T D"], ...] = ()
    cache: Any = None
    keys_values: tuple[tuple[Array, Array], ...] = ()
    final: Float[Array, "B T D"] | None = None


@flax.struct.dataclass
class SamplingParams:
    """One value a row, each with a value that changes nothing; what they mean is said in `specjax.sampling`."""

    temperature: Float[Array, " B"]
    """0 is greedy."""
    top_k: Int[Array, " B"]
    """0: off."""
    top_p: Float[Array, " B"]
    """1: off."""
    min_p: Float[Array, " B"]
    """0: off."""
    repetition_penalty: Float[Array, " B"]
    """1: off."""
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    min_new_tokens: Int[Array, " B"]
    bias: Float[Array, "B V"]
    """Added to the logits; -inf forbids a token."""


@flax.struct.dataclass
class LogitsContext:
    """What a user's logits processor may look at: the tokens before the one to choose, ``tokens[b, :lengths[b]]``
    (prompt, generated, and the drafts before this one); later entries are stale."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


LogitsProcessor = Callable[[Float[Array, "B V"], LogitsContext], Float[Array, "B V"]]
"""Traced into the step, so it must be pure; another function is another program."""


@flax.struct.dataclass
class Noise:
    """Fresh randomness of one block, each number used once, keyed by (row seed, row length at the start of the block,
    purpose, offset), so that no number depends on K. A draw takes two words of 32 random bits
    (`specjax.sampling.draw`). None in place of a Noise means an all-greedy batch."""

    draft_words: UInt[Array, "B K 2"]
    """For the draft tokens."""
    accept: Float[Array, "B K"]
    """Uniforms in [0, 1), one a draft token, for the acceptance test."""
    next_words: UInt[Array, "B 2"]
    """For the target's own token."""

    def draft(self, offset: int | Int[Array, ""]) -> UInt[Array, "B 2"]:
        """What draws the draft token at ``offset`` 0 .. K-1."""
        return self.draft_words[:, offset]


@flax.struct.dataclass
class CoupledNoise:
    """Gumbel noise of the K + 1 tokens a block may choose, keyed by (row seed, absolute position of the token) alone:
    a position that is drawn again sees the same noise, and so does plain sampling."""

    gumbel: Float[Array, "B K1 V"]

    def draft(self, offset: int | Int[Array, ""]) -> Float[Array, "B V"]:
        """The noise that draws the draft token at ``offset`` 0 .. K-1."""
        return self.gumbel[:, offset]


@flax.struct.dataclass
class Context:
    """What a drafter may look at: committed tokens only (``tokens[b, :lengths[b]]``; later entries are stale). It is
    also all that `specjax.sampling.transform` needs, for draft and target alike."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    stop_ids: Int[Array, "B E"]
    sampling: SamplingParams
    noise: Noise | CoupledNoise | None
    processor: LogitsProcessor | None = flax.struct.field(pytree_node=False, default=None)
    controller: Controller | None = flax.struct.field(pytree_node=False, default=None)
    controller_state: Any = None

    def stop(self, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """Asked inside a drafter's loop, before the token at ``offset`` is drawn from ``logits``: the rows that propose
        no more. None: nobody stops. It may depend on earlier tokens only, and so cannot change the distribution."""
        return None if self.controller is None else self.controller.stop(self.controller_state, logits, offset)


@flax.struct.dataclass
class TargetView:
    """What a drafter may read of the target while it drafts. Never kept in a state, and nothing of it is copied."""

    params: Params
    keys_values: tuple[tuple[Array, Array], ...] = ()
    """Of the layers that the drafter's `Reads` name, as the target's cache holds them (`specjax.models.cache`)."""
    lengths: Int[Array, " B"] | None = None
    """Slots that count, ``context.lengths - 1``: the newest token, the root of the block, is not among them."""


@flax.struct.dataclass
class Draft:
    """A proposed block. ``logits`` are after the sampling transform, exactly what each token was drawn from; None when
    the proposal is deterministic. ``valid[b, i]``: with all that come before it; it may depend on the tokens before
    only, so that dropping a proposal never depends on its own draw (freely, if deterministic). ``parents[b, i]``: the
    node that token i follows, 0 the root and i + 1 token i, parents before children; None: a chain."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    logits: Float[Array, "B N V"] | None = None
    parents: Int[Array, "B N"] | None = None
    finite: Bool[Array, "B N"] | None = None
    """Whether the drafter's own logits were, before the sampling parameters; nothing is kept from where they were not.
    None: as ``logits`` are."""
    max_depth: int | None = flax.struct.field(pytree_node=False, default=None)
    """Most tokens on one way down a tree; None: a chain."""


@flax.struct.dataclass
class Verdict:
    """``num_accepted[b]`` draft tokens are kept, then ``next_token[b]`` of the target's own. ``path``: the accepted
    nodes of a tree from the root down (token i is node i + 1; entries past ``num_accepted`` mean nothing, but are
    nodes), None for a chain (the first ``num_accepted`` tokens)."""

    num_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]
    path: Int[Array, "B D"] | None = None


@flax.struct.dataclass
class Outcome:
    """What became of a block, for those who learn from it: `BoundDrafter.commit`, `Controller.adapt`. ``emitted[b]``:
    tokens that the row grew by, 0 in a row that was done. ``tokens``: the accepted ones, then the target's own;
    ``nodes[b, j]``: the node of the block that token j follows, so ``target_out`` has row ``nodes[b, j]`` for it (None:
    row j)."""

    context: Context
    draft: Draft
    target_out: Output
    verdict: Verdict
    emitted: Int[Array, " B"]
    tokens: Int[Array, "B D1"]
    nodes: Int[Array, "B D1"] | None = None


@flax.struct.dataclass
class VerdictDistribution:
    """What a verifier does with given drafts: ``num_accepted[b, n]``, the chance to keep n of them, and
    ``next_token[b, n]``, the distribution of the token that follows."""

    num_accepted: Float[Array, "B K1"]
    next_token: Float[Array, "B K1 V"]


@flax.struct.dataclass
class Counters:
    """Per row, counted on the device over blocks that began while the row was not done (see specjax.metrics)."""

    blocks: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted_at: Int[Array, "B K"]
    """#(k_r >= j): blocks with a valid proposal at position j."""
    reached_at: Int[Array, "B K"]
    """#(n >= j - 1 and k_r >= j): blocks whose verification got to a proposal at position j."""
    accepted_at: Int[Array, "B K"]
    """#(n >= j)."""
    invalid_drafts: Int[Array, " B"]
    """Blocks whose proposal was cut because the drafter's own distribution was not finite."""


@flax.struct.dataclass
class DecodeState:
    """The donated carry of a generation. Invariant: the target's cache holds ``tokens[b, :lengths[b] - 1]``; the newest
    token is the root of the next block."""

    tokens: Int[Array, "B L"]
    origin: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    """Largest total length (prompt included) a row may reach."""
    done: Bool[Array, " B"]
    sampling: SamplingParams
    seeds: UInt[Array, "B 2"]
    stop_ids: Int[Array, "B E"]
    """Token ids that end the row, padded with -1."""
    counters: Counters
    finish: Int[Array, " B"]
    """Why the row is done, an index into `FINISH_REASONS`; UNFINISHED while it is not, and in padding rows."""
    logprobs: Float[Array, "B L"] | None
    """Of the emitted tokens, where asked for."""
    cache: Any
    drafter: Any
    controller: Any = None


ORIGINS = ("prompt", "accepted", "corrected", "bonus")
PROMPT, ACCEPTED, CORRECTED, BONUS = range(4)
FINISH_REASONS = ("unfinished", "stop", "length", "invalid_logits", "stop_string")
"""A stop token; the budget; the next token has no finite distribution to come from (NaN or infinite logits, or nothing
left by a logits processor); a stop string, which the host finds."""
UNFINISHED, STOP, LENGTH, INVALID_LOGITS, STOP_STRING = range(5)


@runtime_checkable
class Model(Protocol):
    """A decoder as a pure function; static and hashable. A fed block is contiguous in ``slots``, row by row."""

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"] | None = None,
        cache: Any = None,
        mask: Bool[Array, "B T T"] | None = None,
        reads: Reads = NOTHING,
        rows: Int[Array, "B R"] | None = None,
    ) -> Output: ...

    def init_cache(self, batch: int, num_slots: int, dtype: DTypeLike = ...) -> Any: ...


class Bound(NamedTuple):
    """A drafter that knows its target: what is static and hashable, and its parameters."""

    spec: BoundDrafter
    params: Params


@runtime_checkable
class Drafter(Protocol):
    """Who proposes the block, as a config says it: frozen and hashable. ``k``: tokens of the longest block."""

    @property
    def kind(self) -> str: ...
    @property
    def k(self) -> int: ...

    def bind(self, target: Any) -> Bound:
        """Resolves what the configuration names (a model path, say) against the target."""
        ...


@runtime_checkable
class BoundDrafter(Protocol):
    """Who proposes the block, as the engine runs it; static and hashable. A drafter of trees also has ``num_nodes`` and
    ``max_depth``, one that reads the target ``reads``; without them, a block is a chain of ``k`` and nothing is read.

    `specjax.models.cache.KVCache` leaves of the state grow with the target's.
    """

    @property
    def k(self) -> int: ...

    def init(self, batch: int, num_slots: int) -> Any:
        """The state of rows without a token. Axis 0 of every leaf is the row."""
        ...

    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        """The next piece of the prompts, or of what was committed without the drafter: ``tokens[b]`` begin at position
        ``start[b]`` (None: 0) of their row, and the first ``lengths[b]`` of them, maybe none, are before the root; the
        rest is padding. ``target_out``: what the target made of them."""
        ...

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]: ...

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """After verification: guesses may be replaced by what the target computed."""
        ...


@runtime_checkable
class Controller(Protocol):
    """How much is proposed; frozen and hashable, its fields are its configuration. Shapes are those of the drafter's
    longest block whatever it chooses, so that no choice moves another row's noise."""

    @property
    def kind(self) -> str: ...

    def init(self, batch: int) -> Any: ...

    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        """The deepest proposal of each row's next block; None: as deep as the drafter goes."""
        ...

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """See `Context.stop`."""
        ...

    def adapt(self, state: Any, outcome: Outcome) -> Any: ...


@runtime_checkable
class Verifier(Protocol):
    """Which part of the block is kept. ``p_logits[b, i]`` is the target's distribution after node i (0 is the root),
    after the sampling transform. Chains have N = K. ``reference``: an arXiv id. ``distribution``: the exact
    distribution of what ``__call__`` does with given drafts and probabilities. One that takes trees has
    ``proposals = ("chain", "tree")`` and gives a `Verdict.path`; without it, it takes chains."""

    @property
    def kind(self) -> str: ...

    lossless: ClassVar[bool]
    noise: ClassVar[Literal["fresh", "coupled", "none"]]
    reference: ClassVar[str]

    def __call__(self, draft: Draft, p_logits: Float[Array, "B N1 V"], noise: Any) -> Verdict: ...
    def distribution(
        self, draft: Draft, p: Float[Array, "B N1 V"], q: Float[Array, "B N V"] | None
    ) -> VerdictDistribution: ...


@flax.struct.dataclass
class FullLogits:
    """Teacher logits over the whole vocabulary."""

    logits: Float[Array, "B T V"]


@flax.struct.dataclass
class TopKLogits:
    """The k largest of the teacher's logits, and the logsumexp of all: what is left over is the true tail. Of the tail
    n tokens drawn from the teacher's distribution there (one may come twice), or None: nothing but its mass is
    known."""

    values: Float[Array, "B T k"]
    ids: Int[Array, "B T k"]
    logsumexp: Float[Array, "B T"]
    tail_values: Float[Array, "B T n"] | None = None
    tail_ids: Int[Array, "B T n"] | None = None


@flax.struct.dataclass
class Batch:
    """Rows of text to train on: ``labels[b, t]`` comes after ``tokens[b, t]``."""

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    weight: Float[Array, "B T"]
    """How much the prediction of ``labels`` counts; 0: not at all (padding, a prompt)."""
    positions: Int[Array, "B T"] | None = None
    """Inside its own document; None: 0 .. T-1."""
    segments: Int[Array, "B T"] | None = None
    """Document of the row that a token belongs to; attention stays inside it. None: a row is one document."""
    teacher: TopKLogits | None = None
    """Cached; None: the target is asked."""

    @property
    def token_positions(self) -> Int[Array, "B T"]:
        if self.positions is not None:
            return jnp.asarray(self.positions)
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None], self.tokens.shape)

    @property
    def attention_mask(self) -> Bool[Array, "B T T"] | None:
        """Causal, and inside a document; None: causal."""
        if self.segments is None:
            return None
        segments, size = jnp.asarray(self.segments), self.tokens.shape[1]
        return (segments[:, :, None] == segments[:, None]) & jnp.tril(jnp.ones((size, size), bool))[None]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One prediction of every position, in a drafter's training forward. ``head(hidden[:, a:b])`` are the logits of
    those positions, so that they need not all exist at once. Position t of row b predicts the token that the target
    predicts at ``rows[b, t]`` of its output (None: at t); ``weight[b, t]`` says how much that counts, and ``share`` how
    much this prediction does among the drafter's."""

    hidden: Float[Array, "B T D"]
    head: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]]
    weight: Float[Array, "B T"]
    rows: Int[Array, "B T"] | None = None
    share: float = 1.0

    @property
    def logits(self) -> Float[Array, "B T V"]:
        return self.head(self.hidden)


@dataclasses.dataclass(frozen=True)
class TrainingForm:
    """How a forward pass runs in training: the same numbers for other costs. ``remat``: activations are computed again
    in the backward pass. ``scan_layers``: equal layers are one compiled loop. ``sharding``: of ``[B, T, D]`` between
    layers, over a mesh; None: on one device. ``dtype``: that it computes in; None: its own."""

    remat: bool = False
    scan_layers: bool = False
    sharding: NamedSharding | None = None
    dtype: str | None = None


@runtime_checkable
class Trainable(Protocol):
    """A drafter that can be distilled: static and hashable; it owns the alignment of positions. One that reads the
    target's forward pass has ``reads``; its predictions then need the target, and cannot be made from cached logits.
    `specjax.drafters.base.TrainedDrafter` adds what a training job asks for beside this."""

    def init_params(self, key: Key[Array, ""], target: Any) -> Params: ...

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """One after the other, by depth: the j-th one is what the drafter proposes at place j of a block."""
        ...


@flax.struct.dataclass
class LossContext:
    """What a loss may know beside the prediction."""

    alpha: Float[Array, ""]
    """Running mean of the batches' alpha (`TrainState.alpha`), from before this step: the same in all its parts."""
    weight: Float[Array, "B T"]
    """How much each prediction counts; 0: not at all."""
    references: Mapping[str, Float[Array, "B T V"]] = dataclasses.field(default_factory=dict)
    """Logits of the frozen drafts that the loss compares with, by its names for them."""


@runtime_checkable
class Sharing(Protocol):
    """A `Trainable` of which some weights are the target's, frozen; it computes with ``complete(own, target's)``."""

    def complete(self, params: Params, target_params: Params) -> Params: ...


@runtime_checkable
class Loss(Protocol):
    """What a prediction costs: one value a predicted token, in float32, without a mean: the trainer adds up
    ``weight * value`` and ``weight`` over microbatches and devices and divides once. ``tokens`` are the next tokens,
    for losses that need labels. A loss that compares with frozen reference drafts has a ``bind(target)`` that gives
    them by name, each as (`Trainable`, its parameters)."""

    @property
    def kind(self) -> str: ...
    @property
    def needs_target(self) -> bool: ...
    @property
    def needs_whole_distribution(self) -> bool:
        """Refuses `TopKLogits`."""
        ...

    @property
    def needs_labels(self) -> bool:
        """Takes the text's next tokens for right: no matter for a prompt, which nobody is to write."""
        ...

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
        context: LossContext | None = None,
    ) -> Float[Array, "B T"]: ...
