"""`specjax generate-data`: let the target write training data ahead, on another machine or once for several runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specjax import registry
from specjax.config import RunConfig
from specjax.errors import ConfigError
from specjax.formats.loading import asked_kind, load_drafter
from specjax.jobs import inputs
from specjax.models.hf import LoadedModel
from specjax.runtime import artifact
from specjax.runtime.progress import Bars, no_bars
from specjax.training.assemble import assemble
from specjax.training.sources import self_chat
from specjax.training.sources.generated import Generated
from specjax.training.sources.text import DraftHandle

_STAGE = "draft-distill"


def writes_chats(config: RunConfig, shard: str | None) -> bool:
    """True if the target's chats are all the data to write. Raises `ConfigError` for a ``shard`` of other data."""
    source = registry.build(registry.DATA, config.distill.data, "distill.data")
    chats = config.data.kind == "self_chat"
    if shard is not None and not chats:
        raise ConfigError(f"--shard: {shard!r} needs data.kind=self_chat; other data is written by one process")
    return chats and (shard is not None or not isinstance(source, Generated))


def make_chats(config: RunConfig, out: Path | None, share: tuple[int, int], bars: Bars = no_bars) -> dict[str, Any]:
    """Write the chats of `data.kind: self_chat` in ``out`` (None: the directory where the run will look for them), or
    the shards i, i + n, i + 2n, ... of them, ``share`` = (i, n). A run whose `data.self_chat.path` is ``out`` trains on
    them. Returns the counts of the data set, if it is whole, the ``missing`` shards and ``directory``."""
    run = assemble(config)
    files = inputs.chat_files(run, inputs.load_target(run, str(config.target.path)))
    files = files if out is None else dataclasses.replace(files, directory=out)
    own = len(range(share[0], files.count, share[1]))
    with inputs.naming_inputs(config), bars("self-chat", own * files.settings.shard_size) as progress:
        missing = self_chat.write(files, share, progress)
        facts = {} if missing else self_chat.read(files)[1]
    return {**facts, "missing": missing, "directory": str(files.directory)}


def make_data(config: RunConfig, out: Path | None, draft: str | None, bars: Bars = no_bars) -> dict[str, Any]:
    """Make the data of the distillation in ``out`` (None: the directory where the run will look for it). The target
    decodes with the draft in the directory ``draft`` (None: the one in the run's directory, if there is one). A run
    whose `distill.data.path` is ``out`` trains on the data. Returns their provenance, and ``directory``.

    Raises `ConfigError` if the config's distillation is not on generated data.
    """
    source = registry.build(registry.DATA, config.distill.data, "distill.data")
    if not isinstance(source, Generated):
        raise ConfigError(f"distill.data: the kind is {source.kind!r}; set distill.data={{kind: generated}}")
    kept = [path for name in ("draft", "draft-before") if (path := Path(config.out) / name).is_dir()]
    with artifact.exclusive(config.out):
        prepared = inputs.prepare(config, bars)
        helper = _helper(config, draft or kept[0], prepared.target) if draft or kept else None
        prepared.target.free_originals()
        # The data are those that the run would make itself.
        _, context = inputs.source_of(prepared, _STAGE, config.distill, bars)
        directory = out or Path(source.path or context.directory).expanduser()
        context = dataclasses.replace(context, draft=helper, directory=directory)
        inputs.rows_of(config, dataclasses.replace(source, path=str(directory)), context)
    return {**artifact.read_provenance(directory), "directory": str(directory)}


def _helper(config: RunConfig, path: str | Path, target: LoadedModel) -> DraftHandle:
    loaded: Any = load_drafter(path, target, 1, asked_kind(config.draft))
    return DraftHandle(loaded.bind(target).params, lambda _, k: dataclasses.replace(loaded, k=k))
