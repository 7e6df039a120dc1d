"""The distillation job: from a run's config to a distilled draft, as a Hugging Face directory, and its acceptance.

The stages, each in its own directory under `out` and finished once: training a target from scratch if none is given
(`target-train`), the draft's pretraining (`draft-pretrain`) from the first weights in `draft-start.safetensors`, its
distillation (`draft-distill`), and the controls, which spend the distillation's tokens on cross-entropy
(`control-<learning rate>`). Held-out evaluation follows, and export to `draft-before` and `draft`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from specjax.config import RunConfig, Stage
from specjax.drafters.base import refuse_longer
from specjax.errors import ModelError
from specjax.evaluation import figures
from specjax.evaluation.held_out import HeldOutDecoding, decoding_enabled, held_out_decoding
from specjax.evaluation.self_test import SelfTest, prompts_of, self_test
from specjax.formats import trained as stored
from specjax.formats.loading import asked_kind, load_drafter
from specjax.interfaces import Drafter, Initial, Params, Trainable
from specjax.jobs import memory
from specjax.jobs.inputs import Prepared, naming_inputs, prepare, rows_of, source_of, start_rows
from specjax.models.hf import LoadedModel
from specjax.models.weights import rounded
from specjax.runtime import artifact, fingerprint, sinks
from specjax.runtime.distributed import is_first, on_main_process
from specjax.runtime.log import note, read_log
from specjax.runtime.progress import Bars, no_bars
from specjax.training.assemble import Run
from specjax.training.evaluate import Evaluation
from specjax.training.exports import MADE_BY, WEIGHTS, card, export, parameter_count, refuse_foreign
from specjax.training.init.cached import FirstWeights, cached_start
from specjax.training.selection import Decoded, affects_selection
from specjax.training.sources.on_policy import draft_sampler
from specjax.training.sources.text import DraftHandle, Text
from specjax.training.teacher import needs_target, with_shared_params
from specjax.training.trainer import StageData, Trainer

_EXPORTS: tuple[str, str] = ("draft-before", "draft")
_SELF_TESTS = "self_tests.json"


@dataclasses.dataclass(frozen=True)
class Measures:
    """Held-out figures at temperature 1, over ``positions`` predicted tokens (fewer than asked for if the held-out text
    is shorter); losses in nats a token. ``alpha_at``, ``nll_at`` and ``agreement_at`` are by depth, for drafters that
    differ between depths; the other figures are those of the first depth. ``alpha_ce_control`` is the best of
    ``alpha_ce_controls`` (learning rate -> alpha), None without control runs."""

    target_nll: float
    draft_nll: float
    draft_nll_after: float
    alpha_before: float
    alpha_after: float
    alpha_ce_control: float | None
    alpha_ce_controls: dict[str, float]
    positions: int
    alpha_at_before: tuple[float, ...] = ()
    alpha_at_after: tuple[float, ...] = ()
    nll_at_after: tuple[float, ...] = ()
    agreement_before: float = math.nan
    agreement_after: float = math.nan
    agreement_at_after: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedDraft:
    """A draft that the job exports. ``name``: its directory. ``params``: all its weights, shared ones included."""

    name: str
    drafter: Trainable
    params: Params
    target: LoadedModel

    def of(self, k: int) -> Drafter:
        """The drafter that decodes with these weights, ``k`` tokens a block."""
        return self.drafter.to_drafter(self.params, self.target, k)

    def save(self, directory: Path, card: str) -> bool:
        """Export the draft to ``directory``. Returns whether anything was written."""

        def save(params: Params) -> None:
            stored.save(self.drafter, params, self.target, directory, name=self.name, card=card)

        return export(self.params, save, directory, card)


@dataclasses.dataclass(frozen=True)
class Distilled:
    """Result of the distillation job. ``logs``: stage name -> records of `specjax.runtime.log.read_log`."""

    prepared: Prepared
    draft_before: TrainedDraft
    draft_after: TrainedDraft
    measures: Measures
    logs: dict[str, list[dict[str, float]]]
    alphas: dict[str, dict[str, float]]
    """Draft (`draft_before`, `draft_after`) -> source of the text -> alpha."""
    comparison: list[figures.ComparisonRow]
    """Rows that compare both drafts, decoded as ``config.selection`` asks; empty if it asks for no decoding."""
    self_tests: dict[str, SelfTest]
    """Directory -> comparison of the exported draft with the trained one; empty with several processes."""

    @property
    def target(self) -> LoadedModel:
        return self.prepared.target


def run(config: RunConfig, bars: Bars = no_bars) -> Distilled:
    """Run `distill` under the lock of ``config.out``, with the logging that ``config`` asks for. Raises `SpecjaxError`
    for errors that the user can mend. With several processes (`specjax.runtime.distributed.start`), all call it and the
    first one writes."""
    with contextlib.ExitStack() as held:
        on_main_process(lambda: held.enter_context(artifact.exclusive(config.out)) and None)
        if is_first():
            bars = held.enter_context(
                sinks.recorded(config.logging, Path(config.out), bars, dataclasses.asdict(config))
            )
        return distill(config, bars)


def distill(config: RunConfig, bars: Bars = no_bars, prepared: Prepared | None = None) -> Distilled:
    """Run the whole job: it reuses finished parts in ``config.out`` and resumes interrupted ones. ``prepared``: result
    of `prepare` for this config, if it was called before.

    The caller holds the run directory's lock (`specjax.runtime.artifact.exclusive`), as `run` does.
    """
    decoding_enabled(config)  # refuses a mesh that does not fit, or cannot select, before anything is read
    for name in _EXPORTS:
        on_main_process(functools.partial(refuse_foreign, Path(config.out) / name))
    prepared = prepare(config, bars, memory.STAGES) if prepared is None else prepared
    target = prepared.target
    drafter, weights = cached_start(prepared.run, target, start_rows(prepared, bars))
    run = dataclasses.replace(prepared.run, initial=Initial(drafter, weights.shapes))
    prepared = dataclasses.replace(prepared, run=run)
    if config.selection.prompts:
        refuse_longer(drafter, config.selection.k, "selection.k")
    decoding = held_out_decoding(config, target, drafter, prepared.corpus.held_out)
    train = _Stages(bars, drafter, prepared).train
    before, _ = train("draft-pretrain", config.draft.pretrain, weights, target)
    after, steps = train("draft-distill", config.distill, before, target, decoding)
    # The controls see the distillation's batches, start from its first weights, and are selected as it is.
    control_target = target if needs_target(drafter) else None
    control_decoding = decoding if affects_selection(config.selection) else None
    start = (before, control_target, control_decoding)
    controls = {
        f"{rate:g}": train(f"control-{rate:g}", _control(config.distill, rate, steps), *start)[0]
        for rate in config.control.learning_rates
    }
    before, after = _finished(run, drafter, before), _finished(run, drafter, after)
    controls = {rate: _finished(run, drafter, params) for rate, params in controls.items()}
    evaluate = functools.partial(figures.evaluate, memory.evaluating(run), bars, drafter, target)
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
        alpha_at_before=first.alpha_at,
        alpha_at_after=last.alpha_at,
        nll_at_after=last.nll_at,
        agreement_before=first.agreement,
        agreement_after=last.agreement,
        agreement_at_after=last.agreement_at,
    )
    trained = dict(zip(_EXPORTS, (before, after), strict=True))
    decoded = figures.decode(config, bars, decoding, trained, target)
    models = {
        name: TrainedDraft(name, drafter, with_shared_params(drafter, params, target.params), target)
        for name, params in trained.items()
    }
    exported = [
        model.save(Path(config.out) / name, _draft_card(config, model, prepared, evaluation, decoded[name]))
        for (name, model), evaluation in zip(models.items(), (first, last), strict=True)
    ]
    tested = _tested(config, prepared, decoding, decoded, dict(zip(models.values(), exported, strict=True)))
    stages = ("target-train", "draft-pretrain", "draft-distill", *(f"control-{rate}" for rate in controls))
    logs = {name: read_log(Path(config.out) / name) for name in stages}
    logs = {name: log for name, log in logs.items() if log}
    alphas = figures.alphas_by_source(
        config, target, prepared.corpus.held_out, evaluate, [before, after], (first, last)
    )
    both = dict(zip(figures.DRAFTS, decoded.values(), strict=True))
    comparison = [] if decoding is None else figures.comparison(decoding, both, alphas)
    both_drafts = (models["draft-before"], models["draft"])
    return Distilled(prepared, *both_drafts, measures, logs, alphas, comparison, tested)


def _finished(run: Run, drafter: Trainable, params: Params) -> Params:
    """The weights that a stage leaves, as they are evaluated and exported: rounded to the draft's dtype, and where the
    layout places them."""
    params = rounded(params, run.config.draft.dtype)
    return run.layout.put(params, run.layout.of_draft(params, drafter))


def _control(distill: Stage, learning_rate: float, steps: int) -> Stage:
    optimizer = dataclasses.replace(distill.optimizer, learning_rate=learning_rate)
    # On text: a draft learns nothing from its own samples, and training on the target's is distillation.
    changes: dict[str, Any] = {"loss": "cross_entropy", "data": "text", "steps": steps, "epochs": None}
    return dataclasses.replace(distill, **changes, optimizer=optimizer)


@dataclasses.dataclass(frozen=True)
class _Stages:
    """Runs the training stages of a run's draft."""

    bars: Bars
    drafter: Any
    prepared: Prepared

    def train(
        self,
        name: str,
        stage: Stage,
        params: Params | FirstWeights,
        target: LoadedModel | None,
        decoding: HeldOutDecoding | None = None,
    ) -> tuple[Params, int]:
        """Train a stage. Returns its parameters, and its number of steps without early stopping."""
        bars, drafter, prepared, run = self.bars, self.drafter, self.prepared, self.prepared.run
        whose, first = prepared.target, FirstWeights.of(params)
        source, made_from = source_of(prepared, name, stage, bars)
        draft = None
        if not isinstance(source, Text):  # rows of the text are made without a draft
            whole = with_shared_params(drafter, first.params, whose.params)
            draft = DraftHandle(whole, lambda params, k: drafter.to_drafter(params, whose, k))
        rows = rows_of(run.config, source, dataclasses.replace(made_from, draft=draft))
        if stage.epochs is not None:
            epochs, stage = stage.epochs, stage.over(len(rows))
            note(f"{name}: {epochs:g} epochs of {len(rows):,} rows are {stage.steps:,} steps of {stage.batch_size}")
        steps = stage.num_steps
        stage = memory.fitting(run, name, stage)
        with naming_inputs(run.config), (bars if steps else no_bars)(name, steps) as progress:
            data = StageData(rows, prepared.held_out_rows, run.seed(name), draft_sampler(drafter, whose))
            options = {"layout": run.layout, "decoding": decoding, "bars": bars}
            trainer = Trainer(run.directory(name), stage, drafter, first, target, data, **options)
            return trainer.run(progress), steps


