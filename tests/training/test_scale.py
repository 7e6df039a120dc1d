"""The same training on one device, over meshes of four, in two processes, rematerialised, scanned; masks are uneven.
And the same decoding in two processes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from specjax import config
from specjax.data.rows import take
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.interfaces import Reads, TrainingForm
from specjax.models import kernels
from specjax.models.config import LayerKind
from specjax.models.hf import load_model
from specjax.models.training import TrainingModel
from specjax.models.transformer import Model
from specjax.runtime import artifact, distributed
from specjax.runtime.checkpoint import Checkpoints
from specjax.runtime.log import read_log
from specjax.training.evaluate import evaluate
from specjax.training.layout import Layout, make_layout
from specjax.training.losses import ForwardKL
from specjax.training.optimizer import make_optimizer
from specjax.training.step import Update, microbatch_rows, start_state
from tests import processes
from tests.cases import in_proof
from tests.decode import test_mesh
from tests.training import scale, test_on_policy, toys
from tests.training.scale import FOUR, SHAPE, Trained

ROOT = Path(__file__).parents[2]
TENSOR = config.Mesh(data=2, tensor=2)


def same_gradient(found, expected, within: float = 1e-6) -> None:
    """Within a part of its size, parameter by parameter."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= within * np.linalg.norm(value), name


def same_training(losses, gradient, expected: Trained, within: float = 1e-6) -> None:
    same_gradient(gradient, expected.gradient, within)
    assert losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-4)


@pytest.fixture(scope="module")
def on_one_device():
    return Trained(Layout(), "short")


@pytest.fixture(scope="module")
def on_four(request):
    """Over data=2, fsdp=2."""
    return Trained(make_layout(FOUR), "short")


def test_four_devices_train_as_one_does(on_one_device, on_four):
    same_training(on_four.losses, on_four.gradient, on_one_device)


def test_the_state_stays_where_the_table_says_and_is_donated(on_four):
    layer = on_four.state.params["layers"][0]["attention"]["q_proj"]["kernel"]
    assert layer.sharding.spec == PartitionSpec("fsdp", "tensor")
    assert layer.addressable_shards[0].data.shape == (8, 16)
    moment = scale.optimizer_moment(on_four.state)
    for tree in (moment, on_four.state.average.params):
        found = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), tree, on_four.state.params)
        assert all(jax.tree.leaves(found))
    assert all(x.is_deleted() for x in jax.tree.leaves(on_four.before))


@functools.cache
def long_on_one_device() -> Trained:
    return Trained(Layout(), "long")


@pytest.mark.more
@pytest.mark.parametrize("mesh", [TENSOR, dataclasses.replace(TENSOR, draft="replicated"), config.Mesh(fsdp=4)])
def test_fifty_steps_over_a_mesh_are_those_of_one_device(mesh):
    found = Trained(make_layout(mesh), "long")
    same_training(found.losses, found.gradient, long_on_one_device())


def run_in_two_processes(directory: Path, case: str) -> None:
    """One of `tests.training.scale`, whose results are left in ``directory``."""
    test_mesh.saved_models(directory)
    command = ["-m", "tests.training.scale", str(directory), case, processes.free_port()]
    processes.in_processes([*command, "0", "2"], [*command, "1", "2"])


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processes")
    run_in_two_processes(directory, "short")
    return directory


def same_as_stored(directory: Path, expected: Trained) -> None:
    losses = json.loads((directory / "losses.json").read_text())
    same_training(losses, dict(np.load(directory / "gradient.npz")), expected)


def decoded_as_on_one_device(directory: Path) -> None:
    """Each of the processes had two of the four devices."""
    found = [json.loads((directory / f"tokens-{i}.json").read_text()) for i in range(2)]
    assert found == [test_mesh.tokens_of(directory)] * 2


def test_two_processes_train_as_one_does(in_two_processes, on_one_device):
    same_as_stored(in_two_processes, on_one_device)


def test_two_processes_decode_as_one_device_does(in_two_processes):
    decoded_as_on_one_device(in_two_processes)


