"""`specjax distill`: a draft for a chat model from nothing but the model, in a given time.

The job writes one shard of the target's chats and measures its pace, then as many as the time allows; it measures a
step of training, then takes as many; `specjax run` does the rest. What was decided stands in `OUT/config.yaml`, so that
the same command goes on after an interruption, and `specjax run OUT/config.yaml` does it again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import yaml
from pydantic import TypeAdapter
from rich.console import Console

from specjax import backend
from specjax.config import RunConfig, load_config
from specjax.config.recipe import TRAINING, WRITING, Kind, recipe
from specjax.errors import ConfigError, unwritable
from specjax.interfaces import Initial
from specjax.jobs import inputs, memory
from specjax.jobs.bench import most_prompts
from specjax.jobs.plan import step_seconds
from specjax.jobs.run import run
from specjax.models.files import write_atomically
from specjax.models.hf import abstract_model
from specjax.report.labels import counted, format_duration
from specjax.runtime import artifact
from specjax.runtime.compile_cache import programs_kept
from specjax.runtime.log import note
from specjax.runtime.progress import Bars, console_bars
from specjax.training.assemble import assemble
from specjax.training.init.cached import cached_start
from specjax.training.sources import self_chat

FILE = "config.yaml"
_ELSEWHERE = "give another --out, or remove its directory"
_LEAST_STEPS = 50
_HELD_OUT = 20
"""Fewest chats that are held out, of which the figures and the benchmark take their prompts."""
_SECONDS_A_PROMPT = 450
"""Seconds of the whole time for each prompt of the benchmark, which compiles and decodes for about a seventh of it."""
_MOST_EPOCHS = 10
"""Most times that training reads the chats: more of them teach it little else than these chats."""


def distill_target(
    target: str,
    out: str,
    minutes: float = 60,
    kind: Kind = "eagle3",
    own: str | None = None,
    share: float = 0.5,
    chats: str | None = None,
) -> dict[str, Any]:
    """Make a draft for ``target`` in ``out``, in about ``minutes`` on this machine; for the other arguments see
    `specjax.config.recipe.recipe`. Returns the summary of `specjax.jobs.run.run`.

    Raises `ConfigError` if ``out`` holds another job's config.
    """
    sizes, rounds = abstract_model(target).config, backend.multiplies_bfloat16()
    sections = recipe(target, out, kind, sizes, own, share, chats, rounds)
    file, console = Path(out) / FILE, Console()
    bars = console_bars(console)
    with programs_kept(), artifact.exclusive(out):
        known = _known(file, sections)
        if known is None:
            seconds = 60 * minutes
            console.print(_plan(seconds))
            sections = _with_chats(sections, seconds, bars, console)
            sections = _with_steps(sections, seconds, bars, console)
            _write(file, sections)
        else:
            note(f"{file}: goes on as decided there; --minutes and --chats are for a new job")
    return run(load_config(file))


def _plan(seconds: float) -> str:
    """The time that each part of the job may take, in one line."""
    shares = {"chats": WRITING, "training with the target's passes": TRAINING}
    parts = [f"{format_duration(share * seconds)} for {name}" for name, share in shares.items()]
    rest = format_duration((1 - WRITING - TRAINING) * seconds)
    return f"plan: {', '.join(parts)}, {rest} for compiling, figures, export and benchmark"


def _validated(sections: dict[str, Any]) -> RunConfig:
    return TypeAdapter(RunConfig).validate_python(sections)


def _known(file: Path, sections: dict[str, Any]) -> dict[str, Any] | None:
    """The sections that were decided on before; None if there are none. Raises `ConfigError` if they are of another
    target, kind or text."""
    if not file.exists():
        return None
    found = yaml.safe_load(file.read_text())
    for name in ("target", "draft"):
        if found.get(name) != json.loads(json.dumps(sections[name])):
            raise ConfigError(f"{file}: of another job ({name}: {found.get(name)}); {_ELSEWHERE}")
    decided = {"self_chat": None, "held_out": None}
    if {**found["data"], **decided} != {**sections["data"], **decided}:
        raise ConfigError(f"{file}: of another job (data: {found['data']}); {_ELSEWHERE}")
    return found


def _write(file: Path, sections: dict[str, Any]) -> None:
    try:
        write_atomically(file, yaml.safe_dump(json.loads(json.dumps(sections)), sort_keys=False), alone=True)
    except OSError as error:
        raise unwritable(file, error) from None


def _with_chats(sections: dict[str, Any], seconds: float, bars: Bars, console: Console) -> dict[str, Any]:
    """The sections with as many chats as their share of the time allows, which are written."""
    run = assemble(_validated(sections))
    memory.tell(run, *memory.STAGES)
    target = inputs.load_target(run, str(run.config.target.path))
    files = inputs.chat_files(run, target)
    size, at = files.settings.shard_size, dict[int, float]()
    with bars("first-chats", size) as shown:

        def progress(count: int, figures: dict[str, float]) -> None:
            at[count] = time.perf_counter()
            if shown is not None:
                shown(count, figures)

        self_chat.write(files, progress=progress)
    early = size // 4
    if early in at:  # before that, programs are compiled
        took = (at[size] - at[early]) * size / (size - early)
    else:  # all shards that were there say more than the first one
        records = itertools.takewhile(lambda record: record is not None, map(files.record, itertools.count()))
        took = statistics.fmean(record["seconds"] for record in records if record is not None)
    shards = max(1, round(WRITING * seconds / took))
    chats = shards * size
    console.print(f"chats: {chats:,} in about {format_duration(shards * took)}, by the pace of the first {size}")
    data, own = sections["data"], {**sections["data"]["self_chat"], "chats": chats}
    held_out = max(data["held_out"], _HELD_OUT / chats)
    return {**sections, "data": {**data, "held_out": held_out, "self_chat": own}}


def _with_steps(sections: dict[str, Any], seconds: float, bars: Bars, console: Console) -> dict[str, Any]:
    """The sections with as many steps of training as their share of the time allows."""
    prepared = inputs.prepare(_validated(sections), bars, memory.STAGES)
    config, rows = prepared.run.config, prepared.train_rows
    began, start = time.perf_counter(), inputs.start_rows(prepared, bars)
    drafter, weights = cached_start(prepared.run, prepared.target, start)
    if start.kept is not None:  # training reads this too
        start.kept(drafter.reads)
    begun = time.perf_counter() - began
    with bars("pace-of-training", 1):
        of_step = step_seconds(config, prepared, Initial(drafter, weights.params))
    least, size = max(_LEAST_STEPS, config.distill.over(len(rows)).num_steps), config.distill.batch_size
    steps = max(least, int((TRAINING * seconds - begun) / of_step))
    steps = min(steps, max(least, int(_MOST_EPOCHS * len(rows) / size)))
    epochs = steps * size / len(rows)
    console.print(
        f"training: {counted(steps, 'step')}, {epochs:.1f} times {len(rows):,} rows, in about "
        f"{format_duration(steps * of_step)}"
    )
    every = max(1, steps // 4)
    distill = {**sections["distill"], "epochs": None, "steps": steps, "eval_every": every, "save_every": every}
    bench, held_out = sections["bench"], prepared.corpus.held_out
    most = min(bench["prompts"], max(2, int(seconds / _SECONDS_A_PROMPT)))
    prompts = most_prompts(held_out, prepared.target, bench["prompt_tokens"], most)
    jax.clear_caches()
    return {**sections, "distill": distill, "bench": {**bench, "prompts": max(1, prompts)}}
