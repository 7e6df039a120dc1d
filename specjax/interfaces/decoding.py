"""Decoding as everything else sees it: noise, proposals, verdicts, the state of a generation, and the abstract drafter,
controller and verifier.

Dims: B rows, K draft length, N block nodes (root excluded; N = K for a chain), T tokens fed, L token buffer,
V vocabulary, E stop ids, D accepted path. Axis 0 of every leaf is the row, so that rows can become a server's batch
slots later.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from specjax.interfaces.model import NOTHING, Output, Params, Reads, Target


@flax.struct.dataclass
class SamplingParams:
    """Sampling parameters of a batch, one value a row. Each parameter has a value that changes nothing;
    `specjax.sampling` applies them."""

    temperature: Float[Array, " B"]
    """Divisor of the logits; 0 is greedy."""
    top_k: Int[Array, " B"]
    """Number of most likely tokens to draw from; 0: off."""
    top_p: Float[Array, " B"]
    """Probability of the most likely tokens to draw from, together; 1: off."""
    min_p: Float[Array, " B"]
    """Least probability of a token to draw, as a share of the largest; 0: off."""
    repetition_penalty: Float[Array, " B"]
    """Divides positive logits of tokens seen in prompt or output, multiplies negative ones; 1: off."""
    presence_penalty: Float[Array, " B"]
    """Subtracted from the logit of every generated token; 0: off."""
    frequency_penalty: Float[Array, " B"]
    """Subtracted from a token's logit once for each time it was generated; 0: off."""
    min_new_tokens: Int[Array, " B"]
    bias: Float[Array, "B V"]
    """Added to the logits; -inf forbids a token."""


@flax.struct.dataclass
class TokenCounts:
    """Number of times that each token occurs in a row, for the penalties."""

    prompt: Int[Array, "B V"]
    generated: Int[Array, "B V"]


@flax.struct.dataclass
class LogitsContext:
    """The tokens before the one to choose, as a user's logits processor sees them: ``tokens[b, :lengths[b]]`` (prompt,
    generated tokens, and the proposed tokens before this one); later entries are stale."""

    tokens: Int[Array, "B L"]
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]


LogitsProcessor = Callable[[Float[Array, "B V"], LogitsContext], Float[Array, "B V"]]
"""A user's change of the logits, before temperature. It is traced into the step, so it must be pure; another function
makes another program."""


@flax.struct.dataclass
class Noise:
    """Fresh random numbers of one block, each used once, keyed by (row seed, row length at the start of the block,
    purpose, depth), so that none depends on K. A draw takes two words of 32 random bits (`specjax.sampling.draw`). None
    in place of a Noise means an all-greedy batch."""

    draft_words: UInt[Array, "B K 2"]
    """Words that draw the proposed tokens."""
    accept: Float[Array, "B K"]
    """Uniforms in [0, 1), one a proposed token, for the acceptance test."""
    next_words: UInt[Array, "B 2"]
    """Words that draw the target's own token."""

    def draft(self, offset: int | Int[Array, ""]) -> UInt[Array, "B 2"]:
        """The random words that draw the proposed token at depth ``offset``, 0 .. K-1."""
        return self.draft_words[:, offset]

    def first(self, k: int) -> Noise:
        """The noise of a block of ``k`` proposed tokens: the first numbers of this one, since none depends on K."""
        return Noise(self.draft_words[:, :k], self.accept[:, :k], self.next_words)


@flax.struct.dataclass
class CoupledNoise:
    """Gumbel noise of the K + 1 tokens that a block may choose, keyed by (row seed, absolute position of the token)
    alone: a position that is drawn again sees the same noise, and so does plain decoding."""

    gumbel: Float[Array, "B K1 V"]

    def draft(self, offset: int | Int[Array, ""]) -> Float[Array, "B V"]:
        """The Gumbel noise that draws the proposed token at depth ``offset``, 0 .. K-1."""
        return self.gumbel[:, offset]

    def first(self, k: int) -> CoupledNoise:
        """The noise of a block of ``k`` proposed tokens."""
        return CoupledNoise(self.gumbel[:, : k + 1])


