"""Inputs of a run's stages: its text, split and cut into rows, and its target, loaded or trained from scratch."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.config import Data, RunConfig, Stage
from specjax.data import chat_template as chat
from specjax.data import corpus
from specjax.data.corpus import BadRecordPolicy, Document
from specjax.data.rows import Batches, ConcatenatedRows, Rows, StartRows, pack
from specjax.data.self_chat import summary
from specjax.data.tokenizer import train_tokenizer
from specjax.drafters.draft_model import TrainedDraftModel
from specjax.errors import ConfigError, DataError, TrainingError
from specjax.interfaces import Reads, Source
from specjax.jobs import memory
from specjax.models.files import import_transformers, write_json, write_manifest
from specjax.models.hf import LoadedModel, load_model
from specjax.runtime import artifact, fingerprint
from specjax.runtime.distributed import on_main_process
from specjax.runtime.log import note
from specjax.runtime.progress import Bars, no_bars
from specjax.training.assemble import Run, assemble
from specjax.training.exports import WEIGHTS, card, export, parameter_count, set_aside_if_damaged
from specjax.training.init.cached import FirstWeights
from specjax.training.init.first_weights import check_length, target_model, target_stage
from specjax.training.kept_streams import Streams
from specjax.training.sources import self_chat
from specjax.training.sources.self_chat import ChatFiles
from specjax.training.sources.text import SourceContext, Text
from specjax.training.trainer import StageData, Trainer, cached_rows, rows_at_once

_DATE = "chat_date.json"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out documents; no text is in both."""

    train: list[Document]
    held_out: list[Document]

    @property
    def digest(self) -> str:
        return corpus.corpus_digest([*self.train, *self.held_out])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Inputs of the training stages."""

    run: Run
    """The run, of this target."""
    target: LoadedModel
    corpus: Corpus
    train_rows: ConcatenatedRows
    held_out_rows: ConcatenatedRows
    bad: BadRecordPolicy = dataclasses.field(default_factory=BadRecordPolicy)
    """Treatment of bad records, with counts of those that `data.on_bad` skipped."""


def prepare(config: RunConfig, bars: Bars = no_bars, jobs: Sequence[str] = (memory.DECODING,)) -> Prepared:
    """Read and split the corpus, load the target or train it from scratch, and cut the rows. Before that, print the
    memory that the following ``jobs`` take, or refuse them."""
    run = assemble(config)
    memory.tell(run, *jobs)
    bad = BadRecordPolicy(config.data.on_bad)
    if config.target.path is None:
        documents = _split(config, _own_text(config, bad))
        tokenizer = _tokenizer(config, documents)
        documents, train, held_out = _rows(config, documents, tokenizer, (tokenizer.eos_token_id,), bad)
        target = _target_from_scratch(run, documents, tokenizer, (train, held_out), bars)
        return Prepared(run.with_target(target), target, documents, train, held_out, bad)
    target = load_target(run, config.target.path)
    if target.tokenizer is None or not target.eos_ids:
        missing = "tokenizer" if target.tokenizer is None else "end-of-sequence id"
        raise ConfigError(f"target.path: {config.target.path!r} has no {missing}, which the corpus needs; add it there")
    check_length(config, target.config, "target")
    documents = _split(config, _documents(run, target, bad, bars))
    return Prepared(run, target, *_rows(config, documents, target.tokenizer, target.eos_ids, bad), bad)


def _own_text(config: RunConfig, bad: BadRecordPolicy) -> list[Document]:
    data = config.data
    return [] if data.path is None else corpus.read_documents(data.path, bad, data.hub, {**data.columns})


def chat_files(run: Run, target: LoadedModel) -> ChatFiles:
    """The chats of `data.kind: self_chat`, which this target writes."""
    data = run.config.data
    directory = run.directory("self-chat") if data.chats.path is None else Path(data.chats.path).expanduser()
    return ChatFiles(directory, data.chats, target, data.seq_len - 1, run.config.seed)


def _documents(run: Run, target: LoadedModel, bad: BadRecordPolicy, bars: Bars) -> list[Document]:
    """The text of the run: its documents, or the target's chats, which are written if they are missing, and a share of
    its documents."""
    config, own = run.config, _own_text(run.config, bad)
    if config.data.kind == "text":
        return own
    files = chat_files(run, target)

    def written() -> None:
        with naming_inputs(config), bars("self-chat", files.count * files.settings.shard_size) as progress:
            self_chat.write(files, progress=progress)

    on_main_process(written)
    chats, facts = self_chat.read(files)
    note(f"{files.directory}: {summary(facts)}")
    return [*chats, *_mixed(chats, own, config.data.mixed)]


def _mixed(chats: Sequence[Document], own: Sequence[Document], share: float) -> list[Document]:
    """The ``own`` documents, in the order of their hashes, up to this share of all characters."""
    written = sum(len(document.text) for document in chats)
    room, chosen = share / (1 - share) * written, []
    for document in sorted(own, key=lambda document: document.digest):
        if room <= 0:
            break
        chosen.append(document)
        room -= len(document.text)
    if own:
        taken = sum(len(document.text) for document in chosen)
        found, all_of = taken / (taken + written), "" if len(chosen) < len(own) else ", which are all"
        documents = f"{len(chosen):,} of {len(own):,} documents{all_of}"
        note(f"data.path: {documents}: {found:.0%} of the text, {share:.0%} asked for")
    return chosen


def _named(data: Data) -> str:
    """The field that says where the text comes from, for messages."""
    return "data.self_chat" if data.path is None else f"data.path: {data.path!r}"


def _split(config: RunConfig, documents: Sequence[Document]) -> Corpus:
    """The documents to train on and those to measure on."""
    data = config.data
    found = Corpus(*corpus.split_held_out(documents, data.held_out))
    for side, name in ((found.train, "training"), (found.held_out, "measuring")):
        if not side:
            raise DataError(
                f"{_named(data)}: none of its documents ({len(documents)}) "
                f"is left for {name} at data.held_out={data.held_out:g}; give more, smaller documents "
                "or another data.held_out"
            )
    return found


def load_target(run: Run, path: str | Path) -> LoadedModel:
    """Load the target at ``path``, with the run's model family and over its mesh."""
    mesh: Any = run.layout.mesh if run.layout.target_sharded else None
    names = ("dtype", "revision", "quantize", "kv_cache")
    return load_model(path, mesh=mesh, **{name: getattr(run.config.target, name) for name in names})


