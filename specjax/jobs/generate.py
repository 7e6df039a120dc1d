"""`specjax generate`: prompts of the command line, continued and shown."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.errors import DataError, ModelError
from specjax.runtime.files import plain_json


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

    model = specjax.load_model(target, **loading)
    if model.tokenizer is None:
        raise ModelError(
            f"{target}: holds no tokenizer, which a prompt of text needs; put its tokenizer.json and "
            "tokenizer_config.json there"
        )
    model.free_originals()
    drafter: Any = specjax.NGram(k=k) if ngram else None
    if draft is not None:
        drafter = specjax.load_drafter(draft, model, k, check_finite=loading["check_finite"])
    return specjax.Decoder(model, drafter=drafter, verifier=verifier)


def defaults(own: Sequence[str], target: str) -> dict[str, Any]:
    """What generation_config.json says and the command line does not, whose ``own`` stand; told on stderr."""
    from specjax.data.chat_template import generation_defaults

    found = generation_defaults(target)
    kept = [name for name in found.values if name in own]
    applied = {name: value for name, value in found.values.items() if name not in own}
    told = ", ".join(f"{name} {value:g}" for name, value in applied.items()) or "nothing to apply"
    kept = f" (as given on the command line: {', '.join(kept)})" if kept else ""
    print(f"note: from {found.source}: {told}{kept}", file=sys.stderr)
    return applied


@dataclasses.dataclass(frozen=True)
class Prompts:
    """``texts``: with ``chat``, each a user's message in the target's chat template, after the message ``system``."""

    texts: list[str]
    chat: bool = False
    system: str | None = None

    def encoded(self, decoder: Any) -> Sequence[Any]:
        if not self.chat:
            return self.texts
        from specjax.data.chat_template import encode

        return [encode(decoder.target.tokenizer, text, self.system) for text in self.texts]


def generate(
    decoder: Any, prompts: Prompts, options: dict[str, Any], verifier: str, as_json: bool, no_color: bool
) -> None:
    """Print what the prompts are continued with: one is streamed. ``verifier``: as it was asked for."""
    from specjax.report import generation

    greedy, texts = options["temperature"] == 0, prompts.texts
    if not decoder.lossless and not greedy:
        print(f"note: verifier {verifier!r} is lossy, this is not the target's distribution", file=sys.stderr)
    given = prompts.encoded(decoder)
    if as_json:
        if len(texts) == 1:
            results = generation.timed_json(decoder, texts[0], given[0], options)
        else:
            results = generation.as_json(texts, decoder.generate(given, **options))
        results["verifier"] = {"kind": verifier, "lossless": decoder.lossless or greedy}
        print(json.dumps(results, default=plain_json))
    elif len(texts) == 1:
        generation.stream(decoder, given[0], options, no_color, texts[0])
    else:
        generation.print_rows(texts, decoder.generate(given, **options), no_color)
