"""Every loss against a float64 reference of its own: its value, and its gradient by central differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import registry
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import FullLogits, LossContext
from specjax.models.hf import LoadedModel, save_model
from specjax.runtime import fingerprint
from specjax.training import losses
from specjax.training.distributions import acceptance, top_k_logits
from specjax.training.losses import (
    AdaSPEC,
    CrossEntropy,
    ForwardKL,
    JensenShannon,
    LKAlpha,
    LKLambda,
    ReverseKL,
    TotalVariation,
    expectation,
    first_of_each_row,
)

ROWS, LENGTH, VOCAB = 2, 5, 7
ALPHA, BETA, ETA = 0.4, 0.3, 3.0
CONTEXT = LossContext(jnp.float32(ALPHA), jnp.ones((ROWS, LENGTH), jnp.float32))
DIVERGENCES = [ForwardKL(), ReverseKL(), JensenShannon(beta=BETA), TotalVariation(), LKAlpha(), LKLambda(eta=ETA)]
COARSE = [ForwardKL(), TotalVariation(), LKAlpha(), LKLambda(eta=ETA)]
by_kind = pytest.mark.parametrize("loss", DIVERGENCES, ids=lambda loss: loss.kind)
coarse = pytest.mark.parametrize("loss", COARSE, ids=lambda loss: loss.kind)


def full(logits: Any) -> FullLogits:
    return FullLogits(logits)


def log_softmax64(logits) -> np.ndarray:
    logits = np.asarray(logits).astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def logsumexp64(values) -> np.ndarray:
    largest = values.max(-1, keepdims=True)
    return largest[..., 0] + np.log(np.exp(values - largest).sum(-1))


def kl64(log_p, log_q) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.exp(log_p) > 0, np.exp(log_p) * (log_p - log_q), 0).sum(-1)


def jensen_shannon64(log_p, log_q):
    with np.errstate(divide="ignore"):
        log_m = np.log(BETA * np.exp(log_p) + (1 - BETA) * np.exp(log_q))
    return BETA * kl64(log_p, log_m) + (1 - BETA) * kl64(log_q, log_m)


def total_variation64(log_p, log_q):
    return 0.5 * np.abs(np.exp(log_p) - np.exp(log_q)).sum(-1)


def lk_lambda64(log_p, log_q):
    blend = np.exp(-ETA * ALPHA)
    return blend * kl64(log_p, log_q) + (1 - blend) * total_variation64(log_p, log_q)


REFERENCES = {
    "forward_kl": kl64,
    "reverse_kl": lambda log_p, log_q: kl64(log_q, np.maximum(log_p, np.log(np.finfo(np.float32).tiny))),
    "jensen_shannon": jensen_shannon64,
    "total_variation": total_variation64,
    "lk_alpha": lambda log_p, log_q: -logsumexp64(np.minimum(log_p, log_q)),
    "lk_lambda": lk_lambda64,
}


def distributions(case: str) -> tuple[np.ndarray, np.ndarray]:
    """(draft logits, target logits)."""
    rng = np.random.default_rng(0)
    draft, target = (3 * rng.standard_normal((ROWS, LENGTH, VOCAB)).astype(np.float32) for _ in range(2))
    match case:
        case "excluded":
            target[:, :, [2, 5]] = -np.inf
        case "equal":
            target = draft.copy()
        case "disjoint":
            target[:, :, 3:], draft[:, :, :3] = -np.inf, -1e4
        case "certain":
            target = np.where(np.arange(VOCAB) == rng.integers(0, VOCAB, (ROWS, LENGTH, 1)), target, -np.inf)
        case "extreme":
            draft, target = (x + rng.choice([-1e4, 0, 1e4], x.shape).astype(np.float32) for x in (draft, target))
        case "bfloat16":
            draft, target = draft.astype(jnp.bfloat16), target.astype(jnp.bfloat16)
    return draft, target


def differences64(value, logits, step: float = 1e-5) -> np.ndarray:
    """d value / d logits, where each position's value depends on its own logits only."""
    logits = np.asarray(logits).astype(np.float64)
    columns = [step * np.eye(VOCAB)[v] for v in range(VOCAB)]
    return np.stack([(value(logits + c) - value(logits - c)) / (2 * step) for c in columns], axis=-1)


