"""Memory that a config's stages and benchmark take on each device, known before anything is loaded. A config that
cannot fit is refused, with a setting that would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import backend, registry
from specjax.config import RunConfig, Stage
from specjax.costs import memory
from specjax.costs.devices import Device
from specjax.costs.memory import Budget, Footprint, Split, TrainingShape, bytes_on_device
from specjax.decode.arguments import bound, controller_for
from specjax.decode.engine import Engine, NoDraft
from specjax.errors import SpecjaxError
from specjax.interfaces import Initial, Params, TrainingForm
from specjax.models.decode_layout import abstract_layout
from specjax.models.hf import LoadedModel, scheme_of
from specjax.runtime.distributed import on_main_process
from specjax.training.assemble import Run, assemble
from specjax.training.evaluate import as_evaluated
from specjax.training.layout import Layout
from specjax.training.optimizer import make_optimizer
from specjax.training.step import microbatch_rows
from specjax.training.teacher import needs_target, with_shared_params
from specjax.training.trainer import with_defaults

STAGES, DECODING = ("target-train", "draft-pretrain", "draft-distill"), "decoding"
JOBS = (*STAGES, DECODING)


def run_budget(config: RunConfig, device: Device | None = None, jobs: Sequence[str] = JOBS) -> Budget:
    """Memory that jobs of a config take on a device.

    Args:
        config: the run; nothing of it is loaded, only the sizes of its models are read.
        device: a device elsewhere (`specjax.costs.devices.device_of`); None: this one.
        jobs: some of `JOBS`.

    Returns:
        The peak of each job, and a remedy where one does not fit.

    Raises:
        SpecjaxError: for a config that the jobs would refuse.
    """
    if device is None or device.backend is None:
        return budget(assemble(config), backend.device_memory(), jobs)
    with backend.lowering_for(device.backend, device.memory):
        return budget(assemble(config), device.memory, jobs)


def budget(run: Run, limit: float | None, jobs: Sequence[str]) -> Budget:
    """Memory that jobs of a run take on devices of ``limit`` bytes; None: unknown. Raises as `run_budget`."""
    found = footprints(run, jobs, limit)
    exceeding = memory.over(found, limit)
    for words, other in () if exceeding is None else _remedies(run.config, exceeding):
        try:
            if memory.over(footprints(assemble(other), jobs, limit), limit) is None:
                return Budget(found, limit, words)
        except SpecjaxError:  # this setting conflicts with others
            continue
    return Budget(found, limit)


def tell(run: Run, *jobs: str) -> None:
    """Print, as a job's first line, its memory on each device. Raises `ConfigError` if the device has less."""
    budget(run, backend.device_memory(), jobs).tell()


def footprints(run: Run, jobs: Sequence[str], limit: float | None = None) -> list[Footprint]:
    """Peak memory of each job, in the order in which they run. ``limit``: bytes that microbatches must fit into, if
    memory decides their size (`fitting`)."""
    planned = [name for name in run.stages if name in jobs and run.trained_by(name) is not None]
    found = [_stage(run, name, _fitting(run, name, run.stages[name], limit)) for name in planned]
    return [*found, *(_decoding(run) if DECODING in jobs else ())]


def fitting(run: Run, name: str, stage: Stage) -> Stage:
    """The stage ``name`` with as many rows at a time as fit the device, if the config leaves that open. Unchanged on a
    CPU, where the cache decides instead (`backend.microbatch_tokens`)."""
    limit, trained = backend.device_memory(), run.trained_by(name)
    if trained is None or trained.drafter.config is None or not _decides(stage, limit):
        return stage
    # One choice for all processes, however much memory each has left.
    rows = on_main_process(lambda: _fitting(run, name, stage, limit).micro_batch_size)
    return dataclasses.replace(stage, micro_batch_size=rows)


