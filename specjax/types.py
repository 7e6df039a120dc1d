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
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt

Params = Any
"""A pytree of weights. Always a traced argument, never closed over: closed-over weights become constants."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """The parts of the target's forward pass that a drafter reads."""

    hidden_layers: tuple[int, ...] = ()
    """The residual stream that enters layer i: 0 is the embedded tokens, the number of layers what leaves the last one,
    before the final norm."""
    kv_layers: tuple[int, ...] = ()
    """Layers whose keys and values are read as attention reads them, after q/k-norm and rotary."""

    def __bool__(self) -> bool:
        return bool(self.hidden_layers or self.kv_layers)


NOTHING = Reads()
"""A drafter that reads committed tokens alone."""


def reads_of(drafter: Any) -> Reads:
    """The parts of the target's forward pass that a drafter or trainable reads; none if it does not say."""
    return getattr(drafter, "reads", NOTHING)


@flax.struct.dataclass
class Output:
    """The result of a decoder's forward pass."""

    logits: Float[Array, "B R V"]
    """After each of the rows asked for (default: all tokens fed), those of the next token."""
    hidden: tuple[Float[Array, "B T D"], ...] = ()
    """The layers that `Reads.hidden_layers` names, in its order."""
    cache: Any = None
    """The cache with the fed block written into it; None without one."""
    keys_values: tuple[tuple[Array, Array], ...] = ()
    """The layers that `Reads.kv_layers` names, in its order: keys and values ``[B, T, G, C]`` of the tokens fed."""
    final: Float[Array, "B T D"] | None = None
    """The input of the head, after the final norm."""


@flax.struct.dataclass
class SamplingParams:
    """The sampling parameters of a batch, one value a row, each with a value that changes nothing; `specjax.sampling`
    applies them."""

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
    """0: off."""
    frequency_penalty: Float[Array, " B"]
    """0: off."""
    min_new_tokens: Int[Array, " B"]
    bias: Float[Array, "B V"]
    """Added to the logits; -inf forbids a token."""


@flax.struct.dataclass
class TokenCounts:
    """How often each token is in a row, for the penalties."""

    prompt: Int[Array, "B V"]
    generated: Int[Array, "B V"]


@flax.struct.dataclass
class LogitsContext:
    """The tokens before the one to choose, as a user's logits processor sees them: ``tokens[b, :lengths[b]]`` (prompt,
    generated, and the drafts before this one); later entries are stale."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


LogitsProcessor = Callable[[Float[Array, "B V"], LogitsContext], Float[Array, "B V"]]
"""A user's change of the logits, before temperature. Traced into the step, so it must be pure; another function is
another program."""


@flax.struct.dataclass
class Noise:
    """Fresh random numbers of one block, each used once, keyed by (row seed, row length at the start of the block,
    purpose, offset), so that none depends on K. A draw takes two words of 32 random bits (`specjax.sampling.draw`).
    None in place of a Noise means an all-greedy batch."""

    draft_words: UInt[Array, "B K 2"]
    """For the draft tokens."""
    accept: Float[Array, "B K"]
    """Uniforms in [0, 1), one a draft token, for the acceptance test."""
    next_words: UInt[Array, "B 2"]
    """For the target's own token."""

    def draft(self, offset: int | Int[Array, ""]) -> UInt[Array, "B 2"]:
        """The random words that draw the draft token at ``offset``, 0 .. K-1."""
        return self.draft_words[:, offset]

    def first(self, k: int) -> Noise:
        """The noise of a block of ``k`` drafts, which is the same: none depends on K."""
        return Noise(self.draft_words[:, :k], self.accept[:, :k], self.next_words)


@flax.struct.dataclass
class CoupledNoise:
    """Gumbel noise of the K + 1 tokens a block may choose, keyed by (row seed, absolute position of the token) alone:
    a position that is drawn again sees the same noise, and so does plain sampling."""

    gumbel: Float[Array, "B K1 V"]

    def draft(self, offset: int | Int[Array, ""]) -> Float[Array, "B V"]:
        """The Gumbel noise that draws the draft token at ``offset``, 0 .. K-1."""
        return self.gumbel[:, offset]

    def first(self, k: int) -> CoupledNoise:
        """The noise of a block of ``k`` drafts."""
        return CoupledNoise(self.gumbel[:, : k + 1])


