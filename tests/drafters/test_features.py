"""Drafts that read hidden states: what they decode is their training forward, their state is what a prompt of the same
tokens leaves, and whatever they propose, the output is the target's."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax
from specjax import config, formats, registry
from specjax.controllers.confidence import Confidence
from specjax.data.rows import ConcatenatedRows, NumberedRows, StartRows, take
from specjax.decode.decoder import Decoder
from specjax.decode.engine import block_context, propose
from specjax.decode.request import prepare
from specjax.decode.scheduler import Scheduler
from specjax.drafters import mtp
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.dflash.training import TrainedDFlash
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.drafters.eagle3 import Eagle3Model, Options
from specjax.drafters.early_exit import ExitModel, TrainedExit
from specjax.drafters.features import FeatureModel
from specjax.drafters.medusa import MedusaModel, TrainedMedusa
from specjax.drafters.p_eagle import PEagleModel
from specjax.drafters.token_rows import TrainedRows
from specjax.errors import ConfigError, ModelError
from specjax.evaluation.certify import Subject, certify
from specjax.formats import trained as stored
from specjax.interfaces import Batch, Reads
from specjax.metrics import alpha_per_position
from specjax.models.cache import KVCache
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.kernels import are_quantised
from specjax.models.rotary import Rope
from specjax.models.vocabulary import NEVER, DraftVocabulary
from specjax.runtime import fingerprint
from specjax.training import step
from specjax.training.chunked_loss import Matching, Teacher
from specjax.training.init import least_squares
from specjax.training.init.draft_vocabulary import coverage, most_frequent
from specjax.training.init.first_weights import initial_draft
from specjax.training.kept_streams import Streams
from specjax.training.losses import ForwardKL
from specjax.training.step import Update
from specjax.training.teacher_cache import TeacherCache
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative
from tests.cases import in_proof, predicted, target_output, transformer
from tests.training import toys

PROMPTS = [[1, 2, 3], [7], list(range(20)), [5] * 11]


def target_of(**changes) -> LoadedModel:
    model = transformer(0, **{"max_positions": 256, "num_layers": 3, **changes})
    return LoadedModel(model.spec, model.params)


def sizes(target: LoadedModel, *kinds: LayerKind) -> ModelConfig:
    kinds = kinds or (LayerKind(),)
    return dataclasses.replace(target.config, num_layers=len(kinds), layers=kinds)


def eagle3(target: LoadedModel, *kinds: LayerKind, vocabulary: Any = None, **options: bool) -> tuple[type, Any]:
    size = target.config.hidden_size
    return TrainedRows, Eagle3Model(
        sizes(target, *kinds), (0, 1, 3), size, vocabulary=vocabulary, options=Options(**options)
    )


FEWER = DraftVocabulary([0, 1, 4, 7, 9, 20, 33, 60], 61)


def p_eagle(target: LoadedModel) -> tuple[type, Any]:
    return TrainedRows, PEagleModel(sizes(target), (0, 3), target.config.hidden_size, mask_token=60)


def head(target: LoadedModel, *options: Any) -> tuple[type, Any]:
    model = mtp.MTPModel(sizes(target), (3,), target.config.hidden_size, options=mtp.Options(*options))
    return TrainedRows, model


def medusa(target: LoadedModel, **options: Any) -> tuple[type, Any]:
    size = target.config.hidden_size
    return TrainedMedusa, MedusaModel(sizes(target), (3,), size, heads=DEPTHS, blocks=2, **options)


def early_exit(target: LoadedModel) -> tuple[type, Any]:
    return TrainedExit, ExitModel(sizes(target), (2,), target.config.hidden_size)


def blocks(target: LoadedModel, *kinds: LayerKind, **options: Any) -> tuple[Any, Any]:
    sizes_of, scales = sizes(target, *kinds or (LayerKind(), LayerKind())), options.pop("scales", {})
    size = target.config.hidden_size
    slots = {"slots": DEPTHS + (not options.get("from_root")), "mask_token": 60}
    model = DFlashModel(dataclasses.replace(sizes_of, **scales), (1, 3), size, **{**slots, **options})
    return functools.partial(TrainedDFlash, anchors=32), model


WINDOW = LayerKind(window=6)
OTHER_LAYERS = LayerKind(), WINDOW
DEPTHS = 4
MARKOV = {"markov_rank": 8, "markov": "vanilla"}
SELECTOR = {"taps": 2, "group": 4, "candidates": 6, "selector_rank": 8, "causal_window": False}
SCALES = {"embedding_multiplier": 2.0, "logit_multiplier": 0.5, "logit_soft_cap": 20.0}
# Flags that are no kinds of their own come together.
MODELS = {
    "published": eagle3,
    "two_layers": lambda target: eagle3(target, *OTHER_LAYERS),
    "other_norms": lambda target: eagle3(
        target, *OTHER_LAYERS, norm_before_residual=False, norm_output=True, fc_norm=True
    ),
    "normed_fewer_ids": lambda target: eagle3(target, vocabulary=FEWER, norm_before_fc=True),
    "p_eagle": p_eagle,
    "mtp": head,
    "mtp_other_norms": lambda target: head(target, "post", "pre"),
    "medusa": medusa,
    "medusa_own_heads": functools.partial(medusa, own_heads=True),
    "early_exit": early_exit,
    "dflash": blocks,
    "dflash_windows": lambda target: blocks(target, WINDOW, WINDOW),
    "dflash_other_windows": lambda target: blocks(target, WINDOW, window_at_root=False, causal_window=False),
    "dspark": lambda target: blocks(target, from_root=True, **MARKOV),
    "dspark_rnn": lambda target: blocks(target, markov_rank=8, markov="rnn"),
    "dspark_confident": lambda target: blocks(target, from_root=True, **MARKOV, confident=True),
    "dspark_confident_gated": lambda target: blocks(
        target, markov_rank=8, markov="gated", confident=True, confident_of_markov=True
    ),
    "dflash2": lambda target: blocks(target, WINDOW, LayerKind(), **SELECTOR),
    "dflash2_scaled": lambda target: blocks(target, **SELECTOR, scales=SCALES),
    "dflash2_from_root": lambda target: blocks(target, **{**SELECTOR, "taps": 3}, from_root=True, scales=SCALES),
    "fewer_ids": lambda target: eagle3(target, vocabulary=FEWER),
    "dspark_fewer_ids": lambda target: blocks(target, from_root=True, **MARKOV, vocabulary=FEWER),
}


def random_params(model: Any) -> Any:
    """What begins as nothing is something as well; not scaled up, as then rounding grows fivefold by each place."""
    rng = np.random.default_rng(1)
    # Not in one program: its parts are compiled once for all models of such shapes.
    begun = model.init(jax.random.key(1))
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape).astype(np.float32)), begun)


def made(name: str, target: LoadedModel) -> tuple[Any, Any]:
    """(in training, its weights)."""
    trained, model = MODELS[name](target)
    depths = {} if name == "early_exit" else {"depths": DEPTHS}
    return trained(model, **depths), random_params(model)


def alike(found: Any, expected: Any) -> None:
    """As far as the target's own features are when it reads a prompt in pieces, or in blocks; a mistake is a hundred
    times as large."""
    found, expected = np.asarray(found), np.asarray(expected)
    can_be = expected > NEVER / 2  # ids that a draft of fewer cannot propose are never drawn
    np.testing.assert_array_equal(found > NEVER / 2, can_be)
    found, expected = found[can_be], expected[can_be]
    assert np.abs(found - expected).max() < 2e-3 * expected.std()


def drafted(decoder: Decoder, prompts: list[list[int]]) -> Any:
    """The block behind each prompt."""
    engine, params = decoder.engine(greedy=False)
    state = decoder.prefilled(prompts, max_new_tokens=8, temperature=1.0)
    return jax.jit(lambda params, state: propose(engine, params, state, block_context(engine, params, state))[0])(
        params, state
    )


QUICK = "other_norms", "p_eagle", "mtp_other_norms", "medusa", "early_exit", "dflash_other_windows"
QUICK += "dspark_confident_gated", "dflash2_from_root"
"""Of each kind the one with the most flags."""
ELSEWHERE = "two_layers", "mtp", "fewer_ids", "dspark", "dflash2_scaled"
"""What is compared in pieces, with more flags, or with what it began as."""


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        *((name, None) for name in QUICK),
        *((name, 5) for name in ("published", "dflash")),
        *(in_proof(name, None) for name in MODELS if name not in (*QUICK, *ELSEWHERE)),
        *(in_proof(name, 5) for name in ("two_layers", "mtp")),
    ],
)
def test_decoding_is_the_training_forward(name, piece):
    """At every depth of blocks behind prompts of many lengths, which are fed at once or in pieces."""
    target, k = target_of(), DEPTHS
    trained, params = made(name, target)
    size, fed = target.config.vocab_size, 32
    lengths = np.asarray([2, 9, 20, fed - k])
    text = np.random.default_rng(0).integers(0, size, (len(lengths), fed)).astype(np.int32)
    drafter = trained.to_drafter(params, target, k)
    decoder = Decoder(target, drafter, "speculative", "fixed", prefill_chunk=piece)
    draft = drafted(decoder, [row[:length].tolist() for row, length in zip(text, lengths, strict=True)])
    for row, length in enumerate(lengths):
        text[row, length : length + k] = draft.tokens[row]
    batch = Batch(jnp.asarray(text), jnp.asarray(np.roll(text, -1, axis=1)), jnp.ones(text.shape))
    predictions = predicted(trained, params, target, batch)
    for depth, prediction in enumerate(predictions if len(predictions) > 1 else predictions * k):
        rows = np.asarray(prediction.target_rows)
        here = np.arange(len(lengths)), np.argmax(rows == (lengths - 1 + depth)[:, None], axis=1)
        np.testing.assert_array_equal(rows[here], lengths - 1 + depth)
        alike(np.asarray(prediction.logits)[here], draft.logits[: len(lengths), depth])
        assert (np.asarray(prediction.weight)[here] == 1).all()


@pytest.mark.parametrize(
    "name", ["two_layers", "p_eagle", "medusa", "dflash_windows", *map(in_proof, ("published", "mtp", "dspark"))]
)
def test_documents_of_a_row_know_nothing_of_each_other(name):
    """What a document's tokens predict is what they do alone, and its first tokens, without features, do not count."""
    target = target_of()
    trained, params = made(name, target)
    trained = trained.unrolled(3)
    text = np.random.default_rng(0).integers(0, 61, (2, 24)).astype(np.int32)
    segments = jnp.asarray(np.repeat([[0, 1]], 2, 0).repeat(12, 1))
    positions = jnp.asarray(np.tile(np.arange(12), 2)[None].repeat(2, 0), jnp.int32)
    together = Batch(jnp.asarray(text), jnp.asarray(text), jnp.ones(text.shape), positions, segments)
    halves = jnp.asarray(text[:, :12]), jnp.asarray(text[:, 12:])
    alone = [Batch(half, half, jnp.ones((2, 12))) for half in halves]

    def by_row(batch: Batch) -> list[Any]:
        """Weights and logits by the target's row."""
        found, count = [], batch.tokens.shape[1]
        for prediction in predicted(trained, params, target, batch):
            rows = prediction.target_rows
            order = jnp.argsort(jnp.where(rows < count, rows, -1), axis=1)  # those beyond the end come first
            there = jnp.take_along_axis(rows, order, axis=1)
            weight = jnp.where(
                there == jnp.arange(count)[None], jnp.take_along_axis(prediction.weight, order, axis=1), 0
            )
            found.append((weight, jnp.take_along_axis(prediction.logits, order[..., None], axis=1)))
        return found

    both = by_row(together)
    for i, batch in enumerate(alone):
        for depth, (whole, part) in enumerate(zip(both, by_row(batch), strict=True)):
            at = slice(12 * i, 12 * i + 12)
            np.testing.assert_array_equal(whole[0][:, at], part[0])
            np.testing.assert_array_equal(part[0][0], np.arange(12) > depth)
            counts = np.asarray(part[0][0]) > 0
            alike(whole[1][:, at][:, counts], part[1][:, counts])
    assert len(both) == 3


