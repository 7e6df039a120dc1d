"""The distillation job: a run's config in, a distilled draft as a Hugging Face directory and its acceptance out.

Stages, each in its own directory under `out` and finished once: a target from scratch if none is given
(`target-train`), the draft's pretraining (`draft-pretrain`), its distillation (`draft-distill`), and the controls,
which spend the distillation's tokens on cross-entropy (`control-<learning rate>`). Then held-out evaluation, and
export to `draft-before` and `draft`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import yaml

from specjax import registry
from specjax.config import RunConfig, Stage
from specjax.data import chat_template as chat
from specjax.data import corpus
from specjax.data.corpus import BadRecordPolicy, Document
from specjax.data.rows import ConcatenatedRows, Rows, pack
from specjax.data.tokenizer import train_tokenizer
from specjax.distill.init import Initial, check_length, initial_draft, model_config
from specjax.distill.sources.on_policy import draft_sampler
from specjax.distill.sources.text import SourceContext
from specjax.distill.teacher import with_shared_params
from specjax.distill.trainer import StageData, Trainer
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, DataError, ModelError, TrainingError
from specjax.evaluation import figures
from specjax.evaluation.evaluate import Evaluation
from specjax.evaluation.held_out import (
    Decoded,
    HeldOutDecoding,
    affects_selection,
    decoding_enabled,
    held_out_decoding,
)
from specjax.models.files import MANIFEST, verify_manifest, write_manifest
from specjax.models.hf import LoadedModel, import_transformers, load_model, save_model
from specjax.models.transformer import Model
from specjax.runtime import fingerprint, lock, sinks, store
from specjax.runtime.distributed import by_first, is_first, whole
from specjax.runtime.layout import make_layout
from specjax.runtime.log import note, read_log
from specjax.runtime.progress import Bars, no_bars
from specjax.types import Params, Sharing

_MIN_POSITIONS = 1024
_CARD, _DATE = "README.md", "chat_date.json"
_EXPORTS: tuple[str, str] = ("draft-before", "draft")
_MADE_BY, _WEIGHTS = "by specjax", "SHA-256 of the weights"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents on the two sides of the split; no text is on both."""

    train: list[Document]
    held_out: list[Document]

    @property
    def digest(self) -> str:
        return corpus.corpus_digest([*self.train, *self.held_out])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the training stages start from."""

    target: LoadedModel
    corpus: Corpus
    train_rows: ConcatenatedRows
    held_out_rows: ConcatenatedRows
    bad: BadRecordPolicy = dataclasses.field(default_factory=BadRecordPolicy)
    """What `data.on_bad` skipped."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """Held-out figures at temperature 1, over ``positions`` predicted tokens (fewer than asked for if the held-out text
    is shorter); nats a token. ``alpha_ce_control`` is the best of ``alpha_ce_controls`` (learning rate -> alpha), None
    without control runs."""

    target_nll: float
    draft_nll: float
    draft_nll_after: float
    alpha_before: float
    alpha_after: float
    alpha_ce_control: float | None
    alpha_ce_controls: dict[str, float]
    positions: int


@dataclasses.dataclass(frozen=True)
class Distilled:
    """``logs``: stage name -> records of `specjax.distill.trainer.read_log`."""

    prepared: Prepared
    draft_before: LoadedModel
    draft_after: LoadedModel
    measures: Measures
    logs: dict[str, list[dict[str, float]]]
    alphas: dict[str, dict[str, float]]
    """Draft (`draft_before`, `draft_after`) -> source of the text -> alpha."""
    comparison: list[figures.ComparisonRow]
    """Before and after, decoded as ``config.selection`` says; empty if it says nothing."""

    @property
    def target(self) -> LoadedModel:
        return self.prepared.target


def run(config: RunConfig, bars: Bars = no_bars) -> Distilled:
    """`distill` while holding the lock of ``config.out``, with the logging that ``config`` asks for. Raises
    `SpecjaxError` for anything the user can mend. Of several processes (`specjax.runtime.distributed.start`), all call
    it, and the first one writes."""
    with contextlib.ExitStack() as held:
        by_first(lambda: held.enter_context(lock.exclusive(config.out)) and None)
        if is_first():
            bars = held.enter_context(
                sinks.recorded(config.logging, Path(config.out), bars, dataclasses.asdict(config))
            )
        return distill(config, bars)


def distill(config: RunConfig, bars: Bars = no_bars, prepared: Prepared | None = None) -> Distilled:
    """The whole job; what is finished in ``config.out`` is reused, what was interrupted goes on. ``prepared``: what
    `prepare` gave for this config, if it was called before.

    The caller holds the run directory's lock (`specjax.runtime.lock.exclusive`), as `run` does.
    """
    decoding_enabled(config)  # a mesh that does not fit, or that cannot select, is refused before anything is read
    for name in _EXPORTS:
        by_first(functools.partial(_refuse_foreign, Path(config.out) / name))
    prepared = prepare(config, bars) if prepared is None else prepared
    target = prepared.target
    initial = initial_draft(config, target, prepared.train_rows)
    drafter = initial.drafter
    decoding = held_out_decoding(config, target, drafter, initial.spec, prepared.corpus.held_out)
    train = _Stages(config, bars, initial, prepared).train
    before, _ = train("draft-pretrain", config.draft.pretrain, initial.params, config.seed, target)
    after, steps = train("draft-distill", config.distill, before, config.seed + 1, target, decoding)
    # The controls see the batches that the distillation saw, start where it started, and are chosen as it is.
    control_target = target if isinstance(drafter, Sharing) else None
    control_decoding = decoding if affects_selection(config.selection) else None
    start = (before, config.seed + 1, control_target, control_decoding)
    controls = {
        f"{rate:g}": train(f"control-{rate:g}", _control(config.distill, rate, steps), *start)[0]
        for rate in config.control.learning_rates
    }
    evaluate = functools.partial(figures.evaluate, config, bars, drafter, target)
    first, last, *rivals = evaluate([before, after, *controls.values()], prepared.held_out_rows)
    control_alphas = {rate: control.alpha for rate, control in zip(controls, rivals, strict=True)}
    measures = Measures(
        target_nll=first.target_nll,
        draft_nll=first.nll,
        draft_nll_after=last.nll,
        alpha_before=first.alpha,
        alpha_after=last.alpha,
        alpha_ce_control=max(control_alphas.values(), default=None),
        alpha_ce_controls=control_alphas,
        positions=first.positions,
    )
    trained = dict(zip(_EXPORTS, (before, after), strict=True))
    decoded = figures.decode(config, bars, decoding, trained, target)
    models = {name: initial.model(params, target, name) for name, params in trained.items()}
    for (name, model), evaluation in zip(models.items(), (first, last), strict=True):
        card = _draft_card(config, model, prepared, evaluation, decoded[name])
        _export(model, Path(config.out) / name, card)
    stages = ("target-train", "draft-pretrain", "draft-distill", *(f"control-{rate}" for rate in controls))
    logs = {name: read_log(Path(config.out) / name) for name in stages}
    logs = {name: log for name, log in logs.items() if log}
    alphas = figures.alphas_by_source(
        config, target, prepared.corpus.held_out, evaluate, [before, after], (first, last)
    )
    both = dict(zip(figures.DRAFTS, decoded.values(), strict=True))
    comparison = [] if decoding is None else figures.comparison(decoding, both, alphas)
    return Distilled(prepared, models["draft-before"], models["draft"], measures, logs, alphas, comparison)


def prepare(config: RunConfig, bars: Bars = no_bars) -> Prepared:
    """Read and split the corpus, load the target or train it from scratch, and cut the windows."""
    data, bad = config.data, BadRecordPolicy(config.data.on_bad)
    documents = Corpus(
        *corpus.split_held_out(corpus.read_documents(data.path, bad, data.hub, {**data.columns}), data.held_out)
    )
    for side, name in ((documents.train, "training"), (documents.held_out, "measuring")):
        if not side:
            raise DataError(
                f"data.path: {data.path!r}: none of its documents ({len(documents.train + documents.held_out)}) "
                f"is left for {name} at data.held_out={data.held_out:g}; give more, smaller documents "
                "or another data.held_out"
            )
    if config.target.path is None:
        tokenizer = _tokenizer(config, documents)
        documents, train, held_out = _rows(config, documents, tokenizer, tokenizer.eos_token_id, bad)
        target = _target_from_scratch(config, documents, tokenizer, (train, held_out), bars)
        return Prepared(target, documents, train, held_out, bad)
    target = _load_target(config, config.target.path)
    if target.tokenizer is None or not target.eos_ids:
        missing = "tokenizer" if target.tokenizer is None else "end-of-sequence id"
        raise ConfigError(f"target.path: {config.target.path!r} has no {missing}, which the corpus needs; add it there")
    check_length(config, target.config, "target")
    return Prepared(target, *_rows(config, documents, target.tokenizer, target.eos_ids[0], bad), bad)


def _load_target(config: RunConfig, path: str | Path) -> LoadedModel:
    layout = make_layout(config.mesh)
    mesh = layout.mesh if layout.target_sharded else None
    return load_model(path, dtype=config.target.dtype, revision=config.target.revision, mesh=mesh)


def _rows(
    config: RunConfig, documents: Corpus, tokenizer: Any, eos_id: int, bad: BadRecordPolicy
) -> tuple[Corpus, ConcatenatedRows, ConcatenatedRows]:
    """Rendered documents, and their rows: train, held out."""
    data = config.data
    today = _today(Path(config.out), tokenizer)
    both = (documents.train, documents.held_out)
    documents = Corpus(*(corpus.rendered(side, tokenizer, bad, today) for side in both))
    sides = []
    for name, side in (("training", documents.train), ("held-out", documents.held_out)):
        try:
            sides.append(pack(tokenizer, side, eos_id, data.seq_len, data.prompt_weight, bad))
        except DataError as error:
            raise DataError(f"data.path: {data.path!r}: its {name} part: {error}") from None
    if bad.counts:
        _log.warning("data.path: %r: %s", data.path, bad)
    return documents, sides[0], sides[1]


def _today(out: Path, tokenizer: Any) -> datetime.date | None:
    """The day that the run began, where the chat template prints the date: the text is the same when it goes on."""
    if not chat.prints_the_date(tokenizer):
        return None
    file = out / _DATE

    def kept() -> str:
        if not file.exists():
            out.mkdir(parents=True, exist_ok=True)
            fingerprint.write_json(file, {"date": datetime.date.today().isoformat()})
        return file.read_text()

    try:
        return datetime.date.fromisoformat(json.loads(by_first(kept))["date"])
    except (ValueError, KeyError, TypeError):
        raise TrainingError(
            f'{file}: damaged; write the day that the run began into it: {{"date": "2025-01-31"}}'
        ) from None


def _target_from_scratch(
    config: RunConfig, documents: Corpus, tokenizer: Any, rows: tuple[Rows, Rows], bars: Bars
) -> LoadedModel:
    out, settings = Path(config.out), config.target
    assert settings.architecture is not None  # the config holds a path or an architecture
    spec = Model(model_config(settings.architecture, len(tokenizer), max(_MIN_POSITIONS, config.data.seq_len)))
    drafter = DraftModel(spec)  # as a trainable, a target is a model like any other
    optional: dict[str, Any] = {"eval_every": max(1, settings.steps // 4), "save_every": 100}
    optional["optimizer"] = settings.optimizer
    stage = Stage("cross_entropy", settings.steps, batch_size=settings.batch_size, **optional)
    key, _ = jax.random.split(jax.random.key(config.seed))
    with _naming_inputs(config), bars("target-train", settings.steps) as progress:
        initial = drafter.init_params(key, None)
        data = StageData(*rows, config.seed + 2)
        trainer = Trainer(out / "target-train", stage, drafter, initial, None, data, layout=make_layout(config.mesh))
        params = trainer.run(progress)
    target = LoadedModel(spec, params, tokenizer, (tokenizer.eos_token_id,), "target")
    title = f"A target of {_count(params):,} parameters, trained from scratch by specjax."
    digests = {_WEIGHTS: fingerprint.digest(params), "SHA-256 of the text": documents.digest}
    training = {"target": dataclasses.asdict(settings), "data": dataclasses.asdict(config.data), "seed": config.seed}
    _export(target, out / "target", _card("target", title, digests, training))
    return _load_target(config, out / "target")


def _tokenizer(config: RunConfig, documents: Corpus) -> Any:
    directory, vocab_size = Path(config.out) / "tokenizer", config.target.vocab_size
    made_from = {"train_text": corpus.corpus_digest(documents.train), "vocab_size": vocab_size}
    files = directory / "files"

    def make() -> None:
        with _naming_inputs(config):
            fingerprint.claim(directory, made_from)
        if not files.exists() or _set_aside_if_damaged(files):
            partial = directory / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            train_tokenizer(documents.train, vocab_size, partial)
            write_manifest(partial)
            os.rename(partial, files)

    by_first(make)
    return import_transformers().PreTrainedTokenizerFast.from_pretrained(files)


def _control(distill: Stage, learning_rate: float, steps: int) -> Stage:
    optimizer = dataclasses.replace(distill.optimizer, learning_rate=learning_rate)
    # Of the text: its own samples would teach a draft nothing, and the target's are distillation.
    changes: dict[str, Any] = {"loss": "cross_entropy", "data": "text", "steps": steps, "epochs": None}
    return dataclasses.replace(distill, **changes, optimizer=optimizer)


@dataclasses.dataclass(frozen=True)
class _Stages:
    """The stages of a run's draft."""

    config: RunConfig
    bars: Bars
    initial: Initial
    prepared: Prepared

    def train(
        self,
        name: str,
        stage: Stage,
        params: Params,
        seed: int,
        target: LoadedModel | None,
        decoding: HeldOutDecoding | None = None,
    ) -> tuple[Params, int]:
        """The trained parameters, and how many steps that took if none was spared."""
        config, bars, initial, prepared = self.config, self.bars, self.initial, self.prepared
        draft = initial.model(params, prepared.target)
        source = registry.build(registry.DATA, "text" if stage.steps == 0 else stage.data, f"{name}: data")
        made_from = source_context(config, prepared, draft, name, data_directory(config, name), seed, bars)
        loss = registry.build(registry.LOSSES, stage.loss, f"{name}: loss")
        rows = rows_of(config, source, dataclasses.replace(made_from, needs_labels=loss.needs_labels))
        if stage.epochs is not None:
            epochs, stage = stage.epochs, stage.over(len(rows))
            note(f"{name}: {epochs:g} epochs of {len(rows):,} rows are {stage.steps:,} steps of {stage.batch_size}")
        steps = stage.num_steps
        with _naming_inputs(config), (bars if steps else no_bars)(name, steps) as progress:
            complete = functools.partial(with_shared_params, initial.drafter, target_params=prepared.target.params)
            data = StageData(rows, prepared.held_out_rows, seed, draft_sampler(draft, complete))
            options = {"layout": make_layout(config.mesh), "decoding": decoding, "bars": bars}
            trainer = Trainer(Path(config.out) / name, stage, initial.drafter, params, target, data, **options)
            return trainer.run(progress), steps