def evaluating(run: Run) -> RunConfig:
    """The run's config with an `eval.batch_size` of at most the rows that a step of the draft's last stage computes at
    a time: those are known to fit."""
    config, name = run.config, run.last_stage
    if name is None:
        return config
    stage = run.stages[name]
    rows = fitting(run, name, stage).micro_batch_size
    if rows is None:
        rows = microbatch_rows(stage.batch_size, config.data.seq_len - 1, run.abstract_layout.row_shards)
    return dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, batch_size=min(rows, config.eval.batch_size))
    )


def _decides(stage: Stage, limit: float | None) -> bool:
    return limit is not None and stage.micro_batch_size is None and backend.microbatch_tokens() is None


def _fitting(run: Run, name: str, stage: Stage, limit: float | None) -> Stage:
    if limit is None or not _decides(stage, limit):
        return stage
    shards, found = run.abstract_layout.row_shards, stage
    for parts in (p for p in range(1, stage.batch_size + 1) if stage.batch_size % (p * shards) == 0):
        found = stage if parts == 1 else dataclasses.replace(stage, micro_batch_size=stage.batch_size // parts)
        if _stage(run, name, found).total <= limit:
            break
    return found


def _split(layout: Layout) -> Split:
    """Parts into which the mesh of ``layout`` splits rows, computation and stored weights."""
    return (
        Split()
        if layout.mesh is None
        else Split(layout.row_shards, *(layout.mesh.shape[n] for n in ("tensor", "fsdp")))
    )


def _placed(params: Params, shardings: Any) -> Params:
    if shardings is None:
        return params
    return jax.tree.map(lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), params, shardings)


def _target_params(run: Run) -> Params:
    """Shapes of the target's weights, as loaded on one device or split over the mesh."""
    target, layout, scheme = run.target, run.abstract_layout, scheme_of(run.config.target.quantize)
    if scheme is not None and layout.mesh is None:
        return abstract_layout(target.spec, scheme=scheme)[1]
    return _placed(target.params, layout.of_target(target.params, target.spec))


def _stage(run: Run, name: str, stage: Stage) -> Footprint:
    """Peak memory of the stage ``name`` with the settings ``stage``."""
    config, layout, trained = run.config, run.abstract_layout, run.trained_by(name)
    assert trained is not None
    drafter, params = trained
    target = None if name == "target-train" else run.target
    stage = with_defaults(dataclasses.replace(stage, epochs=None, steps=stage.steps or 1), drafter)
    optimizer, averages = make_optimizer(stage), stage.optimizer.ema is not None
    state = jax.eval_shape(lambda p: (p, optimizer.init(p), p if averages else None), params)
    loss = run.loss(name, stage)
    runs = target is not None and ((loss.needs_target and stage.teacher == "online") or bool(drafter.reads))
    kept = target is not None and (runs or needs_target(drafter) or loss.needs_target)
    layout.check_rows(stage.batch_size, f"{name}: batch_size")
    length = config.data.seq_len - 1
    rows = stage.micro_batch_size or microbatch_rows(stage.batch_size, length, layout.row_shards)
    shape = TrainingShape(
        drafter.config,
        _placed(params, layout.of_draft(params, drafter)),
        _placed(state, layout.of_draft(state, drafter)),
        target.config if target is not None and runs else None,
        _target_params(run) if kept else None,
        rows,
        stage.batch_size // rows,
        length,
        jnp.dtype(stage.compute_dtype or "float32").itemsize,
        4 if target is None else target.dtype.itemsize,
        drafter.passes(length),
        bool(stage.remat),
    )
    # The evaluation runs the target for any loss, and computes in float32.
    evaluated = dataclasses.replace(shape, depths=as_evaluated(drafter).passes(length), itemsize=4)
    if target is not None:
        full, reads = target.config, drafter.reads
        heads = 2 * len(reads.kv_layers) * full.num_kv_heads * full.head_dim
        read = len(reads.hidden_layers) * full.hidden_size + heads
        evaluated = dataclasses.replace(evaluated, target=full, target_params=_target_params(run), reads=read)
    split = _split(layout)
    return dataclasses.replace(memory.training(name, shape, split), evaluation=memory.evaluation(evaluated, split))


