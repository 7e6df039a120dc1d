"""What is not finite fails closed: never accepted, never emitted, counted and told; other rows go on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend, sampling
from specjax.config import Certify
from specjax.decode import engine
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import ModelError
from specjax.evaluation.bench import Bench, Cell
from specjax.evaluation.certify import Subject, certify
from specjax.interfaces import CoupledNoise, Draft, Noise
from specjax.proposal import Proposal
from specjax.testing.toys import ToyModel, neutral_sampling, prefix_model, related
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.greedy import Greedy
from specjax.verifiers.lenient import Lenient
from specjax.verifiers.speculative import Speculative
from specjax.verifiers.top_k import TopK
from specjax.verifiers.typical import Typical
from tests.cases import transformer

SIZE = 6
TARGET = prefix_model(0, vocab_size=SIZE)
PROMPTS = [[1, 2, 1], [5], [1, 2, 3, 4, 1, 2]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}


def broken(model: ToyModel, value: float, slot: int = 0) -> ToyModel:
    """Its logits hold ``value`` from a prefix of slot + 1 tokens on."""
    table = model.params["table"].at[slot, :, 2].set(value)
    return ToyModel(model.spec, {**model.params, "table": table})


DRAFTS = {
    "nan": broken(TARGET, np.nan),
    "infinite": broken(TARGET, np.inf),
    "nan from the fifth token on": broken(TARGET, np.nan, slot=4),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
def test_a_draft_that_is_not_finite_gives_plain_decoding_and_is_counted(verifier, temperature):
    options = {**OPTIONS, "temperature": temperature, "banned_tokens": [0], "top_k": 4}
    plain = Decoder(TARGET, None, verifier).generate(PROMPTS, **options)
    for name in ("nan", "infinite"):
        found = Decoder(TARGET, DraftModel(DRAFTS[name], 3), verifier).generate(PROMPTS, **options)
        assert found.tokens == plain.tokens
        for stats in found.stats:
            assert (stats.accepted, stats.drafted, stats.invalid_drafts) == (0, 0, stats.blocks)
    # Only from where a row meets it; what was proposed before that is kept.
    late = Decoder(TARGET, DraftModel(DRAFTS["nan from the fifth token on"], 3), verifier).generate(PROMPTS, **options)
    assert late.stats[2].invalid_drafts == late.stats[2].blocks
    assert late.stats[2].accepted == 0 < late.stats[0].accepted
    assert 0 < late.stats[1].invalid_drafts < late.stats[1].blocks
    assert late.finish_reasons == ["length"] * 3


def test_a_row_of_nan_in_a_mixed_batch_is_no_greedy_row():
    """Temperature 0 beside another temperature becomes a one-hot, which must not hide what it was made of."""
    logits = jnp.asarray([[[0.0, jnp.nan, 1.0]], [[0.0, 2.0, 1.0]], [[jnp.inf, 0.0, 1.0]]])
    parameters = neutral_sampling(3, 3, temperature=np.asarray([0.0, 0.0, 1.0]), top_k=np.asarray([0, 2, 2]))
    assert sampling.has_distribution(sampling.warp(logits, parameters)).tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("shape", [(4, 5, 300), (1, 5, 2000), (1, 1, 32_000)], ids=str)
@pytest.mark.parametrize("decoding", [False, True])
def test_one_logit_that_is_not_finite_is_found_at_every_size(shape, decoding):
    """XLA's maximum on CPU loses a NaN in all but small reductions."""
    logits = np.random.default_rng(0).normal(size=(5, *shape)).astype(np.float32)
    for case, value in zip(logits, (np.nan, -np.nan, np.inf, -np.inf), strict=False):
        case[0, 0, shape[2] // 3] = value
    logits[4, 0, 0] = -np.inf  # all of them
    has_distribution = jax.jit(sampling.has_distribution, compiler_options=backend.compiler_options(decoding=decoding))
    found = np.stack([has_distribution(case) for case in logits])
    want = np.ones_like(found)
    want[[0, 1, 2, 4], 0, 0] = False
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("verifier", ["typical", "block"])
@pytest.mark.parametrize("wrong", ["draft", "target"])
def test_a_column_of_nan_in_a_head_of_many_ids_is_found(verifier, wrong):
    """Typical acceptance kept every token that such a draft proposed; such a target gave its last id for ever."""
    shape = {"vocab_size": 2000, "tie_embeddings": False}
    models = {name: transformer(seed, **shape) for seed, name in enumerate(("target", "draft"))}
    params = models[wrong].params
    models[wrong].params = {**params, "head": {"kernel": params["head"]["kernel"].at[:, 7].set(jnp.nan)}}
    decoder = Decoder(models["target"], DraftModel(models["draft"], 3), verifier)
    found = decoder.generate([[1, 2, 3]], temperature=1.0, **SHORT)
    if wrong == "target":
        assert (found.tokens, found.finish_reasons) == ([[]], ["invalid_logits"])
    else:
        assert (found.stats[0].accepted, found.stats[0].invalid_drafts) == (0, found.stats[0].blocks)


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_a_token_that_overflows_ends_only_rows_that_hold_it(drafter):
    """Drafted and rejected, or padding beside a prompt, it is masked; and 0 times NaN must not be NaN there."""
    target, draft = (transformer(seed, vocab_size=8, tie_embeddings=False) for seed in (0, 1))
    embedding = target.params["embedding"].at[0].set(jnp.nan)  # padding's id
    target.params = {**target.params, "embedding": embedding}
    known = DraftModel(draft, 3) if drafter == "draft" else NGram(3, min_n=1)
    prompts = [[1, 2, 1], [3, 4, 3, 4, 3], [5] * 16] * 4
    options = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 2.0}
    found, plain = (Decoder(target, d, "coupled").generate(prompts, **options) for d in (known, None))
    assert (found.tokens, found.finish_reasons) == (plain.tokens, plain.finish_reasons)
    for row, reason in zip(found.tokens, found.finish_reasons, strict=True):
        assert 0 not in row[:-1]
        assert reason == ("invalid_logits" if len(row) < 12 else "length")
    assert {len(row) for row in found.tokens} > {12}
    logits = np.asarray(target.logits([[1, 2, 0, 3]]))[0]
    assert np.isfinite(logits[:2]).all(), "what comes later is not seen"
    assert np.isnan(logits[2:]).all(axis=1).all()