@flax.struct.dataclass
class Calibration:
    """Costs and acceptance of a batch's blocks, known before there is one: a controller weighs with them."""

    seconds: Float[Array, " K1"]
    """Of a block of the whole batch with 0 .. K proposals in every row; only their ratios matter."""
    acceptance: Float[Array, " K"]
    """The chance that the proposal at place 1 .. K is kept if those before it are."""
    catch_up: Float[Array, ""] = np.float32(0)  # pyright: ignore[reportAssignmentType]
    """Seconds that a draft which comes back takes to read what it missed, for each block that it was not asked in."""
    least: Int[Array, ""] = np.int32(0)  # pyright: ignore[reportAssignmentType]
    """Every block with a draft is verified as if it had so many proposals, while its cost is measured; else 0."""


@flax.struct.dataclass
class Context:
    """The inputs of a drafter: committed tokens (``tokens[b, :lengths[b]]``; later entries are stale), sampling
    parameters and noise. It is also all that `specjax.sampling.transform` needs, for draft and target alike."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    """Tokens of each row's prompt, the first of ``tokens``."""
    stop_ids: Int[Array, "B E"]
    """Token ids that end the row, padded with -1."""
    sampling: SamplingParams
    noise: Noise | CoupledNoise | None
    """None: an all-greedy batch."""
    processor: LogitsProcessor | None = flax.struct.field(pytree_node=False, default=None)
    controller: Controller | None = flax.struct.field(pytree_node=False, default=None)
    controller_state: Any = None
    limit: Int[Array, " B"] | None = None
    """Most tokens that the controller lets a row propose, 0 in one that is done. None: as many as the drafter does."""
    calibration: Calibration | None = None
    active: Bool[Array, " B"] | None = None
    """Rows that are not done; None: all."""
    remaining: Int[Array, " B"] | None = None
    """Tokens that each row may still add; None: not known."""
    counts: TokenCounts | None = None
    """Of the committed tokens; None: they are counted where they are asked for."""
    extras: tuple[str, ...] | None = flax.struct.field(pytree_node=False, default=None)
    """What some row asks for: penalties (or `min_new_tokens`), top_k, top_p, min_p; None: that is seen on the
    device."""

    def stop(
        self, logits: Float[Array, "B V"], offset: int | Int[Array, ""], kept: Float[Array, " B"] | None = None
    ) -> Bool[Array, " B"] | None:
        """The rows that propose no more, asked inside a drafter's loop before the token at ``offset`` is drawn from
        ``logits``. ``kept``: the chance that it is kept if those before it are, as the drafter sees it without knowing
        the token; None: the drafter does not say. None: nobody stops. The answer depends on earlier tokens only, and so
        cannot change the distribution."""
        if self.controller is None:
            return None
        more = (kept,) if getattr(self.controller, "asks_the_drafter", False) else ()
        return self.controller.stop(self.controller_state, logits, offset, *more)


@flax.struct.dataclass
class TargetView:
    """A read-only view of the target for a drafter while it drafts. Never kept in a state, and nothing of it is
    copied."""

    params: Params
    keys_values: tuple[tuple[Array, Array], ...] = ()
    """Those of the layers that the drafter's `Reads` name, as the target's cache holds them
    (`specjax.models.cache`)."""
    lengths: Int[Array, " B"] | None = None
    """Slots that count, ``context.lengths - 1``: the newest token, the root of the block, is not among them."""


