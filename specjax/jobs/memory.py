"""Memory that a config's stages and benchmark take on each device, known before anything is loaded. A config that
cannot fit is refused, with a setting that would fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from specjax import backend, registry
from specjax import config as config_lib
from specjax.config import RunConfig
from specjax.costs import memory
from specjax.costs.devices import Device
from specjax.costs.memory import Footprint, Split, TrainingShape, bytes_on_device
from specjax.decode.arguments import bound, controller_for
from specjax.decode.engine import Engine, NoDraft
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import ConfigError, SpecjaxError
from specjax.interfaces import Initial, Params, TrainingForm
from specjax.models import families
from specjax.models.decode_layout import abstract_layout
from specjax.models.hf import LoadedModel, abstract_model, scheme_of
from specjax.models.sharding import AXES
from specjax.models.transformer import param_shapes
from specjax.runtime.distributed import on_main_process
from specjax.runtime.log import note
from specjax.training.evaluate import as_evaluated
from specjax.training.init.first_weights import abstract_draft, target_model, target_stage
from specjax.training.layout import Layout, axis_sizes
from specjax.training.optimizer import make_optimizer
from specjax.training.step import microbatch_rows
from specjax.training.teacher import needs_target, with_shared_params
from specjax.training.trainer import settled

STAGES, DECODING = ("target-train", "draft-pretrain", "draft-distill"), "decoding"
_CHARACTERS = 4
"""Characters of a typical token."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Memory that a config's jobs take, beside the memory of a device."""

    footprints: list[Footprint]
    limit: float | None
    """Bytes of a device's memory; None: unknown."""
    remedy: str | None = None
    """Setting with which all jobs would fit. None: they fit as they are, or no setting that was tried is enough."""

    @property
    def exceeding(self) -> Footprint | None:
        """Largest footprint above the limit; None: all fit."""
        return memory.over(self.footprints, self.limit)

    def to_json(self) -> dict[str, Any]:
        """The budget as a JSON object."""
        found = [footprint.to_json() for footprint in self.footprints]
        return {"memory": found, "limit": self.limit, "fits": self.exceeding is None, "remedy": self.remedy}

    def check(self) -> None:
        """Raise `ConfigError` if a job does not fit, with a setting that would."""
        too_large = self.exceeding
        if too_large is None:
            return
        assert self.limit is not None
        remedy = f"it would with {self.remedy}" if self.remedy else "give more devices (mesh), or a smaller target"
        raise ConfigError(f"memory: {too_large} does not fit {memory.gib(self.limit)}; {remedy}")


def run_budget(config: RunConfig, device: Device | None = None, jobs: Sequence[str] = (*STAGES, DECODING)) -> Budget:
    """Memory that jobs of a config take on a device.

    Args:
        config: the run; nothing of it is loaded, only the sizes of its models are read.
        device: a device elsewhere (`specjax.costs.devices.device_of`); None: this one.
        jobs: which of `STAGES` and `DECODING`.

    Returns:
        The peak of each job, and a remedy where one does not fit.

    Raises:
        SpecjaxError: for a config that the jobs would refuse.
    """
    if device is None or device.backend is None:
        return budget(config, backend.device_memory(), jobs)
    with backend.lowering_for(device.backend, device.memory):
        return budget(config, device.memory, jobs)


def budget(config: RunConfig, limit: float | None, jobs: Sequence[str]) -> Budget:
    """Memory that jobs of a config take on devices of ``limit`` bytes.

    Args:
        config: the run; nothing of it is loaded, only the sizes of its models are read.
        limit: bytes of a device; None: unknown.
        jobs: which of `STAGES` and `DECODING`.

    Returns:
        The peak of each job, and a remedy where one does not fit.

    Raises:
        SpecjaxError: for a config that the jobs would refuse.
    """
    found = footprints(config, jobs, limit)
    exceeding = memory.over(found, limit)
    for words, other in () if exceeding is None else _remedies(config, exceeding):
        try:
            if memory.over(footprints(other, jobs, limit), limit) is None:
                return Budget(found, limit, words)
        except SpecjaxError:  # this setting conflicts with others
            continue
    return Budget(found, limit)


def tell(config: RunConfig, *jobs: str) -> None:
    """Print, as a job's first line, its memory on each device. Raises `ConfigError` if the device has less."""
    found = budget(config, backend.device_memory(), jobs)
    largest = max(found.footprints, key=lambda footprint: footprint.total, default=None)
    if largest is not None:
        note(f"memory: {largest}")
    found.check()