@pytest.mark.more
def test_fifty_steps_and_every_kind_of_draft_in_two_processes_are_those_of_one_device(tmp_path):
    run_in_two_processes(tmp_path, "long")
    same_as_stored(tmp_path, long_on_one_device())
    decoded_as_on_one_device(tmp_path)
    for name, expected in scale.feature_drafts(Layout()).items():
        found = dict(np.load(tmp_path / f"{name}.npz"))
        same_training(found.pop("losses"), found, expected, 3e-6)


def test_two_processes_leave_one_log_and_checkpoints_that_one_process_goes_on_from(in_two_processes, tmp_path):
    directory = in_two_processes / "stage"
    expected = toys.train(tmp_path / "alone", steps=6)
    found = dict(np.load(in_two_processes / "bigram.npz"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    logs = [read_log(where) for where in (directory, tmp_path / "alone")]
    assert [r["step"] for r in logs[0]] == [r["step"] for r in logs[1]] == [5, 6]
    for name in ("loss", "alpha", "held_out_nll", "grad_norm"):
        values = [[record[name] for record in log if name in record] for log in logs]
        np.testing.assert_allclose(*values, rtol=1e-5)
    steps = []
    again = toys.train(directory, lambda step, record: steps.append(step), steps=6)
    toys.assert_same(again, found)
    assert steps == []


def test_two_processes_make_the_data_of_a_stage_that_one_does(in_two_processes, tmp_path):
    directory = in_two_processes
    assert json.loads((directory / "sampled.json").read_text()) == scale.sampled(Layout())
    found, alone = dict(np.load(directory / "on-policy.npz")), test_on_policy.train(tmp_path / "on-policy")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, alone)
    first, second = (scale.cached_row(where / "teacher", Layout()) for where in (directory, tmp_path))
    np.testing.assert_array_equal(first.teacher.ids, second.teacher.ids)
    np.testing.assert_allclose(first.teacher.values, second.teacher.values, atol=2e-2)
    left = [sorted(f.name for f in (where / "teacher").iterdir()) for where in (directory, tmp_path)]
    assert left[0] == left[1]


RUN = """
target:
  architecture: {hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 4}
  vocab_size: 300
  steps: 4
  batch_size: 4
data: {path: TEXT, held_out: 0.25, seq_len: 16}
# Saved as it was trained: a sum in another order may turn the last bit of a bfloat16.
draft:
  init: target
  dtype: float32
  architecture: {hidden_size: 16, intermediate_size: 32, num_layers: 1, num_heads: 4, num_kv_heads: 4, head_dim: 8}
  pretrain: {loss: cross_entropy, steps: 0}
distill: {steps: 6, batch_size: 4, eval_every: 3, save_every: 3, remat: true, optimizer: {ema: 0.9}}
eval: {positions: 256}
selection: {prompts: 0}
"""


@pytest.mark.more
def test_the_whole_job_in_two_processes_is_that_of_one(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(40):
        lines = (f"def function_{i}_{j}(value):\n    return value * {i * j}\n" for j in range(6))
        (tmp_path / "text" / f"{i}.py").write_text("".join(lines))
    (tmp_path / "run.yaml").write_text(RUN.replace("TEXT", str(tmp_path / "text")))
    command = ["train_draft.py", str(tmp_path / "run.yaml")]
    processes.in_processes([*command, f"out={tmp_path / 'one'}"])
    each = ["enabled=true", f"coordinator=localhost:{processes.free_port()}", "num_processes=2"]
    several = [
        *command,
        f"out={tmp_path / 'two'}",
        "mesh.fsdp=2",
        "mesh.tensor=-1",
        *(f"distributed.{v}" for v in each),
    ]
    processes.in_processes(*([*several, f"distributed.process_id={i}"] for i in range(2)))
    one, two = (
        {
            file.relative_to(tmp_path / out).parts
            for file in (tmp_path / out).rglob("*")
            if "checkpoints" not in file.parts
        }
        for out in ("one", "two")
    )
    assert two == one - {("self_tests.json",)}  # several processes do not decode
    one, two = (load_model(tmp_path / out / "draft").params for out in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), two, one)
    first, second = (
        artifact.read_record(tmp_path / out / "evaluations.json", "the test fails") or {} for out in ("one", "two")
    )
    alphas = [sorted(evaluation["alpha"] for evaluation in found.values()) for found in (first, second)]
    np.testing.assert_allclose(*alphas, rtol=1e-4)


@pytest.mark.more
def test_sigterm_to_one_of_two_processes_saves_and_ends_both_at_one_step(tmp_path):
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "value {i} = {i * i} and {i + 7}"}}\n' for i in range(200))
    )
    (tmp_path / "run.yaml").write_text(RUN.replace("TEXT", str(tmp_path / "text.jsonl")))

    def train(out: str, stop: bool) -> None:
        each = ["enabled=true", f"coordinator=localhost:{processes.free_port()}", "num_processes=2"]
        settings = [f"out={tmp_path / out}", "mesh.data=-1", "distill.steps=200", "distill.save_every=200"]
        settings += ["distill.eval_every=200", *(f"distributed.{v}" for v in each)]
        commands = [
            ["train_draft.py", str(tmp_path / "run.yaml"), *settings, f"distributed.process_id={i}"] for i in (0, 1)
        ]
        with processes.of_two_devices(*commands) as group:
            if stop:
                log = tmp_path / out / "draft-distill" / "log.jsonl"
                running = group.processes
                group.wait_until(lambda: any(p.ended for p in running) or (log.exists() and log.read_text() != ""))
                assert not any(p.ended for p in running), [p.so_far.output[-4000:] for p in running]
                running[1].terminate()
            for process in group.finish():
                assert process.returncode == (143 if stop else 0), process.output[-4000:]
                steps.update(re.findall(r"stopped by SIGTERM; step (\d+) is saved", process.output))

    steps: set[str] = set()
    train("stopped", stop=True)
    assert len(steps) == 1
    assert 0 < int(steps.pop()) < 200
    train("stopped", stop=False)
    train("whole", stop=False)
    assert not steps
    first, second = (load_model(tmp_path / out / "draft").params for out in ("stopped", "whole"))
    toys.assert_same(first, second)


