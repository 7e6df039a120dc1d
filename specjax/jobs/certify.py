"""`specjax certify`: the certificate (`specjax.evaluation.certify`) of a config's target, drafter and verifier."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specjax import registry
from specjax.config import RunConfig
from specjax.drafters.base import refuse_longer
from specjax.errors import DataError
from specjax.evaluation import certify as certify_lib
from specjax.formats.loading import asked_kind, load_drafter
from specjax.jobs import inputs
from specjax.jobs.bench import counting, held_out_prompts
from specjax.runtime.progress import Bars, no_bars


def run_certify(config: RunConfig, bars: Bars = no_bars) -> certify_lib.Certificate:
    """Certify the drafter that ``config.certify`` names, or the draft that `train_draft.py` left in ``config.out``.

    Unlike other commands, this one keeps the target's weights as loaded, beside their layout for decoding. The output
    is checked against them: a distribution computed from the layout could not show that a weight was laid out
    wrongly."""
    settings, spec = config.certify, config.certify.drafter
    if config.target.dtype is None:  # an output not exact in float32 is wrong in every precision
        config = dataclasses.replace(config, target=dataclasses.replace(config.target, dtype="float32"))
    draft = Path(config.out) / "draft"
    if spec is None and not draft.is_dir():
        raise DataError(
            f"out: {config.out} holds no draft; run `specjax train` with this config, or give certify.drafter"
        )
    drafter = None if spec is None else registry.build(registry.DRAFTERS, spec, "certify.drafter")
    verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
    prepared = inputs.prepare(config, bars)
    if drafter is None:
        drafter = load_drafter(draft, prepared.target, settings.k, asked_kind(config.draft))
        refuse_longer(drafter, settings.k, "certify.k")
    prompts = held_out_prompts(prepared.corpus.held_out, prepared.target, settings.prompt_tokens, settings.prompts)
    with bars("certify", certify_lib.num_ticks(settings, verifier)) as progress:
        args = (prepared.target, drafter, verifier, prompts, config.sampling.options(), settings, config.seed)
        return certify_lib.certify(certify_lib.Subject(*args, counting(progress)))