@pytest.mark.parametrize(
    ("name", "controller"),
    [
        *(("published", "fixed"), ("dflash", "adaptive")),
        *(in_proof(name, "adaptive") for name in ("two_layers", "mtp", "dflash2")),
        *(in_proof(name, "fixed") for name in ("p_eagle", "medusa", "dspark")),
    ],
)
def test_a_cache_is_what_a_prompt_of_the_same_tokens_leaves(name, controller):
    """After rejections, growth, blocks without a draft, and rows of different lengths."""
    target = target_of(max_positions=512)
    trained, params = made(name, target)
    decoder = Decoder(target, trained.to_drafter(params, target, 3), "block", controller)
    engine, params = decoder.engine(greedy=False, rows=4)
    options = {"temperature": 1.0}
    scheduler = Scheduler(engine, params, 4)
    scheduler.insert(prepare(target, 3, PROMPTS, 300, 0, True, options))
    for _ in range(3):
        scheduler.chunk(max_steps=40)
    state, lengths = scheduler.state, scheduler.lengths
    texts = [np.asarray(state.tokens)[row, :length].tolist() for row, length in enumerate(lengths)]
    fresh = decoder.prefilled(texts, max_new_tokens=8, temperature=1.0)
    for row, length in enumerate(lengths):
        assert length > len(PROMPTS[row]) + 40
        for (ours, axis), (theirs, _) in zip(*(kept(x.drafter) for x in (state, fresh)), strict=True):
            both = (np.asarray(x[row]) for x in (ours, theirs))
            alike(*(x if axis is None else np.take(x, np.arange(length - 2), axis=axis) for x in both))