def values_and_grads(loss, draft, teacher, context=CONTEXT, tokens=None):
    tokens = jnp.zeros(draft.shape[:2], jnp.int32) if tokens is None else tokens

    def total(draft):
        values = loss(draft, teacher, tokens, context)
        return values.sum(), values

    grads, values = jax.grad(total, has_aux=True)(jnp.asarray(draft))
    assert values.dtype == jnp.float32
    return np.asarray(values), np.asarray(grads.astype(jnp.float32))


def assert_matches(loss, draft, teacher, value64) -> None:
    values, grads = values_and_grads(loss, draft, teacher)
    expected = value64(np.asarray(draft).astype(np.float64))
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-6)
    tolerance = 1e-2 if draft.dtype == jnp.bfloat16 else 1e-4  # a gradient has its argument's type
    np.testing.assert_allclose(grads, differences64(value64, draft), rtol=tolerance, atol=tolerance / 5)


@by_kind
@pytest.mark.parametrize("case", ["generic", "excluded", "equal", "disjoint", "certain", "extreme", "bfloat16"])
def test_value_and_gradient_match_float64(loss, case):
    draft, target = distributions(case)
    log_p = log_softmax64(target)
    assert_matches(loss, draft, full(target), lambda z: REFERENCES[loss.kind](log_p, log_softmax64(z)))


@by_kind
def test_temperatures_divide_each_side_s_own_logits(loss):
    draft, target = distributions("generic")
    loss = dataclasses.replace(loss, target_temperature=2.0, draft_temperature=0.5)
    log_p = log_softmax64(target / 2)
    assert_matches(loss, draft, full(target), lambda z: REFERENCES[loss.kind](log_p, log_softmax64(z / 0.5)))


@by_kind
def test_no_gradient_reaches_the_target(loss):
    draft, target = distributions("generic")
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    grads = jax.grad(lambda x: loss(jnp.asarray(draft), full(x), tokens, CONTEXT).sum())(jnp.asarray(target))
    np.testing.assert_array_equal(grads, 0)


@by_kind
def test_equal_distributions_cost_nothing_and_pull_nowhere(loss):
    draft, _ = distributions("generic")
    values, grads = values_and_grads(loss, draft, full(draft))
    np.testing.assert_allclose(values, 0, atol=1e-6)
    np.testing.assert_allclose(grads, 0, atol=1e-6)


def test_an_expectation_leaves_out_what_cannot_be_and_nothing_else():
    probs = jnp.asarray([[[0.5, 0.0, 0.5], [0.5, jnp.nan, 0.5], [0.0, 0.0, 1.0]]])
    values = jnp.asarray([[[2.0, -jnp.inf, 4.0], [1.0, 1.0, 1.0], [jnp.inf, jnp.nan, 3.0]]])
    np.testing.assert_array_equal(expectation(probs, values), [[3.0, np.nan, 3.0]])
    of_values = jax.grad(lambda values: jnp.sum(expectation(probs[:, ::2], values[:, ::2])))(values)
    np.testing.assert_array_equal(of_values, [[[0.5, 0, 0.5], [0, 0, 0], [0, 0, 1]]])


def test_gradient_of_forward_kl_is_q_minus_p():
    draft, target = distributions("generic")
    _, grads = values_and_grads(ForwardKL(), draft, full(target))
    np.testing.assert_allclose(grads, np.exp(log_softmax64(draft)) - np.exp(log_softmax64(target)), atol=1e-6)


def test_gradient_of_total_variation_is_at_most_q_and_vanishes_without_overlap():
    draft, target = distributions("generic")
    _, grads = values_and_grads(TotalVariation(), draft, full(target))
    q, p = np.exp(log_softmax64(draft)), np.exp(log_softmax64(target))
    below = q < p
    np.testing.assert_allclose(grads, q * ((q * below).sum(-1, keepdims=True) - below), atol=1e-6)
    assert (np.abs(grads) <= q).all()
    draft, target = distributions("disjoint")
    values, grads = values_and_grads(TotalVariation(), draft, full(target))
    np.testing.assert_allclose(values, 1, atol=1e-6)
    np.testing.assert_array_equal(grads, 0)


def test_jensen_shannon_tends_to_either_kl_over_its_weight():
    draft, target = (x / 3 for x in distributions("generic"))
    teacher = full(target)
    forward, reverse = (values_and_grads(loss, draft, teacher)[0] for loss in (ForwardKL(), ReverseKL()))
    near = {beta: values_and_grads(JensenShannon(beta=beta), draft, teacher)[0] for beta in (1e-3, 0.999)}
    np.testing.assert_allclose(near[1e-3] / 1e-3, forward, rtol=0.03, atol=2e-3)
    np.testing.assert_allclose(near[0.999] / 1e-3, reverse, rtol=0.03, atol=2e-3)
    assert not np.allclose(forward, reverse, rtol=0.1)


