"""Saving of trained drafts, each in the form of its kind. A drafter from outside saves itself."""

from __future__ import annotations

from pathlib import Path

from specjax import formats
from specjax.drafters.features import LoadedDraft, TrainedFeatureDraft
from specjax.interfaces import Params, Target, Trainable


def save(
    drafter: Trainable, params: Params, target: Target, directory: Path, *, name: str = "draft", card: str | None = None
) -> None:
    """Write a directory with everything that decoding needs, replacing what is there; ``card``: its README.md."""
    if not isinstance(drafter, TrainedFeatureDraft):
        drafter.save(params, target, directory, name=name, card=card)
        return
    formats.save(
        LoadedDraft(drafter.model, params, name),
        drafter.kind,
        directory,
        target=target.source or target.name,
        target_layers=target.config.num_layers,
        card=card,
        shared=drafter.stored_once,
    )


def serving(drafter: Trainable) -> str:
    """Sentence for the draft's card: the software that decodes with what `save` writes."""
    if not isinstance(drafter, TrainedFeatureDraft):
        return drafter.serving
    form, lost = formats.own_form(drafter.model, drafter.kind)
    if lost is not None:
        return f"Only specjax reads it (`specjax.load_drafter`): the library speculators has no words for {lost}."
    return formats.readers_of(form)


def library(drafter: Trainable) -> str:
    """The library that loads what `save` writes, for hubs that read cards."""
    if not isinstance(drafter, TrainedFeatureDraft):
        return drafter.library
    return formats.library_of(formats.own_form(drafter.model, drafter.kind)[0])