@pytest.mark.parametrize("name", ["published", "medusa", "dflash"])
def test_a_depth_weighs_less_than_the_one_before(name):
    target = target_of()
    trained, params = made(name, target)
    text = jnp.ones((1, 12), jnp.int32)
    batch = Batch(text, text, jnp.ones(text.shape))
    shares = [float(prediction.share) for prediction in predicted(trained, params, target, batch)]
    ratio = math.exp(-1 / 4) if name == "dflash" else 0.8
    np.testing.assert_allclose(np.divide(shares[1:], shares[:-1]), ratio, rtol=1e-6)
    assert sum(shares) == pytest.approx(1)


def test_a_row_has_other_anchors_in_another_step():
    """And the same ones again where it is trained on again after a kill."""
    target = target_of()
    trained, params = made("dflash", target)
    trained = dataclasses.replace(trained, anchors=4, depths=1)
    rows = toys.Windows(np.random.default_rng(0).integers(0, 61, (3, 25)).astype(np.int32))

    def anchors(number: int) -> np.ndarray:
        batch = jax.tree.map(jnp.asarray, take(NumberedRows(rows, number), range(3)))
        return np.sort(predicted(trained, params, target, batch)[0].target_rows, axis=1)

    first, second = anchors(1), anchors(2)
    assert (first != second).any(axis=1).all()
    np.testing.assert_array_equal(anchors(1), first)
    assert (np.diff(first, axis=1) > 0).all()
    assert first.min() > 0