def test_lk_alpha_is_cross_entropy_where_the_target_is_certain():
    draft, target = distributions("certain")
    tokens = jnp.asarray(target.argmax(-1).astype(np.int32))
    found = values_and_grads(LKAlpha(), draft, full(target), tokens=tokens)
    for ours, theirs in zip(found, values_and_grads(CrossEntropy(), draft, None, tokens=tokens), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [None, 0, 12])
def test_lk_alpha_pulls_in_a_large_vocabulary_where_hardly_anything_overlaps(cached):
    """152,064 tokens, alpha down to 1e-9. ``cached``: how many tokens of the tail stand beside the 64 best."""
    size, rng = 152_064, np.random.default_rng(0)
    draft, target = (rng.standard_normal((1, 3, size)).astype(np.float32) for _ in range(2))
    target[0, range(3), [7, 70, 700]] += np.asarray([25, 40, 40], np.float32)  # of what the draft has no notion
    draft[0, range(3), [9, 90, 900]] += np.asarray([5, 12, 25], np.float32)
    teacher, log_p, log_q = full(target), log_softmax64(target), log_softmax64(draft)
    if cached is not None:
        uniform = jnp.full((1, 3), 0.5, jnp.float32)
        teacher = top_k_logits(jnp.asarray(target), 64, uniform if cached else None, cached)
    values, grads = values_and_grads(LKAlpha(), draft, teacher)
    expected = -logsumexp64(np.minimum(log_p, log_q))
    assert expected.min() > -np.log(2e-5)
    assert expected.max() > 20
    if cached is None:
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        below, q = log_q < log_p, np.exp(log_q)
        inside = q * below
        slope = (q * inside.sum(-1, keepdims=True) - inside) / np.exp(-expected)[..., None]
        np.testing.assert_allclose(grads, slope, rtol=1e-3, atol=1e-7)
    # As cross-entropy pulls towards what is certain.
    assert (grads[0, range(3), [7, 70, 700]] < -0.3).all()
    assert np.isfinite(values).all()


def test_lk_alpha_without_overlap_is_what_is_left_of_it():
    draft, target = distributions("disjoint")
    values, grads = values_and_grads(LKAlpha(), draft, full(target))
    assert (values > 9_000).all()
    assert (np.abs(grads).sum(-1) > 1).all()


def test_lk_lambda_moves_from_kl_to_rejection_as_the_running_alpha_grows():
    draft, target = distributions("generic")
    ends = [values_and_grads(loss, draft, full(target))[0] for loss in (ForwardKL(), TotalVariation())]
    for alpha, expected in ((0.0, ends[0]), (1e3, ends[1])):
        context = dataclasses.replace(CONTEXT, alpha=jnp.float32(alpha))
        np.testing.assert_allclose(values_and_grads(LKLambda(), draft, full(target), context)[0], expected, rtol=1e-5)
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    draft = jnp.asarray(draft)
    pull = jax.grad(lambda a: LKLambda()(draft, full(target), tokens, dataclasses.replace(CONTEXT, alpha=a)).sum())
    assert pull(jnp.float32(ALPHA)) == 0