def _rows(
    config: RunConfig, documents: Corpus, tokenizer: Any, eos_ids: Sequence[int], bad: BadRecordPolicy
) -> tuple[Corpus, ConcatenatedRows, ConcatenatedRows]:
    """The documents as rendered text, their training rows, and their held-out rows."""
    data = config.data
    today = _today(Path(config.out), tokenizer)
    both = (documents.train, documents.held_out)
    ends = [token for token in tokenizer.convert_ids_to_tokens([*eos_ids]) if token]
    documents = Corpus(*(corpus.rendered(side, tokenizer, bad, today, ends) for side in both))
    sides = []
    for name, side in (("training", documents.train), ("held-out", documents.held_out)):
        try:
            sides.append(pack(tokenizer, side, eos_ids[0], data.seq_len, data.prompt_weight, bad))
        except DataError as error:
            raise DataError(f"{_named(data)}: its {name} part: {error}") from None
    if bad.counts:
        _log.warning("%s: %s", _named(data), bad)
    return documents, sides[0], sides[1]


def _today(out: Path, tokenizer: Any) -> datetime.date | None:
    """Day on which the run began, kept so that its text stays the same; None if the chat template prints no date."""
    if not chat.prints_the_date(tokenizer):
        return None
    file = out / _DATE

    def kept() -> str:
        if not file.exists():
            out.mkdir(parents=True, exist_ok=True)
            write_json(file, {"date": datetime.date.today().isoformat()})
        return file.read_text()

    try:
        return datetime.date.fromisoformat(json.loads(on_main_process(kept))["date"])
    except (ValueError, KeyError, TypeError):
        raise TrainingError(
            f'{file}: damaged; write the day that the run began into it: {{"date": "2025-01-31"}}'
        ) from None


def _target_from_scratch(
    run: Run, documents: Corpus, tokenizer: Any, rows: tuple[Rows, Rows], bars: Bars
) -> LoadedModel:
    config, settings, trained = run.config, run.config.target, "target-train"
    spec, stage = target_model(config, len(tokenizer)), target_stage(config)
    drafter = TrainedDraftModel(spec)  # a target is trained like any model
    key, _ = jax.random.split(jax.random.key(config.seed))
    stage = memory.fitting(run, trained, stage)
    with naming_inputs(config), bars(trained, settings.steps) as progress:
        initial = FirstWeights(
            jax.eval_shape(lambda key: drafter.init_params(key, None), key),
            lambda: drafter.init_params(key, None),
            fingerprint.of_json({"random": [repr(spec), config.seed]}),
        )
        data = StageData(*rows, config.seed + 2)
        trainer = Trainer(run.directory(trained), stage, drafter, initial, None, data, layout=run.layout)
        params = trainer.run(progress)
    target, name = LoadedModel(spec, params, tokenizer, (tokenizer.eos_token_id,), "target"), run.directory("target")
    title = f"A target of {parameter_count(params):,} parameters, trained from scratch by specjax."
    digests = {WEIGHTS: fingerprint.digest(params), "SHA-256 of the text": documents.digest}
    training = {"target": dataclasses.asdict(settings), "data": dataclasses.asdict(config.data), "seed": config.seed}
    own = card("target", title, digests, training)
    export(params, lambda params: drafter.save(params, target, name, name="target", card=own), name, own)
    return load_target(run, name)