@flax.struct.dataclass
class Calibration:
    """Block costs and acceptance of a batch, known before its first block; a controller weighs with them."""

    seconds: Float[Array, " K1"]
    """Seconds of a block of the whole batch with 0 .. K proposed tokens in every row; only their ratios matter."""
    acceptance: Float[Array, " K"]
    """Chance that the proposed token at depth 1 .. K is accepted if those before it are."""
    catch_up: Float[Array, ""] = np.float32(0)  # pyright: ignore[reportAssignmentType]
    """Seconds that a draft takes after a pause to read what it missed, for each block of the pause."""
    found: Float[Array, " K1"] | None = None
    """``seconds`` of blocks whose proposals were all found without a pass of the draft's model, infinite if they are
    never to be looked for; None: there are no such blocks, see `BoundDrafter.model_class`."""
    by_class: Float[Array, "G K"] | None = None
    """``acceptance`` of the proposals of each match class, see `Draft.match_class`; None: all classes are alike."""


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
    """Noise of the block; None: an all-greedy batch."""
    processor: LogitsProcessor | None = flax.struct.field(pytree_node=False, default=None)
    controller: Controller | None = flax.struct.field(pytree_node=False, default=None)
    controller_state: Any = None
    limit: Int[Array, " B"] | None = None
    """Most tokens that the controller lets each row propose, 0 in one that is done. None: as many as the drafter
    does."""
    calibration: Calibration | None = None
    active: Bool[Array, " B"] | None = None
    """True for rows that are not done; None: all."""
    remaining: Int[Array, " B"] | None = None
    """Number of tokens that each row may still add; None: unknown."""
    counts: TokenCounts | None = None
    """Counts of the committed tokens; None: they are counted where they are asked for."""
    extras: tuple[str, ...] | None = flax.struct.field(pytree_node=False, default=None)
    """Steps of `specjax.sampling.transform` that some row asks for: penalties (or `min_new_tokens`), top_k, top_p,
    min_p; None: the device finds out."""

    def stop(
        self, logits: Float[Array, "B V"], offset: int | Int[Array, ""], confidence: Float[Array, " B"] | None = None
    ) -> Bool[Array, " B"] | None:
        """True for rows that propose no more. A drafter asks in its loop, before it draws the token at ``offset`` from
        ``logits``. ``confidence``: its own estimate of the chance that this token is accepted if those before it are,
        made without knowing the token; None: it has none. None: no row stops. The answer depends on earlier tokens
        only, and so cannot change the distribution."""
        if self.controller is None:
            return None
        by_logits = self.controller.stop(self.controller_state, logits, offset)
        by_confidence = self.controller.stop_by_confidence(self.controller_state, confidence, offset)
        if by_logits is None or by_confidence is None:
            return by_confidence if by_logits is None else by_logits
        return by_logits | by_confidence


@flax.struct.dataclass
class TargetView:
    """A read-only view of the target for a drafter while it drafts. It is never stored in a state, and nothing of it is
    copied."""

    params: Params
    keys_values: tuple[tuple[Array, Array], ...] = ()
    """Keys and values of the layers that the drafter's `Reads` name, as the target's cache holds them
    (`specjax.models.cache`)."""
    lengths: Int[Array, " B"] | None = None
    """Number of valid slots, ``context.lengths - 1``: the newest token, the root of the block, is not among them."""


@flax.struct.dataclass
class Draft:
    """The proposed tokens of a block: a chain, or a tree of alternatives."""

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    """True if a token is proposed, which implies that all before it are. It may depend on the tokens before only, so
    that dropping a token never depends on its own draw (a deterministic proposal may be dropped freely)."""
    logits: Float[Array, "B N V"] | None = None
    """Logits after the sampling transform, exactly those that each token was drawn from; None for a deterministic
    proposal."""
    parents: Int[Array, "B N"] | None = None
    """The node that token i follows: 0 is the root, i + 1 is token i, parents come before children; None: a chain."""
    finite: Bool[Array, "B N"] | None = None
    """True if the drafter's own logits, before the sampling parameters, form a distribution; no token from the first
    without one on is accepted. None: judged by ``logits``."""
    max_depth: int | None = flax.struct.field(pytree_node=False, default=None)
    """Most tokens on one root-to-node path of a tree; None: a chain."""
    match_class: Int[Array, " B"] | None = None
    """Match class of each row's proposal, 0 .. ``BoundDrafter.match_classes`` - 1: a controller learns acceptance class
    by class. None: all proposals are of one class."""