def _tested(
    config: RunConfig,
    prepared: Prepared,
    decoding: HeldOutDecoding | None,
    decoded: Mapping[str, list[Decoded]],
    exported: Mapping[TrainedDraft, bool],
) -> dict[str, SelfTest]:
    """Load every export again and compare it with the trained draft, once for the same weights. ``exported``: draft ->
    True if it was written just now. Raises `ModelError` if they differ."""
    if jax.process_count() > 1:
        return {}
    file = Path(config.out) / _SELF_TESTS
    known = artifact.read_record(file, "the exported drafts are tested again") or {}
    for draft, written in exported.items():
        directory, weights = Path(config.out) / draft.name, fingerprint.digest(draft.params)
        if not written and known.get(draft.name, {}).get("weights") == weights:
            continue
        same_dtype = all(x.dtype == draft.target.dtype for x in jax.tree.leaves(draft.params))
        try:
            k = min(config.selection.k, draft.drafter.longest or config.selection.k)
            loaded = load_drafter(directory, draft.target, k, asked_kind(config.draft))
            found = self_test(draft.drafter, draft.params, draft.target, loaded, prompts_of(prepared.held_out_rows))
            if decoding is not None and same_dtype:  # else it was decoded in the dtype of training
                found = found.counting(decoding(draft.params, loaded), decoded[draft.name])
        except ModelError as error:
            raise ModelError(f"{directory}: not the draft that was trained; do not use it. {error}") from None
        known[draft.name] = {"weights": weights, "found": dataclasses.asdict(found)}
        artifact.write_record(file, known)
    return {draft.name: SelfTest(**known[draft.name]["found"]) for draft in exported}


