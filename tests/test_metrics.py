"""Metrics against values computed by hand, and against what docs/metrics.md says of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from specjax import metrics
from specjax.metrics import (
    DecodeStats,
    Latencies,
    RequestMetrics,
    best_k,
    cost_per_1k_tokens,
    expected_blocks,
    expected_emitted,
    mbsu,
    operations_factor,
    tokens_per_s,
    walltime_speedup,
)

DOCUMENT = Path(__file__).parent.parent / "docs/metrics.md"

# alpha -> tau at K = 1, 2, 3, 4, 5, 7, 8.
TAU = {
    0.3: (1.3, 1.39, 1.417, 1.4251, 1.4275, 1.4285, 1.4285),
    0.5: (1.5, 1.75, 1.875, 1.9375, 1.9688, 1.9922, 1.9961),
    0.6: (1.6, 1.96, 2.176, 2.3056, 2.3834, 2.458, 2.4748),
    0.7: (1.7, 2.19, 2.533, 2.7731, 2.9412, 3.1412, 3.1988),
    0.8: (1.8, 2.44, 2.952, 3.3616, 3.6893, 4.1611, 4.3289),
    0.9: (1.9, 2.71, 3.439, 4.0951, 4.6856, 5.6953, 6.1258),
}
# (alpha, c) -> (best K, speedup there).
BEST = {
    (0.6, 0.02): (6, 2.1697),
    (0.6, 0.05): (4, 1.9213),
    (0.6, 0.1): (3, 1.6738),
    (0.6, 0.2): (2, 1.4),
    (0.8, 0.02): (11, 3.8167),
    (0.8, 0.05): (8, 3.0921),
    (0.8, 0.1): (6, 2.4696),
    (0.8, 0.2): (4, 1.8676),
    (0.9, 0.02): (19, 6.3654),
    (0.9, 0.05): (13, 4.6741),
    (0.9, 0.1): (10, 3.4309),
    (0.9, 0.2): (7, 2.3731),
}


def counted(blocks: list[tuple[int, int]], k: int, cut: int = 0) -> DecodeStats:
    """Stats of blocks (k_r, n); ``cut`` tokens were verified but not emitted."""
    positions = range(1, k + 1)
    return DecodeStats(
        blocks=len(blocks),
        emitted=sum(n + 1 for _, n in blocks) - cut,
        drafted_at=tuple(sum(k_r >= j for k_r, _ in blocks) for j in positions),
        reached_at=tuple(sum(k_r >= j and n >= j - 1 for k_r, n in blocks) for j in positions),
        accepted_at=tuple(sum(n >= j for _, n in blocks) for j in positions),
    )


# The worked example of docs/metrics.md.
EXAMPLE = counted([(4, 4), (4, 1), (4, 0), (2, 2), (0, 0), (4, 3)], k=4, cut=1)


def test_tau_of_the_table():
    for alpha, row in TAU.items():
        found = [expected_emitted(alpha, k) for k in (1, 2, 3, 4, 5, 7, 8)]
        assert found == pytest.approx(row, abs=5.1e-5)
    assert expected_emitted(1.0, 5) == 6
    assert expected_emitted(0.0, 5) == 1
    assert expected_emitted(0.7, 0) == 1


def test_the_best_k_of_the_table():
    for (alpha, c), (k, speedup) in BEST.items():
        assert best_k(alpha, c) == k
        assert walltime_speedup(expected_emitted(alpha, k), k, c) == pytest.approx(speedup, abs=5.1e-5)
    assert best_k(0.3, 0.35) == 0
    assert best_k(1.0, 0.1, most=9) == 9


def test_speculation_pays_only_where_alpha_exceeds_the_cost_ratio():
    assert best_k(0.35, 0.3) > 0
    assert best_k(0.3, 0.3) == 0
    assert walltime_speedup(expected_emitted(0.7, 1), 1, 0.2) == pytest.approx(1.7 / 1.2)


def test_operations_and_memory_of_the_table():
    assert walltime_speedup(expected_emitted(0.8, 5), 5, 0.05) == pytest.approx(2.951424)
    assert operations_factor(expected_emitted(0.8, 5), 5, 0.05) == pytest.approx(1.694097, abs=5.1e-7)
    assert walltime_speedup(expected_emitted(0.5, 3), 3, 0.05) == pytest.approx(1.630435, abs=5.1e-7)
    assert operations_factor(expected_emitted(0.5, 3), 3, 0.05) == pytest.approx(2.213333, abs=5.1e-7)
    # 3 tokens for reading the target once and a tenth of it five times.
    assert mbsu(3.0, 5, 100, 1000) == pytest.approx(2.0)


def test_counts_of_the_worked_example():
    stats = EXAMPLE
    assert (stats.drafted, stats.accepted, stats.emitted, stats.target_calls) == (18, 10, 15, 6)
    assert stats.block_efficiency == pytest.approx(15 / 6)
    assert stats.accepted_length == pytest.approx(10 / 6)
    assert stats.acceptance_rate == pytest.approx(10 / 18)
    assert stats.acceptance_at == pytest.approx((4 / 5, 3 / 5, 2 / 4, 1 / 4))
    assert stats.conditional_acceptance_at == pytest.approx((4 / 5, 3 / 4, 2 / 2, 1 / 2))
    # Three blocks rejected a proposal: n = 1 and n = 0 and n = 3 of four.
    assert stats.alpha_mle == pytest.approx(10 / 13)


def test_without_cuts_tau_follows_from_acceptance_at_a_common_k():
    stats = counted([(3, 3), (3, 1), (3, 0), (3, 2)], k=3)
    assert stats.block_efficiency == pytest.approx(1 + sum(stats.acceptance_at))
    assert stats.acceptance_at == pytest.approx(tuple(np.cumprod(stats.conditional_acceptance_at)))


def test_stats_add_up_by_their_counts():
    both = EXAMPLE + EXAMPLE
    counts = {"drafted": 18, "accepted": 10, "emitted": 15, "target_calls": 6}
    counts |= {"k_used": (1, 0, 1, 0, 4), "blocks_without_draft": 1}
    assert both.to_json() | counts == EXAMPLE.to_json()
    assert (both.k_used, both.blocks_without_draft) == ((2, 0, 2, 0, 8), 2)
    with pytest.raises(ValueError, match="do not add"):
        _ = EXAMPLE + counted([(1, 1)], k=1)


def test_alpha_mle_finds_the_alpha_that_made_the_counts():
    rng = np.random.default_rng(0)
    k, alpha = 3, 0.7
    n = np.minimum(rng.geometric(1 - alpha, 40_000) - 1, k)
    stats = counted([(k, int(x)) for x in n], k)
    assert stats.alpha_mle == pytest.approx(alpha, abs=0.01)
    assert stats.accepted_length / k < alpha - 0.1  # the mean alone is far off


def test_nothing_decoded_gives_zeros_and_no_division_by_zero():
    stats = counted([], k=2)
    assert stats.block_efficiency == stats.acceptance_rate == stats.alpha_mle == 0
    assert stats.acceptance_at == (0, 0)


def made(rng, prompts: int) -> list[DecodeStats]:
    """Prompts of unlike lengths and acceptance: the blocks of one resemble each other."""
    alphas, blocks = rng.beta(4, 2, prompts), rng.integers(5, 60, prompts)
    emitted = [int(sum(1 + rng.binomial(4, alpha, count))) for alpha, count in zip(alphas, blocks, strict=True)]
    return [DecodeStats(int(b), e, (), (), ()) for b, e in zip(blocks, emitted, strict=True)]


def test_the_interval_is_the_percentile_bootstrap_over_prompts():
    by_prompt = made(np.random.default_rng(3), 30)
    emitted, blocks = (np.asarray([getattr(s, name) for s in by_prompt], float) for name in ("emitted", "blocks"))
    reference = scipy.stats.bootstrap(
        (emitted, blocks),
        lambda e, b, axis: e.sum(axis=axis) / b.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    found = metrics.block_efficiency_interval(by_prompt, resamples=20_000)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=5e-3)
    assert found.low < emitted.sum() / blocks.sum() < found.high


def test_the_interval_replays_and_covers_nothing_where_there_is_one_prompt():
    by_prompt = made(np.random.default_rng(4), 8)
    assert metrics.block_efficiency_interval(by_prompt) == metrics.block_efficiency_interval(by_prompt)
    one = metrics.block_efficiency_interval([EXAMPLE])
    assert one.low == one.high == EXAMPLE.block_efficiency


def test_expected_blocks_counts_the_block_that_the_budget_cuts():
    assert expected_blocks([], 5) == 5
    assert expected_blocks([1.0, 1.0], 6) == 2
    assert expected_blocks([1.0, 1.0], 7) == 3
    # One proposal, accepted half of the time: 1 block, then 1 + 1/2, then 1 + (1.5 + 1) / 2.
    assert [expected_blocks([0.5], m) for m in (1, 2, 3)] == pytest.approx([1, 1.5, 2.25])


def test_latencies_of_bursts():
    # Blocks of 1, 4 and 2 tokens; one block of three; a single token.
    slow = [0.10, 0.14, 0.14, 0.14, 0.14, 0.20, 0.20]
    latencies = Latencies([slow, [0.30, 0.30, 0.30], [0.05]])
    assert latencies.ttft == [0.10, 0.30, 0.05]
    assert latencies.tpot == pytest.approx([0.10 / 6, 0.0])
    assert latencies.itl == pytest.approx([0.04, 0.06])


def test_percentiles_are_pooled_over_requests():
    latencies = Latencies([[1.0, 2.0], [3.0, 5.0], [5.0, 9.0]])
    found = latencies.to_json()
    assert found["ttft_p50"] == 3.0
    assert found["tpot_p50"] == 2.0
    assert found["itl_p90"] == pytest.approx(2 + 0.8 * 2)  # between the second and third of 1, 2, 4
    assert found["itl_p99"] == pytest.approx(2 + 0.98 * 2)
    assert Latencies([[1.0]]).to_json() == {
        f"{name}_p{percent}": value
        for name, value in (("ttft", 1.0), ("tpot", None), ("itl", None))
        for percent in (50, 90, 99)
    }


@pytest.mark.parametrize("times", [[], [0.2, 0.1]])
def test_commit_times_must_be_there_and_in_order(times):
    with pytest.raises(ValueError, match="request 1"):
        Latencies([[0.1], times])


def test_cost_of_a_thousand_tokens():
    assert tokens_per_s(emitted=500, seconds=2.0) == 250
    # A machine at 3.6 an hour costs 0.001 a second; a thousand tokens take 4 seconds.
    assert cost_per_1k_tokens(3.6, 250) == pytest.approx(0.004)


def test_lengths_used_of_the_example_and_of_plain_decoding():
    assert (EXAMPLE.k_used, EXAMPLE.blocks_without_draft) == ((1, 0, 1, 0, 4), 1)
    plain = counted([(0, 0)] * 3, k=0)
    assert (plain.k_used, plain.blocks_without_draft) == ((3,), 3)


def one_request(**changes) -> RequestMetrics:
    """The example at 0.1 s (5 tokens), 0.2 s (2) and so on: one block every 0.1 s."""
    tokens = (5, 2, 1, 3, 1, 3)
    times = [round(0.1 * (i + 1), 1) for i, count in enumerate(tokens) for _ in range(count)]
    return RequestMetrics(EXAMPLE, [times], seconds=0.6, **changes)


def test_metrics_of_one_request():
    found = one_request(interpolated=4, cost=0.0006).to_json()
    assert (found["requests"], found["tokens"], found["seconds"], found["interpolated"]) == (1, 15, 0.6, 4)
    assert found["ttft"] == found["ttft_p50"] == found["ttft_p99"] == 0.1
    assert found["tpot"] == found["tpot_p90"] == pytest.approx(0.5 / 14)
    assert found["itl_p50"] == pytest.approx(0.1)
    assert found["tokens_per_s"] == pytest.approx(25)
    assert found["cost_per_1k_tokens"] == pytest.approx(0.04)
    assert {name: found[name] for name in EXAMPLE.to_json()} == EXAMPLE.to_json()
    assert "cost" not in one_request().to_json()


def test_metrics_of_several_requests_are_pooled_not_averaged():
    short = RequestMetrics(counted([(4, 0)], k=4), [[0.3]], seconds=0.3, cost=0.001)
    none = RequestMetrics(counted([(0, 0)], k=4, cut=1), [[]], seconds=0.1, cost=0.002)
    total = RequestMetrics.pooled([one_request(interpolated=2, cost=0.003), short, none], seconds=0.8)
    found = total.to_json()
    assert (found["requests"], found["tokens"], found["emitted"], found["interpolated"]) == (3, 16, 16, 2)
    assert found["ttft_p50"] == pytest.approx(0.2), "of the two that got a token"
    assert found["tpot_p50"] == pytest.approx(0.5 / 14), "of the one that got two"
    assert found["tokens_per_s"] == pytest.approx(20), "not the mean of 25 and 1 / 0.3"
    assert (found["k_used"], found["blocks_without_draft"]) == ((2, 0, 1, 0, 5), 2)
    assert found["cost"] == pytest.approx(0.006)
    assert found["cost_per_1k_tokens"] == pytest.approx(0.006 / 16 * 1000)
    assert "ttft" not in found
    assert RequestMetrics.pooled([one_request(), short], seconds=1.0).cost is None
    with pytest.raises(ValueError, match="no requests"):
        RequestMetrics.pooled([], seconds=1.0)


def test_cost_of_a_request_and_of_a_thousand_tokens_are_one():
    request = one_request(cost=metrics.cost(3.6, 0.6))
    assert request.cost == pytest.approx(0.0006)
    assert request.cost_per_1k_tokens == pytest.approx(cost_per_1k_tokens(3.6, request.tokens_per_s))
    nothing = RequestMetrics(counted([(0, 0)], k=0, cut=1), [[]], seconds=0.1, cost=0.1)
    assert nothing.cost_per_1k_tokens is None
    assert nothing.to_json()["ttft"] is nothing.to_json()["ttft_p50"] is None


def documented_names() -> list[str]:
    table = DOCUMENT.read_text(encoding="utf-8").split("## Our metrics")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([a-z0-9_]+)", row)]


def test_every_metric_of_the_document_is_one_of_ours():
    names = documented_names()
    assert len(names) > 15
    text, known = inspect.getdoc(metrics) or "", {*vars(metrics)}
    known |= {name for thing in (DecodeStats, Latencies, RequestMetrics) for name in vars(thing)}
    assert [name for name in names if name not in known and not re.search(rf"\b{name}\b", text)] == []


def test_every_metric_of_the_code_is_in_the_document():
    functions = {name for name, f in vars(metrics).items() if inspect.isfunction(f)} - {
        "agreement_per_position",  # agreement, alpha and the losses, position by position
        "alpha_per_position",
        "negative_log_likelihood",
    }
    own = functions | {re.sub(r"_p\d+$", "", name) for name in one_request(cost=1.0).to_json()}
    assert own - set(documented_names()) == set()


def test_the_worked_example_of_the_document_is_the_one_computed_here():
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in ("block_efficiency", "accepted_length", "acceptance_rate", "alpha_mle"):
        assert re.search(rf"\| `{name}` \|[^|]*\| {getattr(EXAMPLE, name):.3f} \|", text), name


def test_the_conversions_of_the_document_give_its_examples():
    stats, k = EXAMPLE, 4
    proposing = stats.drafted_at[0]
    by_position = [s * d / proposing for s, d in zip(stats.acceptance_at, stats.drafted_at, strict=True)]
    converted = {
        "vLLM, mean acceptance length": f"{1 + stats.accepted / proposing:.3f}",
        "vLLM, draft acceptance rate": f"{stats.acceptance_rate:.3f}",
        "vLLM, per-position acceptance rate": ", ".join(f"{s:.1f}".lstrip("0") for s in by_position),
        "SGLang, accept length": f"{1 + stats.accepted_length:.3f}",
        "SGLang, accept rate (since April 2026)": f"{stats.acceptance_rate * stats.drafted / (stats.blocks * k):.3f}",
        "SGLang, accept rate (before)": f"{(1 + stats.accepted_length) / (k + 1):.3f}",
        "sglang-jax, accept_ratio": f"{100 * (1 + stats.accepted_length) / (k + 1):.1f} %",
        "Spec-Bench, mean accepted tokens": f"{1 + stats.accepted_length:.3f}",
    }
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, value in converted.items():
        assert re.search(rf"^\| {re.escape(name)} \|[^|]*\| {re.escape(value)} \|", text, re.M), name