def test_a_loss_compares_with_the_ids_that_can_be_proposed_and_alpha_with_all():
    """Also of one that takes the text's tokens for right: others are no mistakes."""
    target = target_of()
    trained, params = made("fewer_ids", target)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 12)), jnp.int32)
    batch = Batch(text, jnp.roll(text, -1, axis=1), jnp.ones(text.shape))
    out = target_output(target.spec, target.params, batch, trained.reads)
    prediction = next(iter(trained.predictions(params, batch, out)))
    matched = Matching.of(prediction, Teacher.of(target.spec, target.params, out), batch.labels).whole
    teacher: Any = matched.teacher
    p, q = (np.asarray(jax.nn.softmax(x)) for x in (teacher.logits, matched.draft_logits))
    ids = np.asarray(FEWER.ids)
    assert q[..., ids].sum(-1) == pytest.approx(1, abs=1e-6)
    alpha = alpha_per_position(teacher.logits, matched.draft_logits)
    np.testing.assert_allclose(alpha, np.minimum(p, q).sum(-1), rtol=1e-5)
    among = matched.over_draft_vocabulary(labels=True)
    p = p[..., ids] / p[..., ids].sum(-1, keepdims=True)
    kl = (p * np.log(p / q[..., ids])).sum(-1)
    np.testing.assert_allclose(ForwardKL()(among.draft_logits, among.teacher, among.tokens), kl, rtol=1e-4)
    np.testing.assert_array_equal(among.weight > 0, (np.asarray(prediction.weight) > 0) & np.isin(batch.labels, ids))
    np.testing.assert_array_equal(matched.over_draft_vocabulary(labels=False).weight, prediction.weight)


@pytest.mark.parametrize("loss", ["forward_kl", "lk_lambda", "cross_entropy", "reverse_kl"])
def test_a_loss_over_the_draft_vocabulary_alone_is_that_over_all_ids(loss, monkeypatch):
    """So are its gradients, and alpha, which counts all ids. The logsumexp may be cached or not."""
    target = target_of()
    trained, params = made("fewer_ids", target)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 12)), jnp.int32)
    batch = Batch(text, jnp.roll(text, -1, axis=1), jnp.ones(text.shape))

    def measured(batch: Batch, narrow: bool = True):
        update = Update(trained, registry.build(registry.LOSSES, loss, ""), optax.identity(), target.spec, rows=2)
        given = step._Given(target.params, {}, jnp.float32(0.3))
        with monkeypatch.context() as patch:
            if not narrow:
                patch.setattr(FeatureModel, "narrow", lambda self, params: None)
            return jax.value_and_grad(update.summed_loss, has_aux=True)(params, given, batch)

    (want, (weight, sums)), gradient = measured(batch, narrow=False)
    out = target_output(target.spec, target.params, batch, trained.reads)
    logsumexp = Teacher.of(target.spec, target.params, out).logsumexp(None)
    np.testing.assert_allclose(logsumexp, jax.nn.logsumexp(out.logits, axis=-1), rtol=1e-6)
    cached = dataclasses.replace(batch, streams=(*out.hidden, out.final), logsumexp=logsumexp)
    for some in (batch, cached):
        (found, (counted, of_narrow)), narrow_gradient = measured(some)
        np.testing.assert_allclose(found, want, rtol=1e-5)
        np.testing.assert_allclose(counted, weight)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), of_narrow, sums)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), narrow_gradient, gradient)


OTHER = {"kind": "adaspec", "reference": "other", "keep": 0.5, "of": "cross_entropy"}
SUMS = {
    "kl": ["forward_kl", "cross_entropy"],
    "nested": [{"kind": "sum", "of": ["cross_entropy", {"kind": "lk_lambda", "weight": 0.3}]}, "cross_entropy"],
    "chosen": ["total_variation", OTHER],
    "labels": ["cross_entropy", "cross_entropy"],
}


@pytest.mark.parametrize("of", SUMS.values(), ids=SUMS)
def test_each_part_of_a_sum_counts_where_it_counts_alone(of):
    """Of a draft of fewer ids: cross-entropy says nothing of a token that the draft cannot propose, others do."""
    target, reference = target_of(), transformer(1)
    trained, params = made("fewer_ids", target)
    trained = trained.unrolled(1)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 61, (2, 12))
    text = jnp.asarray(np.where(rng.random(text.shape) < 0.5, FEWER.ids[text % 8], text), jnp.int32)
    batch = Batch(text, jnp.roll(text, -1, axis=1), jnp.ones(text.shape))
    given = step._Given(target.params, {"other": reference.params}, jnp.float32(0.4))

    def summed(spec: Any) -> tuple[float, float]:
        loss = registry.build(registry.LOSSES, spec, "loss")
        references = {"other": TrainedDraftModel(reference.spec)}
        update = Update(trained, loss, optax.identity(), target.spec, rows=2, references=references)
        total, (weight, _) = jax.jit(update.summed_loss)(params, given, batch)
        return float(total), float(weight)

    total, weight = summed({"kind": "sum", "of": of})
    alone = [summed(part) for part in of]
    assert total == pytest.approx(sum(part for part, _ in alone), rel=1e-5)
    assert weight == max(counted for _, counted in alone)
    every, labels = summed("forward_kl")[1], summed("cross_entropy")[1]
    assert 0 < labels < every
    assert weight == (labels if of == SUMS["labels"] else every)


