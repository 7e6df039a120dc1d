"""Distillation losses: the cost of the draft's prediction of one token, against the target's distribution or the text's
token.

Each is a frozen dataclass that is its own configuration and gives one value a position, in nats (total variation: a
probability) and float32. p is the target's distribution, q = softmax of the draft's logits z, alpha = sum min(p, q).
Gradients reach the draft only. Their formulas hold at temperature 1 (a draft temperature divides them by itself, and
nothing multiplies them back).

With cached top-k logits (`TopKLogits`) p and q are the distributions over those k tokens and a stand-in for the rest
(`specjax.training.distributions`). Losses for which that is no good approximation refuse them:
``needs_whole_distribution``.

Dims: B rows, T predicted positions, V vocabulary, W outcomes (V, or those of cached logits). `specjax.interfaces.Loss`
says what the arguments of a loss are, and `Divergence` those of ``between``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from pydantic import BeforeValidator, Field

from specjax.errors import ConfigError
from specjax.interfaces import Loss, LossContext, Params, Target, TopKLogits, Trainable
from specjax.metrics import negative_log_likelihood
from specjax.registry import LOSSES, build
from specjax.training.distributions import log_distributions, log_overlap, overlap

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
References = dict[str, tuple[Trainable, Params]]
"""Frozen drafts that losses compare with, by the loss's name for them, each with its parameters."""
LOG_TINY = math.log(np.finfo(np.float32).tiny)
"""Log of the least probability that float32 holds, about -87."""