def tell_generation(
    target: LoadedModel, quantize: str | None, draft: Path | None, prompts: Sequence[str], new: int
) -> None:
    """Print the memory that decoding prompts of text takes, estimated from their characters. Raises `ConfigError` if
    the device has less. ``target``: with shapes in place of weights. ``draft``: directory of a draft, whose weight
    files are counted."""
    spec, laid_out = abstract_layout(target.spec, scheme=scheme_of(quantize))
    weights = {"target": bytes_on_device(laid_out)}
    if draft is not None:
        weights["draft"] = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
    engine = Engine(spec, NoDraft(), registry.build(registry.VERIFIERS, "greedy", "verifier"), greedy=True)
    longest = min(max(map(len, prompts)) // _CHARACTERS + 1, target.config.max_positions)
    found = Budget([memory.decoding(engine, weights, len(prompts), longest, new)], backend.device_memory())
    note(f"memory: {found.footprints[0]}")
    found.check()


def footprints(config: RunConfig, jobs: Sequence[str], limit: float | None = None) -> list[Footprint]:
    """Peak memory of each job, in the order in which they run. ``limit``: bytes that microbatches must fit into, if
    memory decides their size (`fitting`)."""
    layout, split = _abstract_layout(config.mesh)
    target = abstract_target(config)
    drafts = abstract_draft(config, target)
    found = []
    if "target-train" in jobs and config.target.path is None:
        found.append(_from_scratch(config, target, layout, split))
    for name, stage in _draft_stages(config).items():
        if name in jobs and drafts is not None and stage.steps != 0:
            stage = _fitting(name, stage, config, target, drafts, limit)
            found.append(_stage(name, stage, config, target, drafts, layout, split))
    if DECODING in jobs:
        found += _decoding(config, target, drafts, layout, split)
    return found


def fitting(name: str, stage: config_lib.Stage, config: RunConfig, drafts: Initial) -> config_lib.Stage:
    """The stage with as many rows at a time as fit the device, if the config leaves that open. Unchanged on a CPU,
    where the cache decides instead (`backend.microbatch_tokens`)."""
    limit = backend.device_memory()
    if drafts.drafter.config is None or not _decides(stage, limit):
        return stage
    # One choice for all processes, however much memory each has left.
    rows = on_main_process(
        lambda: _fitting(name, stage, config, abstract_target(config), drafts, limit).micro_batch_size
    )
    return dataclasses.replace(stage, micro_batch_size=rows)


def evaluating(config: RunConfig, drafts: Initial) -> RunConfig:
    """``config`` with an `eval.batch_size` of at most the rows that a step of the draft's last stage computes at a
    time: those are known to fit."""
    last = last_stage(config)
    if last is None:
        return config
    name, stage = last
    rows = fitting(name, stage, config, drafts).micro_batch_size
    if rows is None:
        shards = _abstract_layout(config.mesh)[0].row_shards
        rows = microbatch_rows(stage.batch_size, config.data.seq_len - 1, shards)
    return dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, batch_size=min(rows, config.eval.batch_size))
    )


def last_stage(config: RunConfig) -> tuple[str, config_lib.Stage] | None:
    """Name and settings of the draft's last stage that takes steps; None: the draft is not trained."""
    return next(((name, stage) for name, stage in reversed(_draft_stages(config).items()) if stage.steps != 0), None)


def _draft_stages(config: RunConfig) -> dict[str, config_lib.Stage]:
    return {"draft-pretrain": config.draft.pretrain, "draft-distill": config.distill}


def _decides(stage: config_lib.Stage, limit: float | None) -> bool:
    return limit is not None and stage.micro_batch_size is None and backend.microbatch_tokens() is None


def _fitting(
    name: str,
    stage: config_lib.Stage,
    config: RunConfig,
    target: LoadedModel,
    drafts: Initial,
    limit: float | None,
) -> config_lib.Stage:
    if limit is None or not _decides(stage, limit):
        return stage
    layout, split = _abstract_layout(config.mesh)
    shards, found = layout.row_shards, stage
    for parts in (p for p in range(1, stage.batch_size + 1) if stage.batch_size % (p * shards) == 0):
        rows = stage.batch_size // parts
        found = stage if parts == 1 else dataclasses.replace(stage, micro_batch_size=rows)
        if _stage(name, found, config, target, drafts, layout, split).total <= limit:
            break
    return found