def rows_of(config: RunConfig, source: Any, context: SourceContext) -> Rows:
    """What a stage of the data ``source`` trains on, made if need be. Raises `TrainingError` naming what changed since
    it was made."""
    with _naming_inputs(config, getattr(source, "prompts", None), context.today):
        return source.rows(context)


@contextlib.contextmanager
def _naming_inputs(config: RunConfig, prompts: str | None = None, today: datetime.date | None = None) -> Iterator[None]:
    """What changed since a directory was made is named by where it is read from. ``prompts``: the file, if they are not
    of the text. ``today``: the date that the chat template printed in them."""
    try:
        yield
    except fingerprint.Changed as error:
        text, target = f"data.path: {config.data.path!r}", f" (target.path: {config.target.path!r})"
        asked = text if prompts is None else f"data.prompts: {prompts!r}"
        if today is not None:
            file = Path(config.out) / _DATE
            asked += f", with the date {today} of {file}, where that of the run that made the directory has to stand"
        places = dict.fromkeys(("train_rows", "held_out_rows", "train_text"), f" ({text})")
        places |= {"prompts": f" ({asked})", "target_params": target, "target_config": target, "target": target}
        raise error.at(places) from None


def data_directory(config: RunConfig, name: str) -> Path:
    """Of the data that is made for the stage ``name``."""
    return Path(config.out) / f"{name}-data"