def _decoding(run: Run) -> Iterator[Footprint]:
    """Footprints of the benchmark's smallest and largest batch."""
    settings, target, layout = run.config.bench, run.target, run.abstract_layout
    spec, laid_out = abstract_layout(target.spec, scheme=scheme_of(run.config.target.quantize))
    whole = laid_out if layout.mesh is None else _target_params(run)
    weights: Mapping[str, int] = {"target": bytes_on_device(whole)}
    for batch in dict.fromkeys((min(settings.batch_sizes), max(settings.batch_sizes))):
        k = max(settings.ks_of(batch))
        drafter: Any = NoDraft()
        if run.initial is not None:
            # The benchmark's lengths are for any draft; jobs that ask for shorter blocks must not fail because of them.
            drafter, own = _bound(run.initial, target, min(k, run.initial.drafter.longest or k))
            weights = {**weights, "draft": bytes_on_device(own)}
        controller = controller_for(settings.controller, drafter)
        verifier = registry.build(registry.VERIFIERS, run.config.verifier, "verifier")
        engine = Engine(spec, drafter, verifier, greedy=False, controller=controller)
        yield memory.decoding(engine, weights, batch, settings.prompt_tokens, settings.new_tokens, _split(layout))


def _bound(initial: Initial, target: LoadedModel, k: int) -> tuple[Any, list[Any]]:
    """The drafter for decoding, and the shapes of its own weights for decoding, in the target's dtype."""
    found, trained = [], initial.drafter.in_training(TrainingForm(dtype=str(target.dtype)))

    def bind(own: Params, whole: Params) -> Params:
        model = dataclasses.replace(target, params=whole)
        own = jax.tree.map(lambda x: x.astype(target.dtype), own)
        params = with_shared_params(initial.drafter, own, whole)
        drafter, laid_out = bound(trained.to_drafter(params, model, k), model)
        found.append(drafter)
        # Weights in the target's layout are in memory only once.
        shared = {id(leaf) for leaf in jax.tree.leaves(model.layout().params)}
        return [leaf for leaf in jax.tree.leaves(laid_out) if id(leaf) not in shared]

    weights = jax.eval_shape(bind, initial.params, target.params)
    return found[0], weights


def _remedies(config: RunConfig, exceeding: Footprint) -> Iterator[tuple[str, RunConfig]]:
    """Changes of the config that save memory, the smallest first, each in words and as a config."""
    replace, decodes = dataclasses.replace, exceeding.what.startswith(DECODING)
    if decodes:
        for rows in (2**i for i in reversed(range(max(config.bench.batch_sizes).bit_length()))):
            if rows < max(config.bench.batch_sizes):
                sizes = (*(size for size in config.bench.batch_sizes if size < rows), rows)
                shown = ", ".join(map(str, sizes))
                yield f"bench.batch_sizes=[{shown}]", replace(config, bench=replace(config.bench, batch_sizes=sizes))
    else:
        own, rows = replace(config.distill, remat=True), config.distill.batch_size
        yield "distill.remat=true", replace(config, distill=own)
        while rows % 2 == 0:
            rows //= 2
            words = f"distill.remat=true distill.micro_batch_size={rows}"
            yield words, replace(config, distill=replace(own, micro_batch_size=rows))
    if config.target.path is not None:
        for name, value in (("dtype", "bfloat16"), ("kv_cache", "int8"), ("quantize", "int8"), ("quantize", "int4")):
            yield f"target.{name}={value}", replace(config, target=replace(config.target, **{name: value}))
    axis = "tensor" if decodes else "fsdp"
    for size in (2, 4, 8, 16, 32, 64):
        yield f"mesh.{axis}={size} on as many devices", replace(config, mesh=replace(config.mesh, **{axis: size}))