def expectation(probs: Float[Array, "B T W"], values: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """The expectation sum probs * values. An outcome of probability 0 adds nothing, nor anything to the gradient."""
    impossible = probs == 0
    # The outer selection keeps XLA on CPU from making one library call of product and sum: 20 times as long.
    return jnp.sum(jnp.where(impossible, 0.0, probs * jnp.where(impossible, 0.0, values)), axis=-1)


def kl(log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"]) -> Float[Array, "B T"]:
    """KL(p || q), in nats."""
    return expectation(jnp.exp(log_p), log_p - log_q)


@dataclasses.dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy, -log q(next token). dL/dz = q - onehot(token)."""

    needs_labels = True
    kind: Literal["cross_entropy"] = "cross_entropy"

    def __call__(self, draft_logits, teacher, tokens, context=None) -> Float[Array, "B T"]:
        return negative_log_likelihood(draft_logits, tokens)


@dataclasses.dataclass(frozen=True)
class Divergence(Loss):
    """A loss against the target's distribution; subclasses define its value ``between`` the two distributions."""

    needs_target = True
    coarse: ClassVar[bool] = True
    """True if the top k tokens and a stand-in for the rest will do: the loss is a sum of p times a function of q/p."""
    kind: str
    target_temperature: Positive = 1.0
    """Divisor of the target's logits."""
    draft_temperature: Positive = 1.0
    """Divisor of the draft's logits."""

    @property
    def needs_whole_distribution(self) -> bool:
        return not self.coarse or self.target_temperature != 1

    def __call__(self, draft_logits, teacher, tokens, context=None) -> Float[Array, "B T"]:
        """The divergence at each position. Raises `ValueError` if the target's logits are missing, or if they are
        cached and the loss needs the whole distribution."""
        if teacher is None:
            raise ValueError(f"{self.kind} needs the target's logits; none were given")
        if self.needs_whole_distribution and isinstance(teacher, TopKLogits):
            raise ValueError(
                f"{self.kind} needs the target's whole distribution; found its {teacher.ids.shape[-1]} best tokens"
            )
        distributions = log_distributions(draft_logits, teacher, self.target_temperature, self.draft_temperature)
        return self.between(*distributions, context)

    def between(
        self, log_p: Float[Array, "B T W"], log_q: Float[Array, "B T W"], context: LossContext | None
    ) -> Float[Array, "B T"]:
        """The divergence of two distributions given by their logs, one value a position."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ForwardKL(Divergence):
    """Forward KL, KL(p || q) = sum p (log p - log q), the target's full distribution as the label (1503.02531). dL/dz =
    q - p."""

    kind: Literal["forward_kl"] = "forward_kl"

    def between(self, log_p, log_q, context):
        return kl(log_p, log_q)


@dataclasses.dataclass(frozen=True)
class ReverseKL(Divergence):
    """Reverse KL, KL(q || p) = sum q (log q - log p). dL/dz = q (log q/p - L).

    It is finite where the target excludes a token (p = 0): probabilities below float32's least count as that least
    one, so a token costs at most 87 nats. It punishes the mass that the draft puts where p is small, so it needs the
    whole distribution.
    """

    coarse: ClassVar[bool] = False
    kind: Literal["reverse_kl"] = "reverse_kl"

    def between(self, log_p, log_q, context):
        return expectation(jnp.exp(log_q), log_q - jnp.maximum(log_p, LOG_TINY))


@dataclasses.dataclass(frozen=True)
class JensenShannon(Divergence):
    """Generalised Jensen-Shannon divergence (2306.13649), beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 -
    beta) q. dL/dz = q (w - E_q w) with w = (1 - beta) log q/m.

    It is not rescaled, as in that paper: L / beta tends to forward KL as beta -> 0, L / (1 - beta) to reverse KL as
    beta -> 1, so a beta near an end needs a larger learning rate.
    """

    coarse: ClassVar[bool] = False
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Weight of the target in m."""
    kind: Literal["jensen_shannon"] = "jensen_shannon"

    def between(self, log_p, log_q, context):
        log_m = jnp.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        to_q = expectation(jnp.exp(log_q), log_q - log_m)
        return self.beta * kl(log_p, log_m) + (1 - self.beta) * to_q


@dataclasses.dataclass(frozen=True)
class TotalVariation(Divergence):
    """Total variation, 1 - alpha: the chance that a proposed token is rejected. dL/dz = q (s - 1[q < p]) with s = q(q <
    p). The gradient is at most q: it vanishes where the distributions hardly overlap."""

    kind: Literal["total_variation"] = "total_variation"

    def between(self, log_p, log_q, context):
        return 1.0 - overlap(log_p, log_q)


@dataclasses.dataclass(frozen=True)
class LKAlpha(Divergence):
    """Negative log acceptance (2602.23881), -log alpha at each position. Its gradient is that of total variation over
    alpha, so that a small overlap pulls as hard as a large one. A floor under alpha would end that at the small overlap
    that training with a large vocabulary begins with. Where the target is certain it is cross-entropy."""

    kind: Literal["lk_alpha"] = "lk_alpha"

    def between(self, log_p, log_q, context):
        return -log_overlap(log_p, log_q)


@dataclasses.dataclass(frozen=True)
class LKLambda(Divergence):
    """Blend of KL and rejection (2602.23881), lambda KL(p || q) + (1 - lambda) (1 - alpha), lambda = exp(-eta A): KL
    while hardly any token is accepted, then more and more the chance of rejection itself.

    A is the running alpha of the batches before this step (`specjax.interfaces.LossContext`), one number for all
    positions; no gradient goes through it. The paper's A is the batch's own, which would depend on the microbatch."""

    eta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3.0
    """Rate at which lambda decays with the running alpha; 0: KL alone."""
    kind: Literal["lk_lambda"] = "lk_lambda"

    def between(self, log_p, log_q, context):
        """The blend at each position. Raises `ValueError` without a context."""
        if context is None:
            raise ValueError("lk_lambda needs the running alpha; no context was given")
        blend = jnp.exp(-self.eta * jax.lax.stop_gradient(context.alpha))
        return blend * kl(log_p, log_q) + (1.0 - blend) * (1.0 - overlap(log_p, log_q))


def _loss(spec: Any) -> Loss:
    return build(LOSSES, spec, "") if isinstance(spec, str | Mapping) else spec


@dataclasses.dataclass(frozen=True)
class Term:
    """One loss of a `Sum`, and its weight."""

    loss: Loss
    weight: float


def _term(spec: Any) -> Any:
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping):
        return spec
    fields = dict(spec)
    weight = fields.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"weight: found {weight!r}, expected a number above 0")
    return Term(_loss(fields), float(weight))