def test_a_checkpoint_of_one_mesh_restores_on_another_to_the_same_values(on_four, tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, on_four.state)
        for mesh in (config.Mesh(), TENSOR):
            wanted = make_layout(mesh).of_draft(on_four.state, TrainedDraftModel(Model(SHAPE)))
            if wanted is None:
                wanted = jax.tree.map(lambda x: SingleDeviceSharding(jax.devices()[0]), on_four.state)
            restored = checkpoints.restore_latest(jax.device_put(on_four.state, wanted))
            assert restored is not None
            toys.assert_same(restored.state, on_four.state)
            assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y, restored.state, wanted)))


def test_held_out_figures_over_a_mesh_are_those_of_one_device():
    settings = (toys.BigramDraft(ignored=3), toys.bigram_params(1), toys.target(), toys.rows(7), 10_000, 3)
    one, four = evaluate(*settings), evaluate(*settings, make_layout(FOUR))
    assert four.positions == one.positions
    for name in ("nll", "target_nll", "alpha"):
        assert getattr(four, name) == pytest.approx(getattr(one, name), rel=1e-6)


@pytest.mark.parametrize("axes", [(1, 1), (2, 2)])
def test_the_loss_of_a_step_is_one_mean_over_all_predictions_that_count(axes):
    layout, optimizer, teacher = make_layout(config.Mesh(*axes)), make_optimizer(toys.stage()), toys.target()
    drafter = toys.BigramDraft(ignored=3)
    state = start_state(toys.bigram_params(1), optimizer, False, layout, drafter)
    update = Update(drafter, ForwardKL(), optimizer, teacher.spec, 4, layout=layout).jitted(state)
    batch = take(toys.rows(8), range(8))
    _, metrics = update(state, teacher.params, layout.place_batch(batch), None)
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(params["table"][batch.tokens] + params["bias"][None, None], axis=-1))
        for params in (teacher.params, toys.bigram_params(1))
    )
    kl = np.asarray(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1, dtype=np.float64))
    counts = batch.tokens != 3
    assert len(set(counts.reshape(4, -1).sum(1))) > 1
    assert float(metrics["loss"]) == pytest.approx(kl[counts].mean(), rel=1e-6)