@flax.struct.dataclass
class Draft:
    """A proposed block of tokens: a chain, or a tree of alternatives."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    """Whether a token is proposed, which implies that all that come before it are. It may depend on the tokens before
    only, so that dropping a proposal never depends on its own draw (freely, if the proposal is deterministic)."""
    logits: Float[Array, "B N V"] | None = None
    """Logits after the sampling transform, exactly what each token was drawn from; None when the proposal is
    deterministic."""
    parents: Int[Array, "B N"] | None = None
    """The node that token i follows, 0 the root and i + 1 token i, parents before children; None: a chain."""
    finite: Bool[Array, "B N"] | None = None
    """Whether the drafter's own logits, before the sampling parameters, are those of a distribution; nothing is kept
    from where they are not. None: as ``logits`` are."""
    max_depth: int | None = flax.struct.field(pytree_node=False, default=None)
    """Most tokens on one way down a tree; None: a chain."""
    grade: Int[Array, " B"] | None = None
    """How good each row's proposal looks, below the drafter's ``grades``, of one that is deterministic; None: as all
    others."""


@flax.struct.dataclass
class Verdict:
    """The verifier's decision on a block: the first tokens are kept, and one of the target's own follows."""

    num_accepted: Int[Array, " B"]
    """Draft tokens that are kept."""
    next_token: Int[Array, " B"]
    """The target's own token after them."""
    path: Int[Array, "B D"] | None = None
    """The accepted nodes of a tree from the root down (token i is node i + 1; entries past ``num_accepted`` mean
    nothing, but are nodes); None for a chain, whose first ``num_accepted`` tokens are kept."""


@flax.struct.dataclass
class Outcome:
    """A block and what became of it, for `BoundDrafter.commit` and `Controller.adapt`."""

    context: Context
    draft: Draft
    target_out: Output
    verdict: Verdict
    emitted: Int[Array, " B"]
    """Tokens that the row grew by, 0 in a row that was done."""
    tokens: Int[Array, "B D1"]
    """The accepted tokens, then the target's own; later entries mean nothing."""
    nodes: Int[Array, "B D1"] | None = None
    """The node of the block that token j follows, so that ``target_out`` has row ``nodes[b, j]`` for it. None: row
    j."""


@flax.struct.dataclass
class VerdictDistribution:
    """The exact distribution of a verifier's decision on given drafts."""

    num_accepted: Float[Array, "B K1"]
    """The probability that n draft tokens are kept."""
    next_token: Float[Array, "B K1 V"]
    """The distribution of the token that follows, given that n are kept."""


@flax.struct.dataclass
class Counters:
    """Counts of each row, made on the device over the blocks that began while the row was not done (see
    `specjax.metrics`)."""

    blocks: Int[Array, " B"]
    """Draft-and-verify steps."""
    emitted: Int[Array, " B"]
    """Tokens committed."""
    drafted_at: Int[Array, "B K"]
    """#(k_r >= j): blocks with a valid proposal at position j."""
    reached_at: Int[Array, "B K"]
    """#(n >= j - 1 and k_r >= j): blocks whose verification got to a proposal at position j."""
    accepted_at: Int[Array, "B K"]
    """#(n >= j): blocks that kept at least j draft tokens."""
    invalid_drafts: Int[Array, " B"]
    """Blocks whose proposal was cut because the drafter's own distribution was not finite."""


@flax.struct.dataclass
class DecodeState:
    """The state of a generation, donated from chunk to chunk. Invariant: the target's cache holds ``tokens[b,
    :lengths[b] - 1]``; the newest token is the root of the next block."""

    tokens: Int[Array, "B L"]
    origin: Int[Array, "B L"]
    """Where each token comes from: an index into `ORIGINS`, plus ``len(ORIGINS)`` times how much its block proposed."""
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
    """Log-probabilities of the emitted tokens, in nats, where asked for."""
    cache: Any
    drafter: Any
    controller: Any = None
    counts: TokenCounts | None = None
    """Of the tokens before ``lengths``."""


ORIGINS = ("prompt", "accepted", "corrected", "bonus")
PROMPT, ACCEPTED, CORRECTED, BONUS = range(4)
FINISH_REASONS = ("unfinished", "stop", "length", "invalid_logits", "stop_string")
"""A stop token; the budget; the next token has no finite distribution to come from (NaN or infinite logits, or nothing
left by a logits processor); a stop string, which the host finds."""
UNFINISHED, STOP, LENGTH, INVALID_LOGITS, STOP_STRING = range(5)


@flax.struct.dataclass
class Documents:
    """Rows of several documents: a token sees those before it in its own, and itself."""

    segments: Int[Array, "B T"]
    """The document that each token belongs to."""

    @property
    def mask(self) -> Bool[Array, "B T T"]:
        """Which tokens each one sees, an entry a pair."""
        size = self.segments.shape[1]
        return (self.segments[:, :, None] == self.segments[:, None]) & jnp.tril(jnp.ones((size, size), bool))[None]