@flax.struct.dataclass
class Verdict:
    """The verifier's decision on a block: the first tokens are accepted, and one of the target's own follows."""

    num_accepted: Int[Array, " B"]
    """Number of proposed tokens that are accepted."""
    next_token: Int[Array, " B"]
    """The target's own token after the accepted ones."""
    path: Int[Array, "B D"] | None = None
    """The accepted nodes of a tree from the root down (token i is node i + 1; entries past ``num_accepted`` mean
    nothing, but are nodes); None for a chain, whose first ``num_accepted`` tokens are accepted."""


@flax.struct.dataclass
class Outcome:
    """A block and its outcome, for `BoundDrafter.commit` and `Controller.adapt`."""

    context: Context
    draft: Draft
    target_out: Output
    verdict: Verdict
    emitted: Int[Array, " B"]
    """Number of tokens that the row grew by, 0 in a row that was done."""
    tokens: Int[Array, "B D1"]
    """The accepted tokens, then the target's own; later entries mean nothing."""
    nodes: Int[Array, "B D1"] | None = None
    """The node of the block that token j follows: ``target_out`` has row ``nodes[b, j]`` for it. None: row j."""


@flax.struct.dataclass
class VerdictDistribution:
    """The exact distribution of a verifier's decision on a given proposal."""

    num_accepted: Float[Array, "B K1"]
    """The probability that n proposed tokens are accepted."""
    next_token: Float[Array, "B K1 V"]
    """The distribution of the token that follows, given that n are accepted."""


@flax.struct.dataclass
class Counters:
    """Counts of each row, made on the device over the blocks that began while the row was not done (see
    `specjax.metrics`)."""

    blocks: Int[Array, " B"]
    """Number of draft-and-verify steps."""
    emitted: Int[Array, " B"]
    """Number of committed tokens."""
    drafted_at: Int[Array, "B K"]
    """#(k_r >= j): blocks with a valid proposed token at depth j."""
    reached_at: Int[Array, "B K"]
    """#(n >= j - 1 and k_r >= j): blocks whose verification got to a proposed token at depth j."""
    accepted_at: Int[Array, "B K"]
    """#(n >= j): blocks that accepted at least j proposed tokens."""
    invalid_drafts: Int[Array, " B"]
    """Number of blocks whose proposal was cut because the drafter's own distribution was not finite."""


@flax.struct.dataclass
class DecodeState:
    """The state of a generation, donated from chunk to chunk. Invariant: the target's cache holds ``tokens[b,
    :lengths[b] - 1]``; the newest token is the root of the next block."""

    tokens: Int[Array, "B L"]
    origin: Int[Array, "B L"]
    """Origin of each token: an index into `ORIGINS`, plus ``len(ORIGINS)`` times the number of tokens that its block
    proposed."""
    lengths: Int[Array, " B"]
    prompt_lengths: Int[Array, " B"]
    budget: Int[Array, " B"]
    """Largest total length (prompt included) that a row may reach."""
    done: Bool[Array, " B"]
    sampling: SamplingParams
    seeds: UInt[Array, "B 2"]
    stop_ids: Int[Array, "B E"]
    """Token ids that end the row, padded with -1."""
    counters: Counters
    finish: Int[Array, " B"]
    """Reason for the end of the row, an index into `FINISH_REASONS`; UNFINISHED while it goes on, and in padding
    rows."""
    logprobs: Float[Array, "B L"] | None
    """Log-probabilities of the emitted tokens, in nats, where asked for."""
    cache: Any
    drafter: Any
    controller: Any = None
    counts: TokenCounts | None = None
    """Counts of the tokens before ``lengths``."""


ORIGINS = ("prompt", "accepted", "corrected", "bonus")