def test_a_draft_that_the_parameters_leave_nothing_of_is_cut_and_not_called_broken():
    """It has no such token as the only one allowed, say; at the second position. In the second row it overflowed."""
    logits = jnp.zeros((2, 3, 4)).at[:, 1].set(-jnp.inf)
    sound = jnp.ones((2, 3), bool)
    draft = Draft(jnp.zeros((2, 3), jnp.int32), sound, logits, finite=sound)
    overflowed = dataclasses.replace(draft, finite=sound.at[1, 1].set(False))
    unsaid = dataclasses.replace(draft, finite=None)
    block = Proposal(jnp.zeros(2, jnp.int32), draft.tokens, jnp.zeros(2, jnp.int32), max_depth=3)
    for given, failed in ((draft, [False, False]), (overflowed, [False, True]), (unsaid, [True, True])):
        cut, finite = engine.cut_invalid(block, given, jnp.zeros((2, 4, 4)))
        assert cut.valid.tolist() == [[True, False, False]] * 2
        assert finite.drafter_failed.tolist() == failed


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=lambda c: next(iter(c)))
def test_a_cut_does_not_hide_a_nan(cut):
    logits = jnp.asarray([[[5.0, jnp.nan, 4.0, 3.0, 0.0]]])
    parameters = neutral_sampling(1, 5, **{name: np.asarray([value]) for name, value in cut.items()})
    assert not bool(sampling.has_distribution(sampling.warp(logits, parameters)).any())


RULES = [Speculative(), Block(), Lenient(), TopK(2), Typical(), Greedy(), Coupled()]


