"""The distillation job: a run's config in, a distilled draft as a Hugging Face directory and its acceptance out.

Stages, each in its own directory under `out` and finished once: a target from scratch if none is given
(`target-train`), the draft's pretraining (`draft-pretrain`), its distillation (`draft-distill`), and the controls,
which spend the distillation's tokens on cross-entropy (`control-<learning rate>`). Then held-out evaluation, and
export to `draft-before` and `draft`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from specjax import config as config_lib
from specjax import registry
from specjax.config import RunConfig, Stage
from specjax.distill import corpus, fingerprint, lock, sinks
from specjax.distill.corpus import Bad, Document
from specjax.distill.distributed import by_first, is_first, whole
from specjax.distill.evaluate import Evaluation, evaluate_all
from specjax.distill.layout import make_layout
from specjax.distill.log import read_log
from specjax.distill.on_policy import draft_sampler
from specjax.distill.progress import Bars, no_bars
from specjax.distill.prune import prune
from specjax.distill.rows import Packed, Rows, pack, spread
from specjax.distill.stock import Stock
from specjax.distill.tokenizer import train_tokenizer
from specjax.distill.trainer import train_stage
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, DataError
from specjax.models.config import ModelConfig
from specjax.models.hf import LoadedModel, import_transformers, load_model, save_model
from specjax.models.transformer import Model
from specjax.models.vocabulary import check_same_vocabulary
from specjax.types import Params

CUT_FROM_TARGET = "target"
"""The value of `draft.init` that cuts the draft from the target; a directory of that name is ./target."""
_CALIBRATION_TOKENS = 8192
_MIN_POSITIONS = 1024
_CARD, _EVALUATIONS = "README.md", "evaluations.json"
_EXPORTS = ("draft-before", "draft")
_MADE_BY = "by specjax"
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
    train_rows: Packed
    held_out_rows: Packed
    bad: Bad = dataclasses.field(default_factory=Bad)
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

    @property
    def target(self) -> LoadedModel:
        return self.prepared.target


def run(config: RunConfig, bars: Bars = no_bars) -> Distilled:
    """`distill` while holding the lock of ``config.out``, with the logging that ``config`` asks for. Raises
    `SpecjaxError` for anything the user can mend. Of several processes (`specjax.distill.distributed.start`), all call
    it, and the first one writes."""
    with contextlib.ExitStack() as held:
        by_first(lambda: held.enter_context(lock.exclusive(config.out)) and None)
        if is_first():
            bars = held.enter_context(sinks.recorded(config.logging, Path(config.out), bars))
        return distill(config, bars)


def distill(config: RunConfig, bars: Bars = no_bars, prepared: Prepared | None = None) -> Distilled:
    """The whole job; what is finished in ``config.out`` is reused, what was interrupted goes on. ``prepared``: what
    `prepare` gave for this config, if it was called before.

    The caller holds the run directory's lock (`specjax.distill.lock.exclusive`), as `run` does.
    """
    make_layout(config.mesh)  # a mesh that does not fit is refused before anything is read
    for name in _EXPORTS:
        by_first(functools.partial(_refuse_foreign, Path(config.out) / name))
    prepared = prepare(config, bars) if prepared is None else prepared
    target = prepared.target
    initial = _initial_draft(config, prepared)
    drafter = DraftModel(initial.spec)
    initial = dataclasses.replace(initial, tokenizer=target.tokenizer, eos_ids=target.eos_ids)
    train = functools.partial(_train, config, bars, initial, prepared)
    before = train("draft-pretrain", config.draft.pretrain, initial.params, config.seed, target)
    after = train("draft-distill", config.distill, before, config.seed + 1, target)
    # The controls see the batches that the distillation saw, and start where it started.
    controls = {
        f"{rate:g}": train(f"control-{rate:g}", _control(config.distill, rate), before, config.seed + 1, None)
        for rate in config.control.learning_rates
    }
    first, last, *rivals = _evaluate(config, bars, drafter, [before, after, *controls.values()], prepared)
    alphas = {rate: rival.alpha for rate, rival in zip(controls, rivals, strict=True)}
    measures = Measures(
        target_nll=first.target_nll,
        draft_nll=first.nll,
        draft_nll_after=last.nll,
        alpha_before=first.alpha,
        alpha_after=last.alpha,
        alpha_ce_control=max(alphas.values(), default=None),
        alpha_ce_controls=alphas,
        positions=first.positions,
    )
    drafts = dict(zip(_EXPORTS, ((before, first), (after, last)), strict=True))
    models = {name: dataclasses.replace(initial, params=params, name=name) for name, (params, _) in drafts.items()}
    for name, (_, evaluation) in drafts.items():
        _export(models[name], Path(config.out) / name, _draft_card(config, models[name], prepared, evaluation))
    stages = ("target-train", "draft-pretrain", "draft-distill", *(f"control-{rate}" for rate in controls))
    logs = {name: read_log(Path(config.out) / name) for name in stages}
    logs = {name: log for name, log in logs.items() if log}
    return Distilled(prepared, models["draft-before"], models["draft"], measures, logs)


def prepare(config: RunConfig, bars: Bars = no_bars) -> Prepared:
    """Read and split the corpus, load the target or train it from scratch, and cut the windows."""
    data, bad = config.data, Bad(config.data.on_bad)
    documents = Corpus(*corpus.split_held_out(corpus.read_documents(data.path, bad, data.hub), data.held_out))
    for side, name in ((documents.train, "training"), (documents.held_out, "measuring")):
        if not side:
            raise DataError(
                f"data.path: {data.path!r}: none of its documents ({len(documents.train + documents.held_out)}) "
                f"is left for {name} at data.held_out={data.held_out:g}; give more, smaller documents "
                "or another data.held_out"
            )
    if config.target.path is None:
        tokenizer = _tokenizer(Path(config.out) / "tokenizer", documents, config.target.vocab_size)
        documents, *rows = _rows(config, documents, tokenizer, tokenizer.eos_token_id, bad)
        target = _target_from_scratch(config, documents, tokenizer, (rows[0], rows[1]), bars)
        return Prepared(target, documents, *rows, bad)
    target = _load_target(config, config.target.path)
    if target.tokenizer is None or not target.eos_ids:
        missing = "tokenizer" if target.tokenizer is None else "end-of-sequence id"
        raise ConfigError(f"target.path: {config.target.path!r} has no {missing}, which the corpus needs; add it there")
    _check_length(config, target.config, "target")
    return Prepared(target, *_rows(config, documents, target.tokenizer, target.eos_ids[0], bad), bad)


def _load_target(config: RunConfig, path: str | Path) -> LoadedModel:
    layout = make_layout(config.mesh)
    mesh = layout.mesh if layout.target_sharded else None
    return load_model(path, dtype=config.target.dtype, revision=config.target.revision, mesh=mesh)


def _rows(config: RunConfig, documents: Corpus, tokenizer: Any, eos_id: int, bad: Bad) -> tuple[Corpus, Packed, Packed]:
    """Rendered documents, and their rows: train, held out."""
    data = config.data
    documents = Corpus(*(corpus.rendered(side, tokenizer, bad) for side in (documents.train, documents.held_out)))
    sides = []
    for name, side in (("training", documents.train), ("held-out", documents.held_out)):
        try:
            sides.append(pack(tokenizer, side, eos_id, data.seq_len, data.prompt_weight, bad))
        except DataError as error:
            raise DataError(
                f"data.path: {data.path!r}: its {name} part: {error}; or give a smaller data.seq_len or another "
                "data.held_out"
            ) from None
    if bad.counts:
        _log.warning("data.path: %r: %s", data.path, bad)
    return documents, sides[0], sides[1]


def _target_from_scratch(
    config: RunConfig, documents: Corpus, tokenizer: Any, rows: tuple[Rows, Rows], bars: Bars
) -> LoadedModel:
    out, settings = Path(config.out), config.target
    assert settings.architecture is not None  # the config holds a path or an architecture
    spec = Model(_model_config(settings.architecture, len(tokenizer), max(_MIN_POSITIONS, config.data.seq_len)))
    drafter = DraftModel(spec)  # as a trainable, a target is a model like any other
    optional: dict[str, Any] = {"eval_every": max(1, settings.steps // 4), "save_every": 100}
    optional["optimizer"] = settings.optimizer
    stage = Stage("cross_entropy", settings.steps, settings.batch_size, **optional)
    key, _ = jax.random.split(jax.random.key(config.seed))
    with bars("target-train", stage.steps) as progress:
        initial = drafter.init_params(key, None)
        args = (out / "target-train", stage, drafter, initial, None, *rows, config.seed + 2)
        params = train_stage(*args, progress=progress, layout=make_layout(config.mesh))
    target = LoadedModel(spec, params, tokenizer, (tokenizer.eos_token_id,), "target")
    title = f"A target of {_count(params):,} parameters, trained from scratch by specjax."
    rows = {"SHA-256 of the weights": fingerprint.digest(params), "SHA-256 of the text": documents.digest}
    training = {"target": dataclasses.asdict(settings), "data": dataclasses.asdict(config.data), "seed": config.seed}
    _export(target, out / "target", _card("target", title, rows, training))
    return _load_target(config, out / "target")


def _tokenizer(directory: Path, documents: Corpus, vocab_size: int) -> Any:
    made_from = {"train_text": corpus.corpus_digest(documents.train), "vocab_size": vocab_size}
    files = directory / "files"

    def make() -> None:
        fingerprint.claim(directory, made_from)
        if not files.exists():
            partial = directory / ".partial"
            train_tokenizer(documents.train, vocab_size, partial)
            os.rename(partial, files)

    by_first(make)
    return import_transformers().PreTrainedTokenizerFast.from_pretrained(files)


def _initial_draft(config: RunConfig, prepared: Prepared) -> LoadedModel:
    """The draft before any training."""
    target, init = prepared.target, config.draft.init
    if init is not None and init != CUT_FROM_TARGET:
        draft = load_model(init)
        check_same_vocabulary(target, draft)
        if draft.vocab_size != target.vocab_size:
            raise ConfigError(
                f"draft.init: {init} has {draft.vocab_size} embedding rows, the target {target.vocab_size}; they "
                "decode together, but the losses compare row by row: give the draft as many rows as the target has"
            )
        _check_length(config, draft.config, "draft")
        return draft
    shape = _model_config(config.draft.architecture, target.config.vocab_size, target.config.max_positions)
    if init == CUT_FROM_TARGET:
        inherited = ("layers", "norm", "tie_embeddings")
        shape = dataclasses.replace(shape, **{name: getattr(target.config, name) for name in inherited})
        calibration = np.asarray(spread(prepared.train_rows, _CALIBRATION_TOKENS).tokens)
        full = dataclasses.replace(target, params=whole(target.params))
        return LoadedModel(Model(shape), prune(full, shape, calibration))
    _, key = jax.random.split(jax.random.key(config.seed))
    return LoadedModel(Model(shape), DraftModel(Model(shape)).init_params(key, target))


def _model_config(shape: config_lib.Architecture, vocab_size: int, max_positions: int) -> ModelConfig:
    sizes: dict[str, Any] = dataclasses.asdict(shape)
    sizes["head_dim"] = shape.head_dim or shape.hidden_size // shape.num_heads
    return ModelConfig(vocab_size, **sizes, max_positions=max_positions)


def _check_length(config: RunConfig, model: ModelConfig, name: str) -> None:
    if config.data.seq_len > model.max_positions:
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} exceeds the {name}'s {model.max_positions} positions; lower it"
        )


def _control(distill: Stage, learning_rate: float) -> Stage:
    optimizer = dataclasses.replace(distill.optimizer, learning_rate=learning_rate)
    # Of the text: its own samples would teach a draft nothing, and the target's are distillation.
    return dataclasses.replace(distill, loss="cross_entropy", data="text", optimizer=optimizer)


def _train(
    config: RunConfig,
    bars: Bars,
    initial: LoadedModel,
    prepared: Prepared,
    name: str,
    stage: Stage,
    params: Params,
    seed: int,
    target: LoadedModel | None,
) -> Params:
    draft, directory = dataclasses.replace(initial, params=params), Path(config.out) / name
    source = registry.build(registry.DATA, stage.data if stage.steps else "text", f"{name}: data")
    rows = source.rows(stock(config, prepared, draft, name, data_directory(config, name), seed, bars))
    with (bars if stage.steps else no_bars)(name, stage.steps) as progress:
        args = (DraftModel(draft.spec), params, target, rows, prepared.held_out_rows, seed, progress)
        return train_stage(directory, stage, *args, draft_sampler(draft), make_layout(config.mesh))


def data_directory(config: RunConfig, name: str) -> Path:
    """Of the data that is made for the stage ``name``."""
    return Path(config.out) / f"{name}-data"


def stock(
    config: RunConfig, prepared: Prepared, draft: LoadedModel | None, name: str, directory: Path, seed: int, bars: Bars
) -> Stock:
    """What the data of the stage ``name`` is made from; ``draft``: as the stage begins with it."""
    text, weight = prepared.train_rows, config.data.prompt_weight
    return Stock(name, directory, text, prepared.target, draft, weight, seed, config.data.on_bad, bars)


def _evaluate(
    config: RunConfig, bars: Bars, drafter: DraftModel, models: list[Params], prepared: Prepared
) -> list[Evaluation]:
    """One evaluation a model; measured once, kept in `evaluations.json` under what it was measured on."""
    file = Path(config.out) / _EVALUATIONS
    known = by_first(functools.partial(_read_json, file))
    chosen = spread(prepared.held_out_rows, config.eval.positions)
    measured_on = (fingerprint.digest(prepared.target.params), fingerprint.digest(chosen))
    keys = [hashlib.sha256("".join((fingerprint.digest(m), *measured_on)).encode()).hexdigest() for m in models]
    new = {key: params for key, params in zip(keys, models, strict=True) if key not in known}
    if new:
        settings = (prepared.target, prepared.held_out_rows, config.eval.positions, config.eval.batch_size)
        with bars("evaluation", -(-len(chosen.tokens) // config.eval.batch_size)) as progress:
            found = evaluate_all(drafter, list(new.values()), *settings, progress, make_layout(config.mesh))
        known |= {key: dataclasses.asdict(evaluation) for key, evaluation in zip(new, found, strict=True)}
        by_first(lambda: fingerprint.write_json(file, known))
    return [Evaluation(**known[key]) for key in keys]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _refuse_foreign(directory: Path) -> None:
    """A model that this job did not write is not replaced."""
    card = directory / _CARD
    ours = card.exists() and _MADE_BY in card.read_text(encoding="utf-8", errors="replace")
    if directory.is_dir() and any(directory.iterdir()) and not ours:
        raise DataError(
            f"out: {directory} holds something else, and the draft goes there; move it, or give another `out`"
        )


def _export(model: LoadedModel, directory: Path, card: str) -> None:
    """The card names the weights by digest and is written with them, so the same card means the same model."""
    file = directory / _CARD
    if by_first(lambda: not file.exists() or file.read_text(encoding="utf-8") != card):
        model = dataclasses.replace(model, params=whole(model.params))
        by_first(lambda: save_model(model, directory, overwrite=True, card=card))


def _draft_card(config: RunConfig, draft: LoadedModel, prepared: Prepared, evaluation: Evaluation) -> str:
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
        "SHA-256 of the weights": fingerprint.digest(draft.params),
        "SHA-256 of the target's weights": fingerprint.digest(target.params),
        "SHA-256 of the text": prepared.corpus.digest,
    }
    settings = dataclasses.asdict(config)
    stages = ("draft",) if draft.name == "draft-before" else ("draft", "distill")
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