def kept(state: Any) -> Sequence[tuple[Any, int | None]]:
    """The arrays of a drafter's state, each with the axis of its slots."""
    cache = state if isinstance(state, KVCache) else getattr(state, "cache", None)
    others = [] if isinstance(state, KVCache) else [(getattr(state, "features", state), None)]
    layers = () if cache is None else cache.layers
    return others + [part for layer in layers for part in ((layer.keys, 1), (layer.values, 2))]


@pytest.mark.parametrize(
    "name",
    ["published", "dflash", *map(in_proof, ("early_exit", "mtp", "p_eagle", "medusa", "dflash2", "dspark"))],
)
def test_greedy_output_is_the_targets(name):
    """Of rows that grow, and of rows that end inside a block while others go on."""
    target = target_of()
    trained, params = made(name, target)
    drafter = trained.to_drafter(params, target, 3)
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens
    assert Decoder(target, drafter, "block").generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens == plain
    ending = dataclasses.replace(target, eos_ids=(plain[0][29], plain[2][14]))
    found = Decoder(ending, drafter, "block").generate(PROMPTS, max_new_tokens=100, temperature=0.0)
    assert found.tokens == Decoder(ending).generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens
    assert len({len(row) for row in found.tokens}) > 1


@pytest.mark.parametrize(
    "name",
    ["fewer_ids", *map(in_proof, ("medusa_own_heads", "mtp", "p_eagle", "early_exit", "dflash2"))],
)
def test_a_draft_in_8_bits_is_nearly_the_draft(name, tmp_path):
    target = target_of()
    trained, params = made(name, target)
    stored.save(trained, params, target, tmp_path)
    few = specjax.load_drafter(tmp_path, target, 3, trained.kind, quantize="int8")
    assert are_quantised(few.model.params)
    decoders = [Decoder(target, drafter) for drafter in (specjax.load_drafter(tmp_path, target, 3, trained.kind), few)]
    whole, rounded = (np.asarray(drafted(decoder, PROMPTS).logits[:, 0]) for decoder in decoders)
    can_be = np.minimum(whole, rounded) > NEVER / 2
    off = np.abs(whole - rounded)[can_be].max() / whole[can_be].std()
    assert 0 < off < 0.2
    plain, sped = (
        Decoder(target, drafter).generate(PROMPTS, max_new_tokens=30, temperature=0.0).tokens for drafter in (None, few)
    )
    assert plain == sped
    with pytest.raises(ModelError, match="save: needs the model's weights as they are stored"):
        formats.save(few.model, trained.kind, tmp_path / "again", target="it")


@pytest.mark.parametrize("name", ["dspark_confident", in_proof("dspark_confident_gated")])
def test_a_row_stops_before_a_token_that_its_head_is_not_sure_of(name):
    """As the training forward says it of the tokens drawn before, and of nothing behind."""
    target, k = target_of(), DEPTHS
    trained, params = made(name, target)
    drafter = trained.to_drafter(params, target, k)
    prompts = np.random.default_rng(0).integers(0, 61, (8, 12))

    def block(controller: Any) -> Any:
        return drafted(Decoder(target, drafter, "speculative", controller), prompts.tolist())

    whole = block("fixed")
    text = np.concatenate([prompts, np.asarray(whole.tokens)], axis=1).astype(np.int32)
    batch = Batch(jnp.asarray(text), jnp.asarray(np.roll(text, -1, axis=1)), jnp.ones(text.shape))
    out = target_output(target.spec, target.params, batch, trained.reads)
    sure = np.stack(
        [
            jax.nn.sigmoid(p.confidence(p.hidden))[np.arange(8), np.argmax(p.target_rows == 11 + depth, axis=1)]
            for depth, p in enumerate(trained.predictions(params, batch, out))
        ],
        axis=1,
    )
    threshold = float(np.median(sure))
    found = block(Confidence(threshold, by="head", ks=(0, k)))
    valid = np.cumprod(sure >= threshold, axis=1) > 0
    np.testing.assert_array_equal(found.valid, valid)
    assert 0 < valid.sum() < valid.size
    np.testing.assert_array_equal(np.where(valid, found.tokens, 0), np.where(valid, whole.tokens, 0))


def test_a_draft_without_such_a_head_cannot_be_asked():
    target = target_of()
    trained, params = made("dspark", target)
    decoder = Decoder(target, trained.to_drafter(params, target, 3), "block", Confidence(by="head"))
    with pytest.raises(ConfigError, match="confidence by head, and this draft has no confidence head; judge it by max"):
        decoder.generate(PROMPTS, max_new_tokens=4)


