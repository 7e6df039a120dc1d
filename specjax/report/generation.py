"""What `specjax generate` prints: text as it is committed, coloured by who chose it, or whole rows, or JSON."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specjax.decode.request import derive_seeds
from specjax.metrics import Latencies
from specjax.report.labels import counted
from specjax.report.terminal import legend, render_pieces


@dataclasses.dataclass(frozen=True)
class _Given:
    """The prompt as a piece of text."""

    text: str
    origin: str = "prompt"


def stream(decoder: Any, prompt: Any, options: dict[str, Any], no_color: bool, shown: str) -> None:
    """Text to stdout as it is committed; legend and statistics to stderr. A terminal also gets the prompt as ``shown``
    before it, a pipe the new text alone."""
    console, notes = _console(no_color), _console(no_color, stderr=True)
    first, count, last, event = None, 0, time.perf_counter(), None
    for event in decoder.stream(prompt, **options):
        last = time.perf_counter()
        if first is None and console.is_terminal:
            given = shown if prompt is shown else f"{shown}\n"  # of a chat, whose template has more around it
            console.print(render_pieces([_Given(given)]), end="", soft_wrap=True)
        # The first event waits for compilation, so the rate counts from there.
        first, count = (last, 0) if first is None else (first, count + len(event.tokens))
        _print_pieces(console, event.pieces, event.text)
    console.print()
    if event is None:
        return
    rate = f"\n{count / (last - first):,.0f} tokens/s after the first block" if first is not None and count else ""
    if console.is_terminal:
        notes.print("\n", legend(), sep="")
    notes.print(f"{_describe(event.stats)}{rate}")


def print_rows(prompts: Sequence[str], result: Any, no_color: bool) -> None:
    """Every prompt's start, its text, and how it was decoded, to stdout."""
    console = _console(no_color)
    for row, (prompt, text, stats) in enumerate(zip(prompts, result.text, result.stats, strict=True)):
        start = prompt if len(prompt) <= 60 else f"...{prompt[-57:]}"
        console.print(render_pieces([_Given(start.replace("\n", " "))]), soft_wrap=True)
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


def _console(no_color: bool, stderr: bool = False) -> Console:
    """A console; on the plainest terminals, whose eight colours a theme decides, the marks alone are used."""
    console = Console(no_color=no_color or None, highlight=False, stderr=stderr)
    if console.color_system in ("standard", "windows"):
        console.no_color = True
    return console


def _print_pieces(console: Console, pieces: Sequence[Any], text: str) -> None:
    if console.is_terminal:
        console.print(render_pieces(pieces), end="", soft_wrap=True)
    else:
        # Rich would turn tabs into spaces.
        console.file.write(text)
        console.file.flush()


def _describe(stats: Any) -> str:
    text = f"{counted(stats.emitted, 'token')}, {counted(stats.target_calls, 'target call')}"
    if stats.drafted:
        text += f", block efficiency {stats.block_efficiency:.2f}, acceptance rate {stats.acceptance_rate:.2f}"
    return text


def _row_json(prompt: str, text: str, tokens: Sequence[int], seed: int, stats: Any, logprobs: Any) -> dict[str, Any]:
    row = {"prompt": prompt, "text": text, "tokens": tokens, "seed": seed, "stats": stats.to_json()}
    return row if logprobs is None else {**row, "logprobs": logprobs}