def abstract_target(config: RunConfig) -> LoadedModel:
    """The target of a config, to load or to train, with shapes in place of weights."""
    settings = config.target
    if settings.path is None:
        model = target_model(config, settings.vocab_size)
        return LoadedModel(model, param_shapes(model))
    if settings.family is not None:
        families.register(settings.family)
    return abstract_model(settings.path, settings.dtype, settings.revision, settings.kv_cache)


def _abstract_layout(settings: config_lib.Mesh) -> tuple[Layout, Split]:
    sizes = axis_sizes(settings)
    if math.prod(sizes.values()) == 1:
        return Layout(), Split()
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    layout = Layout(mesh, settings.draft == "sharded", settings.target == "sharded")
    return layout, Split(layout.row_shards, sizes["tensor"], sizes["fsdp"])


def _placed(params: Params, shardings: Any) -> Params:
    if shardings is None:
        return params
    return jax.tree.map(lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), params, shardings)


def _target_params(config: RunConfig, target: LoadedModel, layout: Layout) -> Params:
    """Shapes of the target's weights, as loaded on one device or split over the mesh."""
    scheme = scheme_of(config.target.quantize)
    if scheme is not None and layout.mesh is None:
        return abstract_layout(target.spec, scheme=scheme)[1]
    return _placed(target.params, layout.of_target(target.params, target.spec))


def _from_scratch(config: RunConfig, target: LoadedModel, layout: Layout, split: Split) -> Footprint:
    initial = Initial(TrainedDraftModel(target.spec), target.params)
    return _stage("target-train", target_stage(config), config, None, initial, layout, split)


def _stage(
    name: str,
    stage: config_lib.Stage,
    config: RunConfig,
    target: LoadedModel | None,
    initial: Initial,
    layout: Layout,
    split: Split,
) -> Footprint:
    drafter, params = initial
    stage = settled(dataclasses.replace(stage, epochs=None, steps=stage.steps or 1), drafter)
    optimizer, averages = make_optimizer(stage), stage.optimizer.ema is not None
    state = jax.eval_shape(lambda p: (p, optimizer.init(p), p if averages else None), params)
    loss = registry.build(registry.LOSSES, stage.loss, f"{name}: loss")
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
        _target_params(config, target, layout) if target is not None and kept else None,
        rows,
        stage.batch_size // rows,
        length,
        jnp.dtype(stage.compute_dtype or "float32").itemsize,
        4 if target is None else target.dtype.itemsize,
        drafter.passes(length),
        bool(stage.remat),
    )
    evaluated = _evaluated(shape, config, target, drafter, layout)
    return dataclasses.replace(memory.training(name, shape, split), evaluation=memory.evaluation(evaluated, split))


def _evaluated(
    shape: TrainingShape, config: RunConfig, target: LoadedModel | None, drafter: Any, layout: Layout
) -> TrainingShape:
    """Shapes of the stage's evaluation, which runs the target for any loss and computes in float32."""
    shape = dataclasses.replace(shape, depths=as_evaluated(drafter).passes(shape.length), itemsize=4)
    if target is None:
        return shape
    full, reads = target.config, drafter.reads
    read = len(reads.hidden_layers) * full.hidden_size + 2 * len(reads.kv_layers) * full.num_kv_heads * full.head_dim
    return dataclasses.replace(shape, target=full, target_params=_target_params(config, target, layout), reads=read)


def _decoding(
    config: RunConfig, target: LoadedModel, initial: Initial | None, layout: Layout, split: Split
) -> Iterator[Footprint]:
    """Footprints of the benchmark's smallest and largest batch."""
    settings, scheme = config.bench, scheme_of(config.target.quantize)
    spec, laid_out = abstract_layout(target.spec, scheme=scheme)
    whole = laid_out if layout.mesh is None else _placed(target.params, layout.of_target(target.params, target.spec))
    weights: Mapping[str, int] = {"target": bytes_on_device(whole)}
    for batch in dict.fromkeys((min(settings.batch_sizes), max(settings.batch_sizes))):
        k = max(settings.ks_of(batch))
        drafter: Any = NoDraft()
        if initial is not None:
            # The benchmark's lengths are for any draft; jobs that ask for shorter blocks must not fail because of them.
            drafter, own = _bound(initial, target, min(k, initial.drafter.longest or k))
            weights = {**weights, "draft": bytes_on_device(own)}
        controller = controller_for(settings.controller, drafter)
        verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
        engine = Engine(spec, drafter, verifier, greedy=False, controller=controller)
        yield memory.decoding(engine, weights, batch, settings.prompt_tokens, settings.new_tokens, split)


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