class Composite(Loss):
    """A loss made of others, which needs what they need; a subclass says what else, and if it ``selects``."""

    @property
    def inner(self) -> Sequence[Loss]:
        """The losses that it is made of."""
        raise NotImplementedError

    @property
    def needs_whole_distribution(self) -> bool:
        return any(loss.needs_whole_distribution for loss in self.inner)

    @property
    def needs_labels(self) -> bool:
        return any(loss.needs_labels for loss in self.inner)

    @property
    def labels_alone(self) -> bool:
        return all(loss.labels_alone for loss in self.inner)

    def references(self, target) -> References:
        """The reference drafts of all its losses, by name."""
        return functools.reduce(operator.or_, (loss.references(target) for loss in self.inner))


@dataclasses.dataclass(frozen=True)
class Sum(Composite):
    """A weighted sum of losses: ``of: [{kind: forward_kl, weight: 0.9}, {kind: cross_entropy, weight: 0.1}]``. A weight
    is 1 if it is not given, and they need not add up to 1. A loss that compares with the text's token alone adds
    nothing where that token is outside the draft vocabulary; the others count there as everywhere."""

    of: Annotated[tuple[Annotated[Any, BeforeValidator(_term)], ...], Field(min_length=1)]
    """The losses, each with its weight."""
    kind: Literal["sum"] = "sum"

    @property
    def inner(self) -> Sequence[Loss]:
        """The losses that are added up."""
        return [term.loss for term in self.of]

    @property
    def needs_target(self) -> bool:
        return any(loss.needs_target for loss in self.inner)

    @property
    def selects(self) -> bool:
        return any(loss.selects for loss in self.inner)

    def scores(self, draft_logits, teacher, tokens, context=None) -> Any:
        """The scores of each of its losses, and the positions it compares at, see `compared_at`."""
        given = draft_logits, teacher, tokens, context
        return tuple((term.loss.scores(*given), compared_at(term.loss, context)) for term in self.of)

    def choose(self, scores: Any, weight: Float[Array, "B T"]) -> Any:
        """The choice of each of its losses."""
        pairs = zip(self.of, scores, strict=True)
        return tuple(term.loss.choose(found, only_at(where, weight)) for term, (found, where) in pairs)

    def __call__(self, draft_logits, teacher, tokens, context=None) -> Float[Array, "B T"]:
        chosen = [None] * len(self.of) if context is None or context.chosen is None else context.chosen
        values = []
        for term, own in zip(self.of, chosen, strict=True):
            where, given = compared_at(term.loss, context), with_choice(context, own)
            if given is not None:
                given = dataclasses.replace(given, weight=only_at(where, given.weight))
            values.append(term.weight * only_at(where, term.loss(draft_logits, teacher, tokens, given)))
        return functools.reduce(operator.add, values)