def source_context(
    config: RunConfig, prepared: Prepared, draft: LoadedModel | None, name: str, directory: Path, seed: int, bars: Bars
) -> SourceContext:
    """What the data of the stage ``name`` is made from; ``draft``: as the stage begins with it."""
    text, weight = prepared.train_rows, config.data.prompt_weight
    today = _today(Path(config.out), prepared.target.tokenizer)
    return SourceContext(name, directory, text, prepared.target, draft, weight, seed, config.data.on_bad, bars, today)


def _refuse_foreign(directory: Path) -> None:
    """A model that this job did not write is not replaced."""
    if directory.is_dir() and any(directory.iterdir()) and _MADE_BY not in _card_of(directory):
        raise DataError(
            f"out: {directory} holds something else, and the draft goes there; move it, or give another `out`"
        )


def _export(model: LoadedModel, directory: Path, card: str) -> None:
    """The card names the weights by digest and is written with them, so the same card means the same model, as long as
    the files are those that were written. A model of other weights is kept beside it."""
    (weights,) = (line for line in card.splitlines() if line.startswith(f"| {_WEIGHTS} |"))

    def missing() -> bool:
        known = _card_of(directory)
        if known and weights not in known:
            aside = store.set_aside(directory, store.REPLACED)
            _log.warning("%s: does not hold these weights; it is kept as %s", directory, aside.name)
        return known != card or _set_aside_if_damaged(directory)

    if by_first(missing):
        model = dataclasses.replace(model, params=whole(model.params))
        by_first(lambda: save_model(model, directory, overwrite=True, card=card))


