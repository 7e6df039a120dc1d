"""What `specjax generate` is made of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.errors import DataError, ModelError

if TYPE_CHECKING:
    import typer


def read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt-file {path}: not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from None


def refuse_empty(named: Sequence[tuple[str, str]], decoder: Any) -> None:
    """A prompt without a token, by the name that the user gave it; a tokenizer may begin every text with one."""
    for name, text in named:
        if not text and not decoder.target.tokenizer(text)["input_ids"]:
            raise DataError(f"{name}: empty, and a prompt needs at least one token; put text there, or leave it out")


def biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in (text.split("=") for text in given)}
    except ValueError:
        raise DataError(f"--logit-bias {' '.join(given)}: give ID=VALUE, as in --logit-bias 42=-1.5") from None


def decoder(target: str, draft: str | None, ngram: bool, k: int, verifier: str, loading: dict[str, Any]) -> Any:
    """For prompts of text; ``loading``: options of `specjax.load_model`."""
    import specjax

    drafter: Any = None
    if draft is not None:
        from specjax.models.hf import draft_of

        model = specjax.load_model(draft_of(draft), **loading)
        model.free_originals()
        drafter = specjax.DraftModel(model, k=k)
    elif ngram:
        drafter = specjax.NGram(k=k)
    model = specjax.load_model(target, **loading)
    if model.tokenizer is None:
        raise ModelError(
            f"{target}: holds no tokenizer, which a prompt of text needs; put its tokenizer.json and "
            "tokenizer_config.json there"
        )
    model.free_originals()
    return specjax.Decoder(model, drafter=drafter, verifier=verifier)


def defaults(context: typer.Context, target: str) -> dict[str, Any]:
    """What generation_config.json says and the command line does not; told on stderr."""
    from specjax.data.chat_template import generation_defaults

    found = generation_defaults(target)
    sources = {name: context.get_parameter_source(name) for name in found.values}
    own = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    applied = {name: value for name, value in found.values.items() if name not in own}
    told = ", ".join(f"{name} {value:g}" for name, value in applied.items()) or "nothing to apply"
    kept = f" (as given on the command line: {', '.join(own)})" if own else ""
    print(f"note: from {found.source}: {told}{kept}", file=sys.stderr)
    return applied
