"""`specjax generate`: continue the prompts of the command line and print the results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.data import encoding
from specjax.errors import DataError, ModelError
from specjax.models.files import plain_json, write_atomically

_CHARACTERS = 4
"""Characters of a typical token."""


def read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt-file {path}: not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from None


def refuse_empty(named: Sequence[tuple[str, str]], decoder: Any) -> None:
    """Raise `DataError` for a prompt without tokens. Some tokenizers begin even an empty text with a token."""
    for name, text in named:
        if not text and not encoding.encode(decoder.target.tokenizer, text):
            raise DataError(f"{name}: empty, and a prompt needs at least one token; put text there, or leave it out")


def biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in (text.split("=") for text in given)}
    except ValueError:
        raise DataError(f"--logit-bias {' '.join(given)}: give ID=VALUE, as in --logit-bias 42=-1.5") from None


def decoder(
    target: str,
    draft: str | None,
    ngram: bool,
    k: int | None,
    how: dict[str, Any],
    loading: dict[str, Any],
    quantize_draft: Any = None,
) -> Any:
    """Decoder for prompts of text; ``how``: options of `specjax.Decoder`, ``loading``: of `specjax.load_model`."""
    import specjax
    from specjax.formats.loading import DEFAULT_K

    model = specjax.load_model(target, **loading, decoding_only=True)
    if model.tokenizer is None:
        raise ModelError(
            f"{target}: holds no tokenizer, which a prompt of text needs; put its tokenizer.json and "
            "tokenizer_config.json there"
        )
    drafter: Any = specjax.NGram(k=k or DEFAULT_K) if ngram else None
    if draft is not None:
        options = {"check_finite": loading["check_finite"], "quantize": quantize_draft}
        model_drafter = specjax.load_drafter(draft, model, k, **options)
        drafter = specjax.Hybrid(model_drafter, max(drafter.k, model_drafter.k)) if ngram else model_drafter
    return specjax.Decoder(model, drafter=drafter, **how)


def tell_memory(target: str, draft: str | None, loading: Mapping[str, Any], prompts: Sequence[str], new: int) -> None:
    """Print the memory that decoding takes, before the weights are loaded, estimated from the prompts' characters and
    the draft's files. Raises `ConfigError` if the device has less."""
    from specjax import backend, registry
    from specjax.costs import memory
    from specjax.decode.engine import Engine, NoDraft
    from specjax.models.decode_layout import abstract_layout
    from specjax.models.hf import AS_STORED, abstract_model, keeps_bfloat16, scheme_of

    model = abstract_model(target, loading["dtype"], kv_cache=loading["kv_cache"])
    scheme, stored = scheme_of(loading["quantize"]), abstract_model(target, AS_STORED).spec.dtype
    narrow = stored == "bfloat16" and keeps_bfloat16(model.spec.dtype, scheme)
    spec, laid_out = abstract_layout(model.spec, scheme=scheme, stored=stored if narrow else None)
    weights = {"target": memory.bytes_on_device(laid_out)}
    if draft is not None and (at := Path(draft)).exists():
        weights["draft"] = sum(file.stat().st_size for file in ([at] if at.is_file() else at.glob("*.safetensors")))
    engine = Engine(spec, NoDraft(), registry.build(registry.VERIFIERS, "greedy", "verifier"), greedy=True)
    longest = min(max(map(len, prompts)) // _CHARACTERS + 1, model.config.max_positions)
    found = memory.decoding(engine, weights, len(prompts), longest, new)
    memory.Budget([found], backend.device_memory()).tell()


def defaults(own: Sequence[str], target: str) -> dict[str, Any]:
    """Options from generation_config.json, without those of the command line (``own``), which take precedence. Stderr
    lists them, and the settings of the file that are not applied."""
    from specjax.data.chat_template import generation_defaults

    found = generation_defaults(target)
    kept = [name for name in found.values if name in own]
    applied = {name: value for name, value in found.values.items() if name not in own}
    applied_text = ", ".join(f"{name} {_told(value)}" for name, value in applied.items()) or "nothing to apply"
    kept = f" (as given on the command line: {', '.join(kept)})" if kept else ""
    print(f"note: from {found.source}: {applied_text}{kept}", file=sys.stderr)
    if found.unapplied:
        others = ", ".join(f"{name} {_told(value)}" for name, value in found.unapplied.items())
        greedy = "; without do_sample nothing is sampled" if "temperature" in found.unapplied else ""
        print(f"note: not applied of it: {others}{greedy}", file=sys.stderr)
    return applied


def _told(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts to continue. With ``chat``, each is a user's message in the chat template, after ``system``."""

    texts: list[str]
    chat: bool = False
    system: str | None = None

    def encoded(self, decoder: Any) -> Sequence[Any]:
        if not self.chat:
            return self.texts
        from specjax.data.chat_template import encode

        return [encode(decoder.target.tokenizer, text, self.system) for text in self.texts]


@dataclasses.dataclass(frozen=True)
class Shown:
    """Form of the output: text or JSON, and a file for metrics. ``price_per_hour``: price of an hour of the machine."""

    as_json: bool = False
    no_color: bool = False
    metrics: Path | None = None
    price_per_hour: float | None = None


def _prepare(decoder: Any, prompts: Sequence[Any], options: dict[str, Any]) -> None:
    """Compile, and measure the block costs that the controller needs, ahead of the requests: their metrics would count
    these seconds."""
    from specjax.costs.calibrations import calibrate

    temperature = options["temperature"]
    if decoder.weighs and not decoder.moves_no_token(temperature == 0):
        note = "costs of blocks are not measured, since the text of a seed would depend on them"
        print(f"note: {note} at temperature {temperature:g}; with --verifier coupled it does not", file=sys.stderr)
    elif (kept := calibrate(decoder, prompts, temperature=temperature)) is not None:
        print(f"note: {kept.summary}", file=sys.stderr)
    elif decoder.weighs:
        print("note: costs of blocks are not measured, the target has too few positions", file=sys.stderr)
    decoder.compile(prompts, **{name: options[name] for name in ("max_new_tokens", "temperature", "logprobs")})


def generate(decoder: Any, prompts: Prompts, options: dict[str, Any], verifier: str, shown: Shown) -> None:
    """Print the continuations of the prompts; a single one is streamed. ``verifier``: its name on the command line."""
    from specjax.report import generation

    greedy, texts, price = options["temperature"] == 0, prompts.texts, shown.price_per_hour
    if not decoder.lossless and not greedy:
        print(f"note: verifier {verifier!r} is lossy, this is not the target's distribution", file=sys.stderr)
    given = prompts.encoded(decoder)
    _prepare(decoder, given, options)
    if len(texts) > 1:
        result = decoder.generate(given, **options)
        found, total = generation.answers(texts, result, price), result.metrics(price_per_hour=price)
        if not shown.as_json:
            generation.print_rows(found, result, total, shown.no_color)
    else:
        one = (decoder, texts[0], given[0], options, price)
        answer = generation.streamed(*one) if shown.as_json else generation.stream(*one, shown.no_color)
        found, total = [answer], answer.metrics
    if shown.as_json:
        results = generation.as_json(found, total)
        results["verifier"] = {"kind": verifier, "lossless": decoder.lossless or greedy}
        print(json.dumps(results, default=plain_json))
    if shown.metrics is not None:
        lines = generation.metrics_lines(found, total)
        write_atomically(shown.metrics, "".join(json.dumps(line, default=plain_json) + "\n" for line in lines))