def test_a_batch_lies_row_by_row_over_data_and_fsdp():
    layout, rows = make_layout(FOUR), scale.UnevenRows()
    numbers = [9, 4, 7, 7, 1, 0, 3, 60]
    batch = layout.batch(rows, numbers)
    assert layout.mesh is not None
    toys.assert_same(batch, take(rows, numbers))
    held = {shard.device.id: np.asarray(shard.data) for shard in batch.tokens.addressable_shards}
    devices: Any = layout.mesh.devices
    assert [held[d.id].tolist() for d in devices.flat] == [batch.tokens[i : i + 2].tolist() for i in (0, 2, 4, 6)]


def test_draft_and_target_follow_their_own_rules():
    layout, model = make_layout(dataclasses.replace(TENSOR, draft="replicated")), Model(SHAPE)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert layout.of_target(params, model)["embedding"].spec == PartitionSpec("tensor", "fsdp")
    assert all(
        sharding.is_fully_replicated for sharding in jax.tree.leaves(layout.of_draft(params, TrainedDraftModel(model)))
    )


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        (config.Mesh(data=-1), (4, 1, 1)),
        (config.Mesh(fsdp=-1, tensor=2), (1, 2, 2)),
        (config.Mesh(data=2), (2, 1, 1)),
    ],
)
def test_minus_one_takes_the_devices_that_the_others_leave(mesh, shape):
    made = make_layout(mesh).mesh
    assert made is not None
    assert tuple(made.shape.values()) == shape


def test_the_default_mesh_is_one_device_without_a_mesh():
    assert make_layout(config.Mesh()) == Layout()


@pytest.mark.parametrize("mesh", [config.Mesh(data=8), config.Mesh(data=3, fsdp=-1), config.Mesh(data=-1, tensor=8)])
def test_a_mesh_that_does_not_fit_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"mesh: data=.* does not fit the 4 devices"):
        make_layout(mesh)


def test_a_batch_that_cannot_be_split_is_refused_before_anything_is_written(tmp_path):
    for changes in ({"batch_size": 6}, {"batch_size": 8, "micro_batch_size": 2}):
        with pytest.raises(ConfigError, match=r"s: (micro_)?batch_size=\d is not a multiple of the 4 shards"):
            toys.train(tmp_path / "s", layout=make_layout(FOUR), **changes)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("tokens", "shards", "rows"), [(8, 1, 1), (8, 4, 4), (16, 4, 8), (10_000, 2, 8)])
def test_a_microbatch_has_rows_of_every_shard(tokens, shards, rows, monkeypatch):
    monkeypatch.setattr("specjax.backend.MICRO_TOKENS_CPU", tokens)
    assert microbatch_rows(8, 8, shards) == rows


