"""Export of a run's models, each with a card that says what it is and what it was made from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import yaml

from specjax.errors import DataError, ModelError
from specjax.interfaces import Params
from specjax.models.files import MANIFEST, verify_manifest
from specjax.models.kernels import counted
from specjax.runtime import artifact
from specjax.runtime.distributed import on_main_process, whole

CARD = "README.md"
MADE_BY, WEIGHTS = "by specjax", "SHA-256 of the weights"
_log = logging.getLogger(__name__)


def refuse_foreign(directory: Path) -> None:
    """Raise `DataError` if ``directory`` holds anything that specjax did not write."""
    if directory.is_dir() and any(directory.iterdir()) and MADE_BY not in _card_of(directory):
        raise DataError(
            f"out: {directory} holds something else, and the draft goes there; move it, or give another `out`"
        )


def export(params: Params, save: Callable[[Params], None], directory: Path, card: str) -> bool:
    """Let ``save`` write a model and its ``card`` to ``directory``, unless they are there. ``save`` takes the weights
    ``params`` as arrays that one process has whole. The card holds a digest of the weights, so the same card beside
    undamaged files means the same model. A model of other weights is set aside, not replaced. Returns whether anything
    was written."""
    (weights,) = (line for line in card.splitlines() if line.startswith(f"| {WEIGHTS} |"))

    def missing() -> bool:
        known = _card_of(directory)
        if known and weights not in known:
            aside = artifact.set_aside(directory, artifact.REPLACED)
            _log.warning("%s: does not hold these weights; it is kept as %s", directory, aside.name)
        return known != card or set_aside_if_damaged(directory)

    if not on_main_process(missing):
        return False
    params = whole(params)
    on_main_process(lambda: save(params))
    return True


def _card_of(directory: Path) -> str:
    file = directory / CARD
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def set_aside_if_damaged(directory: Path) -> bool:
    """Set ``directory`` aside if its files do not match their manifest. Returns whether it was set aside."""
    try:
        verify_manifest(directory)
    except ModelError as error:
        damage = str(error).partition(";")[0]
    else:
        if (directory / MANIFEST).exists():
            return False
        damage = f"its {MANIFEST} is gone"
    aside = artifact.set_aside(directory)
    _log.warning("%s: damaged (%s); it is set aside as %s and written again", directory, damage, aside.name)
    return True


def card(name: str, title: str, facts: dict[str, str], training: dict, library: str = "transformers") -> str:
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    settings = yaml.safe_dump(training, sort_keys=False)
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- speculative-decoding\n---\n\n"
        f"# {name}\n\n{title}\n\n| | |\n|---|---|\n{table}\n\n## Training\n\n```yaml\n{settings}```\n"
    )


def parameter_count(params: Params) -> int:
    return counted(params)[0]