@pytest.mark.parametrize(
    ("rule", "where"),
    [
        *((rule, where) for rule in RULES for where in ("target", "both")),
        *((rule, "draft") for rule in RULES[:3]),  # the others do not look at the draft's distribution
    ],
    ids=lambda x: getattr(x, "kind", x),
)
def test_no_rule_keeps_a_token_of_a_distribution_that_is_not_finite(rule, where):
    """Even where the proposal was not cut before it got here; whatever the noise, and for every position."""
    rows, k, size = 64, 3, 4
    rng = np.random.default_rng(0)
    nan = np.full((rows, k, size), np.nan, np.float32)
    p = rng.normal(size=(rows, k + 1, size)).astype(np.float32)
    q = rng.normal(size=(rows, k, size)).astype(np.float32)
    if where != "draft":
        p[:, :k] = nan
    if where != "target":
        q = nan
    draft = Draft(jnp.full((rows, k), size - 1), jnp.ones((rows, k), bool), jnp.asarray(q))
    words = jnp.asarray(rng.integers(0, 2**32, (rows, k, 2), np.uint32))
    noise: Any = Noise(words, jnp.asarray(rng.random((rows, k)) ** 8, jnp.float32), words[:, 0])
    if rule.noise == "coupled":
        noise = CoupledNoise(jnp.asarray(rng.gumbel(size=(rows, k + 1, size)), jnp.float32))
    verdict = jax.jit(rule.__call__)(draft, jnp.asarray(p), noise)
    assert int(jnp.max(verdict.num_accepted)) == 0


@pytest.mark.parametrize("drafter", [None, DraftModel(related(TARGET, 1), 3)], ids=["plain", "draft"])
@pytest.mark.parametrize("temperature", [0.0, [0.0, 1.0, 1.0]], ids=["greedy", "mixed"])
def test_a_target_that_is_not_finite_ends_its_row_and_no_other(drafter, temperature):
    """The third row meets the seventh slot at once after its first token, the others after 4 and 6 of them."""
    target = broken(TARGET, np.nan, slot=6)
    whole = Decoder(TARGET, drafter).generate(PROMPTS, temperature=temperature, **OPTIONS)
    found = Decoder(target, drafter).generate(PROMPTS, temperature=temperature, **OPTIONS)
    assert found.finish_reasons == ["invalid_logits"] * 3
    assert [len(row) for row in found.tokens] == [7 - len(prompt) for prompt in PROMPTS]
    short = Decoder(target, drafter).generate([PROMPTS[0]], temperature=0.0, **SHORT)
    assert short.finish_reasons == ["length"], "what comes after the budget is not missed"
    if drafter is None:
        assert all(row == all_[: len(row)] for row, all_ in zip(found.tokens, whole.tokens, strict=True))
    events = list(Decoder(target, drafter).stream(PROMPTS[0], temperature=0.0, **OPTIONS))
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["invalid_logits"]


def test_finish_reasons_say_why_each_row_ended():
    decoder = Decoder(dataclasses.replace(TARGET, eos_ids=()), DraftModel(TARGET, 3))
    free = decoder.generate(PROMPTS, **OPTIONS)
    stop = free.tokens[1][4]
    found = decoder.generate(PROMPTS, stop_token_ids=[[], [stop], []], **OPTIONS)
    assert found.finish_reasons == ["length", "stop", "length"]
    # A stop token that is also the last one of its budget stopped the row.
    at = free.tokens[1].index(stop) + 1
    assert decoder.generate([PROMPTS[1]], max_new_tokens=at, stop_token_ids=[stop]).finish_reasons == ["stop"]


def test_bench_and_certify_refuse_such_a_draft_by_name():
    from specjax.config import Bench as BenchSettings

    settings = BenchSettings(prompts=2, prompt_tokens=4, new_tokens=6, ks=(2,), batch_sizes=(1,), repeats=1)
    drafters = {"distilled": lambda k: DraftModel(DRAFTS["nan"], k)}
    bench = Bench(TARGET, drafters, settings, PROMPTS[:2], PROMPTS[:2], Speculative(), {}, 0)
    with pytest.raises(ModelError, match=r"drafter 'distilled': its logits are NaN or infinite in 6 of 6 blocks"):
        bench.run([Cell("distilled", 2, 1, 1.0)], PROMPTS[:1])
    nan = broken(TARGET, np.nan, slot=6)
    bench = Bench(nan, drafters, settings, PROMPTS[:2], PROMPTS[:2], Speculative(), {}, 0)
    with pytest.raises(ModelError, match=r"target 'toy': its logits are NaN or infinite at new token 5 of prompt 0"):
        bench.run([Cell("autoregressive", 0, 1, 1.0)], PROMPTS[:1])
    with pytest.raises(ModelError, match="drafter 'draft_model': its logits are NaN"):
        certify(Subject(TARGET, DraftModel(DRAFTS["nan"], 2), Speculative(), PROMPTS[:1], {}, Certify(new_tokens=8), 0))