def _by_depth(what: str, values: Sequence[float]) -> dict[str, str]:
    return {f"{what} by depth in a block": ", ".join(f"{value:.4f}" for value in values)} if values else {}


def _draft_card(
    config: RunConfig, draft: TrainedDraft, prepared: Prepared, evaluation: Evaluation, decoded: list[Decoded]
) -> str:
    target = prepared.target
    title = (
        f"A draft of {parameter_count(draft.params):,} parameters for speculative decoding with the target "
        f"`{target.name}` ({parameter_count(target.params):,} parameters), "
        f"{'before distillation' if draft.name == 'draft-before' else 'distilled'} {MADE_BY}. "
        f"{stored.serving(draft.drafter)}"
    )
    facts = {
        "alpha (E sum min(p, q), held out, temperature 1)": f"{evaluation.alpha:.4f}",
        **_by_depth("alpha", evaluation.alpha_at),
        "agreement with the target's most likely token, held out": f"{evaluation.agreement:.4f}",
        **_by_depth("agreement", evaluation.agreement_at),
        "loss of the draft, nats a token, held out": f"{evaluation.nll:.4f}",
        **_by_depth("loss of the draft", evaluation.nll_at),
        "loss of the target": f"{evaluation.target_nll:.4f}",
        "positions measured": f"{evaluation.positions:,}",
        **figures.card_facts(decoded, draft.name == "draft" and config.selection.select == "best"),
        WEIGHTS: fingerprint.digest(draft.params),
        "SHA-256 of the target's weights": fingerprint.digest(target.params),
        "SHA-256 of the text": prepared.corpus.digest,
    }
    settings = dataclasses.asdict(config)
    stages = ("draft",) if draft.name == "draft-before" else ("draft", "distill", "selection")
    trained = {name: settings[name] for name in ("target", "data", *stages, "seed")}
    return card(draft.name, title, facts, trained, stored.library(draft.drafter))