@runtime_checkable
class Model(Protocol):
    """A decoder as a pure function of its parameters; static and hashable. A fed block is contiguous in ``slots``, row
    by row."""

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        slots: Int[Array, "B T"] | None = None,
        cache: Any = None,
        mask: Bool[Array, "B T T"] | Documents | None = None,
        reads: Reads = NOTHING,
        rows: Int[Array, "B R"] | None = None,
    ) -> Output:
        """Logits after each token fed, or after the ``rows`` of them that are named. ``positions`` are those of rotary
        or learned embeddings, ``slots`` the places in the cache (None: its first ones, or there is no cache), ``mask``
        the tokens of the block that each one sees (None: those before it and itself). Without a cache, a model that has
        ``takes_documents`` is told of rows of several documents by `Documents`."""
        ...

    def init_cache(self, batch: int, num_slots: int, dtype: DTypeLike = ...) -> Any:
        """An empty cache with room for ``num_slots`` tokens a row."""
        ...


class Bound(NamedTuple):
    """A drafter that knows its target: a static, hashable spec, and its parameters."""

    spec: BoundDrafter
    params: Params


@runtime_checkable
class Drafter(Protocol):
    """The proposer of blocks as a config describes it: frozen and hashable."""

    @property
    def kind(self) -> str:
        """Name in the registry, in configs and in results."""
        ...

    @property
    def k(self) -> int:
        """Tokens of the longest block."""
        ...

    def bind(self, target: Any) -> Bound:
        """The drafter for this target: resolves what the configuration names, such as a model's path. Raises
        `ModelError` if the two cannot be paired."""
        ...


@runtime_checkable
class BoundDrafter(Protocol):
    """The proposer of blocks as the engine runs it; static and hashable. A drafter of trees also has ``num_nodes`` and
    ``max_depth``, one that reads the target ``reads``; without them, a block is a chain of ``k`` and nothing is read.
    One that has ``reads_late = True`` is not given a prompt where its controller begins without it.

    `specjax.models.cache.KVCache` leaves of the state grow with the target's.
    """

    @property
    def k(self) -> int:
        """Tokens of the longest block."""
        ...

    def init(self, batch: int, num_slots: int) -> Any:
        """The state of rows that hold no token. Axis 0 of every leaf is the row."""
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
        """The state after the next piece of the prompts, or of what was committed without the drafter: ``tokens[b]``
        begin at position ``start[b]`` (None: 0) of their row, and the first ``lengths[b]`` of them, maybe none, are
        before the root; the rest is padding. ``target_out``: the target's forward pass over them."""
        ...

    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The proposed block, and the state after proposing it."""
        ...

    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The state after verification: guesses may be replaced by what the target computed."""
        ...


@runtime_checkable
class Controller(Protocol):
    """A rule for how much is proposed; frozen and hashable, its fields are its configuration. No choice moves another
    row's noise. What it decides with may depend on committed tokens and on earlier draws of the block alone, never on a
    draw that it drops: then it changes no distribution, whatever it is.

    One that has ``rungs``, ascending numbers of proposals, is compiled for blocks of these lengths alone: a block costs
    what the lowest of them costs that holds its longest row, and 0 what plain decoding does. Without, it is as long as
    the drafter's longest. One that has ``bind(depth)`` is asked for the controller of a drafter of that depth. The
    ``stop`` of one that has ``asks_the_drafter = True`` is given what the drafter says too, see `Context.stop`.
    """

    @property
    def kind(self) -> str:
        """Name in the registry, in configs and in results."""
        ...

    def init(self, batch: int) -> Any:
        """The state before the first block. Axis 0 of every leaf is the row."""
        ...

    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        """The deepest proposal of each row's next block; None: as deep as the drafter goes."""
        ...

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """The rows that propose no more, see `Context.stop`."""
        ...

    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The state after a block. One without proposals in any row has an `Outcome.draft` of no tokens."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """A rule for which part of a drafted block is kept. Chains have N = K. One that takes trees has ``proposals =
    ("chain", "tree")`` and gives a `Verdict.path`; without it, it takes chains."""

    @property
    def kind(self) -> str:
        """Name in the registry, in configs and in results."""
        ...

    lossless: ClassVar[bool]
    """Whether the output has the target's distribution, whatever the draft."""
    noise: ClassVar[Literal["fresh", "coupled", "none"]]
    """The noise that the engine makes for it; 'none' decodes at temperature 0 only."""
    reference: ClassVar[str]
    """An arXiv id."""

    def __call__(self, draft: Draft, p_logits: Float[Array, "B N1 V"], noise: Any) -> Verdict:
        """The decision on a block. ``p_logits[b, i]`` is the target's distribution after node i (0 is the root), after
        the sampling transform."""
        ...

    def distribution(
        self, draft: Draft, p: Float[Array, "B N1 V"], q: Float[Array, "B N V"] | None
    ) -> VerdictDistribution:
        """The exact distribution of what ``__call__`` decides for given drafts and probabilities: ``p`` the target's,
        ``q`` the draft's (None: deterministic)."""
        ...


