"""A made-up run that looks like a real one: the shape of results.json with every optional part present."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from specjax import report

CODE = '''    """Parse a size such as `4k`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")

    number, unit = match.groups()
    html = "<script>alert('<b>&amp;</b>')</script>"
    return int(number) * _UNITS[unit.lower()]
'''


def _pieces() -> list[dict]:
    words = [line[i : i + 7] for line in CODE.splitlines(keepends=True) for i in range(0, len(line), 7)]
    origins = ("accepted", "accepted", "corrected", "accepted", "accepted", "accepted", "bonus")
    return [{"text": text, "origin": origins[i % len(origins)]} for i, text in enumerate(words)]


def _curve(steps: int, start: float, end: float, alphas: tuple[float, float] | None) -> list[dict]:
    records = []
    for step in range(20, steps + 1, 20):
        share = 1 - math.exp(-4 * step / steps)
        record = {"step": step, "tokens": step * 4096, "loss": start + (end - start) * share}
        if alphas and step % 100 == 0:
            record["alpha"] = alphas[0] + (alphas[1] - alphas[0]) * share
        records.append(record)
    return records


def _decoding() -> list[dict]:
    rows = []
    for batch_size in (1, 8):
        for temperature in (0.0, 1.0):
            base = 850.0 if batch_size == 1 else 2900.0
            common = {"batch_size": batch_size, "temperature": temperature, "tokens": 2304, "identical": True}
            rows.append(
                {**common, "drafter": "autoregressive", "k": None, "seconds": 2304 / base, "tokens_per_s": base,
                 "speedup": 1.0, "repeats": 5}
            )  # fmt: skip
            for drafter, alpha, cost in (("draft_before", 0.7, 0.09), ("draft_after", 0.86, 0.09), ("ngram", 0.4, 0.0)):
                for k in (3, 5, 7):
                    at = [alpha**j * (1 + 0.02 * j) for j in range(1, k + 1)]
                    tau = 1 + sum(at)
                    speedup = tau / (1.2 + k * (cost + 0.06 * batch_size**0.5)) * (0.9 if temperature else 0.82)
                    rows.append(
                        {**common, "drafter": drafter, "k": k, "seconds": 2304 / base / speedup,
                         "tokens_per_s": base * speedup, "speedup": speedup,
                         "predicted_speedup": speedup * (1.0 + 0.012 * k) if batch_size == 1 else None,
                         "block_efficiency": tau, "acceptance_rate": sum(at) / k, "acceptance_at": at,
                         "conditional_acceptance_at": [b / a for a, b in zip([1.0, *at], at, strict=False)],
                         "repeats": 5 if k == 5 else 1}
                    )  # fmt: skip
    return rows


def _adaptive() -> dict:
    """A batch of two whose controller gave up on the draft, and looked again once."""
    return {
        "drafter": "adaptive", "k": 5, "batch_size": 8, "temperature": 0.0, "seconds": 3.1, "tokens": 96,
        "tokens_per_s": 96 / 3.1, "speedup": 0.991, "block_efficiency": 1.08, "k_used": [40, 2, 0, 4], "probes": 2,
        "proposals": [[3, 3, *[0] * 16, 1, *[0] * 4], [3, 3, *[0] * 16, 1, *[0] * 4]],
    }  # fmt: skip


def _roofline() -> list[dict]:
    return [
        {"pass": "target, 1 token", "batch": 1, "flops": 2e7, "bytes": 4e7, "intensity": 0.5, "ridge": 9.3,
         "bound": "memory", "least_seconds": 1.1e-3, "seconds": 1.6e-3, "share_of_roofline": 0.6875},
        {"pass": "block of 3", "batch": 8, "flops": 9e8, "bytes": 5e7, "intensity": 18.0, "ridge": 9.3,
         "bound": "compute", "least_seconds": 2.5e-3, "seconds": 5e-3, "share_of_roofline": 0.5},
    ]  # fmt: skip


def _comparison() -> list[dict]:
    rows = []
    for source in ("code", "prose"):
        for temperature in (0.0, 1.0):
            common = {"source": source, "temperature": temperature, "prompts": 6}
            rows.append({**common, "drafter": "ngram", "k": 5, "block_efficiency": 1.7, "tokens_per_s": 901.0})
            for drafter, alpha, tau in (("draft_after", 0.86, 3.91), ("draft_before", 0.7, 2.64)):
                figures = {"alpha": alpha, "block_efficiency": tau, "low": tau - 0.3, "high": tau + 0.25}
                rows.append({**common, "drafter": drafter, "k": 5, **figures, "tokens_per_s": 300 * tau})
            rows.append({**common, "drafter": "autoregressive", "k": None, "tokens_per_s": 850.2})
    return rows


def make_results() -> dict:
    summary = {
        "target_nll": 1.412, "draft_nll": 2.031, "alpha_before": 0.7012, "alpha_after": 0.8613,
        "alpha_ce_control": 0.7421, "alpha_positions": 51200, "greedy_identical": True, "speedup_greedy": 1.149,
        "speedup_t1": 1.52, "best_k_greedy": 5, "best_k_t1": 5, "ar_tokens_per_s": 850.2, "spec_tokens_per_s": 976.9,
        "spec_tokens_per_s_t1": 1292.3, "memory_floor_share": 0.71, "ar_overhead": 1.06, "step_overhead": 1.12,
        "speedup_predicted_error": 0.061, "recompiles": 0, "peak_rss_gb": 2.9,
    }  # fmt: skip
    bounds = {
        "alpha_after": (">= alpha_before + 0.08 and >= alpha_ce_control + 0.05", True, False),
        "greedy_identical": ("true", True, False),
        "speedup_greedy": (">= 1.15", False, True),
        "speedup_t1": (">= 1.3", True, True),
        "memory_floor_share": (">= 0.6", True, True),
        "recompiles": ("0", True, False),
        "peak_rss_gb": ("<= 6", True, False),
    }
    return {
        "name": "demo",
        "date": "2025-11-21T02:10:00+00:00",
        "command": "specjax run configs/demo.yaml",
        "config_yaml": "target:\n  path: models/demo-target\ndata:\n  path: python-stdlib\nbench:\n  ks: [3, 5, 7]\n",
        "machine": {
            "cpu": "AMD EPYC 7B13", "cores": 2, "memory_gb": 7.8, "python": "3.11.14", "jax": "0.10.2",
            "backend": "cpu", "stream_gb_per_s": 21.4,
        },
        "summary": summary,
        "figures": [
            {"key": key, "value": summary[key], "bound": bound, "ok": ok, "timing": timing}
            for key, (bound, ok, timing) in bounds.items()
        ],
        "training": {
            "pretrain": _curve(300, 7.6, 2.4, (0.3, 0.70)),
            "distill": _curve(500, 0.9, 0.21, (0.70, 0.86)),
            "control": {rate: _curve(500, 2.4, 2.4 - 0.1 * i, (0.70, 0.71 + 0.015 * i)) for i, rate in
                        enumerate(("0.0005", "0.001", "0.002"))},
        },
        "decoding": [*_decoding(), _adaptive()],
        "roofline": _roofline(),
        "comparison": _comparison(),
        "places": [
            {"place": 1, "alpha_before": 0.7012, "alpha_after": 0.8613, "loss": 0.212, "agreement": 0.9021},
            {"place": 2, "alpha_before": 0.69, "alpha_after": 0.8571, "loss": 0.231},
            {"place": 3, "alpha_before": 0.68, "alpha_after": 0.8499, "loss": None},
        ],
        "simulated": [
            {"source": "code", "temperature": 0.0, "drafter": "draft_after", "prompts": 4, "k": 5, "low": 4.1,
             "high": 5.9, "block_efficiency": 5.012, "simulated": 4.987},
        ],
        "self_tests": {"draft": "38 arrays and all settings equal"},
        "compile_seconds": 41.7,
        "stage_seconds": {"corpus": 6.2, "pretrain": 71.0, "distill": 214.0, "control": 190.5, "bench": 301.9},
        "sample": {
            "prompt": "def parse_size(text: str) -> int:\n", "pieces": _pieces(), "drafter": "draft_after", "k": 5,
            "temperature": 0.0,
        },
    }  # fmt: skip


@pytest.fixture
def results() -> dict:
    return make_results()


@pytest.fixture
def plotless() -> dict:
    """Results with nothing to draw, for tests of text: drawing takes most of a build's time."""
    return {**make_results(), "training": {}, "decoding": []}


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """The report of the unchanged results, built once; tests only read it."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "results.json").write_text(json.dumps(make_results()))
    return report.build(run_dir)


@pytest.fixture
def save(tmp_path: Path):
    """Writes a results object as a run directory and returns the directory."""

    def write(results: object) -> Path:
        (tmp_path / "results.json").write_text(json.dumps(results))
        return tmp_path

    return write
