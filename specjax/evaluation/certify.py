"""Certificate for one target, drafter, verifier and set of sampling parameters: decoding with them gives the output of
the target alone. It runs three checks of the real decoder, none of which trusts the code that it checks:

- greedy output, token for token, against the autoregressive loop, with the target's top-2 margin where they differ;
- sampled tokens against the exact distribution of each after the tokens before it, by a chi-square test sized
  beforehand; the distribution comes from one teacher-forced forward and `specjax.evaluation.references`;
- the target as its own draft: every token must be accepted (which alone finds a drafter that feeds its cache wrongly).

The coupled rule is also checked for its promise: the output of plain sampling, token for token. For a lossy rule the
distance from the target's distribution is measured and not tested.

In a precision below float32 a logit depends on the shape of the pass that computes it. There the exact distribution
comes from passes of the decoder's own shape (`specjax.evaluation.forced`). The drift between shapes is measured first
and judged by a check of its own, and two choices differ only if their margin exceeds what this drift explains.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from specjax import registry
from specjax import sampling as sampling_lib
from specjax.config import Certify
from specjax.decode.decoder import Decoder
from specjax.decode.options import NUMBERS
from specjax.decode.request import prepare
from specjax.decode.result import check_finite
from specjax.drafters.draft_model import DraftModel
from specjax.evaluation import forced
from specjax.evaluation.references import softmax
from specjax.evaluation.target_distribution import TargetDistribution, margin
from specjax.interfaces import Drafter, Target, Verifier
from specjax.models.vocabulary import unused_ids

CELLS = 16
_RANKS = np.array([1, 2, 4, 8, 16, 64, 256])
"""First rank past each of the first seven groups of likely tokens; the eighth holds the rest."""
_EDGE = 1e-3
"""Gap in logits below the cut of top-k, top-p or min-p at which rounding may let a token in."""
Tick = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one check; ``passed`` None: measured, not judged."""

    name: str
    passed: bool | None
    summary: str
    details: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Results of all checks. ``subject``: names and settings of what was certified."""

    subject: dict[str, Any]
    checks: list[Check]

    @property
    def verdict(self) -> str:
        if any(check.passed is False for check in self.checks):
            return "FAIL"
        return "PASS" if self.subject["lossless"] else "LOSSY"

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **dataclasses.asdict(self)}

    def to_markdown(self) -> str:
        about = "\n".join(f"| {name} | {value} |" for name, value in self.subject.items())
        marks = {True: "pass", False: "**FAIL**", None: "measured"}
        checks = "\n".join(f"| {c.name} | {marks[c.passed]} | {c.summary} |" for c in self.checks)
        return (
            f"# Certificate: {self.verdict}\n\n| | |\n|---|---|\n{about}\n\n"
            f"| check | result | measured |\n|---|---|---|\n{checks}\n"
        )


def certify(context: Subject) -> Certificate:
    """Run all checks."""
    target, drafter, verifier, settings = context.target, context.drafter, context.verifier, context.settings
    # Refuse what cannot be decoded before decoding anything.
    options = {**context.sampling, "temperature": settings.temperature}
    prepare(target, drafter.k, context.prompts, settings.new_tokens, 0, True, options)
    checks = [greedy_identity(context)]
    if context.drift is not None:
        checks.insert(0, logit_drift(context.drift, settings))
    if verifier.noise != "none":
        checks += [sampled_distribution(context), self_acceptance(context)]
    if verifier.noise == "coupled":
        checks.append(coupled_identity(context))
    subject = {
        "target": target.name,
        "dtype": context.low or "float32",
        "drafter": drafter.kind,
        "k": drafter.k,
        "controller": registry.build(registry.CONTROLLERS, settings.controller, "certify.controller").kind,
        "verifier": verifier.kind,
        "lossless": verifier.lossless,
        "reference": f"arXiv {verifier.reference}",
        "temperature": settings.temperature,
        "sampling": {
            name: x for name, x in context.sampling.items() if (x != NUMBERS[name].neutral if name in NUMBERS else x)
        }
        or "none",
        "prompts": len(context.prompts),
        "seed": context.seed,
    }
    return Certificate(subject, checks)


def num_ticks(settings: Certify, verifier: Verifier) -> int:
    """Number of times that `certify` reports progress."""
    return 2 + (0 if verifier.noise == "none" else _calls(settings) + 1 + (verifier.noise == "coupled"))


@dataclasses.dataclass(eq=False)
class Subject:
    """Subject of a certificate: target, drafter, verifier, prompts, settings and decoders that the checks read."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    prompts: list[list[int]]
    """At least four."""
    sampling: Mapping[str, Any]
    """Arguments of `Decoder.generate` but the temperature."""
    settings: Certify
    seed: int = 0
    tick: Tick = lambda: None

    def __post_init__(self) -> None:
        self.plain = Decoder(self.target, None, self.verifier)
        self.fast = Decoder(self.target, self.drafter, self.verifier, self.settings.controller)
        self.distribution = TargetDistribution(self.target, self.sampling, self.settings.new_tokens)
        self.low = next((str(x.dtype) for x in jax.tree.leaves(self.target.params) if x.dtype.itemsize < 4), None)
        """Precision of the target if it is below float32; else None."""

    @functools.cached_property
    def greedy_output(self) -> list[list[int]]:
        """Greedy tokens of the autoregressive loop, all prompts at once."""
        return self.generate(self.plain, self.prompts).tokens

    @functools.cached_property
    def drift(self) -> Drift | None:
        """Drift between shapes of a pass; None in float32, where limits are absolute."""
        return None if self.low is None else _measure_drift(self)

    def allowed(self, temperature: float = 1.0) -> float:
        """Largest gap of two logits, at ``temperature``, that rounding may close."""
        moved = 0.0 if self.drift is None else 2 * self.drift.blocks / temperature
        return max(self.settings.margin, moved)

    def passes(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]], fed: int) -> list[np.ndarray]:
        """Logits that choose ``outputs``, by the passes of decoding over blocks of ``fed`` tokens, all rows at once."""
        engine, params = self.plain.engine(True)
        return forced.output_logits(engine.target, params.target, prompts, outputs, fed)

    def logits(self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Iterable[np.ndarray]:
        """Logits of the target before each token of ``outputs``, ``[N, V]`` for each row."""
        if self.low is not None:
            return self.passes(prompts, outputs, self.drafter.k + 1)
        return map(self.distribution.logits, prompts, outputs)

    def generate(self, decoder: Decoder, prompts: Sequence[list[int]], **options: Any) -> Any:
        if decoder.weighs:  # without block costs it may decode without its controller
            asked = {**self.sampling, **{name: options[name] for name in ("temperature",) if name in options}}
            if decoder.program_of(prompts, **asked) not in decoder.calibrations:
                decoder.calibrate(prompts, blocks=8, seconds=0, **asked)
        options = {"max_new_tokens": self.settings.new_tokens, "ignore_eos": True, **self.sampling, **options}
        result = decoder.generate(prompts, **options)
        check_finite(result, f"drafter {self.drafter.kind!r}", f"target {self.target.name!r}")
        return result


def greedy_identity(context: Subject) -> Check:
    """Check of greedy output, at batch 1 and with all prompts at once, against the autoregressive loop."""
    prompts, want = context.prompts, context.greedy_output
    context.tick()
    together = context.generate(context.fast, prompts).tokens
    alone = [context.generate(context.fast, [prompt]).tokens[0] for prompt in prompts]

    def gap(row: int, at: int) -> float:
        return margin(_transformed(context, prompts[row], want[row], at, 1.0, cuts=False))

    batches = ((len(prompts), together), (1, alone))
    differences = [d for size, found in batches for d in _differences(found, want, gap, batch_size=size)]
    context.tick()
    count = sum(map(len, want))
    return _identity("greedy identity", differences, 2 * count, context.allowed())


def _transformed(
    context: Subject, prompt: list[int], output: list[int], at: int, temperature: float, cuts: bool = True
) -> np.ndarray:
    """Logits ``[V]`` after the sampling parameters that choose token ``at`` of an output."""
    [logits] = context.logits([prompt], [output])
    return context.distribution.transformed(logits[at], prompt, output[:at], temperature, cuts)


@dataclasses.dataclass(frozen=True)
class Drift:
    """Drift of logits between shapes of a pass, along the greedy output of the autoregressive loop. ``blocks``: largest
    difference between single tokens and blocks; ``whole``: largest difference between single tokens and whole sequences
    without a cache; ``total_variation``: mean total variation from single tokens, largest of all shapes; ``choices``:
    share of positions with another choice than by single tokens, largest of all shapes."""

    dtype: str
    blocks: float
    whole: float
    total_variation: float
    choices: float


def _measure_drift(context: Subject) -> Drift:
    prompts, outputs, fed = context.prompts, context.greedy_output, context.drafter.k + 1
    single, t = context.passes(prompts, outputs, 1), context.settings.temperature

    def distribution(logits: np.ndarray, row: int, j: int) -> np.ndarray:
        return context.distribution.transformed(logits[j], prompts[row], outputs[row][:j], t, cuts=False)

    def apart(found: Iterable[np.ndarray]) -> tuple[float, float, float]:
        moved, distances, others = [], [], []
        for row, (a, b) in enumerate(zip(single, found, strict=True)):
            for j in range(len(a)):
                x, y = distribution(a, row, j), distribution(b, row, j)
                possible = np.isfinite(x)
                moved.append(t * np.abs(x[possible] - y[possible]).max())
                distances.append(np.abs(softmax(x) - softmax(y)).sum() / 2)
                others.append(x.argmax() != y.argmax())
        return float(np.max(moved)), float(np.mean(distances)), float(np.mean(others))

    together = apart(context.passes(prompts, outputs, fed))
    alone = apart(context.passes([p], [o], fed)[0] for p, o in zip(prompts, outputs, strict=True))
    whole = apart(map(context.distribution.logits, prompts, outputs))
    _, distances, choices = (max(values) for values in zip(together, alone, whole, strict=True))
    return Drift(context.low or "float32", max(together[0], alone[0]), whole[0], distances, choices)


def logit_drift(drift: Drift, settings: Certify) -> Check:
    """Check that other shapes of a pass change no more than the distance that the certificate is to find."""
    summary = (
        f"{drift.dtype}: logits of blocks within {drift.blocks:.2g} of those of single tokens, of whole sequences "
        f"within {drift.whole:.2g}; mean total variation up to {drift.total_variation:.2g} (allowed "
        f"{settings.total_variation:g}), {drift.choices:.2%} other choices"
    )
    details = {**dataclasses.asdict(drift), "allowed": settings.total_variation}
    return Check("logit drift", drift.total_variation <= settings.total_variation, summary, details)


def coupled_identity(context: Subject) -> Check:
    """Check of sampled output against plain sampling with the same noise."""
    prompts, t = context.prompts, context.settings.temperature
    options = {"temperature": t, "seed": context.seed + 1}
    want, found = (context.generate(d, prompts, **options) for d in (context.plain, context.fast))

    def gap(row: int, at: int) -> float:
        distribution = _transformed(context, prompts[row], want.tokens[row], at, t)
        words = jnp.asarray([[want.seeds[row] >> 32, want.seeds[row] & 0xFFFFFFFF]], jnp.uint32)
        position = jnp.asarray([len(prompts[row]) + at], jnp.int32)
        noise = sampling_lib.coupled_noise(words, position, 0, len(distribution)).gumbel[0, 0]
        return margin(distribution + np.asarray(noise))

    differences = _differences(found.tokens, want.tokens, gap)
    context.tick()
    return _identity("coupled identity", differences, sum(map(len, want.tokens)), context.allowed(t))


def self_acceptance(context: Subject) -> Check:
    """Check that the target accepts its own tokens when it drafts for itself, greedily and sampled."""
    prompts = context.prompts
    controller = registry.build(registry.CONTROLLERS, context.settings.controller, "certify.controller")
    if controller.needs_confidence:  # the target has no such head
        controller = "fixed"
    own = DraftModel(context.target, context.drafter.k)
    decoder = Decoder(context.target, own, context.verifier, controller)
    temperatures = [0.0 if i % 4 == 3 else context.settings.temperature for i in range(len(prompts))]
    new = max(min(context.settings.new_tokens, 64), context.sampling.get("min_new_tokens", 0))
    options = {"temperature": temperatures, "max_new_tokens": new, "seed": context.seed}
    counts = context.generate(decoder, prompts, **options).stats
    drafted, accepted = sum(s.drafted for s in counts), sum(s.accepted for s in counts)
    context.tick()
    # Passes of one token and of a block round differently: p / q is 1 up to about 1e-5, so a draw may reject.
    rate = 0.001 if context.drift is None else 0.001 + 2 * max(context.drift.total_variation, context.drift.choices)
    passed = drafted - accepted <= max(2, rate * drafted) if context.verifier.lossless else None
    summary = f"{accepted:,} of {drafted:,} draft tokens accepted with the target as its own draft"
    details = {"drafted": drafted, "accepted": accepted, "allowed_rejection_rate": rate}
    return Check("self acceptance", passed, summary, details)


def sampled_distribution(context: Subject) -> Check:
    """Check of every sampled token against the exact distribution after its own prefix, over 16 cells that are a
    function of that distribution: eight groups of ranks by two halves of the vocabulary. Given the prefix, the counts
    have the mean and covariance of one draw from that distribution. So their sum over all tokens, whatever the
    prefixes, gives a chi-square statistic."""
    settings, observed = context.settings, np.zeros(CELLS)
    expected, covariance, outside, moved, tokens = np.zeros(CELLS), np.zeros((CELLS, CELLS)), [], [], 0
    size, calls = sample_size(settings), _calls(settings)
    for call in range(20 * calls):  # more calls than planned if stop tokens end rows early
        if tokens >= size:
            break
        prompts = [
            context.prompts[(call * settings.batch_size + i) % len(context.prompts)] for i in range(settings.batch_size)
        ]
        options = {"temperature": settings.temperature, "seed": context.seed + 1 + call}
        if context.low is not None:  # log-probabilities by the program that draws
            options["logprobs"] = "raw"
        result = context.generate(context.fast, prompts, **options)
        found = zip(prompts, result.tokens, context.logits(prompts, result.tokens), strict=True)
        for i, (prompt, new, by_token) in enumerate(found):
            if result.logprobs is not None:
                moved += _moved(context, by_token, new, result.logprobs[i])
            for j, logits in enumerate(by_token):
                distribution = context.distribution.transformed(logits, prompt, new[:j], settings.temperature)
                p = softmax(distribution)
                if p[new[j]] == 0:
                    gap = _outside_by(context, logits, distribution, prompt, new, j)
                    outside.append({"token": int(new[j]), "position": j, "gap": gap})
                cell = cells_of(p)
                mass = np.bincount(cell, p, CELLS)
                observed[cell[new[j]]] += 1
                expected += mass
                covariance += np.diag(mass) - np.outer(mass, mass)
                tokens += 1
        if call < calls:
            context.tick()
    edge = max([_EDGE, context.allowed(settings.temperature), *(2 * x / settings.temperature for x in moved)])
    outside = [found for found in outside if found["gap"] > edge]
    statistic, freedom = _chi_square(observed - expected, covariance, expected)
    p_value = float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0  # all tokens in one cell
    off, noise = np.abs(observed - expected).sum() / 2 / tokens, _noise_floor(covariance) / tokens
    details = {
        "tokens": tokens,
        "cells": CELLS,
        "p_value": p_value,
        "statistic": statistic,
        "degrees_of_freedom": freedom,
        "total_variation": float(off),
        "total_variation_of_exact_sampling": float(noise),
        "outside_the_support": outside[:20],
        "log_probability_moved": float(np.mean(moved)) if moved else 0.0,
    }
    distance = f"total variation over {CELLS} cells {off:.4f} (exact sampling of as many: about {noise:.4f})"
    if not context.verifier.lossless:
        return Check("sampled distribution", None, f"{tokens:,} tokens: {distance}", details)
    # E_p |log p - log p'| is twice the total variation of distributions that are near.
    agrees = details["log_probability_moved"] <= 2 * settings.total_variation
    passed = p_value >= settings.level and not outside and tokens >= size and agrees
    summary = f"{tokens:,} tokens: p = {p_value:.3g}, {distance}"
    if moved:
        summary += (
            f"; log-probabilities differ from the decoder's own by {details['log_probability_moved']:.2g} on average"
        )
    if outside:
        summary += f"; {len(outside)} tokens of probability zero"
    if tokens < size:
        summary += f"; {size:,} are needed, and stop tokens end the rows early"
    return Check("sampled distribution", passed, summary, details)


def sample_size(settings: Certify) -> int:
    """Number of tokens that finds any distribution at a distance of ``settings.total_variation`` over the cells with
    probability ``settings.power``: the noncentrality is at least 4 N TV^2."""
    freedom = CELLS - 1
    critical = stats.chi2.isf(settings.level, freedom)
    needed: Any = optimize.brentq(lambda x: stats.ncx2.sf(critical, freedom, x) - settings.power, 1e-6, 1e4)
    return int(np.ceil(needed / (4 * settings.total_variation**2)))


def _calls(settings: Certify) -> int:
    return -(-sample_size(settings) // (settings.batch_size * settings.new_tokens))


def cells_of(p: np.ndarray) -> np.ndarray:
    """Cell of every token of the vocabulary, 0 .. CELLS - 1, under the distribution ``p``. A hash of the token id
    chooses the half, so that no half is rare."""
    rank = np.empty(len(p), np.int64)
    rank[np.argsort(-p, kind="stable")] = np.arange(len(p))
    half = (np.arange(len(p), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) & np.uint64(1)
    return 2 * np.searchsorted(_RANKS, rank, side="right") + half.astype(np.int64)


def _moved(context: Subject, logits: np.ndarray, new: Sequence[int], own: Sequence[float]) -> list[float]:
    """Distances of each token's log-probability from its ``own``, which the program that drew it reports."""
    known = logits.astype(np.float64)
    known[:, unused_ids(context.target)] = -np.inf
    known = known[np.arange(len(new)), new] - np.logaddexp.reduce(known, axis=-1)
    return np.abs(known - np.asarray(own)).tolist()


def _outside_by(context: Subject, logits, distribution, prompt, new, j: int) -> float:
    """Gap in logits of the emitted token below the least likely one of the support; inf for a forbidden token."""
    free = context.distribution.transformed(logits, prompt, new[:j], context.settings.temperature, cuts=False)
    return float(free[np.isfinite(distribution)].min() - free[new[j]])


def _chi_square(difference: np.ndarray, covariance: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts. Cells that expect fewer than 5 are merged into the largest."""
    few = expected < 5
    merge = np.eye(len(expected))
    merge[few] = np.eye(len(expected))[expected.argmax()]
    merge = merge[:, ~few]
    difference, covariance = difference @ merge, merge.T @ covariance @ merge
    freedom = len(difference) - 1
    # The counts have a fixed sum, so one direction has no variance.
    inverse = np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)
    return float(difference @ inverse @ difference), freedom


def _noise_floor(covariance: np.ndarray) -> float:
    """Expected half of the summed absolute differences of counts with this covariance."""
    return float(np.sqrt(np.diag(covariance) * 2 / np.pi).sum() / 2)


def _identity(name: str, differences: list[dict[str, Any]], tokens: int, allowed: float) -> Check:
    worst = max((d["margin"] for d in differences), default=0.0)
    summary = f"{tokens:,} tokens, {len(differences)} rows differ"
    if differences:
        summary += f", at top-2 margins up to {worst:.2g} (allowed {allowed:g})"
    return Check(name, worst <= allowed, summary, {"tokens": tokens, "differences": differences, "allowed": allowed})


def _differences(
    found: Sequence[Sequence[int]], want: Sequence[Sequence[int]], gap: Callable[[int, int], float], **about: Any
) -> list[dict[str, Any]]:
    """The first difference of each row that has one. ``gap``: margin of the choice of token ``at`` in a row; it is
    infinite where one output goes on after the other's stop token."""
    differences = []
    for row, pair in enumerate(zip(found, want, strict=True)):
        at = next((i for i, (x, y) in enumerate(itertools.zip_longest(*pair)) if x != y), None)
        if at is not None:
            own = gap(row, at) if at < len(want[row]) else np.inf
            differences.append({"prompt": row, **about, "position": at, "margin": own})
    return differences