PROMPT, ACCEPTED, CORRECTED, BONUS = range(4)

FINISH_REASONS = ("unfinished", "stop", "length", "invalid_logits", "stop_string")
"""Reasons for the end of a row: none yet; a stop token; the budget; the next token has no finite distribution to come
from (NaN or infinite logits, or no token left by a logits processor); a stop string, which the host finds."""

UNFINISHED, STOP, LENGTH, INVALID_LOGITS, STOP_STRING = range(5)


class Bound(NamedTuple):
    """A drafter bound to its target: a static, hashable spec, and its parameters."""

    spec: BoundDrafter
    params: Params


class Drafter(abc.ABC):
    """A drafter as a config describes it: frozen and hashable."""

    kind: str
    """Name in the registry, in configs and in results."""
    k: int
    """Largest draft length."""

    @property
    def longest(self) -> int | None:
        """Largest ``k`` that it can have; None: any."""
        return None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of a model of its own; None: it has none."""
        return None

    @property
    def replaceable(self) -> list[Any]:
        """Arrays of a model of its own that a user may replace; it is then bound again."""
        return []

    @abc.abstractmethod
    def bind(self, target: Target) -> Bound:
        """The drafter bound to this target, with everything resolved that the configuration names, such as a model's
        path. Raises `ModelError` if the two cannot be paired."""


class BoundDrafter(abc.ABC):
    """A drafter as the engine runs it; static and hashable. A block is a chain of ``k`` tokens, or a tree of
    ``num_nodes`` with at most ``max_depth`` on a root-to-node path.

    `specjax.models.cache.KVCache` leaves of the state grow with the target's.
    """

    k: int
    """Largest draft length."""
    reads: Reads = NOTHING
    """The parts of the target's forward pass that it reads."""
    reads_late: bool = False
    """True if it reads what it missed when it is asked again, so that no prompt is fed to it before it is asked."""
    previews: bool = False
    """True if `preview` tells of proposals before they are made; a controller may then look before it sets the length,
    see `Controller.review`."""
    match_classes: int = 1
    """Number of match classes, see `Draft.match_class`."""
    model_class: int | None = None
    """The match class of proposals that a model makes, if the others are found without one and cost nothing but their
    verification (`Calibration.found`); None: all cost alike."""
    max_positions: int | None = None
    """Longest row that it can draft for; None: any."""
    model_config: Any = None
    """Settings of the transformer that a pass of it runs, for predictions of its cost; None: it has none."""

    @property
    def num_nodes(self) -> int:
        """Number of proposed tokens in a block, all branches of a tree together."""
        return self.k

    @property
    def max_depth(self) -> int:
        """Most proposed tokens that a block can accept."""
        return self.k

    @abc.abstractmethod
    def init(self, batch: int, num_slots: int) -> Any:
        """The state of rows without tokens. Axis 0 of every leaf is the row."""

    @abc.abstractmethod
    def extend(
        self,
        params: Params,
        state: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        target_out: Output,
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        """The state after the next piece of the prompts, or of the tokens committed without the drafter: ``tokens[b]``
        begin at position ``start[b]`` (None: 0) of their row. The first ``lengths[b]`` of them, maybe none, are before
        the root; the rest is padding. ``target_out``: the target's forward pass over them."""

    def preview(self, context: Context) -> Draft | None:
        """The proposal as far as it is known before anything is spent on it: tokens that are drawn from no
        distribution, the depths that can have one, the match class. It may depend on committed tokens alone. None:
        nothing is known."""
        return None

    @abc.abstractmethod
    def draft(self, params: Params, target: TargetView, state: Any, context: Context) -> tuple[Draft, Any]:
        """The proposal, and the state after making it."""

    @abc.abstractmethod
    def commit(self, params: Params, state: Any, outcome: Outcome) -> Any:
        """The state after verification: it may replace guesses by what the target computed."""


class Controller(abc.ABC):
    """A rule for the draft length of each block; frozen and hashable, its fields are its configuration. No choice moves
    another row's noise. A choice may depend on committed tokens and on earlier draws of the block alone, never on a
    draw that it drops, so that no choice changes the distribution."""

    kind: str
    """Name in the registry, in configs and in results."""
    needs_costs: ClassVar[bool] = False
    """True if it chooses by the costs of blocks (`Context.calibration`)."""
    corrects_costs: bool = False
    """True if the decoder measures the costs again now and then, see `specjax.decode.known_costs.Correction`."""
    needs_confidence: bool = False
    """True if it asks the drafter for its estimate of the chance that a token is accepted, see
    `stop_by_confidence`."""

    @property
    def compiled_lengths(self) -> tuple[int, ...]:
        """Draft lengths that blocks are compiled for, ascending: a block costs as much as the smallest one that holds
        its longest row, and at length 0 as much as plain decoding. Empty: the drafter's longest alone."""
        return ()

    def bind(self, drafter: BoundDrafter) -> Controller:
        """The controller for this drafter."""
        return self

    def without_costs(self) -> Controller:
        """The controller that decodes while no costs are known."""
        return self

    def never_proposes(self, calibration: Calibration) -> bool:
        """True if at these costs no block will have a proposal, whatever comes."""
        return False

    @abc.abstractmethod
    def init(self, batch: int) -> Any:
        """The state before the first block. Axis 0 of every leaf is the row."""

    @abc.abstractmethod
    def choose(self, state: Any, context: Context) -> Int[Array, " B"] | None:
        """Draft length of each row's next block; None: as long as the drafter goes."""

    def stop(self, state: Any, logits: Float[Array, "B V"], offset: int | Int[Array, ""]) -> Bool[Array, " B"] | None:
        """True for rows that propose no more, see `Context.stop`; None: no row stops."""
        return None

    def stop_by_confidence(
        self, state: Any, confidence: Float[Array, " B"] | None, offset: int | Int[Array, ""]
    ) -> Bool[Array, " B"] | None:
        """True for rows that propose no more, by the drafter's own estimate of the chance that the token at ``offset``
        is accepted (None: the drafter has none); None: no row stops."""
        return None

    def review(self, state: Any, context: Context, draft: Draft) -> Int[Array, " B"] | None:
        """Draft length of each row, with the `BoundDrafter.preview` of its proposal in view; None: all of it."""
        return None

    @abc.abstractmethod
    def adapt(self, state: Any, outcome: Outcome) -> Any:
        """The state after a block. If no row proposed a token, `Outcome.draft` has none."""

    def counted(self, state: Any) -> tuple[Float[Array, "B G K"], Float[Array, "B G K"]] | None:
        """Number of blocks of each match class whose verification reached depth j, and of those that accepted it, as
        far back as the controller remembers; None: it does not count them."""
        return None

    def probes(self, state: Any) -> Int[Array, " B"] | None:
        """Number of blocks of each row that probed whether drafting pays; None: it never probes."""
        return None


class Verifier(abc.ABC):
    """A rule for which proposed tokens of a block are accepted. Chains have N = K."""

    kind: str
    """Name in the registry, in configs and in results."""
    lossless: ClassVar[bool]
    """True if the output has the target's distribution, whatever the draft."""
    noise: ClassVar[Literal["fresh", "coupled", "none"]]
    """Noise that the engine makes for it; 'none' decodes at temperature 0 only."""
    reference: ClassVar[str]
    """The arXiv id of its paper."""
    proposals: ClassVar[tuple[str, ...]] = ("chain",)
    """Kinds of proposals that it takes: chain, tree. For a tree it gives a `Verdict.path`."""

    @abc.abstractmethod
    def __call__(self, draft: Draft, p_logits: Float[Array, "B N1 V"], noise: Any) -> Verdict:
        """The decision on a block. ``p_logits[b, i]`` is the target's distribution after node i (0 is the root), after
        the sampling transform."""

    @abc.abstractmethod
    def distribution(
        self, draft: Draft, p: Float[Array, "B N1 V"], q: Float[Array, "B N V"] | None
    ) -> VerdictDistribution:
        """The exact distribution of the decision of ``__call__`` for a given proposal and probabilities: ``p`` the
        target's, ``q`` the draft's (None: deterministic)."""