def test_cross_entropy_and_its_gradient_match_the_closed_form():
    draft, _ = distributions("generic")
    tokens = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    log_q, label = log_softmax64(draft), np.eye(VOCAB)[tokens]
    values, grads = values_and_grads(CrossEntropy(), draft, None, tokens=jnp.asarray(tokens))
    np.testing.assert_allclose(values, -(log_q * label).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(grads, np.exp(log_q) - label, atol=1e-6)


@by_kind
def test_a_divergence_without_a_target_is_refused(loss):
    draft, _ = distributions("generic")
    with pytest.raises(ValueError, match=f"{loss.kind} needs the target's logits"):
        values_and_grads(loss, draft, None)


# Sums, and the choice of tokens.


def test_a_sum_adds_its_losses_by_their_weights():
    draft, target = distributions("generic")
    tokens = jnp.ones((ROWS, LENGTH), jnp.int32)
    spec = {"kind": "sum", "of": [{"kind": "jensen_shannon", "beta": BETA, "weight": 0.9}, "cross_entropy"]}
    found = values_and_grads(registry.build(registry.LOSSES, spec, "loss"), draft, full(target), tokens=tokens)
    parts = [values_and_grads(x, draft, full(target), tokens=tokens) for x in (DIVERGENCES[2], CrossEntropy())]
    for ours, first, second in zip(found, *parts, strict=True):
        np.testing.assert_allclose(ours, 0.9 * first + second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("of", "target", "distribution"),
    [
        (["cross_entropy"], False, False),
        (["cross_entropy", "lk_lambda"], True, False),
        (["forward_kl", {"kind": "sum", "of": ["reverse_kl"]}], True, True),
        (["forward_kl", {"kind": "forward_kl", "target_temperature": 2}], True, True),
        ([{"kind": "adaspec", "reference": "a", "of": "jensen_shannon"}], True, True),
    ],
)
def test_a_sum_needs_what_any_of_its_losses_needs(of, target, distribution):
    loss = registry.build(registry.LOSSES, {"kind": "sum", "of": of}, "loss")
    assert (loss.needs_target, loss.needs_whole_distribution) == (target, distribution)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "sum", "of": []}, r"loss\.of: .*at least 1"),
        ({"kind": "sum", "of": ["forward-kl"]}, r"loss\.of\.0: 'forward-kl' is unknown.*did you mean 'forward_kl'"),
        ({"kind": "sum", "of": [{"kind": "lk_lambda", "eta": -1}]}, r"loss\.of\.0: eta: found -1"),
        (
            {"kind": "sum", "of": [{"kind": "lk_alpha", "weight": 0}]},
            r"loss\.of\.0: weight: found 0, expected a number",
        ),
        ({"kind": "jensen_shannon", "beta": 1}, r"loss\.beta: found 1, expected less than 1"),
        ({"kind": "forward_kl", "draft_temperature": 0}, r"loss\.draft_temperature: found 0, expected greater than 0"),
        ({"kind": "adaspec"}, r"loss\.reference"),
        ({"kind": "adaspec", "reference": "a", "keep": 0}, r"loss\.keep: found 0"),
        ({"kind": "adaspec", "reference": "a", "of": "cross"}, r"loss\.of: 'cross' is unknown"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_by_field(spec, message):
    with pytest.raises(ConfigError, match=message):
        registry.build(registry.LOSSES, spec, "loss")


def adaspec_case(keep: float = 0.4):
    draft, target = distributions("generic")
    reference, _ = (x[::-1].copy() for x in distributions("generic"))
    reference[1] = -target[1]  # so bad that a choice over both rows would take none of this one
    weight = np.array([[1, 0.5, 0, 1, 1], [0, 1, 0, 0, 2]], np.float32)
    context = LossContext(jnp.float32(0), jnp.asarray(weight), {"near": jnp.asarray(reference)})
    return AdaSPEC("near", keep=keep), draft, full(target), context


def adaspec_gaps(draft, teacher, context):
    """(KL(p || q), how much worse than the reference it is)."""
    log_p = log_softmax64(teacher.logits)
    costs = kl64(log_p, log_softmax64(draft))
    return costs, costs - kl64(log_p, log_softmax64(context.references["near"]))


def test_adaspec_keeps_the_tokens_of_each_row_that_the_reference_fits_best_beside_the_draft():
    loss, draft, teacher, context = adaspec_case()
    costs, gaps = adaspec_gaps(draft, teacher, context)
    expected = np.zeros((ROWS, LENGTH))
    for row, weight in enumerate(np.asarray(context.weight)):
        left = 0.4 * weight.sum()
        for i in sorted(np.flatnonzero(weight), key=lambda i, row=row: -gaps[row, i]):
            taken = min(left, weight[i])
            expected[row, i] = taken / weight[i] / 0.4 * costs[row, i]
            left -= taken
    values, grads = values_and_grads(loss, draft, teacher, context)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    assert ((grads != 0).any(-1) == (expected > 0)).all()
    assert (expected == 0).any()


@pytest.mark.parametrize("keep", [0.1, 0.4, 1.0])
def test_adaspec_gives_every_row_the_weight_of_its_predictions_however_few(keep):
    """A row of one prediction is not worth 1 / keep of them."""
    counts = np.array([1, 2, 3, 5])
    weight = (np.arange(5) < counts[:, None]) * np.array([[1.0], [1.0], [0.5], [1.0]], np.float32)
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    taken = first_of_each_row(scores, jnp.asarray(weight.astype(np.float32)), keep)
    np.testing.assert_allclose((taken * weight).sum(-1) / keep, weight.sum(-1), rtol=1e-5)


def test_adaspec_chooses_in_each_row_alone():
    loss, draft, teacher, context = adaspec_case()
    values, _ = values_and_grads(loss, draft, teacher, context)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = LossContext(context.alpha, context.weight[one], {"near": context.references["near"][one]})
        found, _ = values_and_grads(loss, draft[one], full(teacher.logits[one]), alone)
        np.testing.assert_allclose(values[one], found, rtol=1e-6)


def test_adaspec_that_keeps_all_is_the_loss_itself_where_a_prediction_counts():
    loss, draft, teacher, context = adaspec_case(keep=1.0)
    values, _ = values_and_grads(loss, draft, teacher, context)
    whole, _ = values_and_grads(ForwardKL(), draft, teacher)
    np.testing.assert_allclose(values, np.where(context.weight > 0, whole, 0), rtol=1e-6)


def test_adaspec_loads_a_reference_of_the_target_s_vocabulary(tiny_target, tiny_draft, tmp_path):
    save_model(tiny_draft, tmp_path / "same")
    same = str(tmp_path / "same")
    nested = {
        "kind": "sum",
        "of": [{"kind": "adaspec", "reference": same, "of": {"kind": "sum", "of": ["forward_kl"]}}],
    }
    ((name, (trainable, params)),) = registry.build(registry.LOSSES, nested, "loss").references(tiny_target).items()
    assert name == same
    assert isinstance(trainable, TrainedDraftModel)
    assert trainable.model.config == tiny_draft.config
    assert fingerprint.digest(params) == fingerprint.digest(tiny_draft.params)
    spec = dataclasses.replace(tiny_draft.spec, config=dataclasses.replace(tiny_draft.config, vocab_size=301))
    save_model(LoadedModel(spec, spec.init(jax.random.key(0)), tiny_draft.tokenizer), tmp_path / "padded")
    ((padded, _),) = AdaSPEC(str(tmp_path / "padded")).references(tiny_target).values()
    assert isinstance(padded, TrainedDraftModel)
    assert padded.model.config.vocab_size == 301
    save_model(LoadedModel(spec, spec.init(jax.random.key(0))), tmp_path / "other")
    with pytest.raises(ModelError, match="the draft's vocabulary has 301 tokens, the target's 300"):
        AdaSPEC(str(tmp_path / "other")).references(tiny_target)


@pytest.mark.parametrize(("share", "whole"), [(0.3, 30), (0.7, 70), (0.001, 0), (0.305, 30), (1.0, 100)])
def test_a_share_of_a_row_is_the_largest_and_a_part_of_the_next(share, whole):
    scores = np.random.default_rng(0).standard_normal((1, 100)).astype(np.float32)
    taken = np.asarray(first_of_each_row(jnp.asarray(scores), jnp.ones((1, 100), jnp.float32), share))
    ordered = taken[0, np.argsort(-scores[0])]
    np.testing.assert_allclose(ordered[:whole], 1, rtol=1e-5)
    np.testing.assert_allclose(ordered[whole : whole + 1], (100 * share - whole), atol=1e-4)
    assert (ordered[whole + 1 :] == 0).all()


# Cached logits.


def buckets64(target, logits, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(log p, log q) of the target's k best tokens and of the rest, from a sort of our own."""
    log_p, log_q = log_softmax64(target), log_softmax64(logits)
    ids = np.argsort(-log_p, axis=-1)
    best, rest = ids[..., :k], ids[..., k:]
    merged = []
    for distribution in (log_p, log_q):
        tail = np.log(np.exp(np.take_along_axis(distribution, rest, -1)).sum(-1, keepdims=True))
        merged.append(np.concatenate([np.take_along_axis(distribution, best, -1), tail], -1))
    return merged[0], merged[1]


@coarse
@pytest.mark.parametrize("k", [3])
def test_cached_logits_give_the_loss_over_their_tokens_and_one_bucket(loss, k):
    draft, target = distributions("generic")
    teacher = top_k_logits(jnp.asarray(target), k)
    assert_matches(loss, draft, teacher, lambda z: REFERENCES[loss.kind](*buckets64(target, z, k)))


@coarse
@pytest.mark.parametrize("case", ["generic", "extreme", "excluded"])
def test_all_logits_cached_give_the_online_loss(loss, case):
    draft, target = distributions(case)
    cached = values_and_grads(loss, draft, top_k_logits(jnp.asarray(target), VOCAB))
    for ours, theirs in zip(cached, values_and_grads(loss, draft, full(target)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
def test_cached_logits_bound_alpha_and_kl(k):
    draft, target = distributions("generic")
    teacher = top_k_logits(jnp.asarray(target), k)
    found = acceptance(jnp.asarray(draft), teacher)
    alpha = 1 - total_variation64(log_softmax64(target), log_softmax64(draft))
    log_p, log_q = buckets64(target, draft, k)
    assert (found["alpha_lower"] <= alpha + 1e-6).all()
    assert (alpha <= found["alpha_upper"] + 1e-6).all()
    width = np.minimum(np.exp(log_p[..., -1]), np.exp(log_q[..., -1]))
    np.testing.assert_allclose(found["alpha_upper"] - found["alpha_lower"], width, atol=1e-6)
    assert (values_and_grads(ForwardKL(), draft, teacher)[0] <= kl64(log_softmax64(target), log_softmax64(draft))).all()


def test_the_overlap_of_full_logits_is_alpha():
    draft, target = distributions("generic")
    found = acceptance(jnp.asarray(draft), full(jnp.asarray(target)))
    assert set(found) == {"alpha"}
    expected = 1 - total_variation64(log_softmax64(target), log_softmax64(draft))
    np.testing.assert_allclose(found["alpha"], expected, atol=1e-6)


def test_a_small_tail_of_the_draft_keeps_its_digits():
    draft, target = distributions("generic")
    draft[..., 0], target[..., 0] = 18.0, 5.0
    assert_matches(ForwardKL(), draft, top_k_logits(jnp.asarray(target), 3), lambda z: kl64(*buckets64(target, z, 3)))


@pytest.mark.parametrize("loss", [ForwardKL(), TotalVariation()], ids=lambda loss: loss.kind)
def test_tokens_drawn_from_the_tail_give_the_whole_loss_and_gradient_on_average(loss):
    many = 500
    draft, target = (np.repeat(x[:1, :1], many, axis=0) for x in distributions("generic"))
    uniform = (jnp.arange(many, dtype=jnp.float32)[:, None] + 0.5) / many
    teacher = top_k_logits(jnp.asarray(target), 2, uniform, 2)
    assert teacher.tail_ids is not None
    assert not np.any(teacher.tail_ids[..., None] == teacher.ids[..., None, :])
    assert len(np.unique(teacher.tail_ids)) == VOCAB - 2
    values, grads = values_and_grads(loss, draft, teacher)
    whole = values_and_grads(loss, draft, full(target))
    np.testing.assert_allclose(values.mean(), whole[0][0, 0], atol=2e-3)
    np.testing.assert_allclose(grads.mean((0, 1)), whole[1][0, 0], atol=2e-3)
    bucket = values_and_grads(loss, draft, top_k_logits(jnp.asarray(target), 2))
    assert abs(bucket[0][0, 0] - whole[0][0, 0]) > 0.01
    estimate = acceptance(jnp.asarray(draft), teacher)["alpha_estimate"].mean()
    alpha = 1 - total_variation64(log_softmax64(target[0, 0]), log_softmax64(draft[0, 0]))
    assert float(estimate) == pytest.approx(alpha, abs=2e-3)


@coarse
def test_where_nothing_is_left_for_the_tail_its_tokens_change_nothing(loss):
    draft, target = distributions("certain")
    cached = top_k_logits(jnp.asarray(target), 4, jnp.full((ROWS, LENGTH), 0.99, jnp.float32), 3)
    for ours, theirs in zip(
        values_and_grads(loss, draft, cached), values_and_grads(loss, draft, full(target)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", [ReverseKL(), JensenShannon(), ForwardKL(target_temperature=2.0)])
def test_a_loss_of_the_whole_distribution_refuses_cached_logits(loss):
    draft, target = distributions("generic")
    with pytest.raises(ValueError, match=f"{loss.kind} needs the target's whole distribution; found its 3 best tokens"):
        values_and_grads(loss, draft, top_k_logits(jnp.asarray(target), 3))


def test_a_draft_temperature_is_no_matter_of_the_cache():
    draft, target = distributions("generic")
    teacher = top_k_logits(jnp.asarray(target), 3)
    assert_matches(ForwardKL(draft_temperature=2.0), draft, teacher, lambda z: kl64(*buckets64(target, z / 2, 3)))


def test_every_registered_loss_is_here_and_says_its_kind():
    for kind in registry.LOSSES:
        cls = registry.resolve(registry.LOSSES, kind, "loss")
        assert cls.__module__ == losses.__name__
        assert next(f.default for f in dataclasses.fields(cls) if f.name == "kind") == kind
