"""Every metric once, under the one name it has everywhere: code, JSON, reports. docs/metrics.md compares them with the
counts of other projects.

A block is one draft-and-verify step of one row. N = blocks, n = proposed tokens accepted in a block, k_r = tokens that
were proposed validly in it (padding is not proposed).

    drafted            sum of k_r over blocks
    accepted           sum of n over blocks, as verified (before a cut at end-of-sequence or budget)
    emitted            tokens committed to the row, after such cuts
    target_calls       N, forward passes of the target over a block; prefill is not a block
    block_efficiency   emitted / N, with the target's own token of each block (tau = 1 + sum_j s_j when nothing is cut)
    block_efficiency_interval    confidence interval of it, over prompts drawn again
    accepted_length    accepted / N, without the target's own token
    acceptance_rate    accepted / drafted; depends on k, is not alpha
    acceptance_at[j]             s_j = #(n >= j) / #(k_r >= j), unconditional, j = 1..k
    conditional_acceptance_at[j] a_j = #(n >= j) / #(n >= j - 1 and k_r >= j)
    k_used[k]          #(k_r = k), blocks that proposed k tokens, k = 0..K; for a tree, k levels
    blocks_without_draft         k_used[0]
    probes             blocks that draft again after a pause, to see whether drafting pays
    invalid_drafts     blocks whose proposal was cut because the drafter's distribution was not finite
    alpha              E sum_v min(p(v), q(v)) under teacher forcing on given text: 1 - total variation, per position
    agreement          share of positions of given text where draft and target find the same token most likely: alpha at
                       temperature 0
    nll                cross-entropy of the draft under teacher forcing on given text, nats a token, as in training
    simulated          block_efficiency on given texts, computed by the training forward: evaluation/simulated.py
    alpha_mle          the alpha that explains the counts best if every proposed token has the same chance

Predicted from alpha or tau and from costs (`expected_emitted` and what follows it), and measured:

    expected_emitted   tau of a block of k proposed tokens
    expected_blocks    N for a given number of tokens, from acceptance_at
    walltime_speedup   tau tokens for k draft passes and one target pass
    mbsu               walltime_speedup if a pass costs nothing but the reading of its weights
    operations_factor  operations a token, over those of plain decoding
    best_k             the k of the largest walltime_speedup
    ttft, tpot, itl    latencies of a request, see `Latencies`
    tokens             tokens that a request got: emitted, without those decoded behind a stop string
    seconds            time from handing a request in to its last token; of several, that all of them took together
    tokens_per_s       tokens / seconds, of several requests all tokens over the seconds of all together
    cost               money, at a price per hour of the machine; a batch's is shared by the blocks of its rows
    cost_per_1k_tokens 1000 cost / tokens
    interpolated       tokens whose commit was between two host syncs, with a time interpolated from theirs
    speedup            wall time of the autoregressive loop / of speculation, equal emitted tokens: evaluation/bench.py
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def alpha_per_position(p_logits: Float[Array, "*B V"], q_logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Overlap sum_v min(p, q) of two distributions given by logits, computed in float32: the acceptance probability of
    2211.17192."""
    p = jax.nn.softmax(p_logits.astype(jnp.float32), axis=-1)
    q = jax.nn.softmax(q_logits.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def agreement_per_position(p_logits: Float[Array, "*B V"], q_logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """1 where both distributions have the same most likely token (of equal ones the first), else 0."""
    return (jnp.argmax(p_logits, axis=-1) == jnp.argmax(q_logits, axis=-1)).astype(jnp.float32)


def negative_log_likelihood(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log softmax(logits)[token] in nats, computed in float32."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


@dataclasses.dataclass(frozen=True)
class DecodeStats:
    """Counts of one row's decoding, or of several rows added up; every ratio is derived from them. N is the number of
    blocks, n the proposed tokens accepted in a block, k_r those validly proposed in it."""

    blocks: int
    """N: draft-and-verify steps of a row, each one forward pass of the target."""
    emitted: int
    """Number of committed tokens, after cuts at end-of-sequence or budget."""
    drafted_at: tuple[int, ...]
    """#(k_r >= j) for j = 1 .. k: blocks with a valid proposed token at depth j."""
    reached_at: tuple[int, ...]
    """#(n >= j - 1 and k_r >= j): blocks whose verification got to a proposed token at depth j."""
    accepted_at: tuple[int, ...]
    """#(n >= j): blocks that accepted at least j proposed tokens."""
    invalid_drafts: int = 0
    """Number of blocks whose proposal was cut because the drafter's distribution was not finite (NaN or infinite
    logits)."""
    probes: int = 0
    """Number of blocks that drafted again after a pause, to see whether drafting pays."""

    @classmethod
    def of(cls, counts: Mapping[str, Any]) -> DecodeStats:
        """Stats from counts by name, with lists in place of tuples as in JSON and arrays; other names are left out."""
        found: dict[str, Any] = {
            name: tuple(count) if isinstance(count := counts[name], list) else count
            for name in (field.name for field in dataclasses.fields(cls))
            if name in counts
        }
        return cls(**found)

    def __add__(self, other: DecodeStats) -> DecodeStats:
        if len(self.drafted_at) != len(other.drafted_at):
            raise ValueError(f"stats at k={len(self.drafted_at)} and k={len(other.drafted_at)} do not add")

        def total(name: str) -> Any:
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, int):
                return mine + others
            return tuple(a + b for a, b in zip(mine, others, strict=True))

        return DecodeStats.of({field.name: total(field.name) for field in dataclasses.fields(self)})

    @property
    def drafted(self) -> int:
        """Number of tokens that were validly proposed."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Number of proposed tokens that were accepted, before cuts at end-of-sequence or budget."""
        return sum(self.accepted_at)

    @property
    def target_calls(self) -> int:
        """Number of forward passes of the target over a block."""
        return self.blocks

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens a block, the target's own among them."""
        return self.emitted / max(self.blocks, 1)

    @property
    def accepted_length(self) -> float:
        """Accepted tokens a block, the target's own not among them."""
        return self.accepted / max(self.blocks, 1)

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed tokens that are accepted; it depends on k, and is not alpha."""
        return self.accepted / max(self.drafted, 1)

    @property
    def alpha_mle(self) -> float:
        """Maximum-likelihood alpha for n geometric, cut off at k_r: accepted / (accepted + blocks that rejected a
        token). It is not accepted_length / k. It is for token verification; a rule that looks at the whole block has no
        such rejections."""
        return self.accepted / max(sum(self.reached_at), 1)

    @property
    def k_used(self) -> tuple[int, ...]:
        """#(k_r = k), the blocks that proposed k tokens (of a tree: k levels), for k = 0 .. K."""
        at_least = (self.blocks, *self.drafted_at, 0)
        return tuple(more - deeper for more, deeper in itertools.pairwise(at_least))

    @property
    def blocks_without_draft(self) -> int:
        """Number of blocks without a valid proposal, each a step of plain decoding."""
        return self.k_used[0]

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """s_j, the share of blocks proposing j tokens that accept j, for j = 1 .. k."""
        return tuple(a / max(d, 1) for a, d in zip(self.accepted_at, self.drafted_at, strict=True))

    @property
    def conditional_acceptance_at(self) -> tuple[float, ...]:
        """a_j, the share of blocks reaching a proposed token at depth j that accept it, for j = 1 .. k."""
        return tuple(a / max(r, 1) for a, r in zip(self.accepted_at, self.reached_at, strict=True))

    def to_json(self) -> dict:
        """Counts and ratios by their names."""
        names = (
            "drafted",
            "accepted",
            "emitted",
            "target_calls",
            "block_efficiency",
            "accepted_length",
            "acceptance_rate",
            "alpha_mle",
            "acceptance_at",
            "conditional_acceptance_at",
            "k_used",
            "blocks_without_draft",
            "probes",
        )
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Interval:
    """A confidence interval, in the unit of its metric."""

    low: float
    high: float


def block_efficiency_interval(
    by_prompt: Sequence[DecodeStats], level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Confidence interval of the block efficiency of all prompts together, by percentile bootstrap (Efron 1979): each
    resample draws as many prompts with replacement, and takes the ratio of their sums. It draws prompts, because the
    blocks of one prompt are not independent."""
    emitted, blocks = (np.asarray([getattr(stats, name) for stats in by_prompt]) for name in ("emitted", "blocks"))
    drawn = np.random.default_rng(seed).integers(0, len(by_prompt), (resamples, len(by_prompt)))
    values = emitted[drawn].sum(axis=1) / np.maximum(blocks[drawn].sum(axis=1), 1)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def expected_emitted(alpha: float, k: int) -> float:
    """Expected tokens of a block, tau = 1 + alpha + ... + alpha^k, if each of k proposed tokens is accepted with chance
    alpha (2211.17192, section 3.1)."""
    return float(sum(alpha**j for j in range(k + 1)))


def walltime_speedup(tau: float, k: int, c: float) -> float:
    """Speedup over plain decoding, if a pass of the target costs the same for 1 token as for k + 1 (2211.17192, section
    3.3). ``c``: seconds of a draft pass over seconds of a target pass."""
    return tau / (k * c + 1)


def mbsu(tau: float, k: int, draft_bytes: int, target_bytes: int) -> float:
    """Memory-bound speedup (2403.00858): `walltime_speedup` at the ratio of the bytes that a pass reads."""
    return walltime_speedup(tau, k, draft_bytes / target_bytes)


def operations_factor(tau: float, k: int, c: float) -> float:
    """Arithmetic operations a token over those of plain decoding, above 1 as a rule (2211.17192, section 3.4). ``c``:
    operations of a draft pass over those of a target pass over one token."""
    return (k * c + k + 1) / tau


def best_k(alpha: float, c: float, most: int = 64) -> int:
    """The k, at most ``most``, of the largest `walltime_speedup`; the smallest of several. 0 means not to speculate."""
    return max(range(most + 1), key=lambda k: walltime_speedup(expected_emitted(alpha, k), k, c))


def expected_blocks(acceptance_at: Sequence[float], tokens: int) -> float:
    """Expected number of blocks that emit ``tokens`` tokens, if each block accepts depth by depth as measured, whatever
    came before. It is more than ``tokens / tau``, because the budget cuts the last block: E[N_m] = 1 + sum_j Pr(j
    emitted) E[N_(m-j)]."""
    reached = np.array([1.0, *acceptance_at, 0.0])
    emitted = reached[:-1] - reached[1:]
    expected = np.zeros(tokens + 1)
    for m in range(1, tokens + 1):
        before = expected[max(m - len(emitted), 0) : m][::-1]
        expected[m] = 1.0 + emitted[: len(before)] @ before
    return float(expected[tokens])


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Latencies of several requests, in seconds. Raises `ValueError` for a request without commit times, or with times
    out of order."""

    commit_times: Sequence[Sequence[float]]
    """Seconds from handing each request in to the commit of each of its tokens; the tokens of one block share theirs.
    Compile before, since they include the wait for compilation."""

    def __post_init__(self):
        for i, times in enumerate(self.commit_times):
            if len(times) == 0 or any(b < a for a, b in itertools.pairwise(times)):
                raise ValueError(f"request {i}: its commit times are {list(times)}; give one a token, in order")

    @property
    def ttft(self) -> list[float]:
        """Seconds to the first token, one a request; the whole first block comes with it."""
        return [times[0] for times in self.commit_times]

    @property
    def tpot(self) -> list[float]:
        """Seconds per output token after the first, (last - first) / (tokens - 1); one a request with two tokens."""
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.commit_times if len(times) > 1]

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies in seconds: the time between one commit and the next, of all requests together. Tokens
        inside a block add no zeros, so the mean is above that of tpot whenever blocks emit more than a token."""
        return [b - a for times in self.commit_times for a, b in itertools.pairwise(times) if b > a]

    def to_json(self) -> dict[str, float | None]:
        """P50, P90 and P99 over all requests pooled, in seconds; None without a value. Percentiles of several runs must
        not be averaged."""
        return {
            f"{name}_p{percent}": float(np.percentile(values, percent)) if values else None
            for name in ("ttft", "tpot", "itl")
            for percent in (50, 90, 99)
            for values in [getattr(self, name)]
        }


def tokens_per_s(emitted: int, seconds: float) -> float:
    """Throughput: tokens of all rows over the wall seconds that all of them took together."""
    return emitted / seconds


def cost(price_per_hour: float, seconds: float) -> float:
    """Price, in the currency of ``price_per_hour``, of the machine for so many seconds."""
    return price_per_hour / 3600 * seconds


def cost_per_1k_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Price, in the currency of ``price_per_hour``, of the machine while it emits a thousand tokens at that rate."""
    return cost(price_per_hour, 1000 / tokens_per_s)


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """All metrics of a request, or of several pooled."""

    stats: DecodeStats
    """Counts of the request's blocks, added up over several requests."""
    commit_times: Sequence[Sequence[float]]
    """Commit times as in `Latencies`, one entry a request; empty for a request that ended before its first token."""
    seconds: float
    """Wall seconds from handing the request in to its last token; of several, those that all took together."""
    interpolated: int = 0
    """Number of tokens whose commit time is not measured: their block ended between two host syncs, and the blocks
    between two syncs are assumed to take equally long."""
    cost: float | None = None
    """Share of the machine's price for the time that the batch took; None without a price."""

    @classmethod
    def pooled(cls, several: Sequence[RequestMetrics], seconds: float) -> RequestMetrics:
        """Metrics of requests that took ``seconds`` together: counts and costs are added, ratios and percentiles cover
        all. Raises `ValueError` for no requests, and for requests at different k."""
        if not several:
            raise ValueError("no requests, of which there are no metrics")
        costs = [one.cost for one in several if one.cost is not None]
        return cls(
            stats=functools.reduce(operator.add, (one.stats for one in several)),
            commit_times=[times for one in several for times in one.commit_times],
            seconds=seconds,
            interpolated=sum(one.interpolated for one in several),
            cost=sum(costs) if len(costs) == len(several) else None,
        )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.commit_times)

    @property
    def tokens(self) -> int:
        """Number of tokens that the requests got."""
        return sum(len(times) for times in self.commit_times)

    @property
    def latencies(self) -> Latencies:
        """Latencies of the requests that got a token."""
        return Latencies([times for times in self.commit_times if times])

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests over the wall seconds that all took together."""
        return tokens_per_s(self.tokens, self.seconds)

    @property
    def cost_per_1k_tokens(self) -> float | None:
        """Cost of a thousand tokens at the cost a token of these; None without a price or a token."""
        return None if self.cost is None or not self.tokens else 1000 * self.cost / self.tokens

    def to_json(self) -> dict[str, Any]:
        """All metrics by name: counts and ratios, seconds, and money if there is a price. Latencies are percentiles
        over the requests; a single request also has ``ttft`` and ``tpot`` (None with one token)."""
        latencies = self.latencies
        found: dict[str, Any] = {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}
        found["tokens_per_s"] = self.tokens_per_s
        if self.requests == 1:
            found |= {name: next(iter(getattr(latencies, name)), None) for name in ("ttft", "tpot")}
        found |= latencies.to_json() | {"interpolated": self.interpolated} | self.stats.to_json()
        if self.cost is not None:
            found |= {"cost": self.cost, "cost_per_1k_tokens": self.cost_per_1k_tokens}
        return found