def test_confidence_is_taught_what_the_distributions_share():
    """And a loss is told of all ids of a draft that draws from some."""
    target = target_of()
    for name in ("dspark_confident", "dflash2"):
        trained, params = made(name, target)
        text = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 12)), jnp.int32)
        batch = Batch(text, jnp.roll(text, -1, axis=1), jnp.ones(text.shape))
        out = target_output(target.spec, target.params, batch, trained.reads)
        update = Update(trained, ForwardKL(), optax.identity(), target.spec, rows=2)
        given = step._Given(target.params, {}, jnp.float32(0))
        total, (weight, metrics) = update.summed_loss(params, given, batch)
        expected, counted = 0.0, 0.0
        for prediction in trained.predictions(params, batch, out):
            matched = Matching.of(prediction, Teacher.of(target.spec, target.params, out), batch.labels).whole
            among = matched.over_draft_vocabulary(labels=False)
            value = ForwardKL()(among.draft_logits, among.teacher, among.tokens)
            teacher: Any = matched.teacher
            alpha = alpha_per_position(teacher.logits, matched.draft_logits)
            if matched.confidence is not None:
                value += optax.sigmoid_binary_cross_entropy(matched.confidence, alpha)
            else:
                assert (np.asarray(among.draft_logits) > NEVER / 2).all()
                assert ((np.asarray(matched.draft_logits) > NEVER / 2).sum(-1) == SELECTOR["candidates"]).all()
            expected += prediction.share * float(jnp.sum(value * prediction.weight))
            counted += prediction.share * float(jnp.sum(prediction.weight))
        assert float(total) == pytest.approx(expected, rel=1e-5)
        assert float(weight) == pytest.approx(counted, rel=1e-6)
        assert ("confidence_error" in metrics) == (name == "dspark_confident")


@pytest.mark.more
@pytest.mark.parametrize("name", ["dspark", "early_exit"])
def test_over_four_devices_it_proposes_the_same(name, tmp_path):
    save_model(dataclasses.replace(target_of(), eos_ids=(0,)), tmp_path / "target")
    found = []
    for mesh in (None, jax.make_mesh((2, 2), ("data", "tensor"))):
        target = load_model(tmp_path / "target", mesh=mesh)
        trained, params = made(name, target)
        decoder = Decoder(target, trained.to_drafter(params, target, 3))
        found.append(decoder.generate(PROMPTS, max_new_tokens=20, temperature=1.0, seed=0))
    one, many = found
    assert one.tokens == many.tokens
    assert [s.blocks for s in one.stats] == [s.blocks for s in many.stats]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        # One of each way to propose: in a chain, independently, in sequence, among candidates, until a head ends it.
        *(("fewer_ids", Speculative()), ("medusa", Coupled()), ("dspark_fewer_ids", Coupled())),
        *(("dflash2", Speculative()), ("dspark_confident", Block()), ("early_exit", Block())),
    ],
    ids=str,
)
def test_it_is_certified(name, rule):
    """Every kind under every rule: experiments/certify_drafters.py."""
    target = target_of()
    trained, params = made(name, target)
    by_head = {"kind": "confidence", "by": "head", "threshold": 0.5}
    controller = by_head if name == "dspark_confident" else "fixed"
    settings = config.Certify(new_tokens=32, batch_size=64, total_variation=0.04, controller=controller)
    prompts, sampling = [[1, 2, 3, 4], [7, 7, 30, 5], [12, 9, 9, 1], [39, 0, 21, 20]], {"top_k": 20}
    certificate = certify(Subject(target, trained.to_drafter(params, target, 3), rule, prompts, sampling, settings))
    assert [check.name for check in certificate.checks if not check.passed] == []


STARTS = {
    "eagle3": ({}, (2, 4, 6)),
    "eagle3_3.1": ({"fc_norm": True, "norm_output": True, "layers": 2}, (2, 4, 6)),
    "eagle3_fewer_ids": ({"draft_vocab_size": 20}, (2, 4, 6)),
    "dflash_fewer_ids": ({"draft_vocab_size": 20, "layers": 1}, (2, 4, 6)),
    "eagle3_more_heads": ({"num_kv_heads": 4}, (2, 4, 6)),
    "eagle3_normed": ({"norm_before_fc": True, "reads": (1, 2)}, (1, 2)),
    "mtp": ({"state": "post"}, (6,)),
    "p_eagle": ({"mask_token": 7}, (2, 4, 6)),
    "medusa": ({"heads": 3}, (6,)),
    "medusa_own_heads": ({"blocks": 2, "own_heads": True}, (6,)),
    "early_exit": ({"adapter": 16}, (2,)),
    "dflash": ({"block_size": 4}, (2, 4, 6)),
    "dflash_normed": ({"block_size": 4, "qk_norm": True, "layers": 9}, (2, 4, 6)),
    "dflash2": ({"block_size": 3, "selector_rank": 4, "selector_top_k": 5}, (2, 4, 6)),
    "dspark": ({"markov_rank": 4, "markov_head_type": "rnn", "layers": 1}, (2, 4, 6)),
}