def test_the_first_process_speaks_for_all(monkeypatch):
    """Its outcome, error or value, is what the second one gets."""
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "_from_first", lambda value: sent.append(value) or sent[0])

    def fails():
        raise DataError("no.jsonl: line 3")

    def refuses():
        raise artifact.Changed(Path("run"), "seed (3 then, 4 now)", ())

    for error, message, action in ((DataError, r"no\.jsonl: line 3", fails), (TrainingError, "run: was made", refuses)):
        for process, called in ((0, action), (1, lambda: pytest.fail("called"))):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            with pytest.raises(error, match=message):
                distributed.on_main_process(called)
        sent.clear()
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with pytest.raises(ZeroDivisionError):
        distributed.on_main_process(lambda: 1 // 0)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(TrainingError, match="process 0 failed: ZeroDivisionError"):
        distributed.on_main_process(fails)


def test_processes_that_do_not_find_each_other_are_one_line(monkeypatch):
    def nobody(*args):
        raise ValueError("coordinator_address should be defined.\nand more")

    monkeypatch.setattr(jax.distributed, "initialize", nobody)
    with pytest.raises(ConfigError, match=r"distributed: .*\(coordinator_address should be defined.\); outside"):
        distributed.start(config.Distributed(enabled=True))


# Large drafts: the same function, at another price.

PATTERN = dataclasses.replace(
    SHAPE, num_layers=4, layers=(LayerKind(), LayerKind(window=3), LayerKind(), LayerKind(window=3))
)


READS = Reads(hidden_layers=(4, 1, 0, 3), kv_layers=(3, 0))


@functools.lru_cache(maxsize=8)
def loss_and_gradient(model):
    batch = jax.tree.map(jnp.asarray, take(scale.UnevenRows(), range(4)))
    params = Model(model.config).init(jax.random.key(1))

    def loss(params):
        out = model(params, batch.tokens, batch.token_positions, mask=batch.documents, reads=READS)
        assert (len(out.hidden), len(out.keys_values)) == (4, 2)
        read = sum(
            jnp.sum(jnp.square(x) * (i + 1)) for i, x in enumerate(jax.tree.leaves((out.hidden, out.keys_values)))
        )
        return read + jnp.sum(jnp.square(jax.nn.log_softmax(out.logits, axis=-1)) * batch.weight[..., None])

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    ("remat", "scan"), [(True, False), in_proof(False, True), (True, True)], ids=["remat", "scan", "both"]
)
def test_rematerialised_and_scanned_layers_give_the_loss_the_gradient_and_the_reads_of_plain_ones(remat, scan):
    expected_loss, expected = loss_and_gradient(Model(PATTERN))
    loss, gradient = inspect.unwrap(loss_and_gradient)(TrainingModel(PATTERN, remat=remat, scan_layers=scan))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    found, plain = (
        {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (gradient, expected)
    )
    same_gradient(found, plain)


def test_remat_recomputes_and_scan_compiles_one_loop():
    params = jax.eval_shape(Model(SHAPE).init, jax.random.key(0))
    tokens = jnp.zeros((1, 8), jnp.int32)

    def program(model) -> str:
        return str(jax.make_jaxpr(lambda p: model(p, tokens, tokens).logits)(params))

    assert "remat" in program(TrainingModel(SHAPE, remat=True))
    assert "scan" in program(TrainingModel(SHAPE, scan_layers=True))
    assert not {"remat", "scan"} & set(program(TrainingModel(SHAPE)).replace("[", " ").split())


def test_layers_without_a_pattern_are_not_scanned():
    odd = dataclasses.replace(SHAPE, num_layers=2, layers=(LayerKind(), LayerKind(window=3)))
    with pytest.raises(ConfigError, match="scan_layers: the kinds of the 2 layers repeat no pattern"):
        TrainingModel(odd, scan_layers=True)


def test_a_drafter_without_a_transformer_refuses_them(tmp_path):
    with pytest.raises(ConfigError, match="BigramDraft has no transformer"):
        toys.train(tmp_path / "stage", remat=True)


@dataclasses.dataclass(frozen=True)
class Watched(toys.BigramDraft):
    """Says in which dtype it is asked to compute."""

    def predictions(self, params, batch, target_out):
        SEEN.append(params["table"].dtype)
        return super().predictions(params, batch, target_out)


SEEN: list = []


def test_bfloat16_computes_in_it_and_keeps_float32_weights():
    optimizer, target = make_optimizer(toys.stage()), toys.target()
    losses = {}
    for dtype in ("float32", "bfloat16"):
        state = start_state(toys.bigram_params(1), optimizer, True, Layout(), Watched())
        settings = {"form": TrainingForm(dtype=dtype), "ema": 0.9}
        update = Update(Watched(), ForwardKL(), optimizer, target.spec, 4, **settings).jitted()
        state, metrics = update(state, target.params, take(toys.rows(4), range(4)))
        assert SEEN[-1] == dtype
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert {x.dtype for x in floats} == {np.dtype("float32")}
        assert metrics["loss"].dtype == jnp.float32
        losses[dtype] = float(metrics["loss"])
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)


@pytest.mark.parametrize(("remat", "scan"), [(False, False), in_proof(True, True)], ids=["plain", "both"])
def test_a_gradient_of_rounded_products_is_near_that_of_exact_ones(remat, scan):
    model = TrainingModel(PATTERN, remat=remat, scan_layers=scan)
    expected_loss, expected = loss_and_gradient(Model(PATTERN))
    with kernels.operands_in("bfloat16"):
        loss, gradient = inspect.unwrap(loss_and_gradient)(model)
    assert float(loss) != float(expected_loss)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-2)
    for found, exact in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


def test_the_transformer_of_a_drafter_computes_in_the_dtype_of_the_step():
    for model in (Model(SHAPE), Model(SHAPE, "bfloat16")):
        found: Any = TrainedDraftModel(model).in_training(TrainingForm(dtype="bfloat16"))
        assert found.model.dtype == "bfloat16"
    assert Watched().in_training(TrainingForm(dtype="bfloat16")) == Watched()
