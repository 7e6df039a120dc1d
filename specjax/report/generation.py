"""What `specjax generate` prints: text as it is committed, coloured by who chose it, or whole rows, or JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specjax.decode.request import derive_seeds
from specjax.metrics import Latencies
from specjax.report.labels import visible
from specjax.report.terminal import legend, render_pieces


def stream(decoder: Any, prompt: Any, options: dict[str, Any], no_color: bool) -> None:
    """Text to stdout as it is committed; legend and statistics to stderr, so that a pipe gets the text alone."""
    console = Console(no_color=no_color or None, highlight=False)
    notes = Console(stderr=True, no_color=no_color or None, highlight=False)
    first, count, last, event = None, 0, time.perf_counter(), None
    for event in decoder.stream(prompt, **options):
        last = time.perf_counter()
        # The first event waits for compilation, so the rate counts from there.
        first, count = (last, 0) if first is None else (first, count + len(event.tokens))
        _print_pieces(console, event.pieces, event.text)
    console.print()
    if event is None:
        return
    rate = f", {count / (last - first):,.0f} tokens/s after the first block" if first is not None and count else ""
    if console.is_terminal and not console.no_color:
        notes.print("\n", legend(), sep="")
    notes.print(f"{_describe(event.stats)}{rate}")


def print_rows(prompts: Sequence[str], result: Any, no_color: bool) -> None:
    """Every prompt's start, its text, and how it was decoded, to stdout."""
    console = Console(no_color=no_color or None, highlight=False)
    for row, (prompt, text, stats) in enumerate(zip(prompts, result.text, result.stats, strict=True)):
        start = prompt if len(prompt) <= 60 else f"...{prompt[-57:]}"
        console.print(Text(visible(start.replace("\n", " ")), style="bold"), soft_wrap=True)
        _print_pieces(console, result.pieces(row), text)
        console.print()
        console.print(Text(_describe(stats), style="dim"), soft_wrap=True)


def as_json(prompts: Sequence[str], result: Any) -> dict[str, Any]:
    """``{"rows": [...]}``, a row a prompt: text, tokens, seed, statistics, and log-probabilities if there are any."""
    logprobs = result.logprobs or [None] * len(prompts)
    rows = zip(prompts, result.text, result.tokens, result.seeds, result.stats, logprobs, strict=True)
    return {"rows": list(itertools.starmap(_row_json, rows))}


def timed_json(decoder: Any, prompt: str, given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The same for one prompt, decoded from ``given`` (text or ids) as a stream after compiling, with times."""
    shaping = ("max_new_tokens", "temperature", "logprobs")
    decoder.compile([given], **{name: options[name] for name in shaping})
    events, times, start = [], [], time.perf_counter()
    for event in decoder.stream(given, **options):
        times += [time.perf_counter() - start] * len(event.tokens)
        events.append(event)
    text, tokens = "".join(event.text for event in events), [token for event in events for token in event.tokens]
    [seed] = derive_seeds(options["seed"], 1)
    values = None if options["logprobs"] is None else [value for event in events for value in event.logprobs]
    row = _row_json(prompt, text, tokens, seed, events[-1].stats, values)
    return {"rows": [row], "latency_s": Latencies([times]).to_json()}


def _print_pieces(console: Console, pieces: Sequence[Any], text: str) -> None:
    if console.is_terminal:
        console.print(render_pieces(pieces), end="", soft_wrap=True)
    else:
        # Rich would turn tabs into spaces.
        console.file.write(text)
        console.file.flush()


def _describe(stats: Any) -> str:
    text = f"{stats.emitted} tokens, {stats.target_calls} target calls"
    if stats.drafted:
        text += f", block efficiency {stats.block_efficiency:.2f}, acceptance rate {stats.acceptance_rate:.2f}"
    return text


def _row_json(prompt: str, text: str, tokens: Sequence[int], seed: int, stats: Any, logprobs: Any) -> dict[str, Any]:
    row = {"prompt": prompt, "text": text, "tokens": tokens, "seed": seed, "stats": stats.to_json()}
    return row if logprobs is None else {**row, "logprobs": logprobs}
