"""What jobs take, before anything is loaded: exact where it is weights and caches, near XLA's own count in all, and a
refusal that names a setting with which it fits."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import specjax
from specjax import backend, cli
from specjax.config import Draft, load_config
from specjax.costs import memory
from specjax.costs.devices import device_of
from specjax.costs.memory import Split
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError
from specjax.interfaces import Batch
from specjax.jobs import generate
from specjax.jobs import memory as job
from specjax.jobs.plan import training_cost
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel, abstract_model, load_model, save_model
from specjax.models.kernels import counted
from specjax.models.transformer import Model
from specjax.report.planning import training_line
from specjax.training import evaluate
from specjax.training.assemble import assemble
from specjax.training.init.first_weights import initial_draft
from specjax.training.teacher import with_shared_params
from tests.cases import in_proof

GIB = 2**30
RUN = """
target: {path: TARGET}
data: {path: python-stdlib, seq_len: 256}
draft: {architecture: {hidden_size: 64, intermediate_size: 128, num_layers: 2}}
distill: {loss: forward_kl, batch_size: 8, remat: true}
bench: {batch_sizes: [1, 4], prompt_tokens: 100, new_tokens: 100, ks: [3]}
"""
WIDE = ModelConfig(1000, 256, 512, 2, 8, 4, 32, max_positions=4096, tie_embeddings=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target"
    model = Model(WIDE)
    save_model(LoadedModel(model, jax.jit(model.init)(jax.random.key(0))), path)
    return path


def config_of(directory: Path, tmp_path: Path, *overrides: str):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("TARGET", str(directory)))
    return load_config(file, overrides)


def test_the_shapes_of_a_model_are_those_that_are_loaded(directory):
    abstract, loaded = abstract_model(directory), load_model(directory)
    assert (abstract.spec, abstract.family) == (loaded.spec, loaded.family)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (abstract.params, loaded.params))
    assert shapes[0] == shapes[1]
    assert abstract_model(directory, "bfloat16").params["embedding"].dtype == jnp.bfloat16


def test_weights_and_caches_of_a_generation_are_counted_as_they_are(directory, tmp_path):
    """Beside those that decode: nothing of it is estimated."""
    config = config_of(directory, tmp_path)
    target = load_model(directory)
    found = job.footprints(assemble(config), [job.DECODING])[-1]
    assert found.parts["target"] == counted(target.layout().params)[1]
    model = Model(dataclasses.replace(WIDE, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=4))
    model = Model(dataclasses.replace(model.config, head_dim=16))
    draft = LoadedModel(model, jax.jit(model.init)(jax.random.key(1)), family="llama")
    decoder = Decoder(target, DraftModel(draft, k=3), controller="fixed")
    _, params = decoder.engine(greedy=False)
    assert found.parts["draft"] == counted(params.drafter)[1]
    run = decoder._run([[1] * 100] * 4, 100, 0, True, sampling={"temperature": 1.0})
    state = decoder._prefill(run, run.batch.slots[-1])
    caches = sum(x.nbytes for x in jax.tree.leaves((state.cache, state.drafter)))
    assert found.parts["cache"] == caches
    rest = dataclasses.replace(state, cache=None, drafter=None)
    assert found.parts["state"] == sum(x.nbytes for x in jax.tree.leaves(rest))


@pytest.mark.parametrize("kind", ["eagle3", "early_exit", "dflash"])
def test_what_a_draft_has_of_its_target_is_counted_once(directory, tmp_path, kind):
    config = dataclasses.replace(config_of(directory, tmp_path), draft=Draft(kind=kind, init="scratch"))
    target = load_model(directory)
    rows: Any = None  # nothing is fitted
    trained, params = initial_draft(config, target, rows)
    drafter: Any = trained
    _, laid_out = drafter.to_drafter(with_shared_params(trained, params, target.params), target, 3).bind(target)
    shared = {id(leaf) for leaf in jax.tree.leaves(target.layout().params)}
    leaves = jax.tree.leaves(laid_out)
    own = [leaf for leaf in leaves if id(leaf) not in shared]
    assert len(own) < len(leaves)
    assert job.footprints(assemble(config), [job.DECODING])[0].parts["draft"] == counted(own)[1]


def test_a_mesh_splits_what_it_splits(directory, tmp_path):
    whole = job.footprints(assemble(config_of(directory, tmp_path)), [job.DECODING, *job.STAGES])
    config = config_of(directory, tmp_path, "mesh.tensor=2", "mesh.fsdp=2")
    parts = job.footprints(assemble(config), [job.DECODING, *job.STAGES])
    for one, many in zip(whole, parts, strict=True):
        assert many.devices == 4
        assert many.total < one.total
        # All but the norms are split in four.
        assert many.parts["target"] == pytest.approx(one.parts["target"] / 4, rel=0.02)
    assert parts[-1].parts["cache"] == pytest.approx(whole[-1].parts["cache"] / 4, rel=1e-3)
    training, split = whole[0], parts[0]
    assert split.parts["optimizer"] == pytest.approx(training.parts["optimizer"] / 4, rel=0.05)


def test_all_stages_and_batches_are_there_and_a_machine_elsewhere_decides_the_dtype(directory, tmp_path):
    config = config_of(directory, tmp_path, "draft.pretrain={steps: 5, loss: cross_entropy}")
    here, there = job.run_budget(config), job.run_budget(config, device_of("h100-sxm"))
    assert [f.what for f in here.footprints] == [
        "draft-pretrain", "draft-distill", "decoding 1 rows of 200 tokens", "decoding 4 rows of 200 tokens",
    ]  # fmt: skip
    assert (there.limit, backend.default_dtype()) == (80e9, "float32")
    bfloat16 = there.footprints[-1].parts["cache"] / here.footprints[-1].parts["cache"]
    assert bfloat16 == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("jobs", "remedy"),
    [
        ([job.DECODING], r"bench\.batch_sizes=\[1, 2\]"),
        (["draft-distill"], r"distill\.remat=true distill\.micro_batch_size=\d"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(directory, tmp_path, jobs, remedy):
    config = config_of(directory, tmp_path, "distill.micro_batch_size=8")
    found = job.footprints(assemble(config), jobs)
    largest = max(f.total for f in found)
    assert job.budget(assemble(config), largest, jobs).exceeding is None
    budget = job.budget(assemble(config), largest - 1, jobs)
    with pytest.raises(ConfigError, match=rf"memory: .* does not fit .*; it would with {remedy}$"):
        budget.check()
    with pytest.raises(ConfigError, match="give more devices"):
        job.budget(assemble(config), 1, jobs).check()


def test_a_plan_gives_the_same_memory_of_a_distillation(directory, tmp_path):
    class Rows(list):
        length = 255

    config, device = config_of(directory, tmp_path), device_of("h100-sxm")
    run, target = assemble(config), load_model(directory)
    prepared: Any = types.SimpleNamespace(run=run, train_rows=Rows(range(100)), target=target)
    cost = training_cost(config, prepared, device, measure=False)
    assert cost.memory == job.run_budget(config, device, ["draft-distill"]).footprints[0].total
    none = dataclasses.replace(cost, memory=None)
    assert "memory unknown" in training_line(none)


def test_microbatches_are_as_large_as_fit_where_memory_decides(directory, tmp_path):
    """Elsewhere they are what the cache of a CPU holds, and what the config says is left alone."""
    config = config_of(directory, tmp_path, "data.seq_len=2000")
    with backend.lowering_for("cuda"):
        whole = job.footprints(assemble(config), ["draft-distill"])[0].total
        run = assemble(config)
        stage = job.fitting(run, "draft-distill", config.distill)
        assert stage == config.distill  # this machine holds all of it
        sizes = []
        for share in (0.9, 0.6, 0.4, 0.0):
            found = job._fitting(run, "draft-distill", config.distill, share * whole)
            sizes.append(found.micro_batch_size)
            if share:
                assert job.footprints(assemble(config), ["draft-distill"], share * whole)[0].total <= share * whole
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] == 1
        told = dataclasses.replace(config.distill, micro_batch_size=8)
        assert job._fitting(run, "draft-distill", told, 1.0) == told
    assert job._fitting(run, "draft-distill", config.distill, 1.0) == config.distill


def test_a_job_tells_it_first_and_is_refused_before_anything_is_read(directory, tmp_path, monkeypatch, capsys):
    config = config_of(directory, tmp_path)
    job.tell(assemble(config), job.DECODING)
    assert "note: memory: decoding 4 rows of 200 tokens: " in capsys.readouterr().err
    monkeypatch.setattr(backend, "device_memory", lambda: 1000)
    from specjax.jobs import inputs

    monkeypatch.setattr(inputs.corpus, "read_documents", lambda *args: pytest.fail("read before it was refused"))
    with pytest.raises(ConfigError, match=r"^memory: "):
        inputs.prepare(config)


def test_the_command_prints_a_column_a_job(directory, tmp_path):
    config_of(directory, tmp_path)
    run = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "run.yaml"), "--memory", "--json", "--device", "l4"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert (found["limit"], found["fits"], len(found["memory"])) == (24e9, True, 4)
    shown = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "run.yaml"), "--memory"])
    assert shown.exit_code == 0
    assert all(word in shown.output for word in ("optimizer", "draft-", "cache"))


def test_a_generation_is_refused_before_its_target_is_loaded(directory, monkeypatch, capsys):
    loading = {"dtype": None, "quantize": None, "kv_cache": None}
    generate.tell_memory(str(directory), str(directory), loading, ["x" * 1000, "y"], 50)
    assert "note: memory: decoding 2 rows of 301 tokens: " in capsys.readouterr().err
    monkeypatch.setattr(backend, "device_memory", lambda: 1000)
    monkeypatch.setattr(specjax, "load_model", lambda *args, **options: pytest.fail("loaded before it was refused"))
    run = CliRunner().invoke(cli.app, ["generate", "--target", str(directory), "--prompt", "x", "--prompt", "y"])
    assert run.exit_code == 2
    assert "error: memory: decoding 2 rows" in run.stderr


def test_more_tokens_than_positions_are_left_to_be_refused_as_such(directory, capsys):
    loading = {"dtype": None, "quantize": None, "kv_cache": None}
    generate.tell_memory(str(directory), None, loading, ["x"], 10**9)
    assert "note: memory: decoding 1 rows of " in capsys.readouterr().err


def test_quantised_kernels_take_what_they_take(directory, tmp_path):
    config = config_of(directory, tmp_path, "target.quantize=int8")
    found = job.footprints(assemble(config), [job.DECODING])[0].parts["target"]
    assert found == counted(load_model(directory, quantize="int8").layout().params)[1]


def test_a_pass_grows_with_its_tokens_and_a_split_makes_it_smaller():
    sizes = [memory.pass_bytes(WIDE, tokens, 4, Split()) for tokens in (1, 100)]
    assert sizes[1] == 100 * sizes[0]
    assert memory.pass_bytes(WIDE, 100, 4, Split(tensor=4)) < sizes[1]
    assert memory.score_bytes(WIDE, 1, 10**4, 10**5, Split()) == 4 * backend.score_count()


@pytest.mark.parametrize("kind", ["dflash", in_proof("dspark"), in_proof("eagle3")])
def test_the_evaluation_of_a_stage_is_told_near_xla_s_own_count(directory, tmp_path, kind):
    """Weights and optimizer of the stage are there meanwhile. It takes the rows that a step takes, and no more memory
    than a step does: where the step fits, it fits."""
    config = config_of(directory, tmp_path, "distill.micro_batch_size=2", "data.seq_len=513")
    config = dataclasses.replace(config, draft=Draft(kind=kind, init="scratch"))
    run = assemble(config)
    target, draft = run.target, run.initial
    assert draft is not None
    [found] = job.footprints(assemble(config), ["draft-distill"])
    measured = job.evaluating(run).eval
    assert measured.batch_size == 2
    assert measured.positions == config.eval.positions
    deep = evaluate.as_evaluated(draft.drafter)
    ids, weight = (jax.ShapeDtypeStruct((2, 512), dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(ids, ids, weight, ids, ids)
    out = jax.eval_shape(lambda params: evaluate._target_output(target.spec, deep.reads, params, batch), target.params)
    sums = evaluate._sums.lower(deep, target.spec, None, draft.params, target.params, out, batch)
    counted = sums.compile().memory_analysis().temp_size_in_bytes + memory.bytes_on_device(out)
    held = found.parts["target"] + found.parts["draft"] + found.parts["optimizer"]
    assert found.evaluation == pytest.approx(held + counted, rel=0.3)
    assert found.evaluation <= found.total
    assert found.to_json()["evaluation"] == found.evaluation
    assert "; evaluation " in str(found)
    larger = dataclasses.replace(found, evaluation=2 * found.total)
    assert memory.over([larger], found.total) == larger