@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        *(("mtp", "rms"), ("eagle3", "layer"), in_proof("mtp", "layer"), in_proof("eagle3", "rms")),
        *(in_proof("p_eagle", norm) for norm in ("rms", "layer")),
    ],
)
def test_it_begins_as_the_best_linear_guess(kind, norm):
    """From token and streams, as far as the rank of two heads allows where the token is not in the residual. The
    error of the best one, found another way, is met, and that of a fresh draft is far off."""
    target = target_of(num_layers=6, norm=Norm(kind=norm))
    run = config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=8), config.Draft(kind=kind))
    text = np.random.default_rng(0).integers(0, 61, (512, 25)).astype(np.int32)
    rows = toys.Windows(text)
    batch = jax.tree.map(jnp.asarray, take(rows, range(512)))
    fresh = dataclasses.replace(run, draft=dataclasses.replace(run.draft, init="scratch"))
    errors = []
    for begun in (run, fresh):
        initial = initial_draft(begun, target, rows)
        drafter: Any = initial.drafter
        out = target_output(target.spec, target.params, batch, drafter.reads)
        found = next(iter(drafter.predictions(drafter.complete(initial.params, target.params), batch, out))).hidden
        errors.append(error(np.asarray(found)[:, 1:], np.asarray(out.final)[:, 1:]))
    unit = least_squares.unit
    token, streams = unit(target.params["embedding"][batch.tokens])[:, 1:], [x[:, :-1] for x in out.hidden]
    streams = [unit(x) for x in streams] if kind == "mtp" else streams
    x = np.concatenate([token, *streams], axis=-1)
    goal = unit(jnp.asarray(np.asarray(out.final) / np.asarray(target.params["norm"]["scale"])))[:, 1:]
    size = x.shape[-1]
    best = np.linalg.lstsq(x.reshape(-1, size), np.asarray(goal).reshape(-1, goal.shape[-1]), rcond=1e-4)[0]
    least = error(x @ best, np.asarray(goal))
    assert errors[0] - least < (0.2 if kind == "mtp" else 0.4) * (errors[1] - least)
    assert errors[1] > 1.25 * least


def test_the_guess_from_kept_streams_is_that_from_passes(tmp_path, monkeypatch):
    """The same numbers, from the rows that are kept, and from nothing else; but not from fewer than a sample has."""
    target = target_of(num_layers=6)
    run = config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=8), config.Draft(kind="eagle3"))
    text = np.random.default_rng(0).integers(0, 61, (64, 25)).astype(np.int32)
    rows, asked = toys.Windows(text), []
    monkeypatch.setattr(least_squares, "TOKENS_AN_INPUT", 5)

    def kept(reads: Reads) -> tuple[Any, np.ndarray]:
        asked.append(reads)
        numbers = np.arange(0, len(rows), 2)
        found = TeacherCache(target, rows, numbers, Streams(reads, "float32"), 4).at(tmp_path)
        return found, numbers

    from_kept = initial_draft(run, target, StartRows(rows, list, kept)).params
    assert [reads.hidden_layers for reads in asked] == [(2, 4, 6)]
    monkeypatch.setattr(least_squares, "TOKENS_AN_INPUT", 32)
    from_passes = initial_draft(run, target, toys.Windows(text[::2])).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), from_kept, from_passes)
    of_all, of_fewer = (initial_draft(run, target, each).params for each in (rows, StartRows(rows, list, kept)))
    assert fingerprint.digest(of_all) == fingerprint.digest(of_fewer) != fingerprint.digest(from_kept)


def test_streams_of_rounded_products_are_kept_apart(tmp_path):
    target = target_of(num_layers=6)
    rows, reads = toys.Windows(np.random.default_rng(0).integers(0, 61, (8, 25)).astype(np.int32)), Reads((2, 4, 6))
    records = {}
    for dtype in (None, "bfloat16"):
        kept = Streams(reads, "float32", dtype)
        found = TeacherCache(target, rows, np.arange(8), kept, 4).at(tmp_path / str(dtype))
        records[dtype] = np.stack([np.stack(found[i].streams) for i in range(8)])
        assert ("matmul_dtype" in kept.made_from(target)) == (dtype is not None)
    size = np.linalg.norm(records[None])
    assert 1e-4 * size < np.linalg.norm(records["bfloat16"] - records[None]) < 0.2 * size


def test_a_low_rank_kernel_errs_least_over_the_inputs_that_come():
    """The optimum, found by gradient descent from elsewhere, is no better; singular vectors of the kernel alone are
    worse."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 12)) @ np.diag(np.geomspace(3, 0.1, 12)) @ rng.normal(size=(12, 12))
    kernel, rank = rng.normal(size=(12, 12)), 4

    def cost(a: Any, b: Any) -> Any:
        return jnp.mean(jnp.square(x @ (a @ b - kernel)))

    left, strength, right = least_squares.low_rank(kernel, x.T @ x / len(x))
    assert np.allclose((left * strength) @ right, kernel, atol=1e-6)
    found = float(cost(left[:, :rank] * strength[:rank], right[:rank]))
    u, s, v = np.linalg.svd(kernel)
    plain = float(cost(u[:, :rank] * s[:rank], v[:rank]))
    # Alternating least squares, from the plain one.
    a, b = u[:, :rank] * s[:rank], v[:rank]
    for _ in range(300):
        b = np.linalg.lstsq(x @ a, x @ kernel, rcond=None)[0]
        a = kernel @ np.linalg.pinv(b)
    assert found <= 1.02 * float(cost(a, b))
    assert found < 0.9 * plain


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of directions: 0 to 2."""
    found, expected = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (found, expected))
    return float(1 - np.mean(np.sum(found * expected, axis=-1)))


