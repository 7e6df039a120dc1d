"""Devices, rooflines and what would pay, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from specjax import metrics
from specjax.costs.acceptance import Acceptance
from specjax.costs.cost_model import GREEDY, PLAIN, SAMPLED, BatchCosts, CostModel, DrafterCosts, Line
from specjax.costs.devices import Device, device_of, presets, this_device
from specjax.costs.prediction import MOST_K, DraftEconomics, Shape, computed, predict
from specjax.costs.roofline import Pass, Storage, Work, pass_work, storage_of, work_of_weights
from specjax.errors import ConfigError
from specjax.models.config import Experts, LayerKind, ModelConfig
from specjax.models.transformer import Model

FLAT = Line((1.0,), (0.0,))
CONFIG = ModelConfig(
    vocab_size=100, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)


def drafter(each: float, beyond: float = 0.0) -> DrafterCosts:
    line = Line((1.0,), (beyond,))
    return DrafterCosts(each, 0.0, 0.0, {GREEDY: line, SAMPLED: line}, 0.0)


def flat_model(**drafters: DrafterCosts) -> CostModel:
    """A target whose pass takes a second over any number of tokens."""
    plain = {GREEDY: 0.0, SAMPLED: 0.0}
    costs = BatchCosts(256, Line((1.0,), (1.0,)), FLAT, plain, drafters, FLAT, host=0.0)
    return CostModel("toy", "float32", True, {1: costs})


def test_the_best_drafter_and_length_by_hand():
    """36 tokens. cheap at k = 1 keeps half: blocks of 1.1 s emit 1.5. good at k = 2 keeps all: 12 blocks of 1.8 s."""
    model = flat_model(cheap=drafter(0.1), good=drafter(0.4))
    known = {
        ("cheap", 1, 0.0): Acceptance((0.5,)),
        ("cheap", 2, 0.0): Acceptance((0.5, 0.0)),
        ("good", 2, 0.0): Acceptance((1.0, 1.0)),
    }
    found = predict(model, known, [1], prompt=16, tokens=36)
    speeds = {(p.drafter, p.k): p.tokens_per_s for p in found}
    assert speeds[PLAIN, 0] == pytest.approx(1.0)
    assert speeds["good", 2] == pytest.approx(36 / (12 * 1.8))
    assert speeds["cheap", 1] == pytest.approx(36 / (1.1 * metrics.expected_blocks((0.5,), 36)))
    assert speeds["cheap", 2] == pytest.approx(36 / (1.2 * metrics.expected_blocks((0.5,), 36)))
    assert [(p.drafter, p.k) for p in found if p.best] == [("good", 2)]
    assert next(p.speedup for p in found if p.best) == pytest.approx(36 / (12 * 1.8))
    assert found[0].error is None
    assert dataclasses.replace(found[0], measured=0.8).error == pytest.approx(0.25)


@pytest.mark.parametrize("c", [0.0, 0.05, 0.2, 0.6])
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_where_a_pass_costs_the_same_for_all_lengths_the_speedup_is_that_of_the_metrics(alpha, c):
    economics = DraftEconomics.of(flat_model().of_batch(1), GREEDY)
    k = max(metrics.best_k(alpha, c, MOST_K), 1)
    asked = metrics.walltime_speedup(metrics.expected_emitted(alpha, k), k, c)
    assert economics.speedup(alpha, c) == pytest.approx(asked)
    assert economics.least_alpha(c, asked) == pytest.approx(alpha, abs=1e-6)
    assert economics.most_cost(alpha, asked) == pytest.approx(c, abs=1e-6)


def test_what_no_draft_reaches_has_no_alpha_and_no_cost():
    economics = DraftEconomics.of(flat_model().of_batch(1), GREEDY)
    assert economics.least_alpha(0.0, MOST_K + 2.0) is None
    assert economics.most_cost(0.5, 3.0) is None
    # With one draft: 1 + alpha tokens for 1 + c passes, so it pays from alpha = c on.
    assert economics.least_alpha(0.4) == pytest.approx(0.4, abs=1e-6)


def test_a_block_beyond_its_passes_is_as_cheap_as_the_cheapest_known():
    model = flat_model(a=drafter(0.1, beyond=0.5), b=drafter(0.2, beyond=0.25), free=drafter(0.0))
    economics = DraftEconomics.of(model.of_batch(1), SAMPLED)
    assert economics.at_k(1.0, 0.0, 3) == pytest.approx(4 / 1.25)


def test_work_by_hand():
    """A layer: 16 x (16 + 2 x 8) + 16 x 16 of attention, 3 x 16 x 32 of the MLP; a head of 16 x 100."""
    weights = 2 * (512 + 256 + 1536) + 1600
    found = pass_work(CONFIG, batch=3, tokens=2, slots=64, storage=Storage(2.0, 4.0))
    assert found.flops == 2 * 6 * weights + 2 * 4 * 6 * 64 * 16
    assert found.num_bytes == 2 * weights + 4 * 2 * (2 * 8) * (3 * 64 + 6)
    windowed = dataclasses.replace(CONFIG, layers=(LayerKind(window=8),))
    assert pass_work(windowed, 3, 2, 64, Storage(2.0, 0.0)).flops == 2 * 6 * weights + 2 * 4 * 6 * 8 * 16


def test_experts_are_read_as_far_as_tokens_reach_them():
    config = dataclasses.replace(CONFIG, experts=Experts(count=8, top_k=2, intermediate_size=32, normalised=True))
    one, many = (pass_work(config, rows, 1, 0, Storage(1.0, 0.0)) for rows in (1, 100))
    attention, expert, head = 768, 1536, 1600
    assert one.num_bytes == 2 * (attention + 16 * 8 + 2 * expert) + head
    assert many.num_bytes == 2 * (attention + 16 * 8 + 8 * expert) + head
    assert one.flops == 2 * one.num_bytes
    assert many.flops == 100 * one.flops


def test_the_shapes_say_what_the_weights_are():
    params = jax.jit(Model(CONFIG).init)(jax.random.key(0))
    by_shape = pass_work(CONFIG, 1, 1, 0, storage_of(params, None))
    by_weights = work_of_weights(params, 1)  # norms too
    assert by_weights.num_bytes == pytest.approx(by_shape.num_bytes, rel=0.02)
    assert work_of_weights(params, 3, itemsize=2.0).num_bytes == pytest.approx(by_weights.num_bytes / 2)


def test_what_bounds_a_pass_and_how_near_it_is():
    device = Device("toy", bandwidth=10.0, flops=100.0, dtype="float32", measured=True)
    assert device.ridge == 10
    few, many = Work(flops=50.0, num_bytes=20.0), Work(flops=400.0, num_bytes=20.0)
    assert (few.bound(device), many.bound(device)) == ("memory", "compute")
    assert (few.least_seconds(device), many.least_seconds(device)) == (2.0, 4.0)
    found = Pass("target, 1 token", 1, few, device, seconds=4.0).to_json()
    assert (found["intensity"], found["bound"], found["share_of_roofline"]) == (2.5, "memory", 0.5)
    assert Pass("target", 1, few, device).share is None


def test_presets_are_devices_of_datasheets():
    assert {"a100-80g-sxm", "h100-sxm", "h200", "b200", "l4", "rtx-4090"} <= presets().keys()
    assert {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"} <= presets().keys()
    for name in presets():
        device = device_of(name)
        assert (device.dtype, device.measured) == ("bfloat16", False)
        assert 50 < device.ridge < 700, name
    assert device_of("h100-sxm", "float32").flops == 67e12


def test_a_file_describes_a_device(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("bandwidth: 1e12\nflops: {float32: 2e13}\nmemory: 8e9\n")
    assert device_of(str(file)) == Device("mine", 1e12, 2e13, "float32", False, 8e9, "cuda")


def test_the_page_names_every_preset_and_describes_a_device(tmp_path):
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    assert [name for name in presets() if f"`{name}`" not in page] == []
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    described, preset = device_of(str(tmp_path / "mine.yaml")), device_of("h100-sxm")
    assert dataclasses.replace(described, name="h100-sxm") == preset


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("h100", None, r"--device h100: unknown; did you mean 'h100-sxm'\? presets are a100-80g-sxm, .*tpu-v6e"),
        ("xyz", None, "--device xyz: unknown; presets are"),
        ("none.yaml", None, "none.yaml: no such config file"),
        ("a.yaml", "bandwith: 1e12\nflops: {float32: 1e12}\nmemory: 1e9", "bandwith: unknown key; did you mean"),
        ("a.yaml", "bandwidth: -1\nflops: {float32: 1e12}\nmemory: 1e9", "bandwidth: found -1, expected"),
        ("a.yaml", "bandwidth: 1e12\nflops: {}\nmemory: 1e9", "flops"),
    ],
)
def test_a_device_that_is_none_is_refused_in_a_line(name, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        device_of(name)


def test_a_dtype_without_a_peak_is_refused():
    with pytest.raises(ConfigError, match=r"tpu-v4: flops has no float32, only bfloat16; set target.dtype"):
        device_of("tpu-v4", "float32")


def test_costs_of_a_device_that_is_not_here_are_its_roofline():
    device = Device("toy", bandwidth=1e6, flops=1e9, dtype="bfloat16", measured=False)
    target, storage = Shape(CONFIG), Storage(2.0, 2.0)
    model = computed(device, target, {"d": Shape(None, 1000), "ngram": Shape(None)}, [1, 3], slots=64)
    assert (model.measured, model.device, sorted(model.batches)) == (False, "toy", [1, 4])
    one = model.of_batch(1)
    for m in (1, 4):
        asked = target.work(4, m, 64, storage).least_seconds(device)
        assert model.of_batch(4).target(m) == pytest.approx(asked)
    assert one.drafter("d").each == pytest.approx(2000 / 1e6)
    assert one.drafter("ngram").each == 0
    assert one.block("d", 3) == pytest.approx(one.target(4) + 3 * 2000 / 1e6)
    assert model.error is None


def test_the_device_that_is_here_is_measured(tiny_target):
    device = this_device(tiny_target)
    assert device.measured
    assert min(device.bandwidth, device.flops) > 0
    assert device.dtype == "float32"
