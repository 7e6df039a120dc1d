"""The certificate passes what is exact, and fails planted mistakes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax.config import Certify
from specjax.decode import engine as engine_lib
from specjax.decode import programs
from specjax.drafters.draft_model import BoundDraftModel, DraftModel
from specjax.drafters.ngram import NGram
from specjax.evaluation import certify as certify_lib
from specjax.evaluation.certify import CELLS, Subject, certify, sample_size
from specjax.interfaces import Bound
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.testing.toys import prefix_model, related
from specjax.verifiers.block import Block
from specjax.verifiers.coupled import Coupled
from specjax.verifiers.speculative import Speculative
from specjax.verifiers.top_k import TopK
from tests.mutants.drafters import draft_cache_misses_the_last_accepted_token
from tests.mutants.engine import cache_advanced_over_a_rejected_draft

TARGET = prefix_model(0, vocab_size=40, scale=1.5)
DRAFT = related(TARGET, 1)
PROMPTS = [[1, 2, 3, 4], [7, 7, 30, 5], [12, 9, 9, 1], [39, 0, 21, 20]]
# A larger distance needs fewer tokens; the mistakes below are larger still.
SETTINGS = Certify(new_tokens=32, batch_size=64, total_variation=0.04)


@pytest.fixture(autouse=True)
def fresh_programs():
    yield
    programs.compiled_prefill.cache_clear()
    programs.compiled_chunk.cache_clear()


def verdict(drafter, verifier, settings=SETTINGS, **sampling):
    certificate = certify(Subject(TARGET, drafter, verifier, PROMPTS, sampling, settings))
    return certificate, {check.name: check.passed for check in certificate.checks}


@pytest.mark.parametrize(
    ("drafter", "verifier", "sampling"),
    [
        (DraftModel(DRAFT, 3), Speculative(), {"top_p": 0.9, "repetition_penalty": 1.2, "banned_tokens": [3]}),
        pytest.param(NGram(3, min_n=1), Block(), {"top_k": 12, "frequency_penalty": 0.2}, marks=pytest.mark.proof),
        pytest.param(DraftModel(DRAFT, 3), Coupled(), {"min_p": 0.02, "logit_bias": {4: 1.0}}, marks=pytest.mark.proof),
    ],
)
def test_what_is_exact_passes(drafter, verifier, sampling):
    certificate, checks = verdict(drafter, verifier, **sampling)
    assert certificate.verdict == "PASS"
    assert all(checks.values())
    assert ("coupled identity" in checks) is (verifier.kind == "coupled")
    assert certificate.checks[1].details["tokens"] >= sample_size(SETTINGS)
    assert json.loads(json.dumps(certificate.to_json()))["verdict"] == "PASS"
    assert "PASS" in certificate.to_markdown().splitlines()[0]


@pytest.mark.more
def test_a_controller_from_outside_is_certified_by_name():
    settings = dataclasses.replace(SETTINGS, controller={"kind": "specjax.testing.inhabitants:Changing", "sure": 0.9})
    certificate, checks = verdict(DraftModel(DRAFT, 3), Speculative(), settings)
    assert certificate.subject["controller"] == "toy_changing"
    assert all(checks.values())


class ResidualIsTarget(Speculative):
    def residual(self, p, q, weight):
        return p


@dataclasses.dataclass(frozen=True)
class ColdDraft(DraftModel):
    """Draws at the temperature, and reports the logits without it."""

    def bind(self, target):
        spec, params = super().bind(target)
        assert isinstance(spec, BoundDraftModel)
        return Bound(BoundColdDraft(spec.model, spec.k), params)


class BoundColdDraft(BoundDraftModel):
    def draft(self, params, target, state, context):
        draft, state = super().draft(params, target, state, context)
        if draft.logits is None:
            return draft, state
        return dataclasses.replace(draft, logits=draft.logits * context.sampling.temperature[:, None, None]), state


def low_pair() -> tuple[LoadedModel, LoadedModel]:
    """A target and a draft that share a part of its weights, in bfloat16; decided enough that a wrong slot shows."""
    spec = Model(ModelConfig(40, 32, 48, 1, 4, 2, 8, 256, tie_embeddings=False))
    own, other = (jax.jit(spec.init)(jax.random.key(seed)) for seed in (0, 1))
    own, other = (
        {**p, "embedding": 20 * p["embedding"], "head": {"kernel": 3 * p["head"]["kernel"]}} for p in (own, other)
    )
    mixed = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, own, other)
    low = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) for params in (own, mixed))
    target, draft = (LoadedModel(dataclasses.replace(spec, dtype="bfloat16"), params) for params in low)
    return target, draft


LOW_SETTINGS = Certify(new_tokens=16, batch_size=64, total_variation=0.06)


def low_subject(verifier, **sampling):
    target, draft = low_pair()
    return certify_lib.Subject(target, DraftModel(draft, 3), verifier, PROMPTS, sampling, LOW_SETTINGS, 0)


@pytest.mark.proof
def test_a_sound_pair_in_bfloat16_passes_with_its_drift():
    target, draft = low_pair()
    sampling = {"top_p": 0.9, "repetition_penalty": 1.2, "banned_tokens": [3]}
    certificate = certify(Subject(target, DraftModel(draft, 3), Speculative(), PROMPTS, sampling, LOW_SETTINGS))
    assert certificate.verdict == "PASS", certificate.to_markdown()
    assert certificate.subject["dtype"] == "bfloat16"
    assert [check.name for check in certificate.checks] == [
        *("logit drift", "greedy identity", "sampled distribution", "self acceptance")
    ]
    assert json.loads(json.dumps(certificate.to_json()))["checks"][0]["details"]["total_variation"] < 0.06


@pytest.mark.more
def test_a_wrong_residual_fails_in_bfloat16():
    assert certify_lib.sampled_distribution(low_subject(ResidualIsTarget())).passed is False


@pytest.mark.more
def test_a_cache_slot_too_far_fails_in_bfloat16(monkeypatch):
    cache_advanced_over_a_rejected_draft(monkeypatch)
    subject = low_subject(Speculative())
    check = certify_lib.greedy_identity(subject)
    assert check.passed is False
    assert max(d["margin"] for d in check.details["differences"]) > subject.allowed()


def test_choices_differ_only_beyond_twice_the_measured_drift():
    drift = certify_lib.Drift("bfloat16", blocks=0.05, whole=0.07, total_variation=0.002, choices=0.0)
    subject = low_subject(Speculative())
    subject.drift = drift
    assert subject.allowed() == pytest.approx(0.1)
    assert subject.allowed(temperature=0.5) == pytest.approx(0.2)
    assert certify_lib.logit_drift(drift, LOW_SETTINGS).passed
    assert not certify_lib.logit_drift(dataclasses.replace(drift, total_variation=0.07), LOW_SETTINGS).passed


def test_a_wrong_residual_fails():
    certificate, checks = verdict(DraftModel(DRAFT, 3), ResidualIsTarget())
    assert certificate.verdict == "FAIL"
    assert checks == {"greedy identity": True, "sampled distribution": False, "self acceptance": True}


@pytest.mark.more
def test_a_draft_that_reports_other_probabilities_fails():
    settings = dataclasses.replace(SETTINGS, temperature=0.6)
    certificate, checks = verdict(ColdDraft(DRAFT, 3), Speculative(), settings)
    assert certificate.verdict == "FAIL"
    assert checks["sampled distribution"] is False


@pytest.mark.more
def test_a_block_fed_one_position_late_fails(monkeypatch):
    def feed(target, params, cache, proposal, reads):
        late = int(proposal.slots.shape[1] > 1)  # the autoregressive loop stays right
        return target(params, proposal.tokens, proposal.positions + late, proposal.slots, cache)

    monkeypatch.setattr(engine_lib, "feed", feed)
    certificate, checks = verdict(DraftModel(DRAFT, 3), Speculative())
    assert certificate.verdict == "FAIL"
    assert checks["greedy identity"] is False
    worst = max(d["margin"] for d in certificate.checks[0].details["differences"])
    assert worst > SETTINGS.margin


@pytest.mark.more
def test_a_drafter_that_forgets_fails_self_acceptance_alone(monkeypatch):
    """The verifier repairs its output: only the acceptance tells."""

    draft_cache_misses_the_last_accepted_token(monkeypatch)
    certificate, checks = verdict(DraftModel(DRAFT, 3), Block())
    assert certificate.verdict == "FAIL"
    assert checks == {"greedy identity": True, "sampled distribution": True, "self acceptance": False}


@pytest.mark.more
def test_a_lossy_rule_gets_its_distance():
    certificate, checks = verdict(DraftModel(DRAFT, 3), TopK(k=3))
    assert certificate.verdict == "LOSSY"
    assert checks == {"greedy identity": True, "sampled distribution": None, "self acceptance": None}
    details = certificate.checks[1].details
    assert details["total_variation"] > 5 * details["total_variation_of_exact_sampling"]


@pytest.mark.more
def test_a_forbidden_token_fails_whatever_the_counts(monkeypatch):
    found = certify_lib.Subject.generate

    def smuggles(self, decoder, prompts, **options):
        result = found(self, decoder, prompts, **options)
        result.tokens[0][5] = 3
        return result

    monkeypatch.setattr(certify_lib.Subject, "generate", smuggles)
    certificate, checks = verdict(DraftModel(DRAFT, 2), Speculative(), banned_tokens=[3])
    assert checks["sampled distribution"] is False
    assert certificate.checks[1].details["outside_the_support"][0]["gap"] == np.inf


def test_the_sample_size_has_its_power():
    settings = Certify()
    tokens = sample_size(settings)
    critical = stats.chi2.isf(settings.level, CELLS - 1)
    assert stats.ncx2.sf(critical, CELLS - 1, 4 * tokens * 0.02**2) >= 0.99
    assert 34_000 < tokens < 35_000  # the table of MATH for 16 cells


def test_cells_are_a_partition_by_rank_and_half():
    p = np.random.default_rng(0).dirichlet(np.ones(2048))
    cells = certify_lib.cells_of(p)
    assert set(cells) <= set(range(CELLS))
    assert set(cells[np.argsort(-p)[:1]]) <= {0, 1}
    assert {len(np.flatnonzero(cells // 2 == g)) for g in range(8)} == {1, 2, 4, 8, 48, 192, 1792}
    assert 800 < (cells % 2 == 0).sum() < 1250