@flax.struct.dataclass
class FullLogits:
    """Teacher logits over the whole vocabulary."""

    logits: Float[Array, "B T V"]


@flax.struct.dataclass
class TopKLogits:
    """The k largest of the teacher's logits, and the logsumexp of all, so that the mass of the tail is known."""

    values: Float[Array, "B T k"]
    ids: Int[Array, "B T k"]
    logsumexp: Float[Array, "B T"]
    tail_values: Float[Array, "B T n"] | None = None
    """Logits of n tokens drawn from the teacher's distribution over the tail (one may come twice). None: nothing but
    its mass is known."""
    tail_ids: Int[Array, "B T n"] | None = None


@flax.struct.dataclass
class Batch:
    """Rows of text to train on: ``labels[b, t]`` comes after ``tokens[b, t]``."""

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    weight: Float[Array, "B T"]
    """How much the prediction of ``labels`` counts; 0: not at all (padding, a prompt)."""
    positions: Int[Array, "B T"] | None = None
    """Positions inside the token's own document; None: 0 .. T-1."""
    segments: Int[Array, "B T"] | None = None
    """Document of the row that a token belongs to; attention stays inside it. None: a row is one document."""
    teacher: TopKLogits | None = None
    """The target's logits, cached; None: the target is asked."""
    number: Int[Array, " B"] | None = None
    """Of the step that the row is drawn for, of a drafter that ``draws`` in training; where it is not trained on, of
    the part of its predictions that is meant (None: all of them)."""
    streams: tuple[Float[Array, "B T D"], ...] | None = None
    """The streams that the draft's `Reads` name, cached, and behind them `Output.final`; None: the target is asked."""

    @property
    def token_positions(self) -> Int[Array, "B T"]:
        """Position of each token inside its own document."""
        if self.positions is not None:
            return jnp.asarray(self.positions)
        return jnp.broadcast_to(jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None], self.tokens.shape)

    @property
    def documents(self) -> Documents | None:
        """Which tokens each one sees. None: all before it, and itself."""
        return None if self.segments is None else Documents(jnp.asarray(self.segments))

    def mask_for(self, model: Any) -> Documents | Bool[Array, "B T T"] | None:
        """The same for a model's ``mask``: an entry a pair, unless it says ``takes_documents``."""
        documents = self.documents
        return documents if documents is None or getattr(model, "takes_documents", False) else documents.mask


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
    kept: Bool[Array, " V"] | None = None
    """Ids that the drafter can propose: a loss compares with the target's distribution over these. None: all."""
    taught: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]] | None = None
    """Logits that a loss compares, of a drafter that draws from fewer; None: those of ``head``."""
    confidence: Callable[[Float[Array, "B C D"]], Float[Array, "B C"]] | None = None
    """The logit of what the drafter says is the chance that its token is kept; None: it says nothing. It is taught
    what its distribution shares with the target's."""
    confidence_share: float = 1.0
    """How much the cross-entropy of that counts, in nats, beside the loss."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Logits of all positions at once."""
        return self.head(self.hidden)

    @property
    def target_rows(self) -> Int[Array, "B T"]:
        """`rows`, also where they are left out."""
        if self.rows is not None:
            return self.rows
        return jnp.broadcast_to(jnp.arange(self.hidden.shape[1], dtype=jnp.int32)[None], self.hidden.shape[:2])