def _card_of(directory: Path) -> str:
    file = directory / _CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _set_aside_if_damaged(directory: Path) -> bool:
    """Files that are not what their manifest says: kept, but not used."""
    try:
        verify_manifest(directory)
    except ModelError as error:
        damage = str(error).partition(";")[0]
    else:
        if (directory / MANIFEST).exists():
            return False
        damage = f"its {MANIFEST} is gone"
    aside = store.set_aside(directory)
    _log.warning("%s: damaged (%s); it is set aside as %s and written again", directory, damage, aside.name)
    return True


def _draft_card(
    config: RunConfig, draft: LoadedModel, prepared: Prepared, evaluation: Evaluation, decoded: list[Decoded]
) -> str:
    target = prepared.target
    title = (
        f"A draft model of {_count(draft.params):,} parameters for speculative decoding with the target `{target.name}`"
        f" ({_count(target.params):,} parameters), "
        f"{'before distillation' if draft.name == 'draft-before' else 'distilled'} {_MADE_BY}."
    )
    rows = {
        "alpha (E sum min(p, q), held out, temperature 1)": f"{evaluation.alpha:.4f}",
        "loss of the draft, nats a token, held out": f"{evaluation.nll:.4f}",
        "loss of the target": f"{evaluation.target_nll:.4f}",
        "positions measured": f"{evaluation.positions:,}",
        **figures.card_rows(decoded, draft.name == "draft" and config.selection.select == "best"),
        _WEIGHTS: fingerprint.digest(draft.params),
        "SHA-256 of the target's weights": fingerprint.digest(target.params),
        "SHA-256 of the text": prepared.corpus.digest,
    }
    settings = dataclasses.asdict(config)
    stages = ("draft",) if draft.name == "draft-before" else ("draft", "distill", "selection")
    return _card(draft.name, title, rows, {name: settings[name] for name in ("target", "data", *stages, "seed")})


def _card(name: str, title: str, rows: dict[str, str], training: dict) -> str:
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    settings = yaml.safe_dump(training, sort_keys=False)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- speculative-decoding\n---\n\n"
        f"# {name}\n\n{title}\n\n| | |\n|---|---|\n{table}\n\n## Training\n\n```yaml\n{settings}```\n"
    )


def _count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