@dataclasses.dataclass(frozen=True)
class AdaSPEC(Composite):
    """A loss over the tokens that the draft can still learn (2510.19779): those with the largest KL(p || q) - KL(p ||
    q_ref), q_ref the distribution of ``reference``, a frozen draft that was distilled before. The hard tokens, where
    the reference is no better, are dropped.

    Each row chooses its tokens in this order, until they have the share ``keep`` of its weight; the last one counts in
    part (ties: the earlier token). A chosen value is divided by ``keep``, so that a row weighs what it weighs without a
    choice, however short it is, and the mean over all predictions is the mean over the chosen ones. Since each row
    chooses for itself, the choice is the same in every microbatch and on every device; a choice over the batch would
    need the target's forward pass twice.
    """

    needs_target = True
    selects = True
    reference: Annotated[str, Field(min_length=1)]
    """Hugging Face directory of the reference draft, such as the `draft` of another run."""
    keep: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of each row's weight that is chosen."""
    of: Annotated[Any, BeforeValidator(_loss)] = ForwardKL()
    """The loss of the chosen tokens."""
    kind: Literal["adaspec"] = "adaspec"

    @property
    def inner(self) -> Sequence[Loss]:
        """The loss of the chosen tokens."""
        return [self.of]

    def references(self, target: Target) -> References:
        """The reference draft, and those of the loss ``of``. Raises `ModelError` if it cannot be loaded or has another
        vocabulary than ``target``."""
        from specjax.drafters.draft_model import TrainedDraftModel
        from specjax.models import hf, vocabulary

        draft = hf.load_model(self.reference, "float32")
        vocabulary.check_same_vocabulary(target, draft)
        return {**super().references(target), self.reference: (TrainedDraftModel(draft.spec), draft.params)}

    def scores(self, draft_logits, teacher, tokens, context=None) -> Any:
        """KL(p || q) - KL(p || q_ref) at each position, and the scores of the loss ``of``. Raises `ValueError` without
        the logits of its reference draft."""
        if context is None or self.reference not in context.references:
            raise ValueError(f"adaspec needs the logits of its reference draft {self.reference!r}; none were given")
        reference = context.references[self.reference]
        gap = ForwardKL()(draft_logits, teacher, tokens) - ForwardKL()(reference, teacher, tokens)
        return gap, self.of.scores(draft_logits, teacher, tokens, context)

    def choose(self, scores: Any, weight: Float[Array, "B T"]) -> Any:
        """The share of each position that is chosen, and the choice of the loss ``of``."""
        gap, inner = scores
        return first_of_each_row(jax.lax.stop_gradient(gap), weight, self.keep), self.of.choose(inner, weight)

    def __call__(self, draft_logits, teacher, tokens, context=None) -> Float[Array, "B T"]:
        """The loss at each position, 0 where it is dropped. If ``context`` has no choice yet, it chooses, and raises
        `ValueError` as `scores` does."""
        if context is None or context.chosen is None:
            scores = self.scores(draft_logits, teacher, tokens, context)
            assert context is not None
            context = with_choice(context, self.choose(scores, context.weight))
        assert context is not None
        kept, inner = context.chosen
        values = self.of(draft_logits, teacher, tokens, with_choice(context, inner))
        return jnp.where(kept > 0, kept / self.keep * values, 0.0)


def compared_at(loss: Loss, context: LossContext | None) -> Bool[Array, "B T"] | None:
    """The positions at which ``loss`` has something to compare with; None: all."""
    return None if context is None or not loss.labels_alone else context.in_vocabulary


def only_at(where: Bool[Array, "B T"] | None, values: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``values`` at the positions ``where``, 0 elsewhere; None: at all positions."""
    return values if where is None else jnp.where(where, values, 0.0)


def with_choice(context: LossContext | None, chosen: Any) -> LossContext | None:
    """The context of an inner loss, with its own choice ``chosen``."""
    return None if context is None else dataclasses.replace(context, chosen=chosen)


def first_of_each_row(scores: Float[Array, "B T"], weight: Float[Array, "B T"], share: float) -> Float[Array, "B T"]:
    """Share of each position that is chosen, 0 to 1. The positions of a row with the largest ``scores`` come first,
    until they have ``share`` of the row's ``weight``."""
    order = jnp.argsort(jnp.where(weight > 0, -scores, jnp.inf), axis=-1)
    sizes = jnp.take_along_axis(weight, order, axis=-1)
    before = jnp.cumsum(sizes, axis=-1) - sizes
    wanted = share * jnp.sum(weight, axis=-1, keepdims=True)
    taken = jnp.clip((wanted - before) / jnp.where(sizes > 0, sizes, 1.0), 0.0, 1.0)
    return jnp.where(weight > 0, jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1), 0.0)