@dataclasses.dataclass(frozen=True)
class TrainingForm:
    """How a forward pass runs in training: the same numbers for other costs. ``remat``: activations are computed again
    in the backward pass. ``scan_layers``: equal layers are one compiled loop. ``sharding``: of ``[B, T, D]`` between
    layers, over a mesh; None: on one device. ``dtype``: that it computes in; None: its own."""

    remat: bool = False
    scan_layers: bool = False
    sharding: NamedSharding | None = None
    dtype: str | None = None


PLAIN = TrainingForm()


@runtime_checkable
class Trainable(Protocol):
    """A drafter that can be distilled: static and hashable; it owns the alignment of positions. One that reads the
    target's forward pass has ``reads``; its predictions then need the target, and cannot be made from cached logits.
    One that chooses at random what it trains on has ``draws = True``: it then finds `Batch.number`, and what it draws
    is a function of that and of the row.
    `specjax.drafters.base.TrainedDrafter` adds what a training job asks for beside this."""

    def init_params(self, key: Key[Array, ""], target: Any) -> Params:
        """Parameters to begin training with."""
        ...

    def predictions(self, params: Params, batch: Batch, target_out: Output | None) -> Iterator[Prediction]:
        """The drafter's predictions one after the other, by depth: the j-th one is what it proposes at place j of a
        block."""
        ...


@flax.struct.dataclass
class LossContext:
    """The inputs of a loss beside the prediction."""

    alpha: Float[Array, ""]
    """Running mean of the batches' alpha (`TrainState.alpha`), from before this step: the same in all its parts."""
    weight: Float[Array, "B T"]
    """How much each prediction counts; 0: not at all."""
    references: Mapping[str, Float[Array, "B T V"]] = dataclasses.field(default_factory=dict)
    """Logits of the frozen drafts that the loss compares with, by its names for them."""
    chosen: Any = None
    """What the loss chose among the positions of whole rows, see `Loss`; None: it takes these for whole rows."""
    proposable: Bool[Array, "B T"] | None = None
    """Whether the draft can propose the text's next token, of a draft of fewer ids; None: it always can."""


@runtime_checkable
class Sharing(Protocol):
    """A `Trainable` of which some weights are the target's, frozen; it computes with ``complete(own, target's)``."""

    def complete(self, params: Params, target_params: Params) -> Params:
        """All parameters that the drafter computes with: its own, and those of the target."""
        ...


@runtime_checkable
class Loss(Protocol):
    """The cost of a prediction: one value a predicted token, in float32, without a mean: the trainer adds up ``weight *
    value`` and ``weight`` over microbatches and devices and divides once. Frozen and hashable: equal ones share their
    compiled step. ``tokens`` are the next tokens, for losses that need labels. It is asked about some positions of the
    rows at a time. A loss that compares with frozen reference drafts has a ``bind(target)`` that gives them by name,
    each as (`Trainable`, its parameters).

    One that weighs the positions of a row against each other has ``scores``, called as the loss is, which gives arrays
    ``[B, T]``, and ``choose(scores, weight)``, which is given those of whole rows; what it returns, arrays ``[B, T]``
    as well, comes back in `LossContext.chosen`. No gradient goes through either.
    """

    @property
    def kind(self) -> str:
        """Name in the registry, in configs and in results."""
        ...

    @property
    def needs_target(self) -> bool:
        """Whether it compares with the target's distribution."""
        ...

    @property
    def needs_whole_distribution(self) -> bool:
        """Whether it refuses `TopKLogits`."""
        ...

    @property
    def needs_labels(self) -> bool:
        """Whether it takes the text's next tokens for right: no matter for a prompt, which nobody is to write."""
        ...

    def __call__(
        self,
        draft_logits: Float[Array, "B T V"],
        teacher: FullLogits | TopKLogits | None,
        tokens: Int[Array, "B T"],
        context: LossContext | None = None,
    ) -> Float[Array, "B T"]:
        """The cost of each predicted token, in nats unless the loss says otherwise. Raises `ValueError` if ``teacher``
        or ``context`` lacks what it needs."""
        ...