@pytest.mark.parametrize("name", STARTS)
def test_one_begins_with_what_its_target_has_and_comes_back_from_disk(name, tmp_path):
    target, (fields, reads) = target_of(num_layers=6), STARTS[name]
    kind = name if name in registry.DRAFTS else name.partition("_")[0]
    run = config.RunConfig(
        config.Target(path="x"), config.Data(path="x", seq_len=8), config.Draft(kind=kind, settings=fields)
    )
    # Of the first row's tokens each comes three times, of the others' once.
    text = np.concatenate([np.tile(np.arange(40, 49), (3, 1)), np.arange(9)[None]]).astype(np.int32)
    initial = initial_draft(run, target, toys.Windows(text))
    drafter: Any = initial.drafter
    assert drafter.model.reads == reads
    assert not {"embedding", "head"} & initial.params.keys()
    whole = drafter.complete(initial.params, target.params)
    ids = np.arange(61)
    if "draft_vocab_size" in fields:
        ids = drafter.model.vocabulary.ids
        assert set(ids) == {*range(41, 49), *range(12)}
    heads = [whole["head"]] if "head" in whole else [head["head"] for head in whole["heads"].values()]
    for own in heads:
        np.testing.assert_array_equal(own["kernel"], target.params["embedding"].T[:, ids])
    if kind in ("dflash", "dflash2", "dspark"):
        deepest = whole["layers"][len(whole["layers"]) - 1]
        own, last = (layer["mlp"]["up_proj"]["kernel"] for layer in (deepest, target.params["layers"][5]))
        np.testing.assert_array_equal(own, last)
    stored.save(drafter, whole, target, tmp_path / "draft")
    found: Any = specjax.load_drafter(tmp_path / "draft", target, k=3)
    assert found.model.spec == drafter.model
    assert ("head" in found.model.params) == ("draft_vocab_size" in fields)
    assert "embedding" not in found.model.params
    jax.tree.map(np.testing.assert_array_equal, {**found.model.params, **whole}, whole)
    assert {*found.model.params} - {"head"} == initial.params.keys()
    other = LoadedModel(dataclasses.replace(target.spec, config=dataclasses.replace(target.config, num_layers=1)), {})
    last = rf"the last stream of a target of {reads[-1]} layers, and this one has 1;"
    said = last if kind in ("mtp", "medusa") else rf"stream {reads[-1]}, and the target has 0 \.\. 1"
    with pytest.raises(ModelError, match=rf"{kind}: reads {said}"):
        found.bind(other)


def test_ids_are_counted_as_much_as_their_prediction_counts():
    """Of a chat the answers, and prompts by their weight; of parts of what is trained on, each by its share."""
    stream = np.asarray([1, 5, 5, 5, 9, 8, 5, 5, 7], np.int32)
    prompt = np.isin(stream, [1, 5])

    def rows(weight: float) -> ConcatenatedRows:
        return ConcatenatedRows(stream, np.asarray([0]), 8, prompt, weight)

    assert set(most_frequent(rows(0.15), 3, 12).ids) == {7, 8, 9}
    assert set(most_frequent(rows(0.25), 1, 12).ids) == {5}
    assert coverage(DraftVocabulary([5], 12), rows(0.25)) == pytest.approx(5 * 0.25 / (5 * 0.25 + 3))
    others = toys.Windows(np.full((3, 5), 2, np.int32))
    for share, ids in ((0.1, {7, 8, 9}), (0.3, {2, 7, 8})):
        parts = StartRows(rows(0.15), lambda share=share: [(rows(0.15), 1 - share), (others, share)])
        assert set(most_frequent(parts, 3, 12).ids) == ids
        assert coverage(DraftVocabulary([2], 12), parts) == pytest.approx(4 * share / (4 * share + (1 - share) * 3.75))


SCALED = {"logit_multiplier": 0.25, "logit_soft_cap": 3.0}
ODD_ROPES = {
    "none": LayerKind(rope=None),
    "half": LayerKind(Rope(partial=0.5)),
    "pairs": LayerKind(Rope(interleaved=True)),
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("eagle3", "none"),
        ("dflash", "half"),
        ("early_exit", "pairs"),
        in_proof("mtp", "half"),
        in_proof("medusa", "pairs"),
    ],
)
def test_logits_are_made_as_the_targets_whatever_its_layers_are_like(kind, rope, tmp_path):
    """Scaled and capped; layers of a draft are Llama's, whose rotary embedding turns all of a head."""
    target = target_of(layers=(ODD_ROPES[rope],), **SCALED)
    run = config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=8), config.Draft(kind=kind))
    initial = initial_draft(run, target, toys.Windows(np.arange(90).reshape(10, 9).astype(np.int32) % 61))
    drafter: Any = initial.drafter
    whole = drafter.complete(initial.params, target.params)
    final = jax.random.normal(jax.random.key(0), (1, 3, target.config.hidden_size))
    model = drafter.model
    said = model.logits(whole, 0, final) if kind == "medusa" else model.head(whole, final)
    if kind == "dflash":
        said = model.unary(model.module(whole), final)
    np.testing.assert_allclose(said, target.spec.head(target.params, final), rtol=1e-5, atol=1e-6)
    stored.save(drafter, whole, target, tmp_path / "draft")
    found: Any = specjax.load_drafter(tmp_path / "draft", target, k=2)
    assert found.model.spec == model
    assert "Only specjax" in stored.serving(drafter) or kind in ("medusa", "early_exit")
    plain = Decoder(target).generate([[1, 2, 3]], max_new_tokens=8).tokens
    assert Decoder(target, found).generate([[1, 2, 3]], max_new_tokens=8).tokens == plain