def _tokenizer(config: RunConfig, documents: Corpus) -> Any:
    directory, vocab_size = Path(config.out) / "tokenizer", config.target.vocab_size
    made_from = {"train_text": corpus.corpus_digest(documents.train), "vocab_size": vocab_size}
    files = directory / "files"

    def make() -> None:
        with naming_inputs(config):
            artifact.claim(directory, made_from)
        if not files.exists() or set_aside_if_damaged(files):
            partial = directory / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            train_tokenizer(documents.train, vocab_size, partial)
            write_manifest(partial)
            os.rename(partial, files)

    on_main_process(make)
    return import_transformers().PreTrainedTokenizerFast.from_pretrained(files)


def rows_of(config: RunConfig, source: Any, context: SourceContext) -> Rows:
    """Rows that a stage trains on, of the data ``source``; they are made if they do not exist. Raises `TrainingError`
    naming the inputs that changed since they were made."""
    with naming_inputs(config, source.prompts, context.today):
        return source.rows(context)


def start_rows(prepared: Prepared, bars: Bars) -> StartRows:
    """The training rows, with the rows in which token ids are counted for a draft vocabulary. Those belong to the
    draft's last stage, which may train on another text, or weigh it otherwise. If that stage trains on these rows and
    keeps the target's output in a directory that other stages and runs share, first weights are made from it too."""
    run, name = prepared.run, prepared.run.last_stage
    rows, target = prepared.train_rows, prepared.target

    def counted() -> Sequence[tuple[Rows, float]]:
        if name is None:
            return [(rows, 1.0)]
        source, context = source_of(prepared, name, run.stages[name], bars)
        with naming_inputs(run.config, source.prompts, context.today):
            return source.vocabulary_rows(context)

    def kept(reads: Reads) -> tuple[Rows, np.ndarray]:
        assert name is not None
        stage = run.stages[name].over(len(rows))
        at_once = rows_at_once(name, stage, rows.length, run.layout)
        batches, streams = Batches(rows, stage.batch_size, run.seed(name)), Streams.of(reads, target, stage)
        found = cached_rows(stage, batches, target, streams, at_once, run.directory(name), bars)
        return found, found.numbers

    if name is None or run.stages[name].teacher != "cached" or run.stages[name].teacher_path is None:
        return StartRows(rows, counted)
    return StartRows(rows, counted, kept if isinstance(run.source(name, run.stages[name]), Text) else None)


@contextlib.contextmanager
def naming_inputs(config: RunConfig, prompts: str | None = None, today: datetime.date | None = None) -> Iterator[None]:
    """Add to an error of the block, about inputs that changed since a directory was made, the field or file that each
    is read from. ``prompts``: file of the prompts, if they are not cut from the text. ``today``: date that the chat
    template printed in them."""
    try:
        yield
    except artifact.Changed as error:
        text, target = _named(config.data), f" (target.path: {config.target.path!r})"
        asked = text if prompts is None else f"data.prompts: {prompts!r}"
        if today is not None:
            file = Path(config.out) / _DATE
            asked += f", with the date {today} of {file}, where that of the run that made the directory has to stand"
        places = dict.fromkeys(("train_rows", "held_out_rows", "train_text"), f" ({text})")
        places |= {"prompts": f" ({asked})", "target_params": target, "target_config": target, "target": target}
        raise error.at(places) from None


def source_of(prepared: Prepared, name: str, stage: Stage, bars: Bars) -> tuple[Source, SourceContext]:
    """The source of the data of the stage ``name``, and the inputs that the data is made from, a draft left out."""
    run, data = prepared.run, prepared.run.config.data
    context = SourceContext(
        name=name,
        directory=run.directory(f"{name}-data"),
        text=prepared.train_rows,
        target=prepared.target,
        draft=None,
        prompt_weight=data.prompt_weight,
        seed=run.seed(name),
        on_bad=data.on_bad,
        bars=bars,
        today=_today(run.directory(""), prepared.target.tokenizer),
        needs_labels=run.loss(name, stage).needs_labels,
    )
    return run.source(name, stage), context
