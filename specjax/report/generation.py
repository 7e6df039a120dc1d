"""Output of `specjax generate`: text as it is committed, coloured by its origin, or whole rows, or JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from specjax.decode.request import derive_seeds
from specjax.metrics import RequestMetrics, cost
from specjax.report.labels import counted
from specjax.report.results import Piece
from specjax.report.terminal import legend, render_pieces


@dataclasses.dataclass(frozen=True)
class Answer:
    """Continuation of a prompt, and its metrics."""

    prompt: str
    text: str
    tokens: Sequence[int]
    seed: int
    finish_reason: str | None
    metrics: RequestMetrics
    logprobs: Sequence[float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Fields by name; log-probabilities only if there are any."""
        names = ("prompt", "text", "tokens", "seed", "finish_reason")
        found = {name: getattr(self, name) for name in names} | {
            "stats": self.metrics.stats.to_json(),
            "metrics": self.metrics.to_json(),
        }
        return found if self.logprobs is None else {**found, "logprobs": self.logprobs}


def streamed(
    decoder: Any, prompt: str, given: Any, options: dict[str, Any], price: float | None, show: Any = None
) -> Answer:
    """Answer to one prompt, decoded from ``given`` (text or ids) as a stream. ``show`` gets each event. ``price``:
    price of an hour of the machine."""
    events = []
    for event in decoder.stream(given, steps_per_event=None, **options):
        events.append(event)
        if show is not None:
            show(event)
    last, times = events[-1], [event.seconds for event in events for _ in event.tokens]
    seconds = times[-1] if times else last.seconds
    return Answer(
        prompt=prompt,
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        seed=derive_seeds(options["seed"], 1)[0],
        finish_reason=last.finish_reason,
        metrics=RequestMetrics(last.stats, [times], seconds, cost=None if price is None else cost(price, seconds)),
        logprobs=None if options["logprobs"] is None else [value for event in events for value in event.logprobs],
    )


def answers(prompts: Sequence[str], result: Any, price: float | None) -> list[Answer]:
    """Answers of a generation's rows. ``price``: price of an hour of the machine."""
    logprobs = result.logprobs or [None] * len(prompts)
    metrics = [result.metrics(row, price) for row in range(len(prompts))]
    rows = zip(
        *(prompts, result.text, result.tokens, result.seeds, result.finish_reasons, metrics, logprobs), strict=True
    )
    return list(itertools.starmap(Answer, rows))


def stream(
    decoder: Any, prompt: str, given: Any, options: dict[str, Any], price: float | None, no_color: bool
) -> Answer:
    """Print text to stdout as it is committed, legend and metrics to stderr. A terminal also gets the prompt before the
    text, a pipe the new text alone."""
    console, notes = _console(no_color), _console(no_color, stderr=True)
    begun = False

    def show(event: Any) -> None:
        nonlocal begun
        if console.is_terminal and not begun:
            shown = prompt if given is prompt else f"{prompt}\n"  # a chat's template has more around the prompt
            console.print(render_pieces([Piece(text=shown, origin="prompt")]), end="", soft_wrap=True)
        begun = True
        _print_pieces(console, event.pieces, event.text)

    answer = streamed(decoder, prompt, given, options, price, show)
    console.print()
    if console.is_terminal:
        notes.print("\n", legend(), sep="")
    notes.print(_told(answer.metrics), soft_wrap=True)
    return answer


def print_rows(found: Sequence[Answer], result: Any, total: RequestMetrics, no_color: bool) -> None:
    """Print the start of every prompt, its text and its metrics to stdout; at the end the metrics of all."""
    console = _console(no_color)
    for row, answer in enumerate(found):
        prompt = answer.prompt
        start = prompt if len(prompt) <= 60 else f"...{prompt[-57:]}"
        console.print(render_pieces([Piece(text=start.replace("\n", " "), origin="prompt")]), soft_wrap=True)
        _print_pieces(console, result.pieces(row), answer.text)
        console.print()
        console.print(Text(_told(answer.metrics), style="dim"), soft_wrap=True)
    console.print(Text(f"all {len(found)}: {_told(total)}", style="dim"), soft_wrap=True)


def as_json(found: Sequence[Answer], total: RequestMetrics) -> dict[str, Any]:
    """``{"rows": [...], "metrics": {...}, "latency_s": {...}}``: one row for each prompt with text, tokens, seed,
    metrics, and log-probabilities if there are any; and the metrics of all."""
    return {
        "rows": [answer.to_json() for answer in found],
        "metrics": total.to_json(),
        "latency_s": total.latencies.to_json(),
    }


def metrics_lines(found: Sequence[Answer], total: RequestMetrics) -> list[dict[str, Any]]:
    """Metrics alone, flat: one line of kind ``request`` for each request, and a last one of kind ``sum``."""
    lines = [
        {"kind": "request", "request": i, "seed": one.seed, "finish_reason": one.finish_reason, **one.metrics.to_json()}
        for i, one in enumerate(found)
    ]
    return [*lines, {"kind": "sum", **total.to_json()}]


def _console(no_color: bool, stderr: bool = False) -> Console:
    """Console for text. A terminal of eight colours, which a theme decides, gets the marks without colour."""
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


def _told(metrics: RequestMetrics) -> str:
    """Two lines: counts and acceptance; times, draft lengths and, if there is a price, cost."""
    stats, found = metrics.stats, metrics.latencies.to_json()
    counts = f"{counted(stats.emitted, 'token')}, {counted(stats.target_calls, 'target call')}"
    which = " P50" if metrics.requests > 1 else ""
    medians = {name: found[f"{name}_p50"] for name in ("ttft", "tpot")}
    parts = [f"{name.upper()}{which} {1000 * s:,.1f} ms" for name, s in medians.items() if s is not None]
    parts.append(f"{metrics.tokens_per_s:,.0f} tokens/s")
    if stats.drafted:
        counts += f", block efficiency {stats.block_efficiency:.2f}, acceptance rate {stats.acceptance_rate:.2f}"
        used = [k for k, blocks in enumerate(stats.k_used) if blocks]
        few = f" ({used[0]} to {used[-1]})" if len(used) > 1 else ""
        parts.append(f"k used {stats.drafted / stats.blocks:.1f}{few}")
        parts.append(f"{counted(stats.blocks_without_draft, 'block')} without a draft")
    if metrics.cost is not None:
        parts.append(f"cost {metrics.cost:.3g}")
    return f"{counts}\n{', '.join(parts)}"
